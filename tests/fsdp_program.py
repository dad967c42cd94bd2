"""The program that test_fsdp.py runs under torchrun: two ranks train a model that FSDP shards, and generate with it.

`fsdp_program.py OUT MODEL`: both use one Generator in their group, then each one of its own. A rank writes what it saw.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import random_ids
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fastgen import Generator, RequestOutput, SamplingParams

PROMPTS = [random_ids(9, seed=1), random_ids(30, seed=2), random_ids(4, seed=3)]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "seed": 3}


def whole(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights, one after the other; both ranks gather each."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor()


def defaults() -> tuple[torch.dtype, torch.device]:
    return torch.get_default_dtype(), torch.get_default_device()


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train one step on tokens of this rank's own."""
    ids = torch.tensor([random_ids(24, seed=10 + dist.get_rank())])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def farthest(model: Any, outputs: list[RequestOutput]) -> float:
    """Return the largest difference of a logprob to the trainer's."""
    differences = []
    for output in outputs:
        for completion in output.completions:
            ids = output.prompt_token_ids + completion.token_ids
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            places = torch.arange(len(output.prompt_token_ids) - 1, len(ids) - 1)
            theirs = logprobs[places, torch.tensor(completion.token_ids)]
            differences.append((theirs - torch.tensor(completion.logprobs)).abs().max().item())
    return max(differences)


def main() -> None:
    faulthandler.dump_traceback_later(80)
    out, folder = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[str, Any] = {"differences": [], "answers": []}
    for group in (dist.group.WORLD, None):
        state, kinds = torch.get_rng_state(), defaults()
        with Generator(folder, tp_group=group, **OPTIONS) as gen:
            before = gen.generate(PROMPTS, PARAMS)
            found["untouched"] = torch.equal(state, torch.get_rng_state()) and kinds == defaults()
            train(model, optimizer)
            found["version"] = gen.update_weights(whole(model))
            outputs = gen.generate(PROMPTS, PARAMS)
        found["differences"].append(farthest(model, outputs))
        found["answers"].append([[completion.logprobs for completion in o.completions] for o in (*before, *outputs)])
    found["sum"] = torch.ones(1)
    dist.all_reduce(found["sum"])  # the default group goes on
    (out / f"rank{dist.get_rank()}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
    # Not by way of Python's finalization: a thread of gloo's that lets go of a tensor meanwhile ends the process, now
    # and then, by SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
    os._exit(0)


if __name__ == "__main__":
    main()
