"""client.py: a Generator in a process of its own, used by an asyncio program."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import serve_stub
from serving import alive, children, until

import fastgen
from fastgen import Generator
from fastgen.async_engine.client import AsyncGenerator, EngineError, EventStream, joined
from fastgen.processes import spawning as processes
from fastgen.request import SHARED, Event, SamplingParams

pytestmark = pytest.mark.timeout(120)

OPTIONS: dict[str, Any] = {"seed": 7, "max_seqs": 32, "num_pages": 400, "page_size": 16, "max_step_tokens": 512}


Result = TypeVar("Result")


class Client:
    """An engine, its event loop, and an equal Generator in this process."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = AsyncGenerator(**OPTIONS)

    async def start(self) -> None:
        _, self.reference = await asyncio.gather(self.engine.start(), asyncio.to_thread(Generator, **OPTIONS))

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(main)


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    client = Client()
    with client.runner:
        client.run(client.start())
        with client.reference:
            yield client
        client.run(client.engine.close())


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    """A client with a running engine, which a test must leave idle."""
    assert shared.engine.ready
    yield shared
    shared.run(until_idle(shared.engine))


async def until_idle(engine: AsyncGenerator, seconds: float = 50.0) -> None:
    """Wait until the engine reports no request and no page, later than all messages that were sent to it before."""
    deadline, old = time.monotonic() + seconds, engine.stats
    while (stats := engine.stats) is old or stats.requests != stats.finished + stats.aborted or stats.pages_used:
        assert time.monotonic() < deadline, stats
        await engine.call("abort", [])  # an idle engine reports its stats after each message
        await asyncio.sleep(0.01)
    assert (stats.running, stats.waiting, engine.stalled) == (0, 0, 0), "no stream is left"


async def collect(stream: EventStream) -> list[Event]:
    """Read a request to its end; return one event for each sample."""
    with stream:
        lists = [events async for events in stream]
    assert all(lists), "a list without an event"
    return joined([event for events in lists for event in events])


def expected(gen: Generator, prompt: list[int], params: SamplingParams) -> list[Event]:
    """Return the events of a Generator in this process, as `collect` does."""
    gen.add(prompt, params, "expected")
    events = []
    while gen.unfinished:
        events += gen.step()
    return joined(events)


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(10, 4000), k=length)


LONG = SamplingParams(ignore_eos=True, max_tokens=1500)


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize(
    ("length", "params"),
    [
        (20, SamplingParams(temperature=0, max_tokens=30)),
        (5, SamplingParams(n=3, seed=4, max_tokens=25, logprobs=3, top_k=50, return_sampling_mask=True)),
        (40, SamplingParams(seed=1, max_tokens=60, ignore_eos=True, stop=["e", "a "], min_tokens=4)),
        (1034, SamplingParams(n=2, seed=2, max_tokens=4, prompt_logprobs=2)),
        (1024, SamplingParams(max_tokens=0, prompt_logprobs=0)),
        (3, SamplingParams(seed=5, max_tokens=20, logit_bias={100: 4.0, 101: 3.0}, stop_token_ids=[101])),
    ],
)  # fmt: skip
def test_a_stream_is_what_a_generator_says(client: Client, length: int, params: SamplingParams) -> None:
    async def main() -> list[Event]:
        return await collect(client.engine.submit([prompt], params))

    prompt = ids(length)
    wanted = [replace(event, id=0) for event in expected(client.reference, prompt, params)]
    found = client.run(main())
    for event in (*found, *wanted):
        event.cached_tokens = 0  # the engines have had other requests before
        event.started = None
        assert event.prompt_logprobs is None or math.isnan(event.prompt_logprobs.pop(0))
    assert [asdict(event) for event in found] == [asdict(event) for event in wanted]


def test_a_beam_search_is_that_of_a_generator_and_ends_when_it_is_cancelled(client: Client) -> None:
    async def main() -> None:
        engine, reference = client.engine, client.reference
        chat = {"messages": [{"role": "user", "content": "what is 12 + 30?"}]}
        for prompt in (ids(20), "The sum of 2 and 3", chat):
            found = await engine.beam_search(prompt, 3, 8, length_penalty=0.5)
            (wanted,) = reference.beam_search([prompt], 3, 8, length_penalty=0.5)
            assert (found.completions, found.prompt) == (wanted.completions, wanted.prompt)
            assert found.prompt_token_ids == wanted.prompt_token_ids
        for width, prompt, reason in ((0, "a", "width is 0"), (2, [9999], "outside the vocabulary")):
            with pytest.raises(ValueError, match=reason):
                await engine.beam_search(prompt, width, 8)
        search = asyncio.create_task(engine.beam_search("hello", 4, 1000, ignore_eos=True))
        done = engine.stats.finished
        while engine.stats.finished < done + 8:
            await engine.call("abort", [])
            await asyncio.sleep(0.01)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

    client.run(main())


