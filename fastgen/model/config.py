"""Reads Hugging Face's `config.json` as a ModelConfig.

Files of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and of transformers 5 (`rope_parameters`, `dtype`)
give the same ModelConfig. An unsupported model raises a ValueError that names the field and its value. This module
imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.model.config_fields import integer, number_of, unsupported
from fastgen.model.families import FAMILIES, TEXT_TYPES, WRAPPERS, Family
from fastgen.model.quantization import Int4, Quantization, method_of
from fastgen.option import Option

if TYPE_CHECKING:  # for hybrids only
    from fastgen.model.recurrent_layers import Recurrent

BUNDLED_NAME = "fastgen-tiny"

# Fields that make a model something other than a dense text model, and older names of biases, unless they are null,
# false, 0 or empty.
_FOREIGN = (
    "num_experts", "num_local_experts", "n_routed_experts", "vision_config", "audio_config", "text_config",
    "per_layer_config", "is_encoder_decoder", "bias", "qkv_bias",
)  # fmt: skip
_YARN = (("factor",), ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"))
# Kinds of rope: (required numbers, optional numbers).
_ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    # Without an alpha (HunYuan), it stretches only beyond max_position_embeddings, which no sequence reaches.
    "dynamic": ((), ("alpha",)),
    "mrope": ((), ()),  # a token of text has one position, so the sections for images turn like the others
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "longrope": ((), ("factor", "attention_factor")),
    "yarn": _YARN,
    "telechat3-yarn": _YARN,
}
_DTYPES = ("bfloat16", "float16", "float32")
_MOST_LAYERS = 2**12
_QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt", "quant_config.json": "awq", "quantize_config.json": "gptq"
}  # fmt: skip
"""{file that holds the quantization_config if config.json has none: its quant_method}."""


@dataclass(frozen=True)
class RopeConfig:
    """The rotary position embedding of a model (see `fastgen.model.rope`). Comments name the kinds that read a field.

    Sources: RoFormer (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), LongRoPE (2402.13753),
    llama3 from Llama 3.1.
    """

    kind: str = "default"  # default | linear | llama3 | yarn | longrope | none: no rotation
    theta: float = 10000.0
    factor: float = 1.0  # ratio of the stretched context to the original one
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn, longrope: context before stretching; 0: max_position
    beta_fast: float = 32.0  # yarn: pairs that turn more often than this in the original context stay
    beta_slow: float = 1.0  # yarn: pairs that turn less often are interpolated
    attention_factor: float | None = None  # yarn, longrope: factor of cos and sin; None: from `factor`
    mscale: float = 0.0  # yarn: with `mscale_all_dim`, how the factor of cos and sin grows with `factor`; 0: not given
    mscale_all_dim: float = 0.0  # yarn
    alpha: float = 1.0  # factor of the context by which theta grows (NTK-aware scaling, HunYuan)
    short_factors: tuple[float, ...] = ()  # longrope: factors of the periods of the pairs, in the original context
    long_factors: tuple[float, ...] = ()  # longrope: those in a longer context
    rotary: float = 1.0  # rotated part of the dimensions of a head
    truncate: bool = True  # yarn: the ends of the ramp are whole numbers of pairs
    query_growth: float = 0.0  # the growth of queries beyond the original context (Ministral 3: llama_4_scaling_beta)

    def is_long_in(self, context: int) -> bool:
        """Return whether the long factors of longrope apply to all sequences of an engine with this context."""
        return self.kind == "longrope" and context > self.original_max_position > 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense decoder-only transformer. Sizes that do not fit together raise a ValueError."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int  # the model's context in tokens (max_position_embeddings)
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each head of q and k, before rope (Qwen3) unless `norm_after_rope`
    tied: bool  # the head's weight is the embedding unless the checkpoint has another one (`own_head`)
    windows: tuple[int, ...]  # one per layer: a query at p sees the keys in (p - window, p]; 0: all keys up to p
    eos_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    quantization: Quantization | None = None  # of the linear layers
    own_head: bool = False  # the head of a tied model has its own memory, since it differs from the embedding
    other_rope: RopeConfig = RopeConfig()  # the rope of the layers `other_layers`
    other_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0  # factor of the embeddings
    scaled_embedding: bool = False  # embedding_scale is a part of the embedding, rounded to its dtype (Gemma)
    attention_scale: float | None = None  # factor of the products of queries and keys; None: head_size ** -0.5
    branch_scale: float = 1.0  # factor of the outputs of attention and MLP
    logits_divisor: float = 1.0
    logits_cap: float = 0.0  # logits x become cap * tanh(x / cap), after the division; 0: they stay
    qkv_tensor: str = ""  # name in a layer of the tensor that holds q, k and v; "": each has its own
    gate_up_tensor: str = ""  # of the tensor that holds gate and up
    down_tensor: str = "mlp.down_proj"
    post_norm: bool = False  # attention and MLP have an RMSNorm of their output instead of their input
    peri_norm: bool = False  # they have an RMSNorm of their input and one of their output
    wide_norm: bool = False  # an RMSNorm over all heads of q together, and one of k, before rope
    norm_after_rope: bool = False  # q and k are rotated before `qk_norm` (HunYuan)
    gated: bool = True  # the MLP is down(silu(gate(x)) * up(x)); False: down(relu(up(x)) ** 2), without a gate
    gelu: bool = False  # a gated MLP has gelu, approximated by tanh, instead of silu
    centered_norm: bool = False  # norms are multiplied by 1 + weight, and peri_norm's have the names that Gemma's have
    bare_norm: bool = False  # embeddings and `qk_norm` have norms without weights; the last norm is not centered (Muse)
    post_norm_eps: float | None = None  # epsilon of the norms of the outputs of attention and MLP; None: norm_eps
    output_gate: bool = False  # the output of attention is multiplied by sigmoid(gate_proj(x)) before o
    recurrent: Recurrent | None = None  # layers without attention; in the others, q_proj has a gate after each head
    has_vision: bool = False  # it is the text model inside a model with vision, whose other parts are not loaded

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim={self.head_size} is odd; rope rotates pairs")
        if self.rotary_size % 2 or not self.rotary_size:
            raise ValueError(
                f"partial_rotary_factor={self.rope.rotary} of head_dim={self.head_size} is {self.rotary_size} "
                "dimensions; rope rotates pairs"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not supported; it has to be one of {', '.join(_DTYPES)}")

    @property
    def num_parameters(self) -> int:
        """Number of weights, without the few numbers of norms and biases."""
        return self._layer_parameters + self.vocab_size * self.hidden_size * (1 if self.shares_head else 2)

    @property
    def shares_head(self) -> bool:
        """Return whether embedding and head are one tensor in memory."""
        return self.tied and not self.own_head

    @property
    def _layer_parameters(self) -> int:
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        attention += self.hidden_size * self.head_size * self.num_heads * (self.output_gate or bool(self.recurrent))
        mlp = self.hidden_size * (self.gate_up_size + self.intermediate_size)
        recurrent = self.recurrent.num_parameters(self.hidden_size) if self.recurrent else 0
        return self.kv_layers * attention + recurrent + self.num_layers * mlp

    @property
    def kv_layers(self) -> int:
        """Number of layers with attention, which have KV."""
        return self.num_layers - (len(self.recurrent.layers) if self.recurrent else 0)

    def weight_bytes(self, item_size: int) -> float:
        """Return the size of the weights in bytes. item_size: bytes per weight that is not quantized."""
        layers = self._layer_parameters * (self.quantization.weight_bytes if self.quantization else item_size)
        return layers + (self.num_parameters - self._layer_parameters) * item_size

    @property
    def adds_products(self) -> bool:
        """Return whether the outputs of o and down are added to the residual stream without further operations."""
        return self.branch_scale == 1 and not self.post_norm and not self.peri_norm

    @property
    def swiglu(self) -> bool:
        """Return whether the product of gate and up can compute the activation."""
        return self.gated and not self.gelu

    @property
    def gate_up_size(self) -> int:
        """Number of outputs of the linear layer that stacks gate and up, or holds only up."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def rotary_size(self) -> int:
        """Number of dimensions of a head that rope rotates."""
        return int(self.head_size * self.rope.rotary)

    @property
    def partial_rope(self) -> bool:
        """Return whether rope rotates only the first dimensions of a head, which no product can do by itself."""
        return self.rotary_size < self.head_size

    @property
    def input_sizes(self) -> tuple[int, int, int]:
        """Numbers of inputs of the linear layers of a layer."""
        return self.hidden_size, self.num_heads * self.head_size, self.intermediate_size

    def split(self, ranks: int) -> ModelConfig:
        """Return the config of one of `ranks` tensor-parallel ranks, with the rank's number of heads and MLP size.

        KV heads are replicated if there are fewer than ranks. `vocab_size` remains the size of the whole vocabulary,
        although ranks also split it. Raises ValueError for a size that the number of ranks does not divide.
        """
        Option("tensor_parallel", int, 1, low=1).check(ranks)
        if ranks == 1:
            return self
        if self.wide_norm or self.recurrent:
            kind = "recurrent layers" if self.recurrent else "norms of q and k"
            raise ValueError(f"the {kind} of this model cannot be split over ranks; take tensor_parallel=1")
        sizes = {"num_attention_heads": self.num_heads, "intermediate_size": self.intermediate_size,
                 "vocab_size": self.vocab_size}  # fmt: skip
        for name, size in sizes.items():
            if size % ranks:
                raise ValueError(f"{name}={size} does not divide by {ranks} ranks; take another tensor_parallel")
        if max(self.num_kv_heads, ranks) % min(self.num_kv_heads, ranks):
            raise ValueError(
                f"num_key_value_heads={self.num_kv_heads} and {ranks} ranks: one has to divide the other; take another "
                "tensor_parallel"
            )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=max(self.num_kv_heads // ranks, 1),
            intermediate_size=self.intermediate_size // ranks,
        )


