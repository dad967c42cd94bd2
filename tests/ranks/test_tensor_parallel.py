"""Tensor parallelism on the CPU: ranks, spawned here or by torchrun, answer as one process does, and end together."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, CONFIG, adapter
from conftest import FAMILIES, Checkpoint, check_idle, new_weights, random_ids
from hash_model import hopeful
from ranks_program import FEW, OPTIONS, REQUESTS, SCORED, SHORT, STARTS
from safetensors.torch import load_file
from test_ranks_start import wait_until_gone

from fastgen import Generator, Request, RequestOutput, SamplingParams
from fastgen.engine.options import token_bytes
from fastgen.model.config import read_config
from fastgen.ranks import start as ranks_start
from fastgen.request import Completion

pytestmark = pytest.mark.timeout(120)

CLOSE = 1e-4  # of raw logprobs: what a sum in another order may change
HERE = Path(__file__).parent.parent
PROGRAM = HERE / "ranks_program.py"
MODELS = {  # tied, with biases, a window in some layers; norms of heads, whose KV heads are fewer than ranks
    "qwen2": FAMILIES["qwen2"][1],
    "qwen3": {**FAMILIES["qwen3"][1], "num_key_value_heads": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    return checkpoint(FAMILIES[request.param][0], **MODELS[request.param])


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[Generator]:
    """One process, with room for everything."""
    with Generator(folder, device="cpu", seed=3) as gen:
        yield gen


@pytest.fixture(scope="module")
def split(folder: Path) -> Iterator[Generator]:
    """Two ranks, with few pages, a host tier of a few more, and steps of few tokens."""
    config, page_size = read_config(folder), 8
    copies = 2 // min(config.num_kv_heads, 2)  # of a page, where both ranks hold the only KV head
    host_gb = 60 * copies * page_size * token_bytes(config, "float32") / 1e9
    options = {"page_size": page_size, "num_pages": 18, "max_seqs": 12, "max_step_tokens": 50, "seed": 3}
    with Generator(folder, device="cpu", tensor_parallel=2, host_cache_gb=host_gb, **options) as gen:
        gen._loop.scheduler = hopeful(gen.config)
        yield gen


def answers(gen: Generator, requests: list[tuple[Any, SamplingParams]] = REQUESTS) -> list[RequestOutput]:
    return gen.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def contents(output: RequestOutput) -> tuple[Any, ...]:
    """Return the parts of an output that no schedule changes."""
    return output.completions, (output.prompt_logprobs or [])[1:], output.prompt_top_logprobs


def check_close(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Check that ranks answer as one process does, up to a token that is as good as another."""
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert (mine.error, mine.prompt_token_ids) == (its.error, its.prompt_token_ids)
        assert (mine.prompt_logprobs is None) == (its.prompt_logprobs is None)
        assert (mine.prompt_logprobs or [])[1:] == pytest.approx((its.prompt_logprobs or [])[1:], abs=CLOSE)
        check_top(mine.prompt_top_logprobs or [], its.prompt_top_logprobs or [])
        assert len(mine.completions) == len(its.completions)
        for one, other in zip(mine.completions, its.completions, strict=True):
            check_completion(one, other)


def check_completion(found: Completion, expected: Completion) -> None:
    assert found.top_logprobs is not None
    assert expected.top_logprobs is not None
    both = list(zip(found.token_ids, expected.token_ids, strict=False))
    same = next((place for place, (one, other) in enumerate(both) if one != other), len(both))
    if same < len(both):
        best, second = sorted(expected.top_logprobs[same].values(), reverse=True)[:2]
        assert best - second < CLOSE, f"token {same} differs: {both[same]}"
    else:
        assert len(found.token_ids) == len(expected.token_ids)
        assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert found.sampling_mask == expected.sampling_mask
    assert found.raw_logprobs[:same] == pytest.approx(expected.raw_logprobs[:same], abs=CLOSE)
    assert found.logprobs[:same] == pytest.approx(expected.logprobs[:same], abs=CLOSE)
    assert found.untruncated_logprobs[:same] == pytest.approx(expected.untruncated_logprobs[:same], abs=CLOSE)
    check_top(found.top_logprobs[:same], expected.top_logprobs[:same])


