"""The program that test_fsdp.py runs under torchrun: two ranks train a model that FSDP shards, and generate with it.

`fsdp_program.py MODEL`: first both ranks use one Generator of their group, then each uses one of its own.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from conftest import random_ids
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.parallel.rank_group import gather_objects

PROMPTS = [random_ids(9, seed=1), random_ids(30, seed=2), random_ids(4, seed=3)]
PARAMS = SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "seed": 3}


def whole(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights one by one; both ranks take part in gathering each."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor()


def defaults() -> tuple[torch.dtype, torch.device]:
    return torch.get_default_dtype(), torch.get_default_device()


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train for one step on this rank's own tokens."""
    ids = torch.tensor([random_ids(24, seed=10 + dist.get_rank())])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def check_logprobs(model: Any, outputs: list[RequestOutput]) -> None:
    """Check that the logprobs are the trainer's."""
    for output in outputs:
        for completion in output.completions:
            ids = output.prompt_token_ids + completion.token_ids
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            places = torch.arange(len(output.prompt_token_ids) - 1, len(ids) - 1)
            theirs = logprobs[places, torch.tensor(completion.token_ids)]
            torch.testing.assert_close(torch.tensor(completion.logprobs), theirs, atol=1e-4, rtol=0)


def main() -> None:
    faulthandler.dump_traceback_later(80)
    folder = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for group in (dist.group.WORLD, None):
        state, kinds = torch.get_rng_state(), defaults()
        with Generator(folder, tp_group=group, **OPTIONS) as gen:
            before = gen.generate(PROMPTS, PARAMS)
            assert torch.equal(state, torch.get_rng_state())
            assert kinds == defaults()
            train(model, optimizer)
            assert gen.update_weights(whole(model)) == 1
            outputs = gen.generate(PROMPTS, PARAMS)
        check_logprobs(model, outputs)
        said = [[completion.logprobs for completion in output.completions] for output in (*before, *outputs)]
        assert said[: len(PROMPTS)] != said[len(PROMPTS) :]
        assert dist.group.WORLD is not None
        first, second = gather_objects(said, dist.group.WORLD)  # the default group goes on
        assert first == second
    dist.destroy_process_group()
    # Without Python's finalization: if one of gloo's threads frees a tensor during it, the process sometimes ends by
    # SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
    os._exit(0)


if __name__ == "__main__":
    main()