def read_config(folder: Path, quantization: str | None = None) -> ModelConfig:
    """Read `config.json` of a checkpoint folder, and `generation_config.json` if it is there.

    quantization: "fp8": linear layers become fp8, even if the checkpoint is not quantized. Another one is the
    checkpoint's quant_method, as a check.
    Raises ValueError, naming the folder, if config.json is missing, is not JSON, or describes an unsupported model.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder} has no config.json; a checkpoint folder in Hugging Face's format is needed")
    generation = read_json(folder / "generation_config.json")
    for file, method in _QUANTIZATION_FILES.items():
        if not config.get("quantization_config") and (given := read_json(folder / file)):
            config["quantization_config"] = {"quant_method": method, **given}
    try:
        model_config = _quantized(parse_config(config, generation), method_of(config), quantization)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{folder / 'config.json'} has a field of a wrong type ({error!r}); fetch it again") from error
    return model_config


def _quantized(config: ModelConfig, method: str | None, option: str | None) -> ModelConfig:
    """Return the configuration with the quantization that the user wants; see `read_config`. method: quant_method of
    the checkpoint."""
    fits = not isinstance(config.quantization, Int4) if option == "fp8" else option in (None, method)
    if not fits:
        state = "is not quantized" if method is None else f"has quant_method={method!r}"
        raise ValueError(f"quantization={option!r} does not fit the checkpoint, which {state}; leave quantization out")
    if config.recurrent and (option or config.quantization):
        remedy = "leave quantization out" if config.quantization is None else "take a checkpoint that is not quantized"
        raise ValueError(f"models with recurrent layers cannot be quantized; {remedy}")
    return replace(config, quantization=config.quantization or Quantization()) if option == "fp8" else config


def _quantization(config: dict[str, Any], family: Family) -> Quantization | None:
    """Return the quantized form of a checkpoint. The parsers of its fields load only for a quantized one."""
    from fastgen.model.quantization_config import parse_quantization

    return parse_quantization(config, family.gated)


def parse_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Return the ModelConfig for the content of `config.json`. Fields have the meaning that transformers 5 gives them.

    generation: the content of `generation_config.json`, whose eos ids take precedence. `pretraining_tp` is ignored,
    since it changes no result.
    """
    text = _text_config(config)
    family, has_vision = _family(text), text is not config
    config = {**family.absent, **text}
    _refuse_foreign(config, family)
    num_layers = integer(config, "num_hidden_layers", high=_MOST_LAYERS)
    num_heads = integer(config, "num_attention_heads")
    config["layer_types"] = _layer_types(config, family, num_layers)
    windows = _windows(config, family, num_layers)
    rope, other_rope, other_layers = _ropes(config, family, windows)
    hidden_size = integer(config, "hidden_size")
    flags: dict[str, Any] = {**(family.tensors or {}), **_multipliers(config, family, hidden_size)}
    attention_bias = family.attention_bias and bool(config.get("attention_bias"))
    quantization = _quantization(config, family) if method_of(config) else None
    if isinstance(quantization, Int4) and "qkv_tensor" in flags:
        raise ValueError(
            f"{quantization.name} of {flags['qkv_tensor']}, one tensor of several modules, is not supported"
        )
    if family.recurrent:
        from fastgen.model.recurrent_layers import read_recurrent  # for hybrids only

        flags["recurrent"] = read_recurrent(config, num_layers)
    return ModelConfig(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, family.inner),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_size=_head_size(config, hidden_size, num_heads),
        max_position=integer(config, "max_position_embeddings"),
        norm_eps=number_of(config, "rms_norm_eps", 1e-6, low=0, high=1),
        rope=rope,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=family.attention_bias and bool(config.get(family.out_bias)),
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias")),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings")),
        windows=windows,
        eos_ids=_eos_ids(config, generation or {}),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        quantization=quantization,
        other_rope=other_rope,
        other_layers=other_layers,
        post_norm=family.post_norm,
        peri_norm=(family.centered_norm and not family.recurrent) or (family.mup and bool(config["use_post_norm"])),
        wide_norm=family.wide_norm,
        norm_after_rope=family.norm_after_rope,
        gated=family.gated,
        gelu=family.activation[1].startswith("gelu"),
        centered_norm=family.centered_norm,
        scaled_embedding=family.scaled_embedding,
        bare_norm=family.bare_norm,
        output_gate=family.output_gate,
        has_vision=has_vision,
        **flags,
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model inside a model with vision, or else the config itself."""
    names = {config.get("model_type"), *(config.get("architectures") or [])}
    wrapper = next((kind for kind, name in WRAPPERS.items() if names & {kind, name}), None)
    if wrapper is None:
        return config
    parts = "architectures", "model_type", "text_config", "vision_config"
    outer = {field: value for field, value in config.items() if field not in parts}
    inner = config.get("text_config")
    if not inner and wrapper == "qwen2_5_vl":  # as published, the fields of the text are beside vision_config
        inner = {**outer, "model_type": "qwen2_5_vl_text"}
    if not inner:
        raise unsupported("text_config", inner, "the fields of the text model are needed")
    if inner.get("architectures") == [WRAPPERS[wrapper]]:
        inner = {**inner, "architectures": None}
    # transformers 5 writes true for the whole, also if the head has weights of its own.
    text, tied = {**outer, **inner}, outer.get("tie_word_embeddings", True)
    text.pop("tie_word_embeddings", None)  # if the text does not have it, the family says it
    if "tie_word_embeddings" in inner or not tied:
        text["tie_word_embeddings"] = tied and inner.get("tie_word_embeddings")
    return text


def _family(config: dict[str, Any]) -> Family:
    of_types = {family.model_type: name for name, family in FAMILIES.items()}
    kind = config.get("model_type", "")
    names = config.get("architectures") or [of_types.get(TEXT_TYPES.get(kind, kind))]
    if len(names) != 1 or names[0] not in FAMILIES:
        fields = f"architectures={config.get('architectures')!r} (model_type={kind!r})"
        runs = ", ".join(dict.fromkeys([*FAMILIES, *WRAPPERS.values()]))
        raise ValueError(f"{fields} is not supported; fastgen runs {runs}")
    return FAMILIES[names[0]]


def _refuse_foreign(config: dict[str, Any], family: Family) -> None:
    for field, values in (family.only or {}).items():
        value = config.get(field)
        if not set(value if isinstance(value, list) else [value]) <= set(values):
            raise unsupported(field, value, f"only {' or '.join(values)} is")
    for field in (*_FOREIGN, *family.foreign):
        if config.get(field):
            raise unsupported(field, config[field])
    field, activation = family.activation
    if config.get(field, activation) != activation:
        raise unsupported(field, config[field], f"only {activation} is")


def _head_size(config: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return integer(config, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}, and there is no head_dim"
        )
    return hidden_size // num_heads


def _windows(config: dict[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer, as transformers 5 applies it.

    Qwen2 and Qwen3 have windows from layer `max_window_layers` on, Mistral in every layer. `layer_types` overrides
    both: AutoModel loads such a Mistral config as Ministral, which follows that field. Phi 3 and Ministral 3 do not.
    """
    switch = config.get(family.window)
    on = switch is not None and switch is not False and config.get("sliding_window") is not None
    size = integer(config, "sliding_window") if on else 0
    types = config.get("layer_types") if family.layer_types else None
    if types is None or not family.window:
        first = integer(config, "max_window_layers", low=0) if size and "max_window_layers" in family.absent else 0
        return tuple(size if layer >= first else 0 for layer in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise unsupported("layer_types", types, f"{num_layers} of full_attention or sliding_attention are")
    if "sliding_attention" in types and not size:
        raise unsupported("layer_types", types, "sliding_attention needs a sliding_window that is switched on")
    return tuple(size if kind == "sliding_attention" else 0 for kind in types)


def _multipliers(config: dict[str, Any], family: Family, hidden_size: int) -> dict[str, float | None]:
    scales: dict[str, float | None] = {}
    if family.scaled_embedding:
        scales["embedding_scale"] = hidden_size**0.5
    if "query_pre_attn_scalar" in family.absent:
        scales["attention_scale"] = number_of(config, "query_pre_attn_scalar", low=1e-6, high=1e6) ** -0.5
    if "qk_scale_factor" in family.absent:  # of queries, which change in no other way before attention
        head_size = _head_size(config, hidden_size, integer(config, "num_attention_heads"))
        scales["attention_scale"] = number_of(config, "qk_scale_factor") * head_size**-0.5
        scales["logits_divisor"] = 1 / number_of(config, "output_multiplier", low=1e-6, high=1e6)
        scales["post_norm_eps"] = number_of(config, "post_norm_eps", low=0, high=1)
    if config.get("final_logit_softcapping") is not None and "final_logit_softcapping" in family.absent:
        scales["logits_cap"] = number_of(config, "final_logit_softcapping", low=1e-6, high=1e6)
    if not family.multipliers:
        return scales
    fields = {"embedding_scale": "embedding_multiplier", "attention_scale": "attention_multiplier",
              "branch_scale": "residual_multiplier", "logits_divisor": "logits_scaling"}  # fmt: skip
    flags: dict[str, float | None] = {
        flag: number_of(config, field, 1.0, low=1e-6, high=1e6) for flag, field in fields.items()
    }
    if family.mup:
        flags["logits_divisor"] = 1 / number_of(config, "logits_scaling", 1.0)  # logits are multiplied by it
        if config.get("attention_multiplier") is None:
            flags["attention_scale"] = None  # from the head size
    return flags


def _layer_types(config: dict[str, Any], family: Family, num_layers: int) -> list[str] | None:
    """Return the kind of attention of each layer; None if other fields than layer_types give them."""
    if config.get("layer_types") is not None:
        types: list[str] = config["layer_types"]
        return types
    if family.pattern and config.get("sliding_window") is not None:
        period = family.pattern if isinstance(family.pattern, int) else integer(config, family.pattern)
        first = (num_layers - 1) % period if family.from_last else 0 if family.full_first else period - 1
        full = [*range(first, num_layers, period)]
    elif family.no_rope and config.get("use_sliding_window"):
        full = [layer for layer in range(num_layers) if layer not in _layers_without_rope(config, num_layers)]
    else:
        return None
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(num_layers)]


