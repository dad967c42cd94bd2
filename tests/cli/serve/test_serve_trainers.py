"""The routes of vLLM, prime-rl and SGLang for trainers: the calls that SkyRL, prime-rl and slime make."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import CONFIG, adapter, save_adapter
from conftest import new_weights, random_ids
from safetensors.torch import load_file, save_file
from serving import Server, until

from fastgen import Generator, SamplingParams
from fastgen.cli.serve.dialects.sglang import SglangRequest, SglangStream
from fastgen.cli.serve.rollout import call_error
from fastgen.cli.serve.validation import ApiError

pytestmark = pytest.mark.timeout(120)

PROMPT = random_ids(9)
SHORT = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, temperature=0.8, top_k=20)
SAMPLING = {"max_tokens": 6, "seed": 3, "ignore_eos": True, "temperature": 0.8, "top_k": 20}
LONG = {"max_tokens": 250, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server(rollout_server: Server) -> Server:
    return rollout_server


@pytest.fixture
def step(talker: Path, tmp_path: Path) -> Path:
    """A folder with new weights, as a trainer writes it."""
    save_file(new_weights(talker), tmp_path / "model.safetensors")
    return tmp_path


def post(server: Server, path: str, body: Any = None, **query: Any) -> Any:
    """Post a body or none, and return the response's body. It must succeed."""
    answer = server.post(path, body, params=query) if body is not None else server.post_bytes(path, b"", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: Server, path: str, body: Any, status: int = 400, **query: Any) -> str:
    answer = server.post(path, body, params=query)
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize(
    ("path", "allowed"), [("/v1/pause", "POST"), ("/weight_version", "GET, HEAD"), ("/flush_cache", "GET, HEAD, POST")]
)
def test_a_wrong_method_is_answered_with_all_that_the_path_takes(server: Server, path: str, allowed: str) -> None:
    answer = httpx.put(server.url + path, headers={"authorization": "Bearer secret"})
    assert answer.status_code == 405
    assert sorted(answer.headers["allow"].split(", ")) == allowed.split(", ")
    assert answer.json()["error"]["message"].endswith(f"use {allowed.replace(', ', ' or ')}")


def tokens(server: Server, **sampling: Any) -> Any:
    body = {"model": "any", "token_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}}
    return post(server, "/inference/v1/generate", body)


# ------------------------------------------------------------------------------------------------ vLLM


def test_tokens_in_and_tokens_out(server: Server, here: Generator) -> None:
    params = replace(SHORT, n=2, logprobs=2, prompt_logprobs=1)
    (expected,) = here.generate([PROMPT], params)
    found = tokens(server, n=2, logprobs=2, prompt_logprobs=1, skip_special_tokens=False, output_kind=2)
    assert [choice["token_ids"] for choice in found["choices"]] == [each.token_ids for each in expected.completions]
    for choice, completion in zip(found["choices"], expected.completions, strict=True):
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == completion.logprobs
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in completion.token_ids]
        assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
        assert choice["finish_reason"] == "length"
    assert found["prompt_logprobs"][0] is None
    scores = [next(iter(entries.items())) for entries in found["prompt_logprobs"][1:]]  # as prime-rl reads them
    assert [(int(id), entry["logprob"]) for id, entry in scores] == list(
        zip(PROMPT[1:], (expected.prompt_logprobs or [])[1:], strict=True)
    )
    ranks = [[entry["rank"] for entry in entries.values()] for entries in found["prompt_logprobs"][1:]]
    assert [own for own, *_ in ranks] == (expected.prompt_ranks or [])[1:]
    assert [1] in ranks, "the token is the most likely one"
    assert all(own > 1 and best == [1] for own, *best in ranks if own != 1)
    chosen = tokens(server, logprob_token_ids=[7])["choices"][0]["logprobs"]["content"]
    assert [{other["token"] for other in entry["top_logprobs"]} for entry in chosen] == [
        {"token_id:7", entry["token"]} for entry in chosen
    ]
    assert tokens(server)["choices"][0]["logprobs"] is None
    unlimited = {"token_ids": [5] * (here.max_model_len - 9), "sampling_params": {"ignore_eos": True}}
    (choice,) = post(server, "/inference/v1/generate", unlimited)["choices"]
    assert len(choice["token_ids"]) == 9
    masked = tokens(server, return_sampling_mask=True, routed_experts_prompt_start=3)["choices"][0]
    (expected,) = here.generate([PROMPT], replace(SHORT, return_sampling_mask=True))[0].completions
    assert masked["sampling_mask"] == expected.sampling_mask
    wrong = {"token_ids": [99999], "sampling_params": {}}
    assert "outside the vocabulary" in refused(server, "/inference/v1/generate", wrong)
    assert "beam" in refused(server, "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"beam": 1}})


def test_pauses_of_skyrl(server: Server) -> None:
    """`keep` freezes requests, `abort` ends them with their tokens, `wait` lets them finish, and new ones wait."""
    with ThreadPoolExecutor(2) as pool:
        for mode, reason in (("keep", "length"), ("abort", "abort"), ("wait", "length")):
            running = pool.submit(tokens, server, **LONG)
            until(lambda: server.stats()["running"])
            assert post(server, "/pause", mode=mode, clear_cache="false") == {"status": "paused"}
            later = pool.submit(tokens, server)
            time.sleep(0.1)  # the engine reports its last steps after it has answered
            steps = server.stats()["steps_total"]
            time.sleep(0.1)
            assert server.stats()["steps_total"] == steps
            assert running.done() == (mode != "keep")
            assert not later.done()
            assert post(server, "/resume") == {"status": "resumed"}
            (choice,) = running.result()["choices"]
            assert (choice["finish_reason"], len(choice["token_ids"]) == 250) == (reason, mode != "abort")
            assert len(later.result()["choices"][0]["token_ids"]) == 6
    assert "give one of abort, wait, keep" in refused(server, "/pause", {}, mode="now")
    until(server.idle)


def test_a_wait_that_its_client_leaves_lets_new_requests_run(server: Server) -> None:
    post(server, "/pause")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tokens, server, **LONG)
        until(lambda: server.stats()["waiting"] + server.stats()["running"])
        assert "is paused" in refused(server, "/pause", {}, 409, mode="wait")
        post(server, "/resume")
        running.result()
    post(server, "/pause", mode="wait")
    post(server, "/resume")


