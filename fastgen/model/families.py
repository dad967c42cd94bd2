"""The families of models that run: how each one's `config.json` is read (`fastgen.model.config`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """The rules by which the fields of a model family's config.json become the flags of ModelConfig.

    absent: the values that transformers assumes for absent fields; a field that is null stays null. qkv_bias: q, k and
    v always have biases. attention_bias: the field attention_bias adds biases to q, k, v and o; for o there may be
    another field, out_bias. mlp_bias: the field mlp_bias adds biases to gate, up and down. qk_norm, norm_after_rope:
    see ModelConfig. window: name of the field that switches sliding windows on, which may be the size itself
    ("sliding_window"); "" for families without windows. layer_types: that field says which layers have a window;
    otherwise all have one. no_rope: the field no_rope_layers names layers without rope, by default every
    no_rope_layer_interval-th. multipliers: the fields of Granite scale embeddings, attention, branches and logits. mup:
    they do so as in HyperCLOVA X: logits are multiplied, not divided, the scale of attention may be left open, and the
    field use_post_norm sets ModelConfig's peri_norm. tensors: values of ModelConfig's qkv_tensor, gate_up_tensor and
    down_tensor. inner: the field of the size of the MLP. only: the supported values of fields, or of their items.
    post_norm, wide_norm: see ModelConfig. pattern: without layer_types, every pattern-th layer has no window; a number,
    or the field that has it. full_first: the first of each `pattern` layers is the one without a window, instead of the
    last. full_rope: the rope of layers without a window: "" (the same as the others'), "none" (no rope, unless
    sliding_window is null), or "stretched" (the config's stretching, which the others lack). rope: rope_parameters of a
    config that has none. partial_rope: the field partial_rotary_factor may be below 1. gated: see ModelConfig. foreign:
    fields that are supported only if they are null, false, 0 or empty.
    """

    model_type: str
    absent: dict[str, Any]
    qkv_bias: bool = False
    attention_bias: bool = False
    out_bias: str = "attention_bias"
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_after_rope: bool = False
    window: str = ""
    layer_types: bool = True
    no_rope: bool = False
    multipliers: bool = False
    mup: bool = False
    tensors: dict[str, str] | None = None
    inner: str = "intermediate_size"
    only: dict[str, tuple[str, ...]] | None = None
    post_norm: bool = False
    wide_norm: bool = False
    pattern: int | str = ""
    full_first: bool = False
    full_rope: Literal["", "none", "stretched"] = ""
    rope: dict[str, Any] | None = None
    partial_rope: bool = False
    gated: bool = True
    foreign: tuple[str, ...] = ()


WRAPPERS = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
}
"""{model_type: architecture} of models with vision whose text model runs."""
TEXT_TYPES = {"exaone4_5_text": "exaone4"}
"""{model_type of a text model inside a model with vision: that of its family}, if they differ."""

_OLMO = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_TELECHAT3 = Family("telechat3", {"eos_token_id": 2}, attention_bias=True, mlp_bias=True)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", {"eos_token_id": 2}, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family(
        "mistral", {"eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096}, window="sliding_window"),
    "Ministral3ForCausalLM": Family(
        "ministral3", {"eos_token_id": 2, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        window="sliding_window", layer_types=False, rope=_MINISTRAL3_ROPE),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, qkv_bias=True, window="use_sliding_window"),
    "Qwen3ForCausalLM": Family(
        "qwen3", {**_QWEN, "head_dim": 128}, attention_bias=True, qk_norm=True, window="use_sliding_window"),
    "Qwen2_5_VLForConditionalGeneration": Family(
        "qwen2_5_vl_text",
        {**_QWEN, "num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
         "eos_token_id": 151645},
        qkv_bias=True, window="use_sliding_window"),
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl_text", {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0}, attention_bias=True,
        qk_norm=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0, "eos_token_id": 128001},
        attention_bias=True, mlp_bias=True, window="use_sliding_window", no_rope=True),
    "GraniteForCausalLM": Family("granite", {"eos_token_id": 2}, attention_bias=True, mlp_bias=True, multipliers=True),
    "Phi3ForCausalLM": Family(
        "phi3", {"eos_token_id": 32000, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        window="sliding_window", layer_types=False, partial_rope=True,
        tensors={"qkv_tensor": "self_attn.qkv_proj", "gate_up_tensor": "mlp.gate_up_proj"}),
    "GraniteMoeHybridForCausalLM": Family(  # those without experts and without Mamba
        "granitemoehybrid", {"num_local_experts": 8, "eos_token_id": 2}, attention_bias=True, multipliers=True,
        inner="shared_intermediate_size", tensors={
            "gate_up_tensor": "shared_mlp.input_linear", "down_tensor": "shared_mlp.output_linear"},
        only={"position_embedding_type": ("rope",), "layer_types": ("attention", "full_attention")}),
    "SeedOssForCausalLM": Family(
        "seed_oss", {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "eos_token_id": 2},
        attention_bias=True, out_bias="attention_out_bias", mlp_bias=True),
    "Olmo2ForCausalLM": Family("olmo2", _OLMO, attention_bias=True, post_norm=True, wide_norm=True),
    "Olmo3ForCausalLM": Family(
        "olmo3", {**_OLMO, "sliding_window": 4096, "rope_theta": 500000.0}, attention_bias=True, post_norm=True,
        wide_norm=True, window="sliding_window", pattern=4, full_rope="stretched"),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        {"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
         "eos_token_id": 2},
        qk_norm=True, post_norm=True, window="sliding_window", pattern="sliding_window_pattern", full_rope="none"),
    "InternLM3ForCausalLM": Family(
        "internlm3", {"eos_token_id": 2, "head_dim": 128, "rms_norm_eps": 1e-5}, attention_bias=True, mlp_bias=True),
    "MiMoForCausalLM": Family("mimo", _QWEN, qkv_bias=True, window="use_sliding_window"),
    "IQuestCoderForCausalLM": Family(
        "iquestcoder", {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2},
        attention_bias=True, mlp_bias=True, foreign=("clip_qkv", "use_sliding_window")),
    "Telechat3ForCausalLM": _TELECHAT3,
    "TeleChat3ForCausalLM": _TELECHAT3,  # as vLLM spells it
    "CwmForCausalLM": Family(
        "cwm",
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192,
         "rope_theta": 1000000.0, "eos_token_id": [128001, 128008, 128009]},
        mlp_bias=True, window="sliding_window", pattern=4, full_first=True, rope=_CWM_ROPE),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", {"rms_norm_eps": 1e-5, "eos_token_id": 2}, attention_bias=True, qk_norm=True,
        norm_after_rope=True, foreign=("use_cla",)),
    "HyperCLOVAXForCausalLM": Family(
        "hyperclovax", {"eos_token_id": 2, "use_post_norm": True}, attention_bias=True, mlp_bias=True,
        multipliers=True, mup=True),
    "ArceeForCausalLM": Family(
        "arcee", {"eos_token_id": 128001, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}, attention_bias=True,
        mlp_bias=True, gated=False),
}  # fmt: skip
