"""The kinds of heads."""

from __future__ import annotations

from fastgen.engine.speculation.dflash import DFlashWeights
from fastgen.engine.speculation.eagle import EagleWeights
from fastgen.engine.speculation.head import HeadWeights
from fastgen.engine.speculation.heads import DFlashConfig, EagleConfig, HeadConfig, MedusaConfig, SelfDraftConfig
from fastgen.engine.speculation.medusa import MedusaWeights
from fastgen.engine.speculation.self_draft import SelfDraftWeights
from fastgen.model.parameters import Parameters


def weights_of(config: HeadConfig, target: Parameters, context: int, deterministic: bool) -> HeadWeights:
    """Return the weights of a head, not yet filled. context: maximum length of a sequence. deterministic: as for
    Parameters."""
    if isinstance(config, SelfDraftConfig):
        return SelfDraftWeights(config, target, deterministic)
    if isinstance(config, DFlashConfig):
        return DFlashWeights(config, target, context, deterministic)
    if isinstance(config, EagleConfig):
        return EagleWeights(config, target, context, deterministic)
    assert isinstance(config, MedusaConfig)
    return MedusaWeights(config, target, context, deterministic)