def test_sleep_levels_and_what_needs_no_work(server: Server, step: Path) -> None:
    before = tokens(server)["choices"][0]["token_ids"]
    slept = post(server, "/sleep", level=1)
    assert (slept["status"], slept["level"]) == ("sleeping", 1)
    assert "asleep" in refused(server, "/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}, 409)
    for tag, status in (("weights", "sleeping"), ("kv_cache", "awake")):
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
        assert post(server, "/wake_up", tags=tag) == {"status": status, "tags_woken": [tag]}
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}
    assert tokens(server)["choices"][0]["token_ids"] == before
    assert "level is '7'" in refused(server, "/sleep", {}, level=7)
    assert post(server, "/sleep", {"keep_weights": True}) == {"freed": 0}, "our own"
    post(server, "/wake_up")
    assert post(server, "/reset_prefix_cache", {"reset_running_requests": False}) == {"success": True}
    assert server.get("/get_world_size").json() == {"world_size": 1}
    info = server.get("/server_info?config_format=json").json()
    assert info["vllm_config"]["weight_transfer_config"] is None
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["vllm_config"]["model_config"]["dtype"] == f"torch.{info['dtype']}" == "torch.float32"
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
    assert info["vllm_config"]["lora_config"] is None


def test_memory_of_the_kv_cache_is_released_between_requests(server: Server) -> None:
    before = tokens(server)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tokens, server, **LONG)
        until(lambda: server.stats()["running"])
        post(server, "/pause", mode="keep")
        assert "in flight" in refused(server, "/release_kv_cache_memory", {})
        post(server, "/pause", mode="abort")
        assert running.result()["choices"][0]["finish_reason"] == "abort"
    assert post(server, "/release_kv_cache_memory")["status"] == "kv_cache_released"
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert post(server, "/wake_up") == {"status": "awake", "tags_woken": None}
    assert server.get("/is_paused").json() == {"is_paused": True}
    post(server, "/resume")
    assert server.get("/is_paused").json() == {"is_paused": False}
    assert tokens(server)["choices"][0]["token_ids"] == before


