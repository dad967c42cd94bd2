"""The options of speculation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fastgen.engine.feature_options import FeatureOptions
from fastgen.option import option
from fastgen.speculation.heads import HeadConfig

GPU_ROWS, CPU_ROWS = 64, 32  # maximum rows of a speculative step; with more, arithmetic costs more than drafts save
GPU_ROW_COST, CPU_ROW_COST = 0.004, 0.08  # time of one more row, relative to the time of a step


@dataclass(frozen=True, kw_only=True)
class Speculation(FeatureOptions):
    """The options of speculation.

    max_draft: maximum number of drafted tokens of a sequence in a step. max_rows: maximum number of tokens of a
    speculative step, drafted ones included; 0: as it suits the device. row_cost: the time of one more token in a step,
    as a share of the time of a step; None: as it suits the device. history_tokens: number of tokens of earlier requests
    that are kept for drafts; 0: drafts come only from a sequence's own tokens. head: folder or hub id of a head that
    drafts too, or "int4" (docs/python.md); None: only texts draft. The Generator replaces it by its configuration.
    """

    max_draft: int = option(15, low=1, high=63)
    max_rows: int = option(0, low=0, high=256)
    row_cost: float | None = option(None, low=0)
    history_tokens: int = option(2**22, low=0)
    head: str | Path | HeadConfig | None = option(None)

    @classmethod
    def of(cls, given: object) -> Speculation | None:
        """Return the options that `Generator(speculate=...)` stands for; None: no speculation. Raises TypeError or
        ValueError for other values."""
        named = {
            "auto": cls(), "ngram": cls(history_tokens=0), "int4": cls(head="int4"), "off": None, False: None,
            None: None,
        }  # fmt: skip
        if isinstance(given, str | bool | None) and given in named:
            return named[given]
        if isinstance(given, Path) or (isinstance(given, str) and ("/" in given or Path(given).is_dir())):
            return cls(head=given)
        if not isinstance(given, Speculation):
            raise ValueError(
                f"speculate is {given!r}; it must be 'auto', 'ngram', 'int4', 'off', or the folder or hub id of a head "
                "(in Python also False or a Speculation)"
            )
        given.check()
        return given

    def choose(self, gpu: bool, kernels: str, max_step_tokens: int) -> Speculation | None:
        """Speculation is off on a GPU without CUDA graphs of decodes, whose start warns that it is slower than
        possible, and if a step has no room for drafts."""
        if gpu and kernels == "torch":
            return None
        rows, cost = (GPU_ROWS, GPU_ROW_COST) if gpu else (CPU_ROWS, CPU_ROW_COST)
        rows, cost = min(self.max_rows or rows, max_step_tokens), cost if self.row_cost is None else self.row_cost
        return replace(self, max_rows=rows, row_cost=cost) if rows > 1 else None

    @property
    def head_config(self) -> HeadConfig | None:
        """The configuration of the head, if there is one."""
        assert self.head is None or isinstance(self.head, HeadConfig), "the Generator has read it"
        return self.head

    @property
    def more_kv_layers(self) -> int:
        """The number of layers whose keys and values a head keeps in the pages, in addition to the model's."""
        return self.head_config.more_kv_layers if self.head_config else 0

    @property
    def most_rows(self) -> int:
        return self.max_rows

    @property
    def most_lanes(self) -> int:
        """The maximum number of lanes of a speculative step."""
        return self.max_rows // 2

    def row_limit(self, lanes: int) -> int:
        """Return the maximum number of rows of a step of so many lanes."""
        return min(self.max_rows, lanes * (self.max_draft + 1))
