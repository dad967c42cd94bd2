"""remote.py, the routes of `fgserve --rollout` and the wire between them: a Generator in a server behaves like a local
one."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import new_weights, random_ids
from safetensors.torch import load_file, save_file
from sending import KEY, SENDER, Sharded, refusal
from serving import FGSERVE, ROOT, STUB, Server, until
from torch import Tensor

from fastgen import Generator, Request, RequestOutput, SamplingParams
from fastgen.rl.remote import RemoteGenerator

pytestmark = pytest.mark.timeout(120)

SHORT = SamplingParams(n=2, max_tokens=8, seed=7, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, seed=7, ignore_eos=True, speculate=False)
PROMPTS: list[Any] = ["hello", random_ids(20), [{"role": "user", "content": "how are you?"}], {"prompt": "the"}]
SECONDS = 30.0  # time limit of the wire, also on a busy machine

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def server(rollout_server: Server) -> Server:
    return rollout_server


@pytest.fixture
def weights(talker: Path) -> Weights:
    return load_file(talker / "model.safetensors")


@pytest.fixture
def gen(server: Server, weights: Weights) -> Iterator[RemoteGenerator]:
    """A client with a group of its own and small buckets. It leaves the server idle and with the original weights."""
    with RemoteGenerator(server.url, api_key=KEY, timeout=SECONDS, replace_group=True, bucket_bytes=20_000) as gen:
        yield gen
        gen.update_weights(weights)
        until(server.idle)


def drawn(outputs: list[RequestOutput]) -> list[Any]:
    """Return the parts of outputs that depend only on weights and params."""
    for output in outputs:
        if output.prompt_logprobs:
            assert math.isnan(output.prompt_logprobs[0])
        for completion in output.completions:
            completion.weight_versions = []
    return [(o.prompt_token_ids, o.prompt, o.error, o.completions, (o.prompt_logprobs or [])[1:]) for o in outputs]


# ------------------------------------------------------------------------------------------------ outputs


def test_outputs_are_those_of_a_generator(gen: RemoteGenerator, here: Generator) -> None:
    rich = replace(SHORT, logprobs=2, prompt_logprobs=1, top_k=5, return_sampling_mask=True, logit_bias={70: 2.0})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = [rich, {"max_tokens": 3, "seed": 1}, SamplingParams(json_schema=schema, max_tokens=6, seed=2), SHORT]
    found, expected = gen.generate(PROMPTS, params), here.generate(PROMPTS, params)
    assert [output.id for output in found] == [0, 1, 2, 3]
    assert all(completion.weight_versions for output in found for completion in output.completions)
    assert found[0].timings is not None
    assert drawn(found) == drawn(expected)
    assert drawn(gen.generate("hello", {"max_tokens": 3, "seed": 1}))
    assert gen.weight_checksums() == here.weight_checksums()


def test_a_request_fails_alone_and_wrong_params_before_all(gen: RemoteGenerator) -> None:
    first, second = gen.generate([[5, 6], [99999]], SHORT)
    assert first.error is None
    assert "outside the vocabulary" in (second.error or "")
    assert "temperature" in refusal(lambda: gen.generate("a", SamplingParams(temperature=-1)), ValueError)
    assert "2 prompts and 1 params" in refusal(lambda: gen.generate(["a", "b"], [SHORT]), ValueError)
    (resumed,) = gen.stream([Request([5, 6], SHORT, "x", resume=first.completions[0])])
    assert resumed.id == "x"
    assert "n is 2; a request resumes one completion" in (resumed.error or "")


def test_a_stream_takes_requests_and_none_and_ends_them_when_it_is_closed(gen: RemoteGenerator, server: Server) -> None:
    outputs = list(gen.stream([None, Request([5, 6], SHORT), None, Request([7], SHORT), None]))
    assert [output.error for output in outputs] == [None, None]
    (output,) = gen.stream([5, 6], SHORT)
    assert output.completions == outputs[[len(each.prompt_token_ids) for each in outputs].index(2)].completions
    with pytest.raises(TypeError, match="stream takes prompts and Requests, not float"):
        next(gen.stream(iter([5.0])))  # type: ignore[list-item]
    stream = gen.stream(Request([5, 6, number], SHORT if number == 10 else LONG) for number in range(10, 16))
    assert len(next(stream).completions) == 2
    until(lambda: server.stats()["running"])  # the others are sent while this one is read
    stream.close()
    until(server.idle)
    assert server.stats()["aborted_total"] >= 1


def test_agents_see_which_weights_drew_their_tokens(server: Server, gen: RemoteGenerator, weights: Weights) -> None:
    """By the openai client: ids in and out, versions, and logprobs of the distribution that was drawn from."""
    version = gen.update_weights(weights)
    client, extra = server.client(KEY), {"return_token_ids": True, "logprobs_mode": "processed_logprobs"}
    asked: dict[str, Any] = {"model": "any", "temperature": 0.5, "max_tokens": 4, "seed": 3}
    params = SamplingParams(temperature=0.5, max_tokens=4, seed=3)
    (expected,) = gen.generate([random_ids(9)], params)
    text: Any = client.completions.create(prompt=random_ids(9), logprobs=0, extra_body=extra, **asked).choices[0]
    assert text.token_ids == expected.completions[0].token_ids
    assert text.logprobs.token_logprobs == expected.completions[0].logprobs != expected.completions[0].raw_logprobs
    assert text.weight_versions == [[version, 0, 4]]
    chunks: Any = client.chat.completions.create(
        messages=PROMPTS[2], logprobs=True, stream=True, extra_body=extra, **asked
    )
    (expected,) = gen.generate([PROMPTS[2]], params)
    choices = [chunk.choices[0] for chunk in chunks]
    logprobs = [entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert logprobs == expected.completions[0].logprobs
    assert choices[-1].weight_versions == [[version, 0, 4]]
    wrong = {"prompt": "a", "logprobs": 2, "logprobs_mode": "processed_logprobs"}
    assert server.post("/completions", wrong).json()["error"]["param"] == "logprobs_mode"


# ------------------------------------------------------------------------------------------------ weights


def test_updates_by_every_way(gen: RemoteGenerator, here: Generator, talker: Path, tmp_path: Path) -> None:
    old = drawn(here.generate(PROMPTS, SHORT))
    new = new_weights(talker)
    here.update_weights(new)
    expected = drawn(here.generate(PROMPTS, SHORT))
    here.update_weights(load_file(talker / "model.safetensors"))
    save_file(new, tmp_path / "model.safetensors")
    mixed = {name: tensor.double() if "norm" in name else tensor for name, tensor in new.items()}
    ways: list[Any] = [
        new, iter(new.items()), list(mixed.items()), {name: Sharded(tensor) for name, tensor in new.items()}, tmp_path,
        [(name, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor) for name, tensor in new.items()],
    ]  # fmt: skip
    gathered = Sharded.gathered  # by other tests of this process
    for way in ways:
        version = gen.update_weights(load_file(talker / "model.safetensors"))
        assert drawn(gen.generate(PROMPTS, SHORT)) == old
        assert gen.update_weights(way) == gen.weight_version == (version or 0) + 1
        assert drawn(gen.generate(PROMPTS, SHORT)) == expected
    assert Sharded.gathered - gathered == len(new)
    assert gen.update_weights(new, version=4711) == 4711
    assert gen.generate("a", SHORT)[0].completions[0].weight_versions == [(4711, 0, 8)]


@pytest.mark.parametrize("in_flight", ["keep", pytest.param("recompute", marks=pytest.mark.long), "abort"])
def test_requests_in_flight(gen: RemoteGenerator, server: Server, weights: Weights, in_flight: str) -> None:
    version = gen.weight_version
    with ThreadPoolExecutor(1) as pool:

        def begin() -> Future[list[RequestOutput]]:
            running = pool.submit(gen.generate, [random_ids(5)], LONG)
            until(lambda: server.stats()["running"] or running.done())
            gen.pause()
            return running

        try:
            running = begin()
            while not server.stats()["running"]:  # the request has ended before the engine was paused
                gen.resume()
                running = begin()
            assert "are in flight" in refusal(lambda: gen.update_weights(weights), ValueError)
            assert gen.update_weights(weights, in_flight=in_flight) == version + 1
            steps = server.stats()["steps_total"]
            time.sleep(0.05)
            assert server.stats()["steps_total"] == steps
        finally:
            gen.resume()
        (output,) = running.result()
    (completion,) = output.completions
    spans = completion.weight_versions
    assert spans[0][:2] == (version, 0)
    assert spans[-1][2] == len(completion.token_ids) == len(completion.logprobs)
    if in_flight == "abort":
        assert (completion.finish_reason, len(spans)) == ("abort", 1)
    else:
        assert (completion.finish_reason, [span[0] for span in spans]) == ("length", [version, version + 1])


def test_sleep_and_wake(gen: RemoteGenerator, weights: Weights) -> None:
    assert gen.sleep(keep_weights=False) == 0  # on the CPU
    assert "asleep: kv_cache, weights" in refusal(lambda: gen.generate("a", SHORT))
    gen.wake("weights")
    gen.update_weights(weights)
    assert "asleep: kv_cache;" in refusal(lambda: gen.generate("a", SHORT))
    gen.wake(["kv_cache"])
    assert gen.generate("a", SHORT)[0].error is None


# ------------------------------------------------------------------------------------------------ faults


def test_weights_that_do_not_fit(gen: RemoteGenerator, here: Generator, weights: Weights, tmp_path: Path) -> None:
    """Everything is checked before anything is written."""
    old = drawn(here.generate(PROMPTS, SHORT))
    name = next(iter(weights))
    wrong = {**weights, "x": torch.ones(3), name: torch.ones(2, 2)}
    save_file(wrong, tmp_path / "model.safetensors")
    for given in (wrong, iter(wrong.items()), tmp_path):
        message = refusal(lambda given=given: gen.update_weights(given), ValueError)  # type: ignore[misc]
        assert message.startswith("the weights do not fit the model:")
        assert "unexpected tensor 'x'" in message
        assert f"tensor {name!r} has shape [2, 2]" in message
        assert drawn(gen.generate(PROMPTS, SHORT)) == old
    assert "int32" in refusal(lambda: gen.update_weights({**weights, name: weights[name].int()}), ValueError)
    assert gen.update_weights({name: weights[name]}, partial=True) == gen.weight_version
    (tmp_path / "model.safetensors").unlink()
    assert "no tensors" in refusal(lambda: gen.update_weights([]), ValueError)
    nowhere = refusal(lambda: gen.update_weights("/nope"), ValueError)
    assert nowhere == "there is no folder /nope, nor a safetensors file, on the Generator's machine"
    assert "model.safetensors is missing" in refusal(lambda: gen.update_weights(tmp_path), ValueError)


def test_a_trainers_own_error_leaves_no_mixture(gen: RemoteGenerator, weights: Weights) -> None:
    some: dict[str, Any] = {name: Sharded(tensor, KeyError(name)) for name, tensor in weights.items()}
    with pytest.raises(KeyError):
        gen.update_weights({**some, "model.norm.weight": weights["model.norm.weight"]})
    assert "the weights are torn" in refusal(lambda: gen.generate("a", SHORT))
    assert "the weights are torn" in refusal(lambda: gen.update_weights(weights, partial=True))
    gen.update_weights(weights)
    assert gen.generate("a", SHORT)[0].error is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.empty(64, device="meta"), ValueError, "is torch.strided on meta; give a dense one on a CPU or GPU"),
        (torch.ones(64).to_sparse(), ValueError, "is torch.sparse_coo on cpu; give a dense one"),
        (torch.ones(64).numpy(), ValueError, r"\(str, ndarray\) is given, and no \(name, tensor\)"),
        (None, TypeError, r"the weights must be a mapping, or an iterable of \(name, tensor\), not NoneType"),
        ([torch.ones(64)], ValueError, r"Tensor is given, and no \(name, tensor\)"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_sent(
    given: Any, error: type[Exception], message: str, gen: RemoteGenerator, weights: Weights
) -> None:
    named = {**weights, "model.norm.weight": given} if hasattr(given, "dtype") else given
    version = gen.weight_version
    with pytest.raises(error, match=message):
        gen.update_weights(named)
    assert gen.generate("a", SHORT)[0].error is None
    assert gen.weight_version == version


def test_only_one_group_and_one_update(gen: RemoteGenerator, server: Server, weights: Weights) -> None:
    gen.update_weights(weights)
    other = RemoteGenerator(server.url, api_key=KEY)
    assert "another program has a weight group" in refusal(lambda: other.update_weights(weights))
    answer = server.post("/update_weights", {"group": "wrong", "tensors": []})
    assert (answer.status_code, "no weight group with this key" in answer.text) == (400, True)
    answer = server.post("/init_weight_group", {"backend": "nccl", "timeout": 1, "bucket_bytes": 9})
    assert (answer.status_code, "give 'gloo'" in answer.text) == (400, True)
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        go_on.wait()

    slow: dict[str, Any] = {**weights, "model.norm.weight": Sharded(weights["model.norm.weight"], before=wait)}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(gen.update_weights, slow)
        entered.wait()
        until(lambda: "another update" in server.post("/update_weights", {"folder": "/"}).text)
        go_on.set()
        assert running.result() == gen.weight_version
    gen.close()
    assert other.update_weights(weights) == gen.weight_version  # after `close`, another program may have a group
    other.close()


@pytest.mark.parametrize("end", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
def test_a_sender_that_dies_or_hangs(
    end: str, gen: RemoteGenerator, server: Server, here: Generator, talker: Path, weights: Weights
) -> None:
    old = drawn(here.generate(PROMPTS, SHORT))
    command = [sys.executable, "-c", SENDER, server.url, KEY, str(talker), end, "cpu"]
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert sender.stdout is not None
        assert sender.stdout.readline() == b"sending\n"
        begun = time.monotonic()
        assert "the weights are torn" in refusal(lambda: gen.generate("a", SHORT))  # when the update has ended
        assert time.monotonic() - begun < 30, "a limit of 60 seconds for one that has ended, and of 1 for the other"
        assert gen.update_weights(weights)
        assert drawn(gen.generate(PROMPTS, SHORT)) == old
    finally:
        sender.kill()
        sender.communicate()


@pytest.mark.long
def test_the_ranks_of_one_model_of_several_get_its_weights(talker: Path, here: Generator, tmp_path: Path) -> None:
    here.update_weights(new := new_weights(talker))
    expected = [output.completions[0].token_ids for output in here.generate(PROMPTS, SHORT)]
    here.update_weights(load_file(talker / "model.safetensors"))
    models = [{"name": "a"}, {"name": "b c", "tensor_parallel": 2, "device": "cpu"}]
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({"models": [{"model": str(talker), **model} for model in models]}))
    with Server(FGSERVE, "--rollout", "--config", str(file)) as server:
        first, second = (RemoteGenerator(server.await_ready().url, model=name) for name in ("a", "b c"))
        assert second.update_weights(new) == 1
        assert (first.weight_version, second.weight_version) == (0, 1)
        outputs = second.generate(PROMPTS, SHORT)
        assert [output.completions[0].token_ids for output in outputs] == expected
        assert outputs[0].completions[0].weight_versions == [(1, 0, 8)]
        assert first.generate(PROMPTS, SHORT)[0].completions[0].token_ids != expected[0]


# ------------------------------------------------------------------------------------------------ the server


def test_a_server_without_rollout_and_one_that_is_gone() -> None:
    with Server(STUB) as server:
        gen = RemoteGenerator(server.await_ready().url)
        assert "start fgserve with --rollout" in refusal(lambda: gen.weight_version)
        assert httpx.post(f"{server.url}/update_weights", json={"folder": "/"}).status_code == 404
    assert "no answer from" in refusal(lambda: gen.generate([[5]] * 64, SHORT), ConnectionError)
    assert "must be like http://" in refusal(lambda: RemoteGenerator("localhost:1"), ValueError)
    assert "backend is 'mpi'" in refusal(lambda: RemoteGenerator(server.url, backend="mpi"), ValueError)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", ["http://127.0.0.1:9"]], ids=["one", "fleet"])
def test_wrong_tags_are_refused_before_anything_is_asked(url: str | list[str]) -> None:
    gen = RemoteGenerator(url)
    for call in (gen.sleep, gen.wake):
        with pytest.raises(ValueError, match="tags has 'wieghts'; there are 'weights' and 'kv_cache'"):
            call(["wieghts", "kv_cache"])


def test_params_of_many_prompts_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def fields_of(params: Any) -> None:
        checked.append(params)

    monkeypatch.setattr("fastgen.rl.remote.fields_of", fields_of)
    one, other = SamplingParams(), SamplingParams()
    with pytest.raises(ConnectionError):
        RemoteGenerator(["http://127.0.0.1:9"], ready_timeout=0).generate([[1]] * 5, [one, other, one, one, other])
    assert [id(params) for params in checked] == [id(one), id(other)]


def test_a_server_of_a_trainer_is_not_open() -> None:
    command = [sys.executable, "-m", "fastgen.cli.serve.main", "--rollout", "--host", "0.0.0.0"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2
    assert "it needs --api-key" in ran.stderr


def test_a_long_call_is_no_hang() -> None:
    flags = "--rollout", "--request-timeout=4", "--stall-timeout=1"
    with Server(STUB, *flags) as server, ThreadPoolExecutor(1) as pool:
        gen = RemoteGenerator(server.await_ready().url)
        with server.client().completions.create(model="any", prompt=[5], max_tokens=4000, stream=True) as stream:
            next(iter(stream))
            call = pool.submit(gen.sleep)
            time.sleep(1.5)
            assert server.get("/health").status_code == 200
        assert call.result() == 0


def test_samples_without_end_are_refused_and_a_dead_engine_is_not_started_with_old_weights() -> None:
    with Server(STUB, "--rollout", "--max-queued-requests=3") as server:
        told = server.await_ready().post("/generate", {"prompt": [5], "params": {"n": 4}})
        assert (told.status_code, "n is 4; one request may have 3" in told.text) == (400, True)
        server.signal_engines(signal.SIGKILL)
        assert server.end()[0] == 1