def test_requests_are_aborted_by_their_ids_or_all_together(server: Server) -> None:
    body = {"token_ids": PROMPT, "sampling_params": LONG, "request_id": "mine"}
    for ids in (["mine", "other"], None, []):
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(post, server, "/inference/v1/generate", body)
            until(lambda: server.stats()["running"])
            assert post(server, "/abort_requests", {"request_ids": ["other"]}) == {"status": "aborted", "aborted": 0}
            assert post(server, "/abort_requests", {"request_ids": ids}) == {"status": "aborted", "aborted": 1}
            assert running.result()["choices"][0]["finish_reason"] == "abort"
        until(server.idle)


def test_weights_have_the_name_that_the_trainer_gave_last(server: Server, talker: Path) -> None:
    def info() -> Any:
        return server.get("/weight_info").json()["weight_version"]

    number = server.get("/weight_version").json()["weight_version"]
    assert info() == str(number)
    assert post(server, "/update_weight_version", {"new_version": "a"}) == {"success": True, "new_version": "a"}
    assert info() == "a"
    post(server, "/update_weights", {"weight_dir": str(talker)})
    assert info() == str(number + 1), "of weights without a name"
    post(server, "/finish_weight_update", {"weight_version": "b"})
    assert info() == "b"


def test_checksums_tell_whether_an_update_has_arrived(server: Server, talker: Path, step: Path) -> None:
    """With vLLM's route, and with SGLang's as slime calls it for --check-weight-update-equal."""
    weights = load_file(talker / "model.safetensors")
    names = [f"dp0:pp0:pcp0:tp0:{name}" for name in weights]

    def differing() -> Any:
        return post(server, "/weight_checker", {"action": "compare", "baseline": baseline})

    post(server, "/update_weights", {"weight_dir": str(talker)})
    baseline = post(server, "/weight_checker", {"action": "checksum"})["checksums"]
    assert baseline == {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in zip(names, weights.values(), strict=True)
    }
    snapshot = post(server, "/weights_checker", {"action": "snapshot"})
    assert differing() == {"match": True, "mismatches": []}
    for change in ({"action": "reset"}, {"weight_dir": str(step)}):
        post(server, "/weight_checker" if "action" in change else "/update_weights", change)
        assert differing() == {"match": False, "mismatches": sorted(names)}
        message = refused(server, "/weights_checker", {"action": "compare"})
        assert message.startswith(f"{len(names)} weights differ from the snapshot: ")
    post(server, "/weights_checker", {"action": "reset_tensors"})
    assert post(server, "/weights_checker")["per_engine_checksum"] != snapshot["per_engine_checksum"]
    post(server, "/update_weights_from_disk", {"model_path": str(talker)})
    compared = post(server, "/weights_checker", {"action": "compare", "allow_quant_error": False})
    assert compared == snapshot
    (rank,) = compared["ranks"]
    assert list(rank["checksums"].values()) == list(baseline.values())
    assert "baseline belongs to" in refused(server, "/weight_checker", {"action": "compare"})
    assert "baseline belongs to" in refused(server, "/weight_checker", {"action": "reset", "baseline": {}})


def test_a_draft_update_needs_a_head_that_drafts(server: Server) -> None:
    assert "no head that drafts" in refused(server, "/start_draft_weight_update", {})


def test_the_weight_transfer_says_what_is_wrong(server: Server) -> None:
    meeting = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    path = "/init_weight_transfer_engine"
    assert "this server's are on the CPU" in refused(server, path, {"init_info": meeting})
    assert "not the base64 of 128 bytes" in refused(
        server, path, {"init_info": {"nccl_unique_id_b64": "AAAA", "rank_offset": 1, "world_size": 2}}
    )
    for change, message in (
        ({"rank_offset": 2}, "must be below world_size"),
        ({"nccl_unique_id_b64": "x"}, "and not both"),
        ({"master_port": None}, "belongs to master_address"),
        ({"src_mesh_dims": [1]}, "works with TRL 1.16 with vLLM 0.22 to 0.31"),
    ):
        assert message in refused(server, path, {"init_info": {**meeting, **change}})
    update = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]}
    assert post(server, "/start_weight_update") == {"message": "Weight update started"}
    assert "POST /init_weight_transfer_engine first" in refused(server, "/update_weights", {"update_info": update}, 409)
    for change, message in (
        ({"names": []}, "as many items"),
        ({"names": ["x"]}, "unexpected tensor 'x'"),
        ({"dtype_names": ["float7"]}, "no dtype 'float7'"),
        ({"shapes": [[-1]]}, "negative"),
        ({"ipc_handles": []}, "with the backend nccl"),
    ):
        assert message in refused(server, "/update_weights", {"update_info": {**update, **change}})
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(tokens, server)
        time.sleep(0.1)
        assert not held.done(), "no steps run in the midst of an update"
        finished = post(server, "/finish_weight_update", {"weight_version": "step-3"})
        assert finished["message"] == "Weight update finished"
        held.result(10)


