"""The options of speculation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastgen.engine.speculation.heads import HeadConfig
from fastgen.option import Options, option


@dataclass(frozen=True, kw_only=True)
class Speculation(Options):
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
                f"speculate is {given!r}; it must be 'auto', 'ngram', 'int4', 'off' (False), the folder or hub id "
                "of a head, or a Speculation"
            )
        given.check()
        return given

    @property
    def head_config(self) -> HeadConfig | None:
        """The configuration of the head, if there is one."""
        assert self.head is None or isinstance(self.head, HeadConfig), "the Generator has read it"
        return self.head

    @property
    def kv_layers(self) -> int:
        """The number of layers whose keys and values a head keeps in the pages, in addition to the model's."""
        return self.head_config.kv_layers if self.head_config else 0

    @property
    def most_lanes(self) -> int:
        """The maximum number of lanes of a speculative step."""
        return self.max_rows // 2

    def row_limit(self, lanes: int) -> int:
        """Return the maximum number of rows of a step of so many lanes."""
        return min(self.max_rows, lanes * (self.max_draft + 1))
