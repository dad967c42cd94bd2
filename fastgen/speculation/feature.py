"""Speculation as a feature of an engine; see engine/features.py. No torch here: the scheduler needs this module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.engine.features import Feature
from fastgen.engine.options import EngineConfig
from fastgen.engine.stats import Stats
from fastgen.model.config import BUNDLED_NAME, ModelConfig
from fastgen.speculation.heads import HeadConfig, SelfDraftConfig, read_head
from fastgen.speculation.options import Speculation
from fastgen.speculation.planning import DraftPlan, Speculator

if TYPE_CHECKING:  # these modules import torch
    from fastgen.engine.runner import Runner
    from fastgen.model.attention.interface import Attention
    from fastgen.model.transformer import Transformer
    from fastgen.speculation.head import HeadWeights


class SpeculationFeature(Feature):
    """Speculation, which `EngineConfig.speculate` asks for."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        assert isinstance(config.speculate, Speculation)
        self._options = config.speculate
        self._head: HeadWeights | None = None

    @classmethod
    def read(cls, given: Any, target: ModelConfig, ranks: int, load: str) -> Speculation | None:
        """The name of a head is replaced by its configuration."""
        options = Speculation.of(given)
        if options is None or options.head is None or isinstance(options.head, HeadConfig):
            return options
        if ranks > 1:
            raise ValueError(f"speculate={str(options.head)!r} needs tensor_parallel=1; leave it out, or take 'auto'")
        if options.head == "int4":
            if target.quantization:
                raise ValueError("speculate='int4' needs a model that is not quantized; leave it out, or take 'auto'")
            return replace(options, head=SelfDraftConfig())
        try:
            folder = find_head(options.head, weights=load == "auto")
        except ValueError as error:
            raise ValueError(f"speculate: {error}") from error
        return replace(options, head=read_head(folder, target))

    def plan(self, stats: Stats) -> Speculator:
        return Speculator(self._options, self.config.device != "cpu", stats)

    def load(self, model: Transformer, load: str) -> None:
        """Load the weights of the head that drafts, if there is one."""
        if self._options.head_config is not None:
            from fastgen.speculation.drafting import weights_of

            config, head = self.config, self._options.head_config
            self._head = weights_of(head, model.parameters, config.max_model_len, config.deterministic)
            self._head.load(load == "dummy")

    def attach(self, runner: Runner) -> None:
        from fastgen.engine.startup import make_attention
        from fastgen.speculation.drafting import Drafting

        model, config, pool = runner.model, runner.config, runner.pool
        drafting = Drafting(self._options, config, runner.lanes, pool.page_size, model.group.rank == 0)
        runner.features[DraftPlan] = drafting
        if self._head is not None:
            layers, more = model.config.kv_layers, self._options.more_kv_layers
            part = pool.part(layers if more else 0, layers + more)
            name = "paged" if config.attention == "flash" else config.attention

            def attention_of_head(heads: int, rows: int) -> Attention:
                return make_attention(name, part, heads, (0,), rows, config.max_model_len, config.deterministic)

            model.observer = drafting.add_head(self._head, model, part, attention_of_head, runner.attention)


def find_head(name: str | Path, weights: bool) -> Path:
    """Return the local folder of a head: BUNDLED_NAME/NAME (one that drafts for the bundled model), a folder, or a hub
    id; see `loader.resolve`."""
    from fastgen.model.loader import BUNDLED, resolve

    model, _, head = str(name).partition("/")
    if model == BUNDLED_NAME and isinstance(name, str):
        own = {each.name: each for each in BUNDLED.iterdir() if each.is_dir()}
        if head in own:
            return own[head]
        if not Path(name).is_dir():
            heads = ", ".join(sorted(own))
            raise ValueError(f"{name!r} is neither a folder nor a head that drafts for {model}, which has {heads}")
    return resolve(name, weights=weights)
