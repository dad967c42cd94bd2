"""GRPO in plain PyTorch, exactly on policy: the bundled model learns two-digit products.

    python scripts/rl/rl_grpo.py                  # on two CPU cores in minutes
    python scripts/rl/rl_grpo.py --device cuda    # on a GPU
    python scripts/rl/rl_grpo.py --smoke          # two small steps in seconds, to see that it runs
    python scripts/rl/rl_grpo.py --out FILE       # writes the learning curve and the times, as JSON

A step draws prompts, samples each several times, rewards the exact product, and takes a few optimizer steps on the
clipped objective. The trainer is a Policy over the Generator that samples, so there is one model, and before the first
optimizer step of a rollout every importance ratio is exactly 1: `first_ratio_error` is 0. The bundled model has seen
neither the training problems nor the held-out ones: it answers them at once and mostly wrong, and now and then works
one out in steps, which is nearly always right; that is what it can find.

This file needs only fastgen and transformers: copy it, and change the problems and the reward.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.rl.policy import Policy

Problem = tuple[int, int]
MAX_TOKENS = 64  # of an answer
TRAINED_ON = 30  # percent of the products of two-digit numbers that the bundled model was trained on
PARTS = ("generate", "train", "commit")


@dataclass(frozen=True)
class Settings:
    """Settings of the training.

    prompts: number of prompts per step. samples: number of samples per prompt. problems: number of problems that
    prompts are drawn from; None: all. batch: number of sequences per optimizer step. clip_low, clip_high: how far an
    importance ratio may fall and rise. held_out: number of problems that are asked every evaluate_every steps and never
    trained on.
    """

    steps: int = 12
    prompts: int = 32
    samples: int = 8
    problems: int | None = None
    batch: int = 64
    learning_rate: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    held_out: int = 400
    evaluate_every: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Rollout:
    """One sample of a prompt.

    ids: token ids of the prompt and of the answer. logprobs, weight_versions: the ones that the answer was drawn with.
    advantage: of the answer over its group.
    """

    ids: list[int]
    prompt_len: int
    logprobs: list[float]
    advantage: float
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def advantages(self) -> list[float]:
        """The advantage of each token of the answer."""
        return [self.advantage] * len(self.logprobs)


def is_new(a: int, b: int) -> bool:
    """Return True for a product of two-digit numbers that the bundled model has not been trained on: a hash tells."""
    key = f"mul2:{min(a, b)}*{max(a, b)}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 100 >= TRAINED_ON


def problems(settings: Settings) -> tuple[list[Problem], list[Problem]]:
    """Return pairs of two-digit numbers to train on, and held-out ones; a pair and its mirror image are on the same
    side.

    None was in the bundled model's own training data; neither factor is a multiple of ten, as those it knows.
    """
    numbers = [number for number in range(11, 100) if number % 10]
    pairs = [(a, b) for a in numbers for b in numbers if a <= b and is_new(a, b)]
    rng = random.Random(settings.seed)
    rng.shuffle(pairs)
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in pairs]
    return pairs[settings.held_out :], pairs[: settings.held_out]


def chat(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": "what is {} * {}?".format(*problem)}]


def reward(problem: Problem, text: str) -> float:
    """Return 1 where the last number of an answer is the product, else 0."""
    return float(re.findall(r"\d+", text)[-1:] == [str(problem[0] * problem[1])])


def rewards_of(asked: Sequence[Problem], outputs: Sequence[RequestOutput]) -> Tensor:
    """Return the reward of each sample: float32 [prompts, samples]."""
    pairs = zip(asked, outputs, strict=True)
    return torch.tensor([[reward(problem, sample.text) for sample in out.completions] for problem, out in pairs])


def rollouts(outputs: Sequence[RequestOutput], rewards: Tensor) -> list[Rollout]:
    """Return the samples of groups that were neither all right nor all wrong, which have an advantage."""
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return [
        Rollout(
            out.prompt_token_ids + sample.token_ids,
            len(out.prompt_token_ids),
            sample.logprobs,
            advantage,
            sample.weight_versions,
        )
        for out, group in zip(outputs, advantages.tolist(), strict=True)
        for sample, advantage in zip(out.completions, group, strict=True)
        if advantage
    ]


def answer_logprobs(policy: Policy, batch: Sequence[Rollout]) -> Tensor:
    """Return the logprobs of the tokens of all answers: float32 [T]."""
    return policy.logprobs([rollout.ids for rollout in batch], [rollout.prompt_len for rollout in batch])


def clipped_loss(policy: Policy, batch: Sequence[Rollout], settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the clipped objective, the mean over the answers' tokens, and the importance ratio of each token."""
    logprobs = answer_logprobs(policy, batch)
    behaviour = torch.tensor([p for rollout in batch for p in rollout.logprobs], device=logprobs.device)
    advantages = torch.tensor([a for rollout in batch for a in rollout.advantages], device=logprobs.device)
    ratios = (logprobs - behaviour).exp()
    clipped = ratios.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratios * advantages, clipped * advantages).mean(), ratios.detach()