def _ropes(
    config: dict[str, Any], family: Family, windows: tuple[int, ...]
) -> tuple[RopeConfig, RopeConfig, tuple[int, ...]]:
    """Return the rope, and the other rope of some layers, with these layers."""
    if family.full_rope == "stretched":
        of_kinds = config.get("rope_parameters") or {}
        plain = {"rope_type": "default"}
        full, sliding = (dict(of_kinds.get(f"{kind}_attention") or plain) for kind in ("full", "sliding"))
        full.update(config.get("rope_scaling") or {})
        full.setdefault("rope_theta", config["rope_theta"])  # which is not for the others, in transformers 5
        sliding.setdefault("rope_theta", config.get("rope_local_base_freq", family.absent["rope_theta"]))
        for each in full, sliding:
            each.pop("truncate", None)  # it is read only from a rope that all layers have
        with_window = tuple(layer for layer, window in enumerate(windows) if window)
        return _rope({"rope_parameters": full}), _rope({"rope_parameters": sliding}), with_window
    if config.get("rope_parameters") is None:
        config = {**config, "rope_parameters": family.rope}
    without: tuple[int, ...] = ()
    if family.no_rope:
        without = _layers_without_rope(config, len(windows))
    elif family.full_rope == "none" and config.get("sliding_window") is not None:
        without = tuple(layer for layer, window in enumerate(windows) if not window)
    elif family.full_rope == "listed":
        without = _listed_without_rope(config, len(windows))
    rope = _rope(config, family.partial_rope)
    if not family.rope_alpha:
        rope = replace(rope, alpha=1.0)
    return rope, RopeConfig("none" if without else "default"), without


