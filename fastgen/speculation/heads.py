"""The configuration of a head: a small model that drafts from the residual stream of its target. No torch here.

A checkpoint names its kind in its config.json: Medusa's has `medusa_num_heads`, EAGLE-3's has "Eagle3" in its
architectures, or `speculators_model_type` "eagle3". Three programs write DFlash heads, with fields in other places:

- z-lab: fields of Qwen3, and `dflash_config` with `mask_token_id` and `target_layer_ids`.
- DeepSpec: the same fields at the top level, with architectures ["Qwen3DSparkModel"]. Drafts begin one row earlier.
- speculators: `speculators_model_type`, fields of Qwen3 in `transformer_layer_config`, and the numbers of the target's
  layers in `aux_hidden_state_layer_ids`, which are one larger: the layer whose input is read.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fastgen.model.config import ModelConfig, parse_config
from fastgen.model.config_fields import unsupported

log = logging.getLogger(__name__)

EAGLE_DRAFTS = 4  # number of tokens that an EAGLE-3 head drafts, if its config.json does not say it
MEDUSA_FILES = ("medusa_lm_head.safetensors", "model.safetensors")
"""Names of the file with the weights of Medusa heads; the first that is there is read."""

SUPPORTED: dict[str, tuple[object, ...]] = {
    "use_swa": (None, False), "swa_window_size": (None, 0), "attention_sinks": (None, False),
    "use_attention_sinks": (None, False), "add_swa_attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1), "is_causal": (None, False), "causal": (None, False),
    "dflash_query_causal": (None, False), "markov_head_type": (None, "none", "vanilla"),
    "projector_type": (None, "dflash"), "shift_label": (None, False), "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0), "draft_adapter_rank": (None, 0), "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1), "final_logit_softcapping": (None, 0), "quantization_config": (None, {}),
}  # fmt: skip
"""The values that a field of a DFlash head may have; with another value, the head would need more than there is."""


@dataclass(frozen=True)
class HeadConfig:
    """The configuration of a head; each kind of head has a subclass. folder: of the checkpoint. most_lanes: maximum
    number of lanes that it drafts for."""

    most_lanes: ClassVar[int] = sys.maxsize
    folder: Path

    @property
    def more_kv_layers(self) -> int:
        """Number of layers whose keys and values the head keeps in the pages."""
        return 0

    @property
    def ahead(self) -> int:
        """Number of positions, from the last token on, whose pages the head writes to."""
        return 0


@dataclass(frozen=True)
class SelfDraftConfig(HeadConfig):
    """The configuration of an int4 copy of the model, which has no folder. ahead: number of tokens to draft."""

    most_lanes = 16  # with more, a step of the copy is hardly shorter than one of the model
    folder: Path = Path()
    ahead: int = 3


@dataclass(frozen=True)
class LayeredConfig(HeadConfig):
    """The configuration of a head that has layers.

    layers: configuration of its layers. features: the target's layers whose outputs are read. reduced: number of tokens
    of its own vocabulary; 0: it has the target's.
    """

    layers: ModelConfig
    features: tuple[int, ...]
    reduced: int

    @property
    def more_kv_layers(self) -> int:
        return self.layers.num_layers


@dataclass(frozen=True)
class DFlashConfig(LayeredConfig):
    """The configuration of a DFlash head (arXiv 2602.06036).

    The head drafts a block of tokens in one pass: the last token, and `block` - 1 times the token `mask_id`. Its layers
    attend to the whole block, and to keys and values that are made from the target's residual stream.

    anchor_first: row j of the block predicts the token after its position; otherwise the token at its position, so that
    row 0 predicts nothing. markov_rank: number of inputs of the matrix of its Markov head; 0: it has none.
    """

    block: int
    mask_id: int
    anchor_first: bool
    markov_rank: int

    @property
    def ahead(self) -> int:
        return self.block

    @property
    def first(self) -> int:
        """The first row of a block that drafts a token."""
        return 0 if self.anchor_first else 1


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """The configuration of Medusa heads. heads: number of heads, if no file says it; a config.json may
    name fewer than there are. blocks: number of residual blocks of each."""

    heads: int
    blocks: int


@dataclass(frozen=True)
class EagleConfig(LayeredConfig):
    """The configuration of an EAGLE-3 head (arXiv 2503.01840), which has one layer.

    drafts: number of tokens to draft. norm_before_residual: the residual stream of the layer begins with the normed
    state. norm_before_fc, fc_norm: all features together are normed, or the features of each layer. norm_output: the
    next state is the normed result.
    """

    drafts: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def ahead(self) -> int:
        return self.drafts - 1


def read_head(folder: Path, target: ModelConfig) -> HeadConfig:
    """Return the configuration of the head in a folder. Raises ValueError that names the folder and the field for one
    that is not supported, or that does not fit the target."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"speculate is {str(folder)!r}, whose config.json cannot be read: {error}") from error
    try:
        if (folder / "mask_embedding.pt").exists():
            raise ValueError("mask_embedding.pt, an embedding of the mask token, is not supported")
        head_config = parse_head(config, folder, target)
    except ValueError as error:
        raise ValueError(f"speculate: {path}: {error}") from error
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"speculate: {path} has a field of a wrong type or lacks one ({error!r})") from error
    return head_config


def parse_head(config: dict[str, Any], folder: Path, target: ModelConfig) -> HeadConfig:
    """Return the configuration of any kind of head for the content of `config.json`."""
    if "medusa_num_heads" in config:
        return MedusaConfig(folder, _integer(config, "medusa_num_heads"), _integer(config, "medusa_num_layers"))
    kind = str(config.get("speculators_model_type") or (config.get("architectures") or [""])[0])
    head_config = (parse_eagle if "eagle3" in kind.lower() else parse_dflash)(config, folder, target)
    _check_fit(head_config.layers, head_config.features, target)
    return head_config