def test_a_beam_search_ends_with_all_requests(client: Client) -> None:
    async def main() -> None:
        engine = client.engine
        for steps, end in ((0, engine.cut_off), (8, engine.abort)):
            done = engine.stats.finished
            search = asyncio.create_task(engine.beam_search("hello", 3, 2000, ignore_eos=True, length_penalty=0.5))
            await asyncio.sleep(0)
            while engine.stats.finished < done + steps:
                await engine.call("abort", [])
            await end()
            output = await search
            assert [each.finish_reason for each in output.completions] == ["abort"] * 3
            lengths = {len(each.token_ids) for each in output.completions}
            assert len(lengths) == 1
            assert (min(lengths) > 0) == (steps > 0)

    client.run(main())


async def consume(stream: EventStream, way: str) -> list[Event]:
    """Read a stream to its end, or leave it after the first list."""
    if way == "reads":
        return await collect(stream)
    with stream:
        first = await anext(stream)
        if way == "is cancelled":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        return first


def test_many_requests_at_once(client: Client) -> None:
    """Each gets its own events, in order, while others run and leave; the counts at the end are right."""

    async def main() -> list[list[Event]]:
        streams = [client.engine.submit([prompt], params) for prompt, params in requests]
        tasks = [consume(stream, way) for stream, way in zip(streams, ways, strict=True)]
        found = await asyncio.gather(*tasks)
        await until_idle(client.engine)
        return found

    rng = random.Random(3)
    requests = [
        (ids(rng.randrange(1, 40), i), SamplingParams(seed=i, n=1 + (i % 7 == 0), max_tokens=rng.randrange(1, 9)))
        for i in range(60)
    ]
    ways = rng.choices(["reads", "is cancelled", "leaves"], weights=[6, 2, 1], k=len(requests))
    before = client.engine.stats
    found = client.run(main())
    done = client.engine.stats.since(before)
    assert done.requests == 60
    assert done.finished >= ways.count("reads")
    outputs = client.reference.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for events, output, way in zip(found, outputs, ways, strict=True):
        if way == "reads":
            assert [event.token_ids for event in events] == [completion.token_ids for completion in output.completions]
            assert [event.text for event in events] == [completion.text for completion in output.completions]
        for completion in output.completions:
            said = [token for event in events if event.index == completion.index for token in event.token_ids]
            assert said == completion.token_ids[: len(said)]


def test_events_are_merged_for_a_slow_reader(client: Client) -> None:
    params = SamplingParams(max_tokens=6, n=2, seed=3, ignore_eos=True, logprobs=2, top_k=9, return_sampling_mask=True)
    prompt = ids(5)

    async def main() -> tuple[list[Event], float]:
        with client.engine.submit([prompt], params) as stream:
            await until_idle(client.engine)
            events = await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            return events, client.engine.stalled

    events, stalled = client.run(main())
    (output,) = client.reference.generate([prompt], params)
    assert len(events) == 2
    for event, completion in zip(events, output.completions, strict=True):
        for name in SHARED:
            assert getattr(event, name) == getattr(completion, name), name
        assert event.started is not None
    assert stalled == 0


