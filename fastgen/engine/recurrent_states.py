"""The size of the states of recurrent layers in an engine; see fastgen/recurrent."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.engine.feature_options import FeatureOptions
from fastgen.model.recurrent_config import Recurrent

KEPT_STATES = 32  # for prefixes, at least; as many as lanes if these are more


@dataclass(frozen=True)
class RecurrentStates(FeatureOptions):
    """The recurrent layers of a hybrid model, and the number of slots in which their states are kept for prefixes."""

    shape: Recurrent
    slots: int

    @classmethod
    def of(cls, shape: Recurrent, max_seqs: int, prefix_cache: bool) -> RecurrentStates:
        return cls(shape, max(max_seqs, KEPT_STATES) if prefix_cache else 0)

    @property
    def kv_layers(self) -> int:
        return -len(self.shape.layers)  # they have no KV
