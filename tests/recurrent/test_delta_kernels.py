"""recurrent/on_gpu.py and its kernels, on a GPU or in Triton's interpreter, compared with on_cpu.py: steps of decodes
and chunks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen.device.new_memory import memory_on
from fastgen.model.attention.interface import StepLayout
from fastgen.model.recurrent_layers import DELTA_HEAD, DELTA_TAPS, DeltaWeights, Recurrent
from fastgen.recurrent.on_cpu import CpuMixer
from fastgen.recurrent.states import LaneStates

pytest.importorskip("triton")
from fastgen.recurrent.on_gpu import HEADER, GpuMixer, MixPlan

pytestmark = pytest.mark.skipif(
    not (os.environ.get("TRITON_INTERPRET") or torch.cuda.is_available()), reason="needs a GPU or Triton's interpreter"
)
CPU = torch.device("cpu")
DEVICE, DTYPE, ERROR = (CPU, torch.float32, 1e-5)
if not os.environ.get("TRITON_INTERPRET"):
    DEVICE, DTYPE, ERROR = torch.device("cuda"), torch.bfloat16, 2e-2  # rounded in other places than on the CPU
EPS = 1e-6
LANES = 5
PADDING = LANES - 1
MAX_SEQS = 4
SHAPES = {"grouped": Recurrent((0,), 1, 2), "not grouped": Recurrent((0,), 1, 1)}
Plan = Callable[[Any, StepLayout, int], Any]


def make_weights(shape: Recurrent) -> DeltaWeights:
    """Return the weights of a layer on the CPU."""
    taps = torch.randn(shape.channels, 1, DELTA_TAPS) / 2
    step, decay = torch.empty(shape.value_heads).uniform_(-6, 1), torch.empty(shape.value_heads).uniform_(0.01, 16)
    norm = 1 + 0.1 * torch.randn(DELTA_HEAD)
    return DeltaWeights(*(each.to(DTYPE) for each in (taps, step, decay.log(), norm)))


def on(device: torch.device, weights: DeltaWeights) -> DeltaWeights:
    return DeltaWeights(*(each.to(device) for each in vars(weights).values()))


def make_lanes(shape: Recurrent, device: torch.device) -> LaneStates:
    """States that hold anything, as before sequences begin: NaN, which shows if it is read. The lane of padding has
    finite numbers, as on a GPU."""
    lanes = LaneStates.empty(shape, LANES, DTYPE, memory_on(device))
    for tensor in vars(lanes).values():
        tensor.fill_(torch.nan)
        tensor[:, PADDING] = 7
    return lanes


def layout_of(lanes: list[int], counts: list[int], ends: list[int], decodes: int) -> StepLayout:
    return StepLayout(np.array(counts), np.array(ends), decodes, np.array(lanes), torch.zeros(1))


def planned(mixer: Any, layout: StepLayout, rows: int) -> Any:
    return mixer.plan(layout)


def from_lists(mixer: GpuMixer, layout: StepLayout, rows: int) -> MixPlan:
    """Plan as graphs do: lists of a fixed size, whose rest is of an earlier step, and lanes that do not decode."""
    (made,), (size,) = mixer.lists(layout), mixer.list_sizes(rows)
    found = torch.full((size,), 12345, dtype=torch.int32)
    found[: len(made)] = torch.from_numpy(made)
    lanes, lens = torch.full((MAX_SEQS,), PADDING), torch.zeros(MAX_SEQS, dtype=torch.int32)
    lanes[: layout.decodes] = torch.from_numpy(layout.lanes[: layout.decodes])
    lens[: layout.decodes] = torch.from_numpy(layout.kv_lens[: layout.decodes])
    return mixer.plan_lists(*(each.to(DEVICE) for each in (lanes, lens)), [found.to(DEVICE)])


def drive(mixer: Any, layer: Any, sequences: list[Tensor], seed: int, plan: Plan = planned) -> list[Tensor]:
    """Run three sequences in random steps, which have decodes first and chunks in any order, and return their outputs.
    The last one decodes from position 60 on, so that decodes fill its block."""
    draw, done, lanes = random.Random(seed), [0] * len(sequences), random.Random(0).sample(range(PADDING), 3)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    while active := [each for each, x in enumerate(sequences) if done[each] < len(x)]:
        decodes = [each for each in active if done[each] and (draw.random() < 0.4 or each == 2)]
        prefills = [each for each in active if each not in decodes and draw.random() < 0.8]
        draw.shuffle(prefills)
        order = decodes + prefills
        if not order:
            continue
        wanted = (60 if each == 2 else draw.choice((1, 3, 16, 40, 64, 100)) for each in prefills)
        chunks = (min(count, len(sequences[at]) - done[at]) for at, count in zip(prefills, wanted, strict=True))
        counts = [1] * len(decodes) + list(chunks)
        ends = [done[each] + count for each, count in zip(order, counts, strict=True)]
        rows = [sequences[at][end - count : end] for at, count, end in zip(order, counts, ends, strict=True)]
        padding = sequences[0].new_full((MAX_SEQS, sequences[0].shape[1]), torch.nan)
        x = torch.cat([*rows, padding]) if plan is from_lists else torch.cat(rows)
        layout = layout_of([lanes[each] for each in order], counts, ends, len(decodes))
        mixed = mixer.mix(plan(mixer, layout, len(x)), 0, layer, x)[: sum(counts)]
        for each, part, end in zip(order, torch.split(mixed, counts), ends, strict=True):
            outputs[each].append(part)
            done[each] = end
    return [torch.cat(parts) for parts in outputs]


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the error of a tensor, relative to what is expected."""
    expected = expected.double()
    return float((found.cpu().double() - expected).norm() / expected.norm())


