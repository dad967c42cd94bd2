"""weights.py: errors for tensors that do not fit the model, and updates that keep one tensor at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Shard, write
from fastgen.names import MAX_FAULTS

SHAPES = {"a.weight": (4, 3), "b.weight": (2,), "c.weight": (2, 2)}
PARTS = {name: Shard.whole(torch.empty(shape, device="meta")) for name, shape in SHAPES.items()}


def state(**changed: Any) -> dict[str, Any]:
    return {name: torch.ones(shape) for name, shape in SHAPES.items()} | changed


class Sharded(Tensor):
    """A stand-in for a DTensor."""

    full_tensor = None


WRONG: dict[str, tuple[Any, list[str]]] = {
    "all at once": (
        [("x", torch.ones(1)), ("a.weight", torch.ones(3, 4)), *[("b.weight", torch.ones(2))] * 2],
        ["unexpected tensor 'x'", r"'a.weight' has shape \[3, 4\]; the model needs \[4, 3\]",
         "'b.weight' is given twice", "missing 1 of 3 tensors: c.weight"],
    ),
    "wrapped": (
        {f"_orig_mod.{name}" if name < "c" else name: tensor for name, tensor in state(x=torch.ones(1)).items()},
        ["2 names are not the model's; give 'a.weight' instead of '_orig_mod.a.weight'", "unexpected tensor 'x'"],
    ),
    "wrapped inside": (
        [("a.module.weight", torch.ones(4, 3)), ("b.weight", torch.ones(2))],
        ["a name is not the model's; give 'a.weight' .*", "missing 1 of 3 tensors: c.weight$"],
    ),
    "fp8": (state(**{"b.weight": torch.ones(2).to(torch.float8_e4m3fn)}), ["'b.weight' is torch.float8_e4m3fn"]),
    "nowhere": (state(**{"b.weight": torch.ones(2, device="meta")}), ["'b.weight' is torch.strided on meta"]),
    "sparse": (state(**{"c.weight": torch.ones(2, 2).to_sparse()}), ["'c.weight' is torch.sparse_coo on cpu"]),
    "a DTensor": (
        state(**{"b.weight": torch.ones(2).as_subclass(Sharded)}),
        [r"'b.weight' is a DTensor; give its full_tensor\(\)"],
    ),
    "arrays": (
        state(**{"b.weight": [1.0, 1.0]}),
        ["'b.weight' has a list that is not a pair of tensors", "missing 1 of 3 tensors: b.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_one_error_tells_all_faults(name: str, once: bool) -> None:
    given, faults = WRONG[name]
    items = list(given.items() if isinstance(given, dict) else given)
    update = WeightUpdate(iter(items) if once else given, PARTS)
    if once:
        update.check()  # it cannot look at an iterator
    with pytest.raises(ValueError, match="the weights do not fit the model:\n") as raised:
        for _ in update.tensors() if once else iter([update.check()]):
            pass
    for fault in faults:
        assert raised.match(fault)
    assert str(raised.value).count("\n") <= len(faults) + 1


def test_the_list_of_faults_has_an_end() -> None:
    given = state() | {f"module.{number}": torch.ones(1) for number in range(MAX_FAULTS + 3)}
    with pytest.raises(ValueError, match=f"'module.{MAX_FAULTS - 1}'.*\n  and 3 more$") as raised:
        WeightUpdate(given, PARTS).check()
    assert str(raised.value).count("\n") == MAX_FAULTS + 1


def test_a_partial_update_needs_known_tensors() -> None:
    update = WeightUpdate({"b.weight": torch.ones(2)}, PARTS, partial=True)
    update.check()
    assert update.names == ["b.weight"]
    with pytest.raises(ValueError, match="no tensors are given"):
        WeightUpdate({}, PARTS, partial=True).check()
    with pytest.raises(ValueError, match="unexpected tensor 'x'"):
        WeightUpdate({"x": torch.ones(2)}, PARTS, partial=True).check()


def test_no_tensor_is_kept_while_the_next_is_made() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, shape in SHAPES.items():
            assert not [ref for ref in alive if ref() is not None]
            tensor = torch.ones(shape, dtype=torch.float64)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    gc.disable()
    try:
        views = {name: Shard.whole(torch.zeros(shape)) for name, shape in SHAPES.items()}
        write(views, WeightUpdate(made(), PARTS).tensors())
    finally:
        gc.enable()
    assert len(alive) == 3
