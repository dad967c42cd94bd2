"""GeneratorPool: outputs are those of one Generator, a request fails alone, and so does a process."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import children

from fastgen import EngineError, Generator, GeneratorPool, Request, SamplingParams
from fastgen.pool.processes import AHEAD, Processes

SIZES: dict[str, Any] = {"device": "cpu", "max_seqs": 4, "max_step_tokens": 64, "page_size": 16, "num_pages": 100}
PROMPTS = [f"hello {word}" for word in ("world", "the other", "you", "fox", "dog")] * 4


@pytest.fixture(scope="module")
def pool(talker: Path) -> Iterator[GeneratorPool]:
    with GeneratorPool(talker, data_parallel=2, seed=7, **SIZES) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(talker: Path) -> list[Any]:
    """The completions of one Generator with the same seed, for PROMPTS twice."""
    with Generator(talker, seed=7, **SIZES) as gen:
        return [output.completions for output in gen.generate(PROMPTS * 2, SamplingParams(max_tokens=8, n=2))]


class Allowed:
    """A mask that allows all tokens."""

    def fill(self, row: Any) -> None: ...
    def accept(self, token: int) -> None: ...


def unreadable() -> None:
    """A tool that a process cannot import."""


def test_outputs_are_those_of_one_generator_with_the_same_seed(pool: GeneratorPool, expected: list[Any]) -> None:
    params = SamplingParams(max_tokens=8, n=2)
    outputs = pool.generate(PROMPTS, params)
    assert [output.id for output in outputs] == list(range(len(PROMPTS)))
    named = [Request(prompt, {"max_tokens": 8, "n": 2}, id=f"{at}") for at, prompt in enumerate(PROMPTS)]
    streamed = {output.id: output for output in pool.stream([None, *named[:7], None, *named[7:]])}
    outputs += [streamed[request.id] for request in named]
    assert [output.completions for output in outputs] == expected
    assert (pool.max_model_len, pool.default_params.temperature) == (512, 1.0)


def test_a_request_fails_alone(pool: GeneratorPool) -> None:
    tools = {"messages": [{"role": "user", "content": "hello"}], "tools": [unreadable]}
    requests = [
        Request("hello", {"max_tokens": -1}, id="wrong"),
        Request(tools, {"max_tokens": 2}, id="unreadable"),
        Request("hello " * 1000, {"max_tokens": 2}, id="long"),
        Request("hello", {"max_tokens": 2}, id="right"),
    ]
    errors = {output.id: output.error for output in pool.stream(requests)}
    assert errors.pop("right") is None
    for name, reason in (("wrong", "max_tokens is -1"), ("unreadable", "cannot read this"), ("long", "512")):
        assert reason in (errors[name] or "")
    with pytest.raises(ValueError, match="max_tokens is -1"):
        pool.generate(PROMPTS, {"max_tokens": -1})
    with pytest.raises(ValueError, match="a mask cannot be sent"):
        pool.stream(PROMPTS, SamplingParams(mask=Allowed()))


def test_a_stream_that_is_closed_aborts_its_requests(pool: GeneratorPool) -> None:
    stream = pool.stream(PROMPTS * 50, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(RuntimeError, match="another stream of this pool is not at its end"):
        pool.generate(PROMPTS)
    stream.close()
    assert len(pool.generate(PROMPTS, SamplingParams(max_tokens=2))) == len(PROMPTS)


def test_what_a_generator_refuses_is_raised() -> None:
    for options, reason in (
        ({"data_parallel": 0}, "data_parallel is 0; it must be at least 1"),
        ({"data_parallel": 1, "model": "/no/such/folder"}, "/no/such/folder"),
        ({"data_parallel": 1, "device": "cuda:1"}, "device is 'cuda:1'; with data_parallel it is 'cpu', or 'cuda'"),
    ):
        with pytest.raises(ValueError, match=reason):
            GeneratorPool(**options)


def test_the_process_with_the_fewest_tokens_left_gets_an_item_and_the_others_those_of_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    late = tmp_path / "late"
    items = [str(late), *range(AHEAD - 1)]  # which one process may have at a time
    processes = Processes("pool_stub:make", None, count=2, ranks=1, device="cpu")
    results = processes.run(
        ((number, (number, item)) for number, item in enumerate(items)), lambda item: 1 if item[0] else 10 * len(items)
    )
    small = [next(results) for _ in items[1:]]
    late.touch()
    (large,) = results
    assert large[2] not in {process for _, _, process in small}
    assert Counter(number for number, *_ in [large, *small]) == dict.fromkeys(range(len(items)), 1)

    late.unlink()
    again = processes.run(((number, (number, str(late))) for number in range(1000, 1008)), lambda _: 1)
    os.kill(large[2], signal.SIGKILL)
    late.touch()
    found = list(again)
    assert sorted(number for number, *_ in found) == list(range(1000, 1008))
    processes.close()


def test_requests_of_a_process_that_is_killed_go_to_the_others(
    pool: GeneratorPool, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The last test with the pool."""
    params = [SamplingParams(max_tokens=60, ignore_eos=True, seed=seed) for seed in range(len(PROMPTS))]
    undisturbed = [output.completions for output in pool.generate(PROMPTS, params)]
    requests = [Request(prompt, own, id=at) for at, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True))]
    stream = pool.stream(requests)
    outputs = [next(stream)]
    first, second = pids(pool)
    os.kill(first, signal.SIGKILL)
    outputs += stream
    assert "was killed by SIGKILL" in caplog.text
    assert [output.completions for output in sorted(outputs, key=lambda output: int(output.id))] == undisturbed
    stream = pool.stream(requests)
    next(stream)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"engine \d was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineError, match="the processes of this pool have ended; make a new one"):
        pool.generate(PROMPTS)


def pids(pool: GeneratorPool) -> list[int]:
    """Return the ids of the processes of the only pool."""
    found = [one for one in children(os.getpid()) if b"fastgen.pool.child" in Path(f"/proc/{one}/cmdline").read_bytes()]
    return found