def check(shape: Recurrent, lengths: tuple[int, ...], seed: int, plan: Plan) -> None:
    torch.manual_seed(seed)
    layer = make_weights(shape)
    sequences = [torch.randn(length, shape.outputs).to(DTYPE) for length in lengths]
    ours, theirs = make_lanes(shape, DEVICE), make_lanes(shape, CPU)
    expected = drive(CpuMixer(shape, theirs, EPS), layer, sequences, seed + 100)
    found = drive(
        GpuMixer(shape, ours, MAX_SEQS, EPS), on(DEVICE, layer), [x.to(DEVICE) for x in sequences], seed, plan
    )
    for got, wanted in zip(found, expected, strict=True):
        assert difference(got, wanted) < ERROR
    for tensor in vars(ours).values():
        assert (tensor[:, PADDING] == 7).all(), "a lane of padding was written"
    for name in ("state", "border_inputs"):
        mine, its = (getattr(lanes, name).nan_to_num(7) for lanes in (ours, theirs))  # one lane has no sequence
        assert difference(mine, its) < ERROR


@pytest.mark.parametrize("plan", [planned, from_lists])
def test_mixed_steps_have_the_outputs_and_states_of_the_cpu(plan: Plan) -> None:
    check(SHAPES["grouped"], (90, 66, 67), 3, plan)


@pytest.mark.long
@pytest.mark.parametrize("plan", [planned, from_lists])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_many_steps_have_the_outputs_and_states_of_the_cpu(shape: str, seed: int, plan: Plan) -> None:
    check(SHAPES[shape], (200, 70, 130), seed, plan)


def test_a_step_of_padding_changes_nothing() -> None:
    shape = SHAPES["grouped"]
    lanes = make_lanes(shape, DEVICE)
    mixer = GpuMixer(shape, lanes, MAX_SEQS, EPS)
    (size,) = mixer.list_sizes(8)
    lists = torch.full((size,), 12345, dtype=torch.int32, device=DEVICE)
    lists[:HEADER] = 0
    decodes = torch.zeros(MAX_SEQS, dtype=torch.int64, device=DEVICE)
    plan = mixer.plan_lists(decodes, decodes.int(), [lists])
    for tensor in vars(lanes).values():
        tensor.fill_(7)
    x = torch.full((8, shape.outputs), torch.nan, dtype=DTYPE, device=DEVICE)
    mixer.mix(plan, 0, on(DEVICE, make_weights(shape)), x)
    assert all((tensor == 7).all() for tensor in vars(lanes).values())


def test_lists_name_chunks_and_their_blocks() -> None:
    mixer = GpuMixer(SHAPES["grouped"], make_lanes(SHAPES["grouped"], DEVICE), MAX_SEQS, EPS)
    layout = layout_of([2, 0, 3], [1, 70, 6], [9, 130, 6], 1)  # a decode; positions 60 to 129; positions 0 to 5
    (lists,) = mixer.lists(layout)
    assert lists[:2].tolist() == [2, 4]
    chunks, blocks = lists[2:18].reshape(2, 8)[:, :5], lists[18:].reshape(4, 2)
    assert chunks.tolist() == [[0, 60, 130, 1, 0], [3, 0, 6, 71, 3]]
    assert blocks.tolist() == [[0, 0], [0, 64], [0, 128], [1, 0]]


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_lists_of_any_step_fit_into_their_size(tokens: int) -> None:
    mixer = GpuMixer(SHAPES["grouped"], make_lanes(SHAPES["grouped"], DEVICE), MAX_SEQS, EPS)
    draw = random.Random(tokens)
    for _ in range(200):
        cuts = sorted(draw.sample(range(1, tokens), min(draw.randrange(MAX_SEQS), tokens - 1)))
        counts = [end - start for start, end in zip([0, *cuts], [*cuts, tokens], strict=True)]
        ends = [draw.choice((0, 63, 64, draw.randrange(200))) + count for count in counts]
        (made,) = mixer.lists(layout_of(list(range(len(counts))), counts, ends, 0))
        (size,) = mixer.list_sizes(tokens)
        chunks, blocks = mixer._room[size]
        assert len(made) <= size
        assert made[0] <= chunks
        assert made[1] <= blocks