def test_a_trainer_that_never_comes_is_a_timeout(server: Server, talker: Path) -> None:
    """The next update mends the weights, which are torn then."""
    group = post(server, "/init_weight_group", {"backend": "gloo", "timeout": 0.2, "bucket_bytes": 1000})["group"]
    tensors = [["model.norm.weight", "float32", [64]]]
    body = {"group": group, "tensors": tensors, "partial": True, "in_flight": "keep"}
    assert "the weight group has failed" in refused(server, "/update_weights", body, 504)
    assert post(server, "/update_weights", {"weight_dir": str(talker)})["status"] == "ok"
    assert tokens(server)["choices"]


def test_an_update_of_a_paused_engine_leaves_it_paused(server: Server) -> None:
    post(server, "/pause", mode="keep")
    post(server, "/start_weight_update", {})
    post(server, "/finish_weight_update", {})
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(tokens, server)
        time.sleep(0.1)
        assert not held.done()
        post(server, "/resume")
        held.result(10)


def test_prime_rl_names_a_folder(server: Server, here: Generator, step: Path, talker: Path) -> None:
    assert server.get("/v1/models").json()["data"]
    old = here.generate([PROMPT], SHORT)[0].completions[0].token_ids
    here.update_weights(new_weights(talker))
    new = here.generate([PROMPT], SHORT)[0].completions[0].token_ids
    here.update_weights(load_file(talker / "model.safetensors"))
    for folder, expected in ((step, new), (talker, old)):
        post(server, "/pause", mode="keep", clear_cache="false")
        assert post(server, "/update_weights", {"weight_dir": str(folder)})["status"] == "ok"
        post(server, "/resume")
        assert tokens(server)["choices"][0]["token_ids"] == expected
    assert old != new
    assert "there is no folder /nope" in refused(server, "/update_weights", {"weight_dir": "/nope"})


def test_adapters_of_prime_rl_are_merged(server: Server, here: Generator, talker: Path, tmp_path: Path) -> None:
    """A name is loaded again with each step; the base comes back, to the bit, when it is unloaded."""
    base = tokens(server, logprobs=0)
    states = [adapter(talker, seed=seed) for seed in (1, 2)]
    for step, state in enumerate(states):
        folder = save_adapter(tmp_path / str(step), state)
        loaded = post(server, "/load_lora_adapter", {"lora_name": "mine", "lora_path": str(folder)})
        here.update_adapter(state, CONFIG)
        assert loaded == {"status": "ok", "weight_version": server.get("/weight_version").json()["weight_version"]}
        expected = here.generate([PROMPT], SHORT)[0].completions[0].token_ids
        assert tokens(server, logprobs=0)["choices"][0]["token_ids"] == expected != base["choices"][0]["token_ids"]
    here.update_adapter(None)
    other = {"lora_name": "other", "lora_path": str(folder)}
    assert "one adapter is merged at a time" in refused(server, "/load_lora_adapter", other, 409)
    lost = {"lora_name": "mine", "lora_path": str(tmp_path / "nope")}
    assert "there is no adapter_config.json" in refused(server, "/load_lora_adapter", lost, 404)
    assert "lora.sync_mode=disk" in refused(
        server, "/skyrl/v1/load_lora_adapter", {"lora_name": "a", "in_memory": True}
    )
    post(server, "/v1/unload_lora_adapter", {"lora_name": "mine"})
    (again,), (before,) = tokens(server, logprobs=0)["choices"], base["choices"]
    assert (again["token_ids"], again["logprobs"]) == (before["token_ids"], before["logprobs"])
    assert "no adapter 'mine' is merged" in refused(server, "/unload_lora_adapter", {"lora_name": "mine"}, 404)
    post(server, "/load_lora_adapter", {**other, "lora_name": "mine"})
    post(server, "/update_weights", {"weight_dir": str(talker)})  # new weights have no adapter
    assert "no adapter 'mine' is merged" in refused(server, "/unload_lora_adapter", {"lora_name": "mine"}, 404)
    post(server, "/load_lora_adapter", other)
    post(server, "/unload_lora_adapter", {"lora_name": "other"})


