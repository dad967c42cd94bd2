"""The program that test_tensor_parallel.py runs on several ranks, and how its answers are compared with one process.

`ranks_program.py STORE RANK SIZE MODEL [MODEL ...]` makes all kinds of calls on two ranks with the first model, and a
few with the other models, or on more ranks. Then a rank is killed; the others have to notice this and to exit with
status 3.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import ALL, CONFIG, adapter
from conftest import Turns, new_weights, random_ids
from gathering import prepare_and_cut
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from fastgen import Generator, Request, RequestOutput, SamplingParams
from fastgen.engine import halves as step_halves
from fastgen.engine import runner
from fastgen.parallel.rank_group import RankGroup, gather_objects
from fastgen.ranks import start
from fastgen.request import Completion

SHORT = SamplingParams(max_tokens=10, seed=7, ignore_eos=True, logprobs=2)
LONG = replace(SHORT, max_tokens=28)
SYSTEM = random_ids(37, seed=1)
REQUESTS = [
    (random_ids(1), replace(SHORT, temperature=0)),
    (random_ids(70), replace(SHORT, temperature=0, prompt_logprobs=2)),
    (random_ids(33), replace(SHORT, temperature=0.8, top_p=0.9)),
    (random_ids(5), replace(SHORT, top_k=20, min_p=0.05, seed=-1, return_sampling_mask=True)),
    (random_ids(64), replace(SHORT, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
    (random_ids(90), replace(SHORT, temperature=1.3, logit_bias={5: 3.0, 6: -100.0, 7: 2.5}, prompt_logprobs=0)),
    (random_ids(20), replace(SHORT, temperature=2.0, min_tokens=4, stop_token_ids=tuple(range(3, 60)))),
    (random_ids(40), replace(SHORT, mask=Turns(), temperature=0, n=2)),
    (SYSTEM, replace(SHORT, n=3)),
    (SYSTEM + random_ids(16, seed=2), replace(LONG, temperature=0.9, mask=Turns())),
    (SYSTEM + random_ids(16, seed=2), replace(LONG, n=4, seed=8)),
    (SYSTEM + random_ids(30, seed=3), replace(LONG, temperature=0)),
]
FEW = REQUESTS[:9]
SOME = REQUESTS[1:4] + REQUESTS[8:9]
SCORED = [random_ids(30), random_ids(75), SYSTEM + random_ids(9, seed=4), SYSTEM + random_ids(12, seed=4)]
STARTS = [0, 20, 5, 40]
OPTIONS: dict[str, Any] = {"device": "cpu", "page_size": 16, "max_seqs": 16, "speculate": False, "seed": 3}
CLOSE = 1e-4  # how much a sum in a different order may change a raw logprob


def run_ranks(size: int, store: Path, *folders: Path) -> list[int]:
    """Run this program on several ranks, which meet in a new file `store`; return their exit statuses."""
    path = os.pathsep.join(map(str, (Path(start.__file__).parents[2], Path(__file__).parent)))
    command = [sys.executable, __file__, str(store)]
    environment = {**os.environ, "PYTHONPATH": path}
    ranks = [subprocess.Popen([*command, str(rank), str(size), *folders], env=environment) for rank in range(size)]
    try:
        return [rank.wait(280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


# ------------------------------------------------------------------------------------------- comparing answers


def answers(gen: Generator, requests: list[tuple[Any, SamplingParams]] = REQUESTS) -> list[RequestOutput]:
    return gen.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def contents(output: RequestOutput) -> tuple[Any, ...]:
    """Return the parts of an output that no schedule changes."""
    return output.completions, (output.prompt_logprobs or [])[1:], output.prompt_top_logprobs


def tokens_of(outputs: list[RequestOutput]) -> list[Any]:
    """Return the answers without the version of the weights."""
    return [(each.token_ids, each.logprobs, each.raw_logprobs) for output in outputs for each in output.completions]


def check_close(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Check that ranks answer as one process does, up to a token that is as good as another."""
    for mine, its in zip(found, expected, strict=True):
        assert (mine.error, mine.prompt_token_ids) == (its.error, its.prompt_token_ids)
        assert (mine.prompt_logprobs is None) == (its.prompt_logprobs is None)
        assert (mine.prompt_logprobs or [])[1:] == pytest.approx((its.prompt_logprobs or [])[1:], abs=CLOSE)
        assert values_of(mine.prompt_top_logprobs) == pytest.approx(values_of(its.prompt_top_logprobs), abs=CLOSE)
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
    for name in ("raw_logprobs", "logprobs", "untruncated_logprobs"):
        assert getattr(found, name)[:same] == pytest.approx(getattr(expected, name)[:same], abs=CLOSE)
    tops = values_of(expected.top_logprobs[:same])
    assert values_of(found.top_logprobs[:same]) == pytest.approx(tops, abs=CLOSE)