def test_several_prompts_are_one_request_and_a_reader_of_the_complete_answers_is_seldom_woken(client: Client) -> None:
    prompts, params = [ids(5), ids(9), ids(3)], SamplingParams(max_tokens=30, n=2, seed=3, ignore_eos=True)

    async def main() -> list[list[Event]]:
        with client.engine.submit(prompts, params, every_step=False) as stream:
            return [events async for events in stream]

    lists = client.run(main())
    assert len(lists) <= len(prompts) + 1
    found = joined([event for events in lists for event in events])
    assert [(event.id, event.index) for event in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    outputs = client.reference.generate(prompts, params)
    wanted = [completion.token_ids for output in outputs for completion in output.completions]
    assert [event.token_ids for event in found] == wanted


# ------------------------------------------------------------------------------------------------ calls


def test_a_stream_and_a_whole_output_are_those_of_a_generator(client: Client) -> None:
    prompt, params = "The sum of 2 and 3", SamplingParams(n=2, seed=3, max_tokens=12, prompt_logprobs=1, logprobs=1)

    async def main() -> tuple[str, Any]:
        events = [event async for event in client.engine.stream(prompt, params)]
        return "".join(event.text for event in events if event.index == 1), await client.engine.generate(prompt, params)

    text, output = client.run(main())
    (wanted,) = client.reference.generate([prompt], params)
    assert text == wanted.completions[1].text
    assert output.completions == wanted.completions
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert output.prompt == prompt
    assert output.prompt_logprobs[1:] == wanted.prompt_logprobs[1:]
    assert output.prompt_top_logprobs == wanted.prompt_top_logprobs
    assert 0 < output.timings.first_token <= output.timings.finished


def test_methods_of_the_generator_run_between_steps(client: Client) -> None:
    async def main() -> None:
        gen = client.engine
        reading = asyncio.create_task(collect(gen.submit([ids(9)], replace(LONG, max_tokens=80))))
        await asyncio.sleep(0.05)
        (scores,) = await gen.call("score", [ids(6)], temperature=2.0)
        assert scores[1:] == client.reference.score([ids(6)], temperature=2.0)[0][1:]
        with pytest.raises(ValueError, match=r"requests are in flight \(1\)"):
            await gen.call("update_weights", {})
        with pytest.raises(ValueError, match=r"requests are in flight \(1\)"):
            await gen.call("update_adapter", None)
        with pytest.raises(AttributeError, match="nothing"):
            await gen.call("nothing")
        with pytest.raises((TypeError, AttributeError), match="pickle"):  # of the result
            await gen.call("stream", [])
        cancelled = asyncio.create_task(gen.call("score", [ids(7)]))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert len((await reading)[0].token_ids) == 80

    client.run(main())


def test_a_call_comes_after_the_end_of_a_stream_and_a_request_in_sleep_fails_alone(client: Client) -> None:
    async def main() -> None:
        with client.engine.submit([ids(9)], LONG) as stream:
            await anext(stream)
        await client.engine.call("sleep")
        with pytest.raises(RuntimeError, match="call wake first"):
            await client.engine.generate(ids(4))
        await client.engine.call("wake")
        assert len((await client.engine.generate(ids(4), replace(LONG, max_tokens=3))).completions[0].token_ids) == 3

    client.run(main())


class Unknown(StrEnum):
    """A string that the process of an engine does not know."""

    STOP = "a"


def test_what_another_process_cannot_read_fails_alone(client: Client) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, stop=[Unknown.STOP], seed=0, temperature=5)
        with pytest.raises(ValueError, match="must be in a module"):
            await client.engine.generate(ids(4), params)
        with pytest.raises(ValueError, match="must be in a module"):
            await client.engine.call("score", [Unknown.STOP])
        output = await client.engine.generate(ids(4), replace(params, stop=[np.str_("a")]))
        assert output.completions[0].stop_reason == "a"

    client.run(main())


# ------------------------------------------------------------------------------------------------ ends


TWO = replace(LONG, n=2)


async def by_cancelling(engine: AsyncGenerator) -> None:
    task = asyncio.create_task(engine.generate(ids(10), TWO))
    while not engine.stats.running:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_breaking(engine: AsyncGenerator) -> None:
    async for event in engine.stream(ids(10), TWO):
        if event.text:
            break


async def by_leaving(engine: AsyncGenerator) -> None:
    with engine.submit([ids(10)], TWO) as stream:
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def at_once(engine: AsyncGenerator) -> None:
    with engine.submit([ids(10)], TWO):
        pass


@pytest.mark.parametrize("way", [by_cancelling, by_breaking, by_leaving, at_once])
def test_a_request_is_aborted(client: Client, way: Any) -> None:
    """The engine stops its computation, and other requests go on."""

    async def main() -> None:
        other = asyncio.create_task(collect(engine.submit([ids(9)], SamplingParams(max_tokens=5))))
        await way(engine)
        assert (await other)[0].finish_reason in ("stop", "length")
        await until_idle(engine)

    engine, before = client.engine, client.engine.stats
    client.run(main())
    client.run(until_idle(engine))
    done = engine.stats.since(before)
    assert done.generated_tokens < 1000
    assert done.aborted == (done.requests == 2), "closed at once, it may never be added"