def learn(
    policy: Policy, optimizer: torch.optim.Optimizer, samples: list[Rollout], settings: Settings, rng: random.Random
) -> dict[str, float]:
    """Train one pass over a step's samples, with one optimizer step for each batch.

    Returns first_ratio_error, the largest |ratio - 1| in the first batch, before any optimizer step; and over all
    tokens the mean ratio and the share of ratios outside the clip range.
    """
    rng.shuffle(samples)
    found: list[Tensor] = []
    for start in range(0, len(samples), settings.batch):
        loss, ratios = clipped_loss(policy, samples[start : start + settings.batch], settings)
        loss.backward()
        found.append(ratios)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if not found:  # nothing to learn from
        return {}
    ratios = torch.cat(found)
    outside = (ratios < 1 - settings.clip_low) | (ratios > 1 + settings.clip_high)
    return {
        "first_ratio_error": (found[0] - 1).abs().max().item(),
        "mean_ratio": ratios.mean().item(),
        "outside_clip": outside.float().mean().item(),
    }


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add what the block takes, on the device too, to the seconds of a part of the loop."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start


def accuracy(gen: Generator, held_out: Sequence[Problem]) -> float:
    """Return the share of problems that the greedy answer has right."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = gen.generate([chat(problem) for problem in held_out], greedy)
    return rewards_of(held_out, outputs).mean().item()


def train(settings: Settings, device: str, dtype: str, speculate: str = "auto") -> dict[str, Any]:
    """Train; return the learning curve, a point for each step, and the time of each part."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    seconds: dict[str, float] = {}
    curve: list[dict[str, Any]] = []
    # Half of a GPU's memory is the trainer's. In float32 a GPU is deterministic only if asked.
    options: dict[str, Any] = {"device": device, "dtype": dtype, "seed": settings.seed, "speculate": speculate}
    with Generator(memory_fraction=0.5, deterministic=True, **options) as gen:
        policy = Policy(gen, dtype=torch.float32)  # with dtype="bfloat16", these are master weights
        optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        rng = random.Random(settings.seed)
        sampling = SamplingParams(n=settings.samples, temperature=1.0, max_tokens=MAX_TOKENS)
        to_train, held_out = problems(settings)
        for step in range(settings.steps + 1):  # at step 0 there are only the held-out problems
            point: dict[str, Any] = {"step": step}
            if step:
                asked = rng.sample(to_train[: settings.problems], settings.prompts)
                with timed(seconds, "generate"):
                    outputs = gen.generate([chat(problem) for problem in asked], sampling)
                with timed(seconds, "train"):
                    rewards = rewards_of(asked, outputs)
                    found = learn(policy, optimizer, rollouts(outputs, rewards), settings, rng)
                with timed(seconds, "commit"):
                    policy.commit()
                point |= {"reward": rewards.mean().item(), **found}
            if step % settings.evaluate_every == 0 or step == settings.steps:
                with timed(seconds, "evaluate"):
                    point["held_out_accuracy"] = accuracy(gen, held_out)
            point |= {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - begin_cpu}
            print(", ".join(f"{key} {value:.4g}" for key, value in point.items()), flush=True)
            curve.append(point)
    loop = sum(seconds[part] for part in PARTS)
    shares = {part: seconds[part] / loop for part in PARTS}
    worst = max(point.get("first_ratio_error", 0.0) for point in curve)
    return {"settings": asdict(settings), "seconds": seconds, "shares": shares, "first_ratio_error": worst,
            "curve": curve}  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", help="dtype of the Generator; the parameters are float32")
    parser.add_argument(
        "--speculate", default="auto", choices=("auto", "ngram", "off"), help="changes no point of the curve"
    )
    for name in ("seed", "steps", "prompts", "samples", "problems"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    parser.add_argument("--out", type=Path, help="JSON file for the learning curve (default: none is written)")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    smoke = {"steps": 2, "prompts": 4, "samples": 8, "batch": 16, "held_out": 8}
    given = {name: getattr(arguments, name) for name in ("seed", "steps", "prompts", "samples", "problems")}
    settings = Settings(**given | (smoke if arguments.smoke else {}))
    machine = platform.machine() if arguments.device == "cpu" else torch.cuda.get_device_name()
    report: dict[str, Any] = {"machine": machine, "threads": torch.get_num_threads(), "dtype": arguments.dtype}
    report |= {"torch": torch.__version__, **train(settings, arguments.device, arguments.dtype, arguments.speculate)}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