def values_of(tops: list[dict[int, float]] | None) -> list[float]:
    """Return the logprobs of alternatives, which may change places if they are equally good."""
    return [value for top in tops or [] for value in sorted(top.values())]


# ------------------------------------------------------------------------------------------- the program


class Program:
    """One rank. gen: the Generator of all ranks. alone: on rank 0, a Generator of one process with the same model."""

    def __init__(self, folder: Path, *others: Path) -> None:
        self.others = others
        self.folder, self.rank, self.size = folder, dist.get_rank(), dist.get_world_size()
        self.alone = Generator(folder, **OPTIONS) if self.rank == 0 else None
        self.gen = Generator(folder, tp_group=dist.group.WORLD, **OPTIONS)

    def mine(self, value: Any, others: Any = None) -> Any:
        """Return an argument on rank 0. The other ranks get a value that must not be used."""
        return others if self.rank else value

    def check_same(self, value: Any) -> None:
        """Check that all ranks have the same value. Its repr is compared, since nan is not equal to itself."""
        assert dist.group.WORLD is not None
        assert len(set(gather_objects(repr(value), dist.group.WORLD))) == 1, value

    def check_answers(self, gen: Generator, count: int = len(FEW)) -> list[RequestOutput]:
        """Check that all ranks get the answers of one process, and return them. Only rank 0's arguments are used."""
        prompts, params = zip(*FEW[:count], strict=True)
        found = gen.generate(self.mine(list(prompts)), self.mine(list(params)))
        self.check_same(found)
        if self.alone is not None:
            check_close(found, answers(self.alone, FEW[:count]))
        return found

    def requests(self, read: list[Any]) -> Iterator[Request]:
        for prompt, params in FEW:
            read.append(prompt)
            yield Request(prompt, params)

    def make_calls(self) -> None:
        gen, mine = self.gen, self.mine
        exact = list(map(contents, self.check_answers(gen)))
        scores = gen.score(mine(SCORED), start=mine(STARTS), temperature=mine(0.8, -1.0))
        self.check_same((scores, gen.stats))
        if self.alone is not None:
            for found, expected in zip(scores, self.alone.score(SCORED, STARTS, temperature=0.8), strict=True):
                assert found == pytest.approx(expected, abs=CLOSE, nan_ok=True)

        read: list[Any] = []
        streamed = list(gen.stream(mine(self.requests(read), 5)))
        self.check_same(streamed)
        assert sorted(map(repr, exact)) == sorted(repr(contents(output)) for output in streamed)
        for left in gen.stream(mine(self.requests(read), 5)):
            self.check_same((left, gen.unfinished))
            assert contents(left) in exact
            break
        assert gen.unfinished == 0
        assert len(FEW) <= len(read) <= 2 * len(FEW) if self.rank == 0 else not read

        ids = [gen.add(mine(prompt), mine(some), id=mine(f"request {i}")) for i, (prompt, some) in enumerate(FEW[:6])]
        events = [event for _ in range(6) for event in gen.step()]
        assert gen.unfinished == 6
        aborted = gen.abort(mine(ids[1:3]))
        while gen.unfinished:
            events += gen.step()
        self.check_same((ids, events, aborted))
        assert ids == [f"request {place}" for place in range(6)]
        assert [output.id for output in aborted] == ids[1:3]
        assert {each.finish_reason for output in aborted for each in output.completions} == {"abort"}
        said: dict[Any, list[int]] = {}
        for event in events:
            said.setdefault((event.id, event.index), []).extend(event.token_ids)
        for place, (completions, *_) in enumerate(exact[:6]):
            for completion in completions:
                own = said[ids[place], completion.index]
                assert own == completion.token_ids[: len(own)]
                assert (len(own) < len(completion.token_ids)) == (place in (1, 2))

    def cut_steps(self) -> None:
        """Run steps in two halves of any size, which ranks cannot always split evenly: the bits stay the same."""
        step_halves.CUT_TOKENS, step_halves.CUT_MULTIPLE = 8, 1
        parts, halves = step_halves.cut, list[int]()

        def noted(sequences: Any, decodes: int) -> Any:
            found = parts(sequences, decodes)
            halves.extend(int(part.query_lens.sum()) for part in found[: len(found) // 2])
            return found

        step_halves.cut = noted
        found = []
        for prepare in (RankGroup.prepare, prepare_and_cut):
            RankGroup.prepare = prepare  # type: ignore[method-assign]
            with Generator(self.folder, tp_group=dist.group.WORLD, **OPTIONS, prefix_cache=False) as gen:
                found.append(list(map(contents, answers(gen, FEW))))
                found.append([contents(*answers(gen, [request])) for request in FEW])
        assert found[0] == found[1] == found[2] == found[3]
        assert len(halves) > 6
        assert any(half % self.size for half in halves)

    def call_wrongly(self) -> None:
        """Errors are raised on all ranks, which then go on."""
        gen, mine, bad = self.gen, self.mine, SamplingParams(top_p=7.0)
        mesh, odd = init_device_mesh("cpu", (2,)), mine({}, {"max_seqs": 2, "num_pages": 9})
        with Generator(self.folder, tp_group=mesh, **OPTIONS | odd) as other:  # while there is another one
            self.check_answers(other, 3)
            suspended = other.stream(Request(*asked) for asked in FEW[:3])
            next(suspended)
        suspended.close()
        with pytest.raises(RuntimeError, match="this Generator is closed; make a new one"):
            other.generate([5], SHORT)
        with pytest.raises(ValueError, match="/nowhere"):
            Generator(mine(self.folder, "/nowhere"), tp_group=mesh, **OPTIONS)
        with pytest.raises(ValueError, match=r"top_p is 7.0; it must be above 0"):
            gen.add([5, 6], bad)
        with pytest.raises(RuntimeError, match="rank 1 called score while rank 0 called generate"):
            gen.generate([5, 6], SHORT) if self.rank == 0 else gen.score([[5, 6]])

        def broken() -> Iterator[Request]:
            yield Request([5, 6], SHORT)
            raise LookupError("no more requests")

        with pytest.raises(LookupError, match="no more requests"):
            list(gen.stream(mine(broken())))
        first, second = gen.generate([[5, 6], [5, 6]], [SHORT, bad])
        assert first.error is None
        assert second.error == "top_p is 7.0; it must be above 0 and at most 1"
        self.check_answers(gen, 3)

    def update(self) -> None:
        """Update the weights. Each rank gives tensors of its own; rank 0's other arguments are used."""
        gen, mine, alone = self.gen, self.mine, self.alone
        old, new = load_file(self.folder / "model.safetensors"), new_weights(self.folder)
        few, before = dict(list(new.items())[:3]), gen.generate([5, 6], SHORT)
        for weights, kind, text in ((few, ValueError, "missing"), (None, TypeError, "not NoneType")):
            with pytest.raises(kind, match=text):
                gen.update_weights(mine(new, weights))
            assert tokens_of(gen.generate([5, 6], SHORT)) == tokens_of(before), "nothing has changed yet"
        with pytest.raises(ValueError, match="rank 1 gives other tensors than rank 0: model"):
            gen.update_weights(iter(mine(few, new).items()), partial=mine(True))
        with pytest.raises(RuntimeError, match="call update_weights with all of them"):
            gen.generate([5, 6], SHORT)
        assert gen.update_weights(mine(iter(new.items()), new), version=mine(7)) == 7
        if alone is not None:
            alone.update_weights(new)
        self.check_answers(gen, 3)

        gen.add([5, 6, 7], LONG)
        with pytest.raises(ValueError, match=r"requests are in flight \(1\)"):
            gen.update_weights(old)
        gen.step()
        assert gen.update_weights(old.items(), in_flight=mine("abort")) == gen.weight_version == 8
        assert gen.step()[-1].finish_reason == "abort"
        if alone is not None:
            alone.update_weights(old)
        before = self.check_answers(gen, 3)

        state, config = adapter(self.folder, ("o_proj", "q_proj")), CONFIG | {"target_modules": ["o_proj", "q_proj"]}
        with pytest.raises(ValueError, match="use_dora is True"):
            gen.update_adapter(state, mine(config, config | {"use_dora": True}))
        gen.update_adapter(state, config)
        if alone is not None:
            alone.update_adapter(state, config)
        self.check_answers(gen, 3)
        gen.update_adapter(None)
        assert tokens_of(answers(gen, FEW[:3])) == tokens_of(before)

        assert gen.sleep(mine(("weights", "kv_cache")), keep_weights=mine(False)) == gen.sleep() == 0
        with pytest.raises(ValueError, match="tags has 'kv'"):
            gen.wake(mine("kv"))
        for call in (partial(gen.generate, [5, 6], SHORT), partial(gen.add, [5, 6], SHORT)):
            with pytest.raises(RuntimeError, match="asleep: kv_cache, weights; call wake first"):
                call()
        gen.wake()
        with pytest.raises(RuntimeError, match="the weights were dropped by sleep; call update_weights"):
            gen.generate([5, 6], SHORT)
        gen.update_weights(old)
        assert tokens_of(answers(gen, FEW[:3])) == tokens_of(before)

    def call_other_models(self) -> None:
        """Check the answers of other models, also with other weights, which untie a tied model, and with an adapter."""
        for folder in self.others:
            print(f"rank {self.rank}: {folder}", flush=True)
            state, weights = adapter(folder), new_weights(folder)
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].flip(1))
            how: dict[str, Any] = {"device": "cpu", "seed": 3}
            alone = Generator(folder, **how) if self.rank == 0 else None
            with Generator(folder, tp_group=dist.group.WORLD, **how, max_step_tokens=50, page_size=16) as gen:
                for changed in (False, True):
                    for each in filter(None, (gen, alone)) if changed else ():
                        each.update_weights(weights.items())
                        each.update_adapter(state, CONFIG | {"target_modules": list(ALL)})
                    found = answers(gen, SOME)
                    if alone is not None:
                        check_close(found, answers(alone, SOME))
            if alone is not None:
                alone.close()

    # ------------------------------------------------------------------------------------------- failures

    def make(self) -> Generator:
        options = {"load": "dummy", "device": "cpu", "num_pages": 16, "max_seqs": 4, "seed": 0}
        return Generator(self.folder, tp_group=dist.group.WORLD, **options)

    @contextmanager
    def raises(self, kind: type[Exception], text: str) -> Iterator[None]:
        """Check that an error is raised soon, and that the program's own group goes on."""
        begun = time.monotonic()
        with pytest.raises(kind, match=text):
            yield
        assert time.monotonic() - begun < 50
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == self.size

    def check_resources(self, before: tuple[int, int]) -> None:
        dist.barrier()
        deadline = time.monotonic() + 50  # for threads that are ending
        while (now := resources()) != before:
            assert time.monotonic() < deadline, (now, before)
            time.sleep(0.02)

    def fail(self) -> None:
        """Let each rank fail in a step and in a start: all ranks raise its error, and no socket or thread is left."""
        start._public_address = lambda: "127.0.0.1"
        for one_host in (True, False):
            peers = start.connect(dist.distributed_c10d._get_default_group(), one_host)
            peers.send(self.rank)
            assert peers.receive(10) == (1 - self.rank, 1 - self.rank)
            dist.barrier()
            peers.close()
        with self.make() as gen:
            first = gen.generate([1, 2, 3], SHORT)
        before, build = resources(), start.build_rank
        gen = self.make()
        assert tokens_of(gen.generate([1, 2, 3], SHORT)) == tokens_of(first)
        del gen  # not closed
        self.check_resources(before)
        for failing in range(self.size):
            broken = partial(cannot, failing)
            gen = self.make()
            gen.generate([1, 2, 3], SHORT)
            if self.rank == failing:
                gen._runner._runner.model.run_layers = broken  # type: ignore[attr-defined]
            with self.raises(LookupError, f"rank {failing} cannot"):
                gen.generate([1, 2, 3], SHORT)
            with self.raises(RuntimeError, "no longer agree"):
                gen.generate([1, 2, 3], SHORT)
            del gen
            start.build_rank = broken if self.rank == failing else build
            with self.raises(LookupError, f"rank {failing} cannot"):
                self.make()
            start.build_rank = build
            self.check_resources(before)

    def die(self, victim: int) -> None:
        """Kill a rank in the middle of generate. The others raise errors soon, in this call and in the next one."""
        launch, steps = runner.Runner.launch, iter(range(10))

        def last(made: Any, batch: Any) -> Any:
            if next(steps) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return launch(made, batch)

        if self.rank == victim:
            runner.Runner.launch = last  # type: ignore[method-assign]
        # If neither is the leader, it is chance which of their neighbours the survivors miss first.
        text = f"rank {victim} is gone; make a new Generator" if 0 in (self.rank, victim) else "rank"
        params, begun = SamplingParams(max_tokens=200, ignore_eos=True), time.monotonic()
        for expected in (text, f"the ranks no longer agree, make a new Generator: RuntimeError: .*{text}"):
            with pytest.raises(RuntimeError, match=expected):
                self.gen.generate([[5, 6, 7]] * 4, params)
        assert time.monotonic() - begun < 50
        sys.exit(3)


def resources() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def cannot(rank: int, *_: object) -> Any:
    raise LookupError(f"rank {rank} cannot")


def main() -> None:
    faulthandler.dump_traceback_later(250)
    store, rank, size, *folders = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    program = Program(*map(Path, folders))
    if program.size > 2:
        program.check_answers(program.gen)
        program.die(program.size - 1)
    parts: list[Callable[[], None]] = [
        program.make_calls, program.call_other_models, program.cut_steps, program.call_wrongly, program.update,
        program.fail,
    ]  # fmt: skip
    for part in parts:
        begun = time.monotonic()
        part()
        print(f"rank {program.rank}: {part.__name__} in {time.monotonic() - begun:.1f} s", flush=True)
    program.die(0)


if __name__ == "__main__":
    main()