def _layers_without_rope(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    turned = config.get("no_rope_layers")  # 1 for a layer with rope
    if turned is None:
        interval = integer(config, "no_rope_layer_interval", 4)
        turned = [(layer + 1) % interval for layer in range(num_layers)]
    if len(turned) < num_layers:
        raise unsupported("no_rope_layers", turned, f"one number per layer is needed, {num_layers} in all")
    return tuple(layer for layer in range(num_layers) if not turned[layer])


def _listed_without_rope(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers for which "layer_rope_theta" is 0. Other thetas count for nothing, as in transformers."""
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        return tuple(range((num_layers - 1) % 4, num_layers, 4))
    if len(thetas) != num_layers:
        raise unsupported("layer_rope_theta", thetas, f"one number per layer is needed, {num_layers} in all")
    return tuple(layer for layer, theta in enumerate(thetas) if not theta)


def _rope(config: dict[str, Any], partial: bool = False) -> RopeConfig:
    """Return the rope that a config describes. partial: it may rotate a part of each head."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given: dict[str, Any] = config.get(field) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if any(isinstance(value, dict) for value in given.values()) or kind not in _ROPE_KINDS:
        raise unsupported(field, given, f"a rope_type of {', '.join(_ROPE_KINDS)}, the same for all layers, is")
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1) and not partial:
        raise unsupported("partial_rotary_factor", part)
    rotary = number_of({"partial_rotary_factor": part}, "partial_rotary_factor", 1.0, low=0, high=1)
    theta = number_of(given, "rope_theta", number_of(config, "rope_theta", 10000.0, low=2), low=2)
    needed, optional = _ROPE_KINDS[kind]
    names = *needed, *(name for name in optional if given.get(name))
    numbers: dict[str, Any] = {name: number_of(given, name, low=1e-6, high=1e6) for name in names}
    growth = number_of(given, "llama_4_scaling_beta", 0.0, low=0, high=1e6)
    truncate = bool(given.get("truncate", True))  # transformers takes null as false
    if kind == "telechat3-yarn":  # cos and sin grow less with the factor
        numbers.setdefault("attention_factor", 0.07 * math.log(max(numbers["factor"], 1.0)) + 1)
    # Some configs also have this field at the top level, which transformers prefers.
    field = "original_max_position_embeddings"
    original = integer(config, field, integer(given, field, 0, low=0), low=0)
    if kind == "longrope":
        numbers |= _long_rope(config, given, rotary)
        longest = integer(config, "max_position_embeddings")
        numbers.setdefault("factor", longest / (original or longest))
        if original == 1:
            raise unsupported(field, original, "2 or more is")
    kind = {"dynamic": "default", "mrope": "default", "telechat3-yarn": "yarn"}.get(kind, kind)
    rope = RopeConfig(
        kind, theta, **numbers, original_max_position=original, rotary=rotary, query_growth=growth, truncate=truncate
    )
    if kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        low, high = rope.low_freq_factor, rope.high_freq_factor
        raise ValueError(f"low_freq_factor={low} has to lie between 0 and high_freq_factor={high}")
    return rope


def _long_rope(config: dict[str, Any], given: dict[str, Any], rotary: float) -> dict[str, tuple[float, ...]]:
    """Return the factors of longrope. given: rope_parameters. rotary: rotated part of the dimensions of a head."""
    size = _head_size(config, integer(config, "hidden_size"), integer(config, "num_attention_heads"))
    fields = {}
    for name in ("short_factor", "long_factor"):
        values = given.get(name)
        if not isinstance(values, list) or len(values) != int(size * rotary) // 2:
            raise unsupported(name, values, f"{int(size * rotary) // 2} numbers, one for each rotated pair, are")
        fields[f"{name}s"] = tuple(number_of({name: value}, name, low=1e-6, high=1e6) for value in values)
    return fields


def _eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    ids = generation.get("eos_token_id")
    ids = config.get("eos_token_id") if ids is None else ids
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int for token in ids):  # a bool is no id
        raise unsupported("eos_token_id", ids, "an id or a list of ids is")
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ValueError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object but {type(content).__name__}")
    return content
