"""The program that test_tensor_parallel.py runs under torchrun: every rank writes a report to a file of its own.

`ranks_program.py OUT MODEL` makes all kinds of calls on two ranks, and answers on more. Then a rank is killed.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from adapters import CONFIG, adapter
from conftest import Turns, new_weights, random_ids
from gathering import GatheringExchange
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from fastgen import Generator, Request, SamplingParams
from fastgen.engine import runner
from fastgen.engine import step as step_sequences

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
SCORED = [random_ids(30), random_ids(75), SYSTEM + random_ids(9, seed=4), SYSTEM + random_ids(12, seed=4)]
STARTS = [0, 20, 5, 40]
OPTIONS: dict[str, Any] = {"device": "cpu", "page_size": 16, "max_seqs": 16, "speculate": False, "seed": 3}


class Ranks:
    """This rank of the program. found: its report, by name."""

    def __init__(self, out: Path) -> None:
        self.group = dist.group.WORLD
        self.rank = dist.get_rank()
        self.out = out / f"rank{self.rank}"
        self.found: dict[str, Any] = {"pid": os.getpid()}

    def save(self) -> None:
        self.out.with_suffix(".part").write_bytes(pickle.dumps(self.found))
        self.out.with_suffix(".part").rename(self.out)

    def mine(self, value: Any, others: Any = None) -> Any:
        """Return an argument on rank 0; other ranks get a value that must not be looked at."""
        return others if self.rank else value

    def raised(self, call: Callable[[], Any]) -> tuple[str, str]:
        try:
            call()
        except Exception as error:
            return type(error).__name__, str(error)
        return "", "nothing"

    def die(self, gen: Generator, victim: int) -> None:
        """Kill `victim` in the middle of generate. The others have to end by themselves, so that torchrun's own signal
        is ignored."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        launch, steps = runner.Runner.launch, iter(range(10))

        def last(self: Any, batch: Any) -> Any:
            if next(steps) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return launch(self, batch)

        self.found["killed"] = time.time()
        self.save()
        if self.rank == victim:
            runner.Runner.launch = last  # type: ignore[method-assign]
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        self.found["death"] = self.raised(lambda: gen.generate([[5, 6, 7]] * 4, long))
        self.found["after"] = self.raised(lambda: gen.generate([5, 6, 7], SHORT))
        self.save()
        sys.exit(3)


def main() -> None:
    faulthandler.dump_traceback_later(50)
    dist.init_process_group("gloo")
    ranks = Ranks(Path(sys.argv[1]))
    folder = sys.argv[2]
    gen = Generator(folder, tp_group=ranks.group, **OPTIONS)
    if dist.get_world_size() > 2:
        ranks.found["generate"] = gen.generate(*(ranks.mine(list(x)) for x in zip(*FEW, strict=True)))
        ranks.die(gen, dist.get_world_size() - 1)
    call_all(ranks, gen)
    cut_steps(ranks, gen)
    mesh = init_device_mesh("cpu", (2,))
    odd = ranks.mine({}, {"max_seqs": 2, "num_pages": 9})  # rank 0's arguments count
    with Generator(folder, tp_group=mesh, **OPTIONS | odd) as other:  # beside the first
        ranks.found["mesh"] = other.generate(*(ranks.mine(list(x)) for x in zip(*FEW[:3], strict=True)))
        suspended = other.stream(Request(*asked) for asked in FEW[:3])
        next(suspended)
    suspended.close()
    ranks.found["closed"] = ranks.raised(lambda: other.generate([5], SHORT))
    ranks.found["nowhere"] = ranks.raised(lambda: Generator(ranks.mine(folder, "/nowhere"), tp_group=mesh, **OPTIONS))
    call_wrongly(ranks, gen)
    update(ranks, gen, Path(folder))
    sleep(ranks, gen, Path(folder))
    ranks.die(gen, 0)


def call_all(ranks: Ranks, gen: Generator) -> None:
    """Make calls whose results must be the same on all ranks; rank 0's arguments count."""
    found, mine = ranks.found, ranks.mine
    prompts, params = zip(*FEW, strict=True)
    found["generate"] = gen.generate(mine(list(prompts)), mine(list(params)))
    found["score"] = gen.score(mine(SCORED), start=mine(STARTS), temperature=mine(0.8, -1.0))
    found["stats"] = gen.stats
    read = []

    def requests() -> Iterator[Request]:
        for prompt, some in FEW:
            read.append(prompt)
            yield Request(prompt, some)

    found["stream"] = list(gen.stream(mine(requests(), 5)))
    found["read"] = len(read)
    for left in gen.stream(mine(requests(), 5)):
        found["left"] = left, gen.unfinished
        break
    found["unfinished"] = [gen.unfinished]
    ids = [gen.add(mine(prompt), mine(some), id=mine(f"request {i}")) for i, (prompt, some) in enumerate(FEW[:6])]
    events = [gen.step() for _ in range(6)]
    found["unfinished"].append(gen.unfinished)
    found["aborted"] = gen.abort(mine(ids[1:3]))
    while gen.unfinished:
        events.append(gen.step())
    found["unfinished"].append(gen.unfinished)
    found["added"] = ids, events


