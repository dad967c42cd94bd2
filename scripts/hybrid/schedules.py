"""Random inputs of kernels.py, and the outputs of one sequence by a random schedule of prefills, decodes and drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import kernels
import reference
import torch
from kernels import BLOCK, DEFAULT, HALF, SIZE, Lanes, Tiles
from torch import Tensor


@dataclass
class Inputs:
    """q, k: (T, K, D), v: (T, H, D) bfloat16; g, beta: (T, H) float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, start: int, stop: int) -> Inputs:
        return Inputs(*(getattr(self, field.name)[start:stop] for field in fields(self)))

    def all(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def random_inputs(
    length: int, heads: int, key_heads: int, device: str, seed: int = 0, half: torch.dtype = HALF
) -> Inputs:
    """Return inputs whose decays go from 0.001 to 20 a token; half of the keys of head 0 are nearly the same."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    k = normal(length, key_heads, SIZE)
    middle = slice(length // 4, 3 * length // 4)
    k[middle, 0] = k[length // 4, 0] + 0.05 * k[middle, 0]
    speed = torch.logspace(-3, 1.2, heads, device=device)
    g = -speed * torch.nn.functional.softplus(normal(length, heads))
    q, v = normal(length, key_heads, SIZE), normal(length, heads, SIZE)
    return Inputs(q.to(half), k.to(half), v.to(half), g, torch.sigmoid(2 * normal(length, heads)))


def whole(inputs: Inputs, tiles: Tiles = DEFAULT) -> tuple[Tensor, Lanes]:
    """Return the outputs (T, H, D) of one prefill, and the lane after it."""
    lanes = Lanes.empty(1, inputs.v.shape[1], inputs.k.shape[1], inputs.k.device, inputs.k.dtype)
    return kernels.prefill(*inputs.all(), lanes, 0, tiles), lanes


def by_schedule(inputs: Inputs, seed: int, tiles: Tiles = DEFAULT) -> Tensor:
    """Return the outputs (T, H, D) by a random schedule, in lane 1 of 3. Lanes 0 and 2 decode random tokens."""
    choice, length, device = random.Random(seed), len(inputs.k), inputs.k.device
    shape = inputs.v.shape[1], inputs.k.shape[1], str(device)
    lanes = Lanes.empty(3, *shape, inputs.k.dtype)
    outputs, done = [], 0
    while done < length:
        at = int(lanes.count[1])
        if choice.random() < 0.25:
            n = min(length - done, choice.choice((2, 15, 64, 100, 129)))
            outputs.append(kernels.prefill(*inputs.part(done, done + n).all(), lanes, 1, tiles))
            done += n
            continue
        n = choice.randint(1, min(8, BLOCK - at, length - done)) if choice.random() < 0.5 else 1
        wrong = choice.randint(0, min(2, BLOCK - at - n))  # drafts that are rejected
        drafts = random_inputs(n + wrong, *shape, seed + done, inputs.k.dtype)
        right = inputs.part(done, done + n).all()
        rows = [torch.stack([x, torch.cat([mine, x[n:]]), x]) for x, mine in zip(drafts.all(), right, strict=True)]
        lanes.count[0] = lanes.count[2] = choice.randint(0, BLOCK - n - wrong)
        outputs.append(kernels.decode(*rows, lanes, tiles)[1, :n])
        lanes.count[1] = at + n
        if at + n == BLOCK:
            kernels.advance(lanes, torch.tensor([1], device=device))
        done += n
    return torch.cat(outputs)


def reference_outputs(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """Return the outputs (T, H, D) float32 by reference.py, whose products have operands of `dtype`, on the CPU."""
    q, k, v, g, beta = (x.cpu().float() for x in inputs.all())
    group = v.shape[1] // k.shape[1]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = ((x * scale).to(dtype).float().repeat_interleave(group, 1) for x, scale in ((q, SIZE**-0.5), (k, 1.0)))
    lane = reference.new_lane(v.shape[1], SIZE, 1)
    outputs = []
    for first in range(0, len(k), BLOCK):
        rows = slice(first, first + BLOCK)
        outputs.append(reference.add_rows(lane, q[rows], k[rows], v[rows], g[rows], beta[rows], dtype))
        if lane.count == BLOCK:
            reference.advance(lane, dtype)
    return torch.cat(outputs)
