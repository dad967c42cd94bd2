"""Graphs that call the step where a GPU would replay it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from fastgen.engine.cuda_graphs import Graphs
from fastgen.model.attention.cpu import CpuAttention
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.native import NativeAttention, NativePlan


class Called(Graphs[Any]):
    """Calls the step instead of replaying it."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.ran: list[Any] = []

    def capture(self, step: Callable[[Any], None], compiled: bool = False) -> None:
        self._step = step

    def run(self, key: Any) -> None:
        self.ran.append(key)
        self._step(key)


class CapturableOnCpu:
    """Makes attention on the CPU plan steps with prefills from tensors, which it can read where graphs are only
    called."""

    capturable = True
    plan: Any

    def lists(self, layout: StepLayout) -> list[NDArray[np.int32]]:
        chunks = [x[layout.decodes :] for x in (layout.query_lens, layout.kv_lens, layout.lanes)]
        return [np.concatenate([[len(chunks[0])], *chunks]).astype(np.int32)]

    def list_sizes(self, tokens: int) -> list[int]:
        return [1 + 3 * tokens]

    def plan_lists(
        self, lanes: Tensor, kv_lens: Tensor, page_table: Tensor, lists: Sequence[Tensor], shared: bool = False
    ) -> Any:
        (listed,) = (each.numpy().astype(np.int64) for each in lists)
        chunks = listed[1 : 1 + 3 * listed[0]].reshape(3, -1)
        decodes = int((kv_lens > 0).sum())
        assert not kv_lens[decodes:].any(), "lanes that decode come first"
        query_lens = np.concatenate([np.ones(decodes, dtype=np.int64), chunks[0]])
        ends = np.concatenate([kv_lens[:decodes].numpy(), chunks[1]])
        if not len(ends):  # a step of padding
            return []
        own = np.concatenate([lanes[:decodes].numpy(), chunks[2]])
        return self.plan(StepLayout(query_lens, ends, decodes, own, page_table))


def attend_real(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an `attend` for all rows but padding, whose keys and values go to the spare page, and must therefore be
    finite."""

    def of_real(self: Any, plan: Any, layer: int, q: Tensor, window: int) -> Tensor:
        if isinstance(plan, NativePlan):
            real = int(plan.tiles[:, 1].sum())
        else:
            real = sum(len(tiles.targets) for tiles, _ in plan)
        return attend(self, plan, layer, q[:real], window) if real else q[:0]

    return of_real


def capturable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Runner captures from now on is `Called`."""
    for module in ("engine.warm_up", "engine.prefill_graphs", "speculation.drafting"):
        monkeypatch.setattr(f"fastgen.{module}.Graphs", Called)
    for kind in (CpuAttention, NativeAttention):
        for name in ("capturable", "lists", "list_sizes", "plan_lists"):
            monkeypatch.setattr(kind, name, getattr(CapturableOnCpu, name), raising=False)
        monkeypatch.setattr(kind, "attend", attend_real(kind.attend))
