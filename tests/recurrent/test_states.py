"""recurrent/states.py, and the memory that states take at the start of an engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import HYBRIDS, SIZES, save_random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.device.new_memory import memory_on
from fastgen.engine import startup
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.startup import build_model, measure_pages
from fastgen.model.config import read_config
from fastgen.model.recurrent_layers import Recurrent
from fastgen.parallel.group import Group
from fastgen.recurrent import hybrid, states
from fastgen.recurrent.states import KeptStates, LaneStates

SHAPE = Recurrent((0, 2), 1, 2)
LANES, SLOTS = 7, 6
GB = 10**9


class LargestResult(TorchDispatchMode):
    """Notes the size of the largest tensor that is made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.index_select.default:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def filled(dtype: torch.dtype) -> tuple[LaneStates, KeptStates]:
    """Lanes and slots with random numbers."""
    torch.manual_seed(0)
    memory = memory_on(torch.device("cpu"))
    lanes = LaneStates.empty(SHAPE, LANES, dtype, memory)
    kept = KeptStates(lanes, SLOTS, memory)
    for tensor in (*vars(lanes).values(), kept._state, kept._inputs):
        tensor.copy_(torch.randn(tensor.shape))
    return lanes, kept


MOVES: dict[str, Callable[[LaneStates, KeptStates, Tensor, Tensor], None]] = {
    "save": lambda lanes, kept, sources, targets: kept.save(sources, targets),
    "restore": lambda lanes, kept, sources, targets: kept.restore(sources, targets),
    "copy": lambda lanes, kept, sources, targets: lanes.copy(sources, targets),
}

PAIRS = {
    "save": ([6, 0, 3, 1, 4], [2, 5, 0, 1, 3]),
    "restore": ([5, 0, 0, 1, 4], [2, 6, 0, 1, 3]),
    "copy": ([6, 6, 0, 0], [2, 5, 4, 1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("move", MOVES)
def test_many_states_move_a_few_at_a_time(move: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose memory the largest step and the pages fill."""
    sources, targets = map(torch.tensor, PAIRS[move])
    at_once, one_by_one = filled(dtype), filled(dtype)
    MOVES[move](*at_once, sources, targets)
    most = 2 * one_by_one[0].state[:, 0].nbytes
    monkeypatch.setattr(states, "MOVED", most)
    with LargestResult() as largest:
        MOVES[move](*one_by_one, sources, targets)
    assert largest.bytes == most
    for field in fields(LaneStates):
        assert torch.equal(getattr(at_once[0], field.name), getattr(one_by_one[0], field.name)), field.name
    assert torch.equal(at_once[1]._state, one_by_one[1]._state)
    assert torch.equal(at_once[1]._inputs, one_by_one[1]._inputs)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_start_measures_moves_and_does_not_keep_the_states_that_it_measures(
    prefix_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, more = HYBRIDS["qwen3_5"]
    save_random(name, {**SIZES, **more}, tmp_path)
    made: list[weakref.ref[Any]] = []
    moved = {"save": 0, "restore": 0, "copy": 0}

    def make_mixer(*arguments: Any) -> Any:
        mixer = original(*arguments)
        made.append(weakref.ref(mixer))
        return mixer

    def counting(move: str, of: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, sources: Tensor, targets: Tensor) -> None:
            moved[move] = max(moved[move], len(sources))
            of(self, sources, targets)

        return run

    original = hybrid.make_mixer
    monkeypatch.setattr(hybrid, "make_mixer", make_mixer)
    for owner, move in ((KeptStates, "save"), (KeptStates, "restore"), (LaneStates, "copy")):
        monkeypatch.setattr(owner, move, counting(move, getattr(owner, move)))
    readings = iter((9 * GB, 8 * GB))
    monkeypatch.setattr(startup, "device_memory", lambda device: next(readings))
    model_config = read_config(tmp_path)
    options = GeneratorOptions(device="cpu", dtype="float32", max_seqs=4, max_step_tokens=32, prefix_cache=prefix_cache)  # type: ignore[arg-type]
    config = replace(EngineConfig.make(model_config, options), num_pages=0)
    model = build_model(model_config, config, tmp_path, "dummy", Group())
    assert measure_pages(model, config, 10 * GB) > 0
    assert moved == {"save": 4 * prefix_cache, "restore": 4 * prefix_cache, "copy": 3}
    (mixer,) = made
    assert mixer() is None
