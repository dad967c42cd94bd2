"""Asynchronous GRPO: rl_grpo.py's problems and trainer, and a server that samples the next step during each step.

    python scripts/rl/async_grpo.py                                                # both on the CPU, in minutes
    python scripts/rl/async_grpo.py --device cuda:0 --server-device cuda:1         # on two GPUs
    python scripts/rl/async_grpo.py --url http://host:5678                         # `fgserve --rollout --dtype float32`
    python scripts/rl/async_grpo.py --out FILE                                     # writes the learning curve
    python scripts/rl/async_grpo.py --smoke                                        # two small steps in seconds

The trainer is a Policy over a Generator of its own, which computes the server's logprobs to the bit and draws nothing.
It asks for the samples of step N + 1 before it trains on those of step N, and gives the server its weights
after each step, while requests are in flight (in_flight="keep"). So the weights that draw an answer are at most one
step old when it is trained on; it may begin with old weights and end with new ones, over the KV of the old ones. Its
weight_versions tell whether tokens are old. For such an answer the objective is decoupled, as in AReaL
(https://arxiv.org/abs/2505.24298): the clipped ratio is that of the new weights to the trainer's at the start of the
step, and each token's advantage is multiplied by its probability under the latter divided by the one that it was drawn
with, at most 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rl_grpo import (
    MAX_TOKENS,
    Rollout,
    Settings,
    accuracy,
    answer_logprobs,
    chat,
    learn,
    problems,
    rewards_of,
    rollouts,
    timed,
)

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.rl.policy import Policy
from fastgen.rl.remote import RemoteGenerator

sys.path.append(str(Path(__file__).parent.parent / "bench"))

from serve_process import Server

MOST_LAG = 1  # maximum age of a token, in steps of the trainer
MOST_WEIGHT = 2.0  # of a token: its probability at the start of the step over the one that it was drawn with
PARTS = ("wait", "train", "push")
FEW: dict[str, Any] = {"max_seqs": 1, "num_pages": 8}  # of the trainer's Generator, which draws nothing


@dataclass(frozen=True)
class Corrected(Rollout):
    """A sample with old tokens. logprobs: the trainer's at the start of the step. weights: factor of each token's
    advantage."""

    weights: tuple[float, ...] = ()

    @property
    def advantages(self) -> list[float]:
        return [self.advantage * weight for weight in self.weights]


def lags(sample: Rollout, version: int | None) -> list[int]:
    """Return for each token of an answer how many versions before `version` it was drawn."""
    assert version is not None  # as it is on ranks above 0
    return [version - drawn for drawn, start, end in sample.weight_versions for _ in range(start, end)]


def corrected(policy: Policy, samples: Sequence[Rollout], version: int | None) -> list[Rollout]:
    """Return samples for a step that begins with weights of this version. Raises RuntimeError where one is too old."""
    found = [sample for sample in samples if not any(lags(sample, version))]
    old = [sample for sample in samples if any(lags(sample, version))]
    with torch.no_grad():
        now = answer_logprobs(policy, old).tolist()
    for sample in old:
        own, now = now[: len(sample.logprobs)], now[len(sample.logprobs) :]
        late = lags(sample, version)
        if max(late) > MOST_LAG:
            raise RuntimeError(f"a token is {max(late)} steps old; the server has not taken every update")
        # The tokens of the present version are corrected too: they were drawn with the KV of the old weights.
        ratios = torch.tensor(own) - torch.tensor(sample.logprobs)
        weights = ratios.exp().clamp(max=MOST_WEIGHT).tolist()
        found.append(Corrected(**{**vars(sample), "logprobs": own}, weights=tuple(weights)))
    return found


class Sampler:
    """A client that samples from a server, in a thread. seconds: time that the server has worked on samples."""

    def __init__(self, gen: RemoteGenerator, settings: Settings) -> None:
        self.gen, self.seconds = gen, 0.0
        self._params = SamplingParams(n=settings.samples, temperature=1.0, max_tokens=MAX_TOKENS)
        self._thread = ThreadPoolExecutor(1, "sampler")

    def ask(self, asked: Sequence[tuple[int, int]]) -> Any:
        """Return the future outputs of problems."""
        return self._thread.submit(self._sample, asked)

    def _sample(self, asked: Sequence[tuple[int, int]]) -> list[RequestOutput]:
        start = time.perf_counter()
        outputs = self.gen.generate([chat(problem) for problem in asked], self._params)
        self.seconds += time.perf_counter() - start
        return outputs


def train(gen: RemoteGenerator, own: Generator, settings: Settings) -> dict[str, Any]:
    """Train; return the learning curve, a point for each step, and the time of each part.

    own: the trainer's Generator, which computes the server's logprobs.
    idle: shares of the loop's time, without evaluations, in which the trainer waits for samples, and in which the
    server has no samples to work on.
    """
    seconds: dict[str, float] = {}
    policy = Policy(own, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    rng, sampler = random.Random(settings.seed), Sampler(gen, settings)
    to_train, held_out = problems(settings)
    version = gen.update_weights(policy.named_parameters())  # this joins the group, too
    begin = time.perf_counter()
    curve: list[dict[str, Any]] = [{"step": 0, "held_out_accuracy": accuracy(gen, held_out)}]
    seconds["evaluate"] = time.perf_counter() - begin
    asked = rng.sample(to_train, settings.prompts)
    coming = sampler.ask(asked)
    for step in range(1, settings.steps + 1):
        with timed(seconds, "wait"):
            outputs = coming.result()
        rewards = rewards_of(asked, outputs)
        if step < settings.steps:  # the server goes on, with the weights of the step before
            asked = rng.sample(to_train, settings.prompts)
            coming = sampler.ask(asked)
        with timed(seconds, "train"):
            samples = rollouts(outputs, rewards)
            late = [lag for sample in samples for lag in lags(sample, version)]
            found = learn(policy, optimizer, corrected(policy, samples, version), settings, rng)
        with timed(seconds, "push"):
            version = gen.update_weights(policy.named_parameters(), in_flight="keep")
        point = {"step": step, "reward": rewards.mean().item(), "old_tokens": sum(map(bool, late)) / max(len(late), 1)}
        point |= {"most_lag": max(late, default=0), **found}
        if step % settings.evaluate_every == 0 or step == settings.steps:
            with timed(seconds, "evaluate"):
                point["held_out_accuracy"] = accuracy(gen, held_out)
        curve.append({**point, "seconds": time.perf_counter() - begin})
        print(", ".join(f"{key} {value:.4g}" for key, value in curve[-1].items()), flush=True)
    loop = sum(seconds[part] for part in PARTS)
    shares = {part: seconds[part] / loop for part in PARTS}
    idle = {"trainer": shares["wait"], "server": max(1 - sampler.seconds / loop, 0.0)}
    return {"settings": asdict(settings), "seconds": seconds, "sampling_seconds": sampler.seconds, "shares": shares,
            "idle": idle, "curve": curve}  # fmt: skip


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="device of the trainer, such as cuda:0")
    parser.add_argument("--server-device", default="cpu", help="device of the server, such as cuda:1")
    parser.add_argument("--dtype", default="float32", help="dtype of the server; the trainer's is float32")
    parser.add_argument("--url", help="URL of a server with the bundled model (default: one is started)")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--out", type=Path, help="JSON file for the learning curve (default: none is written)")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    smoke = {"steps": 2, "prompts": 4, "samples": 8, "batch": 16, "held_out": 8}
    settings = replace(Settings(seed=arguments.seed), **(smoke if arguments.smoke else {}))
    key = os.environ.get("FASTGEN_API_KEY")
    with ExitStack() as stack:
        url = arguments.url
        if url is None:  # half of a GPU's memory is the trainer's, if that is on the same one
            options = {"device": arguments.server_device, "dtype": arguments.dtype, "seed": arguments.seed}
            flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            flags += ["--deterministic", "--memory-fraction", "0.5"]
            url = stack.enter_context(Server(None, ["--rollout", *flags])).url
        gen = stack.enter_context(RemoteGenerator(url, api_key=key))
        same: dict[str, Any] = {"dtype": arguments.dtype, "deterministic": True}
        own = stack.enter_context(Generator(device=arguments.device, **same, **FEW))
        found = train(gen, own, settings)
    machine = platform.machine() if arguments.device == "cpu" else torch.cuda.get_device_name()
    report = {"machine": machine, "threads": torch.get_num_threads(), "dtype": arguments.dtype}
    report |= {"torch": torch.__version__, **found}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