def test_requests_end_with_their_tokens_and_can_be_resumed(client: Client) -> None:
    async def main() -> None:
        calls = [asyncio.create_task(engine.generate(ids(10), LONG, name)) for name in ("a", "b", "c")]
        calls.append(asyncio.create_task(engine.generate([10**9], LONG, "wrong")))
        stream = asyncio.create_task(collect(engine.submit([ids(9)], LONG)))
        while engine.stats.running < 4:
            await asyncio.sleep(0.01)
        (first,) = await engine.abort(iter(["a", "nobody"]))
        await engine.cut_off("b")
        cut = await calls[1]
        (last,) = await engine.abort()
        assert (first is await calls[0], last is await calls[2]) == (True, True)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await calls[3]
        ends = [*(output.completions[0] for output in (first, cut, last)), *(await stream)]
        assert [each.finish_reason for each in ends] == ["abort"] * 4
        request = first.resume(LONG.replace(max_tokens=len(first.completions[0].token_ids) + 5))
        resumed = await engine.generate(**vars(request))
        assert resumed.completions[0].token_ids[:-5] == first.completions[0].token_ids
        assert await engine.abort() == []

    engine = client.engine
    client.run(main())


def test_a_wrong_request_fails_alone(client: Client) -> None:
    async def refused(kind: type[Exception], match: str, prompt: Any, params: SamplingParams) -> None:
        with pytest.raises(kind, match=match):
            await collect(engine.submit([ids(3), prompt], params))

    async def main() -> None:
        good = asyncio.create_task(collect(engine.submit([ids(9)], replace(LONG, max_tokens=60))))
        await asyncio.sleep(0)
        await refused(ValueError, "temperature is -1", ids(3), SamplingParams(temperature=-1))
        await refused(TypeError, "n must be an integer", ids(3), SamplingParams(n="2"))  # type: ignore[arg-type]
        await refused(ValueError, "the prompt has 3000 tokens", ids(3000), SamplingParams())
        await refused(ValueError, "the id 5000", [5000], SamplingParams())
        await refused(ValueError, "the prompt is empty", [], SamplingParams())
        await refused(TypeError, "must hold integers", ["x"], SamplingParams())
        await refused(ValueError, "^json_schema: Invalid type: x", ids(3), SamplingParams(json_schema={"type": "x"}))
        await refused(TypeError, "pickle", (id for id in [5]), SamplingParams())
        mask: Any = SimpleNamespace(fill=print, accept=print)
        await refused(ValueError, "a mask cannot be sent to another process", ids(3), SamplingParams(mask=mask))
        (event,) = await good
        assert len(event.token_ids) == 60

    engine = client.engine
    client.run(main())


# ------------------------------------------------------------------------------------------------ processes


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start from now on have a Generator that computes nothing."""
    monkeypatch.setattr(processes, "spawn", serve_stub.spawn)


async def stall(engine: AsyncGenerator, pid: int) -> None:
    with engine.submit([[5]], LONG) as stream:
        await anext(stream)
        os.kill(pid, signal.SIGINT)  # ignored
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.4)
        assert engine.stalled > 0.2
        os.kill(pid, signal.SIGCONT)
        async for _ in stream:
            if engine.stalled < 0.2:
                break
        assert engine.ready
    assert engine.stalled == 0


async def die(engine: AsyncGenerator, how: str, kill: Callable[[], Any]) -> None:
    streams = [engine.submit([[5]], replace(LONG, n=2)) for _ in range(3)]
    await anext(streams[0])
    started = time.monotonic()
    kill()
    for stream in streams:
        with pytest.raises(EngineError) as raised:
            await collect(stream)
        assert str(raised.value) == await engine.died() == engine.dead
    assert time.monotonic() - started < 50
    assert engine.dead is not None
    assert engine.dead.startswith(f"the engine of the bundled model {how}")
    assert not engine.ready
    assert engine.stalled == 0
    with pytest.raises(RuntimeError, match=how):
        engine.submit([[5]], LONG)


@pytest.mark.usefixtures("stubs")
def test_requests_between_the_end_of_the_connection_and_the_end_of_the_process_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop's transports raise RuntimeError when they are written to after their end."""
    ended, write, wait = asyncio.Event(), asyncio.StreamWriter.write, subprocess.Popen.wait

    def strict_write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if writer.is_closing():
            raise RuntimeError("the handler is closed")
        write(writer, data)

    def slow_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        ended.set()
        time.sleep(0.2)
        return wait(process, timeout)

    async def main() -> None:
        before = children(os.getpid())
        async with AsyncGenerator() as engine:
            (pid,) = set(children(os.getpid())) - set(before)
            monkeypatch.setattr(asyncio.StreamWriter, "write", strict_write)
            monkeypatch.setattr(subprocess.Popen, "wait", slow_wait)
            os.kill(pid, signal.SIGKILL)
            while not ended.is_set():
                await asyncio.sleep(0.001)
            assert engine.ready
            with pytest.raises(EngineError, match="was killed by SIGKILL"):
                await collect(engine.submit([[5]], LONG))
            monkeypatch.undo()

    asyncio.run(main())


