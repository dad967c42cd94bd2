"""The door of features: the one place that turns options, and what requests ask for, into features.

The modules of features are named here and imported when they are asked for. So the engine imports no feature, and
features import the engine. A feature that an option asks for is there from the start. One that requests ask for comes
with the first such request: for the scheduler with its Sequence, for steps, on each rank, with its first payload.

A feature has a PlanFeature for the scheduler, a StepFeature for the runner or both, and, if an option asks for it, a
Feature that makes them. No torch here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from fastgen.engine.admission import LaneTable
from fastgen.engine.feature_options import FeatureOptions
from fastgen.engine.interface import EarlierOutputs, PlanFeature
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.pages import PageAllocator
from fastgen.engine.stats import Stats
from fastgen.model.config import ModelConfig
from fastgen.request import STRUCTURES, SamplingParams, Sequence

if TYPE_CHECKING:  # these modules import torch
    from fastgen.engine.runner import Runner
    from fastgen.engine.step import StepFeature
    from fastgen.model.transformer import Transformer

BY_OPTION = {
    "host_pages": "fastgen.engine.host_tier:HostTierFeature",
    "free_windows": "fastgen.engine.free_windows:FreeWindowsFeature",
    "speculate": "fastgen.speculation.feature:SpeculationFeature",
    "recurrent": "fastgen.recurrent.feature:RecurrentFeature",
}
"""The Feature that a field of EngineConfig asks for, unless it is 0 or None."""

BY_REQUEST = {
    "score": "fastgen.engine.prompt_scores:PromptScores",
    "mask": "fastgen.engine.masks:Masks",
    "thinking": "fastgen.engine.thinking:ThinkingBudgets",
}
"""The PlanFeature that a field of a Sequence asks for, unless it is None."""

BY_PAYLOAD = {
    "fastgen.engine.prompt_scores:ScorePlan": "fastgen.engine.prompt_scorer:PromptScorer",
    "fastgen.engine.thinking:ClosingPlan": "fastgen.engine.thinking_closer:ThinkingCloser",
}
"""The StepFeature that the first payload of a type asks for, if no Feature has made one. It is made of the model."""

HYBRID = "fastgen.recurrent.transformer:HybridTransformer"
"""The class of models with recurrent layers; all others are a Transformer."""

EMPTY_HISTORY = "fastgen.speculation.planning:OutputHistory"
"""The class of an empty `Generator.history`, for engines whose features keep no outputs."""


class Feature(ABC):
    """A feature that an option asks for, on one rank. config: of the engine; a field in BY_OPTION asks for this."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @classmethod
    def read(cls, given: Any, target: ModelConfig, ranks: int, load: str) -> FeatureOptions | None:
        """Return what the user's value of an option of GeneratorOptions stands for, with the content of files that it
        names; None: no feature. target: the model's configuration. load: see GeneratorOptions. Raises ValueError for a
        value that cannot be used."""
        return None

    @abstractmethod
    def plan(self, stats: Stats) -> PlanFeature:
        """Return the part for the scheduler. stats: it counts there."""

    def load(self, model: Transformer, load: str) -> None:  # noqa: B027
        """Load the feature's weights, when the model's are loaded. load: see GeneratorOptions."""

    @abstractmethod
    def attach(self, runner: Runner) -> None:
        """Add the part for steps to `runner.features`."""


# ----------------------------------------------------------------------------------------------- options


def read_options(options: GeneratorOptions, target: ModelConfig, ranks: int) -> GeneratorOptions:
    """Return options whose values that ask for features are read (`Feature.read`), or None. They can be sent to other
    ranks, and EngineConfig takes them."""
    values: dict[str, Any] = {}
    for name in BY_OPTION.keys() & options.__dataclass_fields__.keys():
        given = getattr(options, name)
        off = given is None or given is False or (isinstance(given, str) and given == "off")
        values[name] = None if off else resolve_name(BY_OPTION[name]).read(given, target, ranks, options.load)
    return replace(options, **values)


def features_of(config: EngineConfig) -> list[Feature]:
    """Return the features that a configuration asks for."""
    return [resolve_name(path)(config) for name, path in BY_OPTION.items() if getattr(config, name)]


# ------------------------------------------------------------------------------------------ the scheduler


def asks_for_mask(params: SamplingParams) -> bool:
    """Return whether parameters restrict the tokens of an answer, so that its Sequence has a TokenMask."""
    structured = any(getattr(params, name) is not None for name in STRUCTURES)
    return structured or params.allowed_token_ids is not None or bool(params.bad_words)


def add_requested(features: list[PlanFeature], sequence: Sequence, lanes: LaneTable) -> None:
    """Add the features that a sequence asks for and that are not there yet."""
    for name, path in BY_REQUEST.items():
        if getattr(sequence, name) is not None:
            kind = resolve_name(path)
            if not any(isinstance(feature, kind) for feature in features):
                features.append(kind())
                features[-1].reset(lanes)


def make_allocator(config: EngineConfig, features: Iterable[PlanFeature]) -> PageAllocator:
    """Return a PageAllocator, which a feature may make."""
    made = (feature.make_allocator(config) for feature in features)
    return next(filter(None, made), None) or PageAllocator(config.num_pages, config.page_size)


def history_of(features: Iterable[PlanFeature]) -> EarlierOutputs:
    """Return the outputs of earlier requests that a feature keeps; if none does, an object that stays empty."""
    kept = [feature.history for feature in features if feature.history is not None]
    history: EarlierOutputs = kept[0] if kept else resolve_name(EMPTY_HISTORY)(0)
    return history


# --------------------------------------------------------------------------------------------- the runner


class StepFeatures(dict[type, "StepFeature[Any]"]):
    """The features that act in the steps of a runner, by the types of their payloads. One in BY_PAYLOAD is made when
    its first payload comes, on each rank, since all ranks get the same batches."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self._model = model  # not the runner, which has these features: a circle would keep its memory

    def __missing__(self, kind: type) -> StepFeature[Any]:
        feature: StepFeature[Any] = resolve_name(BY_PAYLOAD[f"{kind.__module__}:{kind.__name__}"])(self._model)
        self[kind] = feature
        return feature


def make_requested(features: dict[type, StepFeature[Any]]) -> None:
    """Make all features that requests can ask for, to prepare their kernels and their memory."""
    for path in BY_PAYLOAD:
        features[resolve_name(path)]