def cut_steps(ranks: Ranks, gen: Generator) -> None:
    step_sequences.CUT_TOKENS, step_sequences.CUT_MULTIPLE = 32, 16
    model = gen._runner._runner.model
    model.group.exchange = GatheringExchange(model.group, step_sequences.largest_half(gen.config.max_step_tokens))
    parts, counts = step_sequences.StepSequences.parts, []

    def counted(self: Any, decodes: int) -> Any:
        found = parts(self, decodes)
        counts.append(len(found))
        return found

    step_sequences.StepSequences.parts = counted  # type: ignore[method-assign]
    scored = [place for place, (_, params) in enumerate(FEW) if params.prompt_logprobs is not None]
    for name, places in (("scored", scored), ("plain", [p for p in range(len(FEW)) if p not in scored])):
        counts.clear()
        some = [FEW[place] for place in places]
        found = gen.generate([prompt for prompt, _ in some], [params for _, params in some])
        ranks.found["cut " + name] = places, found, counts.count(2)


def call_wrongly(ranks: Ranks, gen: Generator) -> None:
    """Make calls whose errors are raised on all ranks, which then go on."""
    found, raised = ranks.found, ranks.raised
    bad = SamplingParams(top_p=7.0)
    found["value"] = raised(lambda: gen.add([5, 6], bad))
    found["mismatch"] = raised(lambda: gen.generate([5, 6], SHORT) if ranks.rank == 0 else gen.score([[5, 6]]))
    found["iterable"] = raised(lambda: list(gen.stream(ranks.mine(broken()))))
    found["bad"] = gen.generate([[5, 6], [5, 6]], [SHORT, bad])
    found["again"] = gen.generate(*(list(x) for x in zip(*FEW[:3], strict=True)))


def update(ranks: Ranks, gen: Generator, folder: Path) -> None:
    """Update the weights. Each rank gives weights of its own; rank 0's other arguments count."""
    found, raised, mine = ranks.found, ranks.raised, ranks.mine
    old, new = load_file(folder / "model.safetensors"), new_weights(folder)
    few, other = dict(list(new.items())[:3]), dict(list(new.items())[1:4])
    found["torn"] = [
        raised(lambda: gen.update_weights(mine(new, few))),
        raised(lambda: gen.update_weights(mine(new, None))),
        raised(lambda: gen.update_weights(mine(few, other), partial=mine(True))),
        raised(lambda: gen.generate([5, 6], SHORT)),  # nothing has changed yet
        raised(lambda: gen.update_weights(iter(mine(few, other).items()), partial=mine(True))),
        raised(lambda: gen.generate([5, 6], SHORT)),
        raised(lambda: gen.update_weights(mine(new, iter(few.items())))),
        raised(lambda: gen.add([5, 6], SHORT)),
    ]
    found["versions"] = [gen.update_weights(mine(iter(new.items()), new), version=mine(7))]
    found["new"] = gen.generate(*(list(x) for x in zip(*FEW[:3], strict=True)))
    gen.add([5, 6, 7], LONG)
    found["in flight"] = [raised(lambda: gen.update_weights(old)), [gen.step() for _ in range(9)]]
    found["versions"] += [gen.update_weights(old.items(), in_flight=mine("recompute")), gen.weight_version]
    while gen.unfinished:
        found["in flight"][1].append(gen.step())
    few_again = tuple(list(x) for x in zip(*FEW[:3], strict=True))
    found["old"] = gen.generate(*few_again)
    state, config = adapter(folder, ("o_proj", "q_proj")), CONFIG | {"target_modules": ["o_proj", "q_proj"]}
    found["adapted"] = [raised(lambda: gen.update_adapter(state, mine(config, config | {"use_dora": True})))]
    gen.update_adapter(state, config)
    found["adapted"].append(gen.generate(*few_again))
    gen.update_adapter(None)
    found["base"] = gen.generate(*few_again)


def sleep(ranks: Ranks, gen: Generator, folder: Path) -> None:
    """Sleep and wake. Rank 0's arguments count."""
    found, raised, mine = ranks.found, ranks.raised, ranks.mine
    found["slept"] = [gen.sleep(mine(("weights", "kv_cache")), keep_weights=mine(False)), gen.sleep()]
    found["asleep"] = [
        raised(lambda: gen.wake(mine("kv"))),
        raised(lambda: gen.generate([5, 6], SHORT)),
        raised(lambda: gen.add([5, 6], SHORT)),
    ]
    gen.wake()
    found["asleep"].append(raised(lambda: gen.generate([5, 6], SHORT)))
    gen.update_weights(load_file(folder / "model.safetensors"))
    found["awake"] = gen.generate(*(list(x) for x in zip(*FEW[:3], strict=True)))


def broken() -> Iterator[Request]:
    yield Request([5, 6], SHORT)
    raise LookupError("no more requests")


if __name__ == "__main__":
    main()