def check_top(found: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    """Check the alternatives, which may change places where they are as good."""
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert sorted(mine.values()) == pytest.approx(sorted(its.values()), abs=CLOSE)
        assert all(mine.get(token, min(mine.values())) == pytest.approx(its[token], abs=CLOSE) for token in its)


# ------------------------------------------------------------------------------------------- ranks that are started


def test_ranks_answer_as_one_process_whatever_comes_between(split: Generator, whole: Generator) -> None:
    """Some sequences are preempted, or come from cached pages and the host tier; a second run gives the same bits."""
    assert split.config.tensor_parallel == 2
    first = answers(split)
    check_close(first, answers(whole))
    assert list(map(contents, answers(split))) == list(map(contents, first))
    check_idle(split)
    stats = split.stats
    assert min(stats.preemptions, stats.pages_saved, stats.pages_loaded, stats.cached_tokens) > 0


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_what_ranks_answer_does_not_show_neighbours_that_are_aborted(split: Generator, whole: Generator) -> None:
    chosen = [REQUESTS[place] for place in (1, 4, 7, 8)]
    doomed = [split.add(random_ids(40, seed=seed), SamplingParams(n=2, ignore_eos=True)) for seed in range(3)]
    ids = [split.add(*request) for request in chosen]
    said: dict[Any, list[int]] = {}
    while split.unfinished:
        for event in split.step():
            said.setdefault((event.id, event.index), []).extend(event.token_ids)
        if doomed and split.stats.steps % 4 == 0:
            (output,) = split.abort(doomed.pop())
            assert {completion.finish_reason for completion in output.completions} == {"abort"}
    assert not doomed
    check_idle(split)
    for id, output in zip(ids, answers(split, chosen), strict=True):
        for completion in output.completions:
            assert said[id, completion.index] == completion.token_ids


def test_ranks_score_as_one_process(split: Generator, whole: Generator) -> None:
    expected = whole.score(SCORED, start=STARTS, temperature=0.8)
    for _ in range(2):
        for mine, its in zip(split.score(SCORED, start=STARTS, temperature=0.8), expected, strict=True):
            assert mine == pytest.approx(its, abs=CLOSE, nan_ok=True)


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_two_generators_of_ranks_and_one_that_loses_a_rank(split: Generator, llama: Path) -> None:
    """Steps of one Generator run between those of the other, and it goes on after the other has died."""
    one = split
    with Generator(llama, device="cpu", tensor_parallel=2, max_seqs=8, seed=3) as other:
        for gen in (one, other):
            gen.add([5, 6, 7], SHORT)
        said: list[list[int]] = [[], []]
        while one.unfinished or other.unfinished:
            for ids, gen in zip(said, (one, other), strict=True):
                ids += [token for event in gen.step() for token in event.token_ids]
        for ids, gen in zip(said, (one, other), strict=True):
            assert ids == gen.generate([5, 6, 7], SHORT)[0].completions[0].token_ids
        processes = other._runner._spawned.processes
        stream = other.stream(endless())
        next(stream)
        start = time.monotonic()
        processes[0].kill()
        with pytest.raises(RuntimeError, match=r"rank 1 was killed by SIGKILL .*; make a new Generator"):
            list(stream)
        assert time.monotonic() - start < 10
        assert not any(Path(f"/proc/{process.pid}").exists() for process in processes), "none is left, nor a zombie"
        with pytest.raises(RuntimeError, match=r"the ranks no longer agree, .*rank 1 was killed"):
            other.generate([5, 6, 7], SHORT)
        assert one.generate([5, 6, 7], SHORT)[0].completions[0].token_ids == said[0]


def test_ranks_take_new_weights(split: Generator, whole: Generator, folder: Path) -> None:
    """Weights come from a mapping, and one after the other; the prefix cache and the host tier hold KV of the old
    ones."""
    old, new = load_file(folder / "model.safetensors"), new_weights(folder)
    some = REQUESTS[1:4] + REQUESTS[8:9]
    before = answers(split, some)
    with pytest.raises(ValueError, match="missing 1 of"):
        split.update_weights(dict(list(new.items())[1:]))
    for gen in (split, whole):
        assert gen.update_weights(new.items()) == 1
    check_close(answers(split, some), answers(whole, some))
    for gen in (split, whole):
        gen.update_weights(iter(old.items()), version=0)
    assert list(map(contents, answers(split, some))) == list(map(contents, before))
    check_idle(split)


def test_ranks_merge_adapters(split: Generator, whole: Generator, folder: Path) -> None:
    some = REQUESTS[1:4] + REQUESTS[8:9]
    before = answers(split, some)
    with pytest.raises(ValueError, match="missing 1 of"):
        split.update_adapter(dict(list(adapter(folder).items())[1:]), CONFIG)
    for seed, layers in enumerate((ALL, ("o_proj", "up_proj"))):
        for gen in (split, whole):
            config = CONFIG | {"target_modules": layers}
            assert gen.update_adapter(adapter(folder, layers, seed=seed), config) == seed + 1
        check_close(answers(split, some), answers(whole, some))
    for gen in (split, whole):
        gen.update_adapter(None, version=0)
    assert list(map(contents, answers(split, some))) == list(map(contents, before))
    check_idle(split)


def test_ranks_sleep_and_wake(split: Generator, folder: Path) -> None:
    some = REQUESTS[1:4] + REQUESTS[8:9]
    before = answers(split, some)
    split.sleep()
    with pytest.raises(RuntimeError, match="call wake first"):
        split.generate([5, 6, 7], SHORT)
    split.wake()
    assert list(map(contents, answers(split, some))) == list(map(contents, before))
    split.sleep(keep_weights=False)
    split.wake("weights")
    weights = load_file(folder / "model.safetensors")
    split.update_weights(weights)
    split.wake()
    split.update_weights(weights, version=0)  # as it was, for whatever test is next
    assert list(map(contents, answers(split, some))) == list(map(contents, before))
    check_idle(split)


def endless() -> Iterator[Request]:
    while True:
        yield Request([5, 6, 7], SHORT)


SCRIPT = """
import json, sys
from fastgen import Generator, SamplingParams

gen = Generator(sys.argv[1], tensor_parallel=2, device="cpu", seed=3)
params = SamplingParams(max_tokens=10, seed=7, ignore_eos=True)
print(json.dumps([process.pid for process in gen._runner._spawned.processes]))
print(json.dumps(gen.generate([[5, 6, 7]], params)[0].completions[0].token_ids), flush=True)
gen.generate([[5, 6, 7]] * 5000, SamplingParams(ignore_eos=True))
"""


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_a_plain_script_and_ctrl_c(folder: Path, whole: Generator, tmp_path: Path) -> None:
    """The script has no main guard and does not close; SIGINT comes to its process group in the middle of generate."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(folder)]
    with start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        pids, ids = json.loads(script.stdout.readline()), json.loads(script.stdout.readline())
        time.sleep(0.3)
        os.killpg(script.pid, signal.SIGINT)
        _, errors = script.communicate(timeout=10)
    wait_until_gone(pids, 0.5)
    assert ids == whole.generate([[5, 6, 7]], SHORT)[0].completions[0].token_ids
    assert script.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1, errors


# ------------------------------------------------------------------------------------------- ranks that are there


def start(command: list[str], variables: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a process group of its own, with this fastgen."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def saw(out: Path, ranks: int, started: list[subprocess.Popen[Any]], log: Path) -> list[dict[str, Any]]:
    """Return the report of each rank of the program when all have ended."""
    try:
        for process in started:
            process.wait(60)
    except subprocess.TimeoutExpired:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the ranks live on\n{log.read_text()}")
    ended = time.time()
    files = [out / f"rank{rank}" for rank in range(ranks)]
    assert all(file.exists() for file in files), log.read_text()
    found = [pickle.loads(file.read_bytes()) for file in files]
    assert all("killed" in each for each in found), log.read_text()
    assert ended - min(each["killed"] for each in found) < 10
    wait_until_gone([each["pid"] for each in found], 0.5)
    return found


def test_a_program_of_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """One run does everything, as its start takes seconds."""
    folder = checkpoint(FAMILIES["qwen2"][0], **MODELS["qwen2"])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    with (tmp_path / "log").open("wb") as log:
        torchrun = start([*command, str(PROGRAM), str(tmp_path), str(folder)], stdout=log, stderr=log)
    program = saw(tmp_path, 2, [torchrun], tmp_path / "log")
    check_all_ranks_see_the_same(*program)
    with Generator(folder, **OPTIONS) as alone:
        check_answers(program[0], alone)
    check_steps_and_aborts(program[0])
    check_errors(program)
    check_updates(program[0], folder)
    check_sleep(program)
    assert "death" not in program[0]
    check_death(program[1], "rank 0 is gone; make a new Generator")


def check_all_ranks_see_the_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    same = first.keys() - {"pid", "killed", "read", "death", "after"}
    assert {"generate", "mesh", "score", "stream", "left", "stats", "unfinished", "added", "aborted"} <= same
    for name in same:
        assert repr(first[name]) == repr(second[name]), name  # nan is not equal to itself
    assert first["unfinished"] == [0, 6, 0]
    assert len(FEW) <= first["read"] <= 2 * len(FEW)
    assert second["read"] == 0, "it alone reads the iterable"


def check_answers(found: dict[str, Any], alone: Generator) -> None:
    """Compare with one process; steps that are cut in two give the same bits."""
    expected = answers(alone, FEW)
    check_close(found["generate"], expected)
    check_close(found["mesh"], expected[:3])
    check_close(found["again"], expected[:3])
    exact = list(map(contents, found["generate"]))
    assert sorted(map(repr, exact)) == sorted(repr(contents(output)) for output in found["stream"])
    assert contents(found["left"][0]) in exact
    for mine, its in zip(found["score"], alone.score(SCORED, start=STARTS, temperature=0.8), strict=True):
        assert mine == pytest.approx(its, abs=CLOSE, nan_ok=True)
    for name in ("cut scored", "cut plain"):
        places, outputs, cuts = found[name]
        assert cuts > 0
        assert [contents(output) for output in outputs] == [exact[place] for place in places]


def check_steps_and_aborts(found: dict[str, Any]) -> None:
    ids, steps = found["added"]
    assert ids == [f"request {place}" for place in range(6)]
    said: dict[Any, list[int]] = {}
    for event in (event for events in steps for event in events):
        said.setdefault((event.id, event.index), []).extend(event.token_ids)
    assert [output.id for output in found["aborted"]] == ids[1:3]
    for output in found["aborted"]:
        assert [completion.finish_reason for completion in output.completions] == ["abort"]
    for place, output in enumerate(found["generate"][:6]):
        for completion in output.completions:
            ids_said, ended = said[ids[place], completion.index], place not in (1, 2)
            assert ids_said == completion.token_ids[: None if ended else len(ids_said)]
            assert ended or len(ids_said) < len(completion.token_ids)


def check_errors(program: list[dict[str, Any]]) -> None:
    """Errors are raised on all ranks, and the ranks go on."""
    for found in program:
        assert found["closed"] == ("RuntimeError", "this Generator is closed; make a new one")
        assert found["nowhere"][0] == "ValueError"
        assert "/nowhere" in found["nowhere"][1]
        assert found["value"] == ("ValueError", "top_p is 7.0; it must be above 0 and at most 1")
        assert found["mismatch"] == ("RuntimeError", "rank 1 called score where rank 0 called generate")
        assert found["iterable"] == ("LookupError", "no more requests")
        good, bad = found["bad"]
        assert good.error is None
        assert bad.error == "top_p is 7.0; it must be above 0 and at most 1"


def check_updates(found: dict[str, Any], folder: Path) -> None:
    """An error in any rank's weights is raised on all ranks, and only an update that was cut short leaves no usable
    weights."""
    kinds, texts = zip(*found["torn"], strict=True)
    assert list(kinds) == ["ValueError", "TypeError", "ValueError", "", *["ValueError", "RuntimeError"] * 2]
    assert "missing" in texts[0]
    assert "not NoneType" in texts[1]
    for text in (texts[2], texts[4]):
        assert text.startswith("rank 1 gives other tensors than rank 0: model.")
    for text in (texts[5], texts[7]):
        assert "call update_weights with all of them" in text
    assert found["versions"] == [7, 8, 8]
    assert list(map(answer, found["old"])) == list(map(answer, found["generate"][:3]))
    with Generator(folder, **OPTIONS) as alone:
        alone.update_weights(new_weights(folder))
        check_close(found["new"], answers(alone, FEW[:3]))
        alone.update_weights(load_file(folder / "model.safetensors"))
        alone.update_adapter(adapter(folder, ("o_proj", "q_proj")), CONFIG | {"target_modules": ["o_proj", "q_proj"]})
        check_close(found["adapted"][1], answers(alone, FEW[:3]))
    assert found["adapted"][0][0] == "ValueError"
    assert "use_dora is True" in found["adapted"][0][1]
    assert list(map(answer, found["base"])) == list(map(answer, found["old"]))
    refused, steps = found["in flight"]
    assert refused[0] == "ValueError"
    assert "1 requests are in flight" in refused[1]
    said = sum(len(event.token_ids) for events in steps[:9] for event in events)
    spans = [event.weight_versions for events in steps for event in events if event.weight_versions]
    assert len(spans) == 1
    assert [version for version, _, _ in spans[0]] == [7, 8]
    assert said <= spans[0][0][2] <= said + 1


def check_sleep(program: list[dict[str, Any]]) -> None:
    """Wrong arguments of one rank, and calls during sleep, are errors on all ranks."""
    for found in program:
        assert found["slept"] == [0, 0], "on the CPU"
        kinds, texts = zip(*found["asleep"], strict=True)
        assert list(kinds) == ["ValueError", "RuntimeError", "RuntimeError", "RuntimeError"]
        assert "tags has 'kv'" in texts[0]
        assert texts[1:3] == ("asleep: kv_cache, weights; call wake first",) * 2
        assert texts[3] == "the weights were dropped by sleep; call update_weights with all of them"
        assert list(map(answer, found["awake"])) == list(map(answer, found["old"]))


def answer(output: RequestOutput) -> list[Any]:
    """Return an answer, with any weights."""
    return [(completion.token_ids, completion.logprobs, completion.raw_logprobs) for completion in output.completions]


def check_death(found: dict[str, Any], text: str) -> None:
    """Check the errors of a survivor, in the call and in the next one."""
    assert found["death"] == ("RuntimeError", text)
    assert found["after"] == ("RuntimeError", f"the ranks no longer agree, make a new Generator: RuntimeError: {text}")


@pytest.mark.long
def test_four_ranks_answer_as_one_process_and_one_is_killed(llama: Path, tmp_path: Path) -> None:
    """The ranks hold each of two KV heads twice, and start without torchrun."""
    program = [sys.executable, str(PROGRAM), str(tmp_path), str(llama)]
    group = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (tmp_path / "log").open("wb") as log:
        ranks = [start(program, {**group, "RANK": str(rank)}, stdout=log, stderr=log) for rank in range(4)]
    found = saw(tmp_path, 4, ranks, tmp_path / "log")
    with Generator(llama, **OPTIONS) as gen:
        expected = answers(gen, FEW)
    for each in found:
        check_close(each["generate"], expected)
    assert "death" not in found[3]
    check_death(found[0], "rank 3 is gone; make a new Generator")
    for each in found[1:3]:  # which of their neighbours they miss first is chance
        assert [each[name][0] for name in ("death", "after")] == ["RuntimeError"] * 2


# ------------------------------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"tensor_parallel": 3}, ValueError, "num_attention_heads=4 does not divide by 3 ranks"),
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel is 0; it must be at least 1"),
        ({"tensor_parallel": "2"}, TypeError, "tensor_parallel must be an integer, not '2'"),
        ({"tensor_parallel": True}, TypeError, "tensor_parallel must be an integer, not True"),
        ({"tensor_parallel": 2, "tp_group": 1}, ValueError, "tp_group has its ranks already; leave tensor_parallel=2"),
        ({"tp_group": "tp"}, TypeError, "tp_group must be a process group or a DeviceMesh, not str"),
        (
            {"tensor_parallel": 2, "device": "cuda"},
            ValueError,
            "tensor_parallel is 2, and torch finds 1 GPUs here; lower it, or",
        ),
        ({"tensor_parallel": 2, "device": "cuda:1"}, ValueError, "device is 'cuda:1'; with tensor_parallel it is"),
        ({"tensor_parallel": 2, "page_size": 0}, ValueError, "page_size is 0; it must be at least 1"),
    ],
)
def test_what_can_not_work_is_told_before_ranks_are_started(
    options: dict[str, Any], kind: type[Exception], text: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ranks_start, "spawn", lambda *_: pytest.fail("a rank is started"))
    with pytest.raises(kind, match=re.escape(text)):
        Generator(llama, **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"intermediate_size": 95}, "intermediate_size=95 does not divide by 2 ranks"),
        ({"vocab_size": 321}, "vocab_size=321 does not divide by 2 ranks"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads=3 and 2 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_named(sizes: dict[str, int], text: str, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 16, **sizes}))
    with pytest.raises(ValueError, match=text):
        Generator(tmp_path, device="cpu", tensor_parallel=2)