# ------------------------------------------------------------------------------------------------ SGLang


def sampled(server: Server, **fields: Any) -> Any:
    sampling = {"max_new_tokens": 6, "sampling_seed": 3, "temperature": 0.8, "top_k": 20, "ignore_eos": True}
    sampling |= {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    sampling |= fields.pop("sampling_params", {})
    body = {"input_ids": PROMPT, "return_logprob": True, **fields, "sampling_params": sampling}
    return post(server, "/generate", body)


def test_generate_as_slime_asks(server: Server, here: Generator) -> None:
    expected = here.generate([PROMPT], SHORT)[0].completions[0]
    found = sampled(server)
    meta = found["meta_info"]
    assert [item[1] for item in meta["output_token_logprobs"]] == expected.token_ids == found["output_ids"]
    assert [item[0] for item in meta["output_token_logprobs"]] == expected.untruncated_logprobs != expected.logprobs
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert found["text"] == expected.text
    stop = {"stop_token_ids": [expected.token_ids[2]]}
    stopped = sampled(server, sampling_params=stop)["meta_info"]
    assert stopped["finish_reason"] == {"type": "stop", "matched": expected.token_ids[2]}
    greedy = sampled(server, sampling_params={"temperature": 0.0})["meta_info"]["output_token_logprobs"]
    raw = here.generate([PROMPT], replace(SHORT, temperature=0.0))[0].completions[0].raw_logprobs
    assert [item[0] for item in greedy] == raw
    assert "output_token_logprobs" not in sampled(server, return_logprob=False)["meta_info"]
    assert len(sampled(server, sampling_params={"n": 2})) == 2
    assert post(server, "/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}})["output_ids"]
    assert "images are not supported" in refused(server, "/generate", {"text": "a", "image_data": ["x"]})
    assert "and not both" in refused(server, "/generate", {"text": "a", "input_ids": [5]})
    assert "the prompt is empty" in refused(server, "/generate", {"input_ids": []})
    assert post(server, "/generate", {"prompt": PROMPT, "params": {"max_tokens": 1}})["completions"], "our own"


def test_a_teacher_scores_as_slime_asks(server: Server, here: Generator) -> None:
    (expected,) = here.score([PROMPT])
    found = sampled(server, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    first, *rest = found["meta_info"]["input_token_logprobs"]
    assert first == [None, PROMPT[0], None]
    assert [item[0] for item in rest] == pytest.approx(expected[1:], abs=1e-4)
    assert [item[1] for item in rest] == PROMPT[1:]
    assert (found["text"], found["output_ids"], found["meta_info"]["output_token_logprobs"]) == ("", [], [])
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    both = sampled(server, logprob_start_len=5)["meta_info"]
    assert (len(both["input_token_logprobs"]), len(both["output_token_logprobs"])) == (4, 6)
    assert "input_token_logprobs" not in sampled(server, logprob_start_len=-1)["meta_info"]


def test_no_answer_has_numbers_that_json_does_not_have(server: Server) -> None:
    """The first token of a prompt has no logprob, which is NaN in Python and null in JSON."""
    ours = {"prompt": PROMPT, "params": {"max_tokens": 1, "prompt_logprobs": 0}}
    for path, body in (
        ("/score", {"sequences": [PROMPT], "logprobs": 1}),
        ("/generate", ours),
        ("/generate", {**ours, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 200
        for line in answer.text.splitlines():
            json.loads(line, parse_constant=pytest.fail)
        assert "null" in answer.text


def test_a_stream_as_slime_reads_it(server: Server) -> None:
    """Each event has all tokens so far, and the last one is the answer without a stream."""
    whole = sampled(server, rid="a", logprob_start_len=0)
    sampling = {"max_new_tokens": 6, "sampling_seed": 3, "temperature": 0.8, "top_k": 20, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    body |= {"stream": True, "rid": "a"}
    answer = server.post("/generate", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *events, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    for event in found[:-1]:
        assert event["meta_info"]["finish_reason"] is None
    drawn = [[item[1] for item in event["meta_info"]["output_token_logprobs"]] for event in found]
    assert all(ids == drawn[-1][: len(ids)] for ids in drawn)
    last = found[-1]
    for either in (last, whole):
        either["meta_info"]["e2e_latency"] = either["meta_info"]["cached_tokens"] = None
    assert last == whole
    assert "with n=1" in refused(server, "/generate", {**body, "sampling_params": {**sampling, "n": 2}})
    wrong = {**body, "input_ids": [99999]}
    assert "outside the vocabulary" in refused(server, "/generate", wrong)


def test_a_stream_that_fails_ends_with_its_error() -> None:
    stream = SglangStream(None, None, SglangRequest(text="a"), greedy=False)  # type: ignore[arg-type]
    error, end = stream.error_line(ApiError(500, "the engine has ended")).decode().split("\n\n", 1)
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the engine has ended"
    assert end == "data: [DONE]\n\n"


def test_masks_as_slime_replays_them(server: Server, here: Generator) -> None:
    """Of each token's mask, the ids are between two offsets."""
    custom = {"top_p": 0.5, "top_k": -1, "custom_params": {"return_top_p_token_ids": True}}
    meta = sampled(server, sampling_params=custom)["meta_info"]
    params = replace(SHORT, top_p=0.5, top_k=0, return_sampling_mask=True)
    (expected,) = here.generate([PROMPT], params)[0].completions
    ids, offsets = meta["top_p_token_ids"], meta["top_p_token_offsets"]
    assert [ids[start:end] for start, end in itertools.pairwise(offsets)] == expected.sampling_mask
    assert "top_p_token_ids" not in sampled(server)["meta_info"]


def test_a_step_of_slime(server: Server, step: Path, talker: Path) -> None:
    """Abort until idle, give memory back, take it, update from disk, continue; partial samples come with their ids."""
    info = server.get("/server_info").json()
    assert server.get("/model_info").json()["is_generation"] is True
    assert (info["tp_size"], info["pp_size"], info["disaggregation_mode"]) == (1, 1, "null")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sampled, server, sampling_params={"max_new_tokens": 400}, rid="mine")
        until(lambda: server.stats()["running"])
        post(server, "/abort_request", {"abort_all": True})
        partial = running.result(10)
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(partial["output_ids"]) < 400
    until(lambda: server.get("/v1/loads?include=core").json()["loads"][0]["num_running_reqs"] == 0)
    assert server.get("/flush_cache").status_code == 200
    post(server, "/release_memory_occupation", {})
    post(server, "/resume_memory_occupation", {"tags": ["weights"]})
    post(server, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    for folder, version in ((step, "111"), (talker, "112")):
        post(server, "/pause_generation", {})
        body = {"model_path": str(folder), "weight_version": version, "load_format": None}
        assert post(server, "/update_weights_from_disk", body)["success"] is True
        post(server, "/continue_generation", {})
        assert sampled(server)["meta_info"]["weight_version"] == version
        assert server.get("/get_weight_version").json()["weight_version"] == int(version)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sampled, server, sampling_params={"max_new_tokens": 400})
        until(lambda: server.stats()["running"])
        post(server, "/update_weights_from_disk", {"model_path": str(step), "abort_all_request": True})  # AReaL's name
        assert running.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
    post(server, "/update_weights_from_disk", {"model_path": str(talker)})
    assert "there is no folder" in refused(server, "/update_weights_from_disk", {"model_path": "/nope"})
    delta = {"model_path": str(step), "load_format": "delta"}
    assert "--update-weight-mode full" in refused(server, "/update_weights_from_disk", delta)
    assert server.get("/health_generate").status_code == 200


def test_the_schema_has_all_dialects(server: Server) -> None:
    schema = server.get("/openapi.json").json()
    bodies = schema["paths"]["/v1/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    assert [each["$ref"].rpartition("/")[2] for each in bodies] == ["GenerateRequest", "SglangRequest"]
    assert not schema["paths"]["/v1/pause"]["post"]["requestBody"]["required"]
    assert "TransferRequest" in schema["components"]["schemas"]


@pytest.mark.parametrize("timeout", ["1e308", "-1e308", "0", "1e18", str(2**63), "NaN", "true", "[1]", "1e999"])
def test_a_timeout_that_is_no_time_is_refused(server: Server, timeout: str) -> None:
    body = json.dumps({"backend": "gloo", "bucket_bytes": 1000, "replace": True, "timeout": "@"}).replace(
        '"@"', timeout
    )
    told = server.post_bytes("/init_weight_group", body.encode())
    assert told.status_code == 400
    assert "timeout" in told.text or timeout == "NaN"
    assert call_error(OverflowError("too large")).status == 400, "of whatever number"
