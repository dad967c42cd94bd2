"""Measure the heads that draft for the bundled model: how many drafts are right on held-out questions, and the speed.

    python scripts/tiny/measure_heads.py                     # on the CPU, 8 minutes: bundled-heads-cpu.json
    python scripts/tiny/measure_heads.py --device cuda       # bundled-heads-h100.json, by the card
    python scripts/tiny/measure_heads.py --rounds 1 --only "int4, all drafts" \\
        --out scripts/results/bundled-int4-cpu.json
    python scripts/tiny/measure_heads.py --smoke             # writes nothing without --out

One Generator for each way of drafting answers the same questions, one at a time (one lane), in turn with the others.
The answers must be the same to the bit. A row is a token that a step computes for a sequence: the last one, or a draft.
"all drafts" verifies each draft (row_cost=0), as if rows were free: the acceptance of the head itself, or of earlier
text where that was right more often. "int4" is an int4 copy of the model. The other cases are what a user gets.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_data import SKILLS, evaluation_tasks, prompt

from fastgen import Completion, Generator, SamplingParams, Speculation

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from reports import RESULTS, processor, write_json

TINY = Path(__file__).parents[2] / "fastgen" / "tiny"
TEMPERATURES = (0.0, 0.2)  # the second one is the bundled model's own, which fgchat takes
MOST_TOKENS = 400


@dataclass
class Case:
    """A way of drafting, and what was measured.

    seconds: the time of each round. answers, counts: token ids and counters of the last round. stopped: number of
    answers that end in a stop token, after which one more step has been launched.
    """

    generator: Generator
    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    stopped: int = 0

    def answer(self, prompts: Sequence[dict[str, Any]], temperature: float) -> None:
        """Answer the prompts one after the other, and keep the time and the counts."""
        before, start, found = self.generator.stats, time.perf_counter(), list[Completion]()
        for seed, asked in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=MOST_TOKENS, seed=seed)
            found.append(self.generator.generate([asked], params)[0].completions[0])
        self.seconds.append(time.perf_counter() - start)
        self.answers = [each.token_ids for each in found]
        self.stopped = sum(each.finish_reason == "stop" for each in found)
        stats = self.generator.stats.since(before)
        self.counts = {
            name: getattr(stats, name) for name in ("steps", "drafted", "accepted", "head_drafted", "head_accepted")
        }

    def report(self, prompts: int) -> dict[str, Any]:
        """Return the figures. The first token of an answer comes from the step of its prompt."""
        tokens = sum(map(len, self.answers))
        steps, drafted = self.counts["steps"] - prompts - self.stopped, self.counts["drafted"]
        return {
            "tokens": tokens, "tokens_per_second": tokens / min(self.seconds),
            "tokens_per_step": (tokens - prompts) / steps, "tokens_per_row": (tokens - prompts) / (steps + drafted),
            **self.counts,
        }  # fmt: skip


def ways(folder: Path) -> dict[str, Any]:
    """Return the ways of drafting, values of `speculate`. folder: with the folders of heads."""
    found: dict[str, Any] = {"off": False, "text": Speculation(history_tokens=0)}
    for path in sorted(path.parent for path in folder.glob("*/config.json")):
        found[path.name] = Speculation(head=path, history_tokens=0)
        found[f"{path.name}, all drafts"] = Speculation(head=path, history_tokens=0, row_cost=0.0)
    found["int4, all drafts"] = Speculation(head="int4", history_tokens=0, row_cost=0.0)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all ways by the temperature."""
    tasks = [task for name in SKILLS for task in evaluation_tasks(name, args.prompts, args.seed)]
    prompts, found = [prompt(task) for task in tasks][: args.most], dict[str, Any]()
    for temperature in TEMPERATURES[: 1 if args.smoke else None]:
        cases = {
            name: Case(Generator(device=args.device, speculate=way, prefix_cache=False, max_seqs=4))
            for name, way in ways(args.heads).items()
            if name == "off" or name in (args.only or ([] if name.startswith("int4") else [name]))
        }
        for case in cases.values():
            case.answer(prompts[:8], temperature)  # a warm-up
            case.seconds.clear()
        for _ in range(args.rounds):
            for case in cases.values():
                case.answer(prompts, temperature)
        for name, case in cases.items():
            if case.answers != cases["off"].answers:
                raise RuntimeError(f"the answers with {name} are not the plain ones")
            case.generator.close()
        reports = {name: case.report(len(prompts)) for name, case in cases.items()}
        for name, each in reports.items():
            each["times_off"] = each["tokens_per_second"] / reports["off"]["tokens_per_second"]
            print(
                f"temperature {temperature}, {name:20}: {each['tokens_per_step']:.2f} tokens per step, "
                f"{each['tokens_per_row']:.2f} per row, {each['tokens_per_second']:.0f} tok/s, "
                f"{each['times_off']:.2f} times off",
                flush=True,
            )
        found[f"temperature {temperature}"] = reports
    return {"prompts": len(prompts), **found}


def main(argv: list[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, default=TINY, help="folder with the folders of heads")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="ways of drafting, as in the file, besides off")
    parser.add_argument("--prompts", type=int, default=1, help="held-out questions per skill")
    parser.add_argument("--most", type=int, help="maximum number of questions in all")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--smoke", action="store_true", help="a few questions; writes only with --out")
    args = parser.parse_args(argv)
    if args.smoke:
        args.prompts, args.most, args.rounds = 1, 4, 1
    cuda = args.device == "cuda"
    about = {"machine": torch.cuda.get_device_name() if cuda else processor(), "torch": torch.__version__}
    report = {**about, **measure(args)}
    card = about["machine"].removeprefix("NVIDIA ").split()[0].lower() if cuda else "cpu"
    path = args.out or (None if args.smoke else RESULTS / f"bundled-heads-{card}.json")
    if path is not None:
        write_json(path, report)


if __name__ == "__main__":
    main()