@pytest.mark.usefixtures("stubs")
def test_a_stall_and_a_death_are_detected() -> None:
    async def main() -> None:
        before = children(os.getpid())
        async with AsyncGenerator() as engine:
            (pid,) = set(children(os.getpid())) - set(before)
            await stall(engine, pid)
            await die(engine, "was killed by SIGKILL", lambda: os.kill(pid, signal.SIGKILL))
            with pytest.raises(RuntimeError, match="has been started; make a new AsyncGenerator"):
                await engine.start()
        async with AsyncGenerator() as engine:
            await die(engine, "failed with RuntimeError: bad luck", lambda: engine.submit([[serve_stub.BAD]], LONG))

    asyncio.run(main())


@pytest.mark.usefixtures("stubs")
def test_a_close_or_a_cancellation_ends_a_start() -> None:
    async def main() -> None:
        for steps in (1, 2, 5):  # of the event loop
            engine = AsyncGenerator()
            start = asyncio.create_task(engine.start())
            for _ in range(steps):
                await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineError, match="was closed"):
                await start
            assert not engine.ready
        engine = AsyncGenerator("slow")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.start(), 0.1)
        assert not engine.ready
        assert engine.dead == "the engine of slow was closed"

    before = children(os.getpid())
    asyncio.run(main())
    assert children(os.getpid()) == before


def python(code: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(fastgen.__file__).parent.parent)}
    return subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, timeout=30)


PARENT = """
import asyncio, os, signal
from fastgen.async_engine.client import AsyncGenerator

async def main():
    engine = AsyncGenerator()
    starting = asyncio.create_task(engine.start())
    while not (child := open(f"/proc/self/task/{os.getpid()}/children").read()):
        await asyncio.sleep(0.001)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_an_engine_ends_with_its_parent() -> None:
    done = python(PARENT)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not alive(int(done.stdout)))


@pytest.mark.usefixtures("stubs")
def test_a_generator_that_fails_to_start_reports_its_reason() -> None:
    async def main() -> None:
        engine = AsyncGenerator("broken", name="mine")
        with pytest.raises(RuntimeError, match="the engine of mine is not ready; await start"):
            engine.submit([[1]], SamplingParams())
        with pytest.raises(ValueError, match="broken is broken; mend it"):
            await engine.start()
        assert engine.dead is not None
        assert engine.dead.startswith("the engine of mine ")
        assert not engine.ready

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("sys.exit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("own.sendall(bytes([0, 0, 0, 1, 0])); time.sleep(0.2)", "exited with status 0"),  # no message at all
    ],
)
def test_a_process_that_dies_while_it_loads(code: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = AsyncGenerator("a model")
        with pytest.raises(RuntimeError, match=f"the engine of a model {how}"):
            await engine.start()
        assert await engine.died() == engine.dead
        await engine.close()

    program = f"import os, socket, sys, time; own = socket.socket(fileno=int(sys.argv[-1])); {code}"
    spawn = processes.spawn
    monkeypatch.setattr(processes, "spawn", lambda _, started: spawn(("-c", program), started))
    asyncio.run(main())


FORGETFUL = """
import asyncio
from fastgen import AsyncGenerator, SamplingParams

async def main():
    gen = AsyncGenerator()
    await gen.start()
    async for event in gen.stream("hello", SamplingParams(ignore_eos=True)):
        break

asyncio.run(main())
print("done")
"""


@pytest.mark.long
def test_a_program_that_forgets_to_close_ends_well() -> None:
    done = python(FORGETFUL)
    assert (done.returncode, done.stdout) == (0, b"done\n")
