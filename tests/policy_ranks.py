"""A rank of data-parallel training with a Policy: `policy_ranks.py STORE RANK SIZE MODEL OUT DEVICE`.

Each rank has a Generator and a Policy, which DistributedDataParallel wraps, and keeps a part of Adam's states. It takes
every SIZE-th sequence in the first step; in the second one, all ranks but the first have only empty answers. The ranks
check that their draws have the logprobs of their Policy, and save their parameters to OUT followed by the rank.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import random_ids
from torch.nn.parallel import DistributedDataParallel

from fastgen import Generator, SamplingParams
from fastgen.rl.policy import Policy

SEQUENCES = [random_ids(30 + number) for number in range(4)]
ADAM = {"lr": 1e-2, "eps": 1e-3}  # eps: gradients that differ by rounding make steps that differ little
STEPS = [SEQUENCES, SEQUENCES[:1]]


def check_draws(gen: Generator, policy: Policy) -> None:
    (output,) = gen.generate([random_ids(25)], SamplingParams(max_tokens=10, ignore_eos=True))
    (sample,) = output.completions
    assert policy.logprobs([output.prompt_token_ids + sample.token_ids], 25).tolist() == sample.raw_logprobs


def main(store: str, rank: int, size: int, folder: str, out: str, device: str) -> None:
    from torch.distributed.fsdp import fully_shard  # test_policy.py, which imports this file, needs neither
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    options: dict[str, Any] = {"device": device, "dtype": "float32", "page_size": 16, "seed": rank}
    with Generator(folder, deterministic=True, **options) as gen:
        policy = Policy(gen)
        parallel = DistributedDataParallel(policy, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(policy.parameters(), torch.optim.AdamW, **ADAM)
        for sequences in STEPS:
            parallel(sequences[rank::size]).logprobs.sum().backward()
            unused = policy.logprobs(SEQUENCES[:1]).sum()
            optimizer.step()
            with pytest.raises(RuntimeError, match="call backward before"):
                unused.backward()
            optimizer.zero_grad()
            policy.commit()
            check_draws(gen, policy)
        states = sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())
        torch.save((policy.state_dict(), states), f"{out}{rank}")
        fully_shard(policy)
        for call in (policy.commit, lambda: policy(SEQUENCES)):
            with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
                call()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
