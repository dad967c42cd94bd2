"""A rank of data-parallel training with a Policy: `policy_ranks.py STORE RANK SIZE MODEL OUT`.

Each rank has a Generator and a Policy, which DistributedDataParallel wraps, and takes every SIZE-th sequence. After one
step it draws with the new weights, and rank 0 saves its parameters to OUT.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from conftest import random_ids
from torch.nn.parallel import DistributedDataParallel

from fastgen import Generator, SamplingParams
from fastgen.rl.policy import Policy

SEQUENCES = [random_ids(30 + number) for number in range(4)]
RATE = 0.1


def main(store: str, rank: int, size: int, folder: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with Generator(folder, page_size=16, seed=rank) as gen:
        policy = Policy(gen)
        parallel = DistributedDataParallel(policy)
        parallel(SEQUENCES[rank::size]).logprobs.sum().backward()
        torch.optim.SGD(policy.parameters(), RATE).step()
        policy.commit()
        (output,) = gen.generate([random_ids(25)], SamplingParams(max_tokens=10, ignore_eos=True))
        (sample,) = output.completions
        logprobs = policy.logprobs([output.prompt_token_ids + sample.token_ids], 25)
        assert logprobs.tolist() == sample.raw_logprobs
        if rank == 0:
            torch.save(policy.state_dict(), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