def parse_dflash(config: dict[str, Any], folder: Path, target: ModelConfig) -> DFlashConfig:
    """Return the DFlashConfig for the content of `config.json`. target: configuration of the target model."""
    fields = {**config, **(config.get("dflash_config") or {})}
    layers, shift = config, 0
    names = config.get("architectures") or [None]
    if "speculators_model_type" in config:
        if config["speculators_model_type"] != "dflash":
            raise unsupported("speculators_model_type", config["speculators_model_type"], "dflash and eagle3 are")
        layers, shift = config["transformer_layer_config"], 1
        fields["target_layer_ids"] = fields["aux_hidden_state_layer_ids"]
    elif names == ["Qwen3DSparkModel"]:
        fields["sample_from_anchor"] = True
    elif "dflash_config" not in config:
        raise unsupported("architectures", names, "DFlash (with dflash_config), EAGLE-3 and Medusa are")
    for name, values in SUPPORTED.items():
        if fields.get(name) not in values:
            raise unsupported(name, fields[name])
    vocab = _integer(fields, "draft_vocab_size") if fields.get("draft_vocab_size") else target.vocab_size
    sizes = {"vocab_size": target.vocab_size, "tie_word_embeddings": True}
    layer_config = parse_config({**layers, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes})
    if any(layer_config.windows):
        raise unsupported("layer_types", layers.get("layer_types"), "only full_attention is")
    block, mask = _integer(fields, "block_size"), _integer(fields, "mask_token_id")
    if not 2 <= block <= 64:
        raise ValueError(f"block_size={block} must be 2 to 64")
    if not 0 <= mask < target.vocab_size:
        raise ValueError(f"mask_token_id={mask} is not a token of the model, which has {target.vocab_size}")
    has_markov = fields.get("markov_rank") and fields.get("markov_head_type") != "none"
    rank = _integer(fields, "markov_rank") if has_markov else 0
    if rank < 0:
        raise unsupported("markov_rank", rank)
    if rank and vocab != target.vocab_size:
        raise unsupported("markov_rank", rank, "with draft_vocab_size it is not")
    if fields.get("enable_confidence_head"):
        log.info("%s has a confidence head, which is not used: all drafts are verified", folder)
    return DFlashConfig(
        folder=folder,
        layers=layer_config,
        features=tuple(int(number) - shift for number in fields["target_layer_ids"]),
        block=block,
        mask_id=mask,
        anchor_first=bool(fields.get("sample_from_anchor")),
        markov_rank=rank,
        reduced=0 if vocab == target.vocab_size else vocab,
    )


def parse_eagle(config: dict[str, Any], folder: Path, target: ModelConfig) -> EagleConfig:
    """Return the EagleConfig for the content of `config.json`. target: configuration of the target model."""
    layers = config.get("transformer_layer_config", config)
    if layers.get("num_hidden_layers", 1) != 1:
        raise unsupported("num_hidden_layers", layers["num_hidden_layers"], "one layer is")
    for name in ("attention_bias", "mlp_bias", "quantization_config", "parallel_drafting"):
        if config.get(name) or layers.get(name):
            raise unsupported(name, config.get(name) or layers.get(name))
    if config.get("target_hidden_size") not in (None, target.hidden_size):
        raise ValueError(f"target_hidden_size={config['target_hidden_size']}, and the model has {target.hidden_size}")
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise unsupported("norm_before_fc", True, "with fc_norm it is not")
    family = "Qwen3" if layers.get("model_type") == "qwen3" else "Llama"
    sizes = {"vocab_size": target.vocab_size, "tie_word_embeddings": True, "num_hidden_layers": 1}
    own = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "layer_types": None}
    vocab = _integer(config, "draft_vocab_size") if config.get("draft_vocab_size") else target.vocab_size
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return EagleConfig(
        folder=folder,
        layers=parse_config({**layers, **own, **sizes}),
        features=_eagle_features(config, target),
        reduced=0 if vocab == target.vocab_size else vocab,
        drafts=max(int(methods[0].get("speculative_tokens") or EAGLE_DRAFTS), 1),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        fc_norm=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
    )


def _eagle_features(config: dict[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the target's layers whose outputs are read. In some fields a number is that of the layer whose output is
    read, in others, and by default, that of the layer whose input is read."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    outputs = config.get("target_layer_ids") or nested
    if outputs:
        return tuple(map(int, outputs))
    default = (2, target.num_layers // 2, target.num_layers - 3)
    return tuple(int(number) - 1 for number in config.get("eagle_aux_hidden_state_layer_ids") or default)


def _check_fit(layers: ModelConfig, features: tuple[int, ...], target: ModelConfig) -> None:
    """Raise ValueError for a head of another target. features: the target's layers whose outputs are read."""
    sizes: Mapping[str, tuple[int, int]] = {
        "hidden_size": (layers.hidden_size, target.hidden_size),
        "num_key_value_heads": (layers.num_kv_heads, target.num_kv_heads),
        "head_dim": (layers.head_size, target.head_size),
    }
    for name, (own, needed) in sizes.items():
        if own != needed:
            raise ValueError(f"{name}={own}, and the model has {needed}; take a head that was made for this model")
    if not features or not all(0 <= layer < target.num_layers - 1 for layer in features):
        raise ValueError(
            f"the layers {list(features)} of the model, whose outputs are read, must be 0 to "
            f"{target.num_layers - 2}; take a head that was made for this model"
        )


def _integer(fields: Mapping[str, object], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer")
    return value
