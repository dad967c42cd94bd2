"""The families of models that run: how each one's `config.json` is read (`fastgen.model.config`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """The rules by which the fields of a model family's config.json become the flags of ModelConfig. Comments quote the
    names of its fields."""

    model_type: str
    absent: dict[str, Any]  # the values that transformers assumes for absent fields; a field that is null stays null
    qkv_bias: bool = False  # q, k and v always have biases
    attention_bias: bool = False  # "attention_bias" adds biases to q, k, v and o
    out_bias: str = "attention_bias"  # the field that adds one to o
    mlp_bias: bool = False  # "mlp_bias" adds biases to gate, up and down
    qk_norm: bool = False  # see ModelConfig
    norm_after_rope: bool = False  # see ModelConfig
    window: str = ""  # the field that switches sliding windows on, or is their size ("sliding_window"); "": no windows
    layer_types: bool = True  # "layer_types" says which layers have a window; otherwise all have one
    no_rope: bool = False  # some layers have no rope: by "no_rope_layers", or every "no_rope_layer_interval"-th
    multipliers: bool = False  # the fields of Granite scale embeddings, attention, branches and logits
    mup: bool = False  # they do so as in HyperCLOVA X: see _multipliers; "use_post_norm" sets ModelConfig's peri_norm
    tensors: dict[str, str] | None = None  # ModelConfig's qkv_tensor, gate_up_tensor and down_tensor
    inner: str = "intermediate_size"  # the field that is the size of the MLP
    only: dict[str, tuple[str, ...]] | None = None  # the supported values of fields, or of their items
    post_norm: bool = False  # see ModelConfig
    wide_norm: bool = False  # see ModelConfig
    pattern: int | str = ""  # without "layer_types", every pattern-th layer has no window; or the field that says it
    full_first: bool = False  # of each `pattern` layers, the first has no window, instead of the last
    from_last: bool = False  # layers are counted from the last one, which has no window
    # The rope of layers without a window: "" (as in the others), "none" (no rope, unless "sliding_window" is null),
    # "stretched" (the config's stretching, which the others lack) or "listed" ("layer_rope_theta" is 0 for no rope).
    full_rope: Literal["", "none", "stretched", "listed"] = ""
    rope: dict[str, Any] | None = None  # "rope_parameters" of a config that has none
    partial_rope: bool = False  # "partial_rotary_factor" may be below 1
    rope_alpha: bool = False  # "alpha" of dynamic rope counts; the others ignore it, as in transformers
    gated: bool = True  # see ModelConfig
    activation: tuple[str, str] = ("hidden_act", "silu")  # the field of the MLP's activation, and its supported value
    centered_norm: bool = False  # see ModelConfig
    bare_norm: bool = False  # see ModelConfig
    output_gate: bool = False  # see ModelConfig
    recurrent: bool = False  # "layer_types" says which layers are recurrent
    scaled_embedding: bool = False  # embeddings are multiplied by the root of their size; see ModelConfig
    foreign: tuple[str, ...] = ()  # fields that are supported only if they are null, false, 0 or empty


WRAPPERS = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
}
"""{model_type: architecture} of models with vision whose text model runs."""
TEXT_TYPES = {"exaone4_5_text": "exaone4"}
"""{model_type of the text model inside a vision model: model_type of its family}, if they differ."""

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
_QWEN3_5 = Family(
    "qwen3_5_text",
    {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
     "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
     "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25},
    qk_norm=True, partial_rope=True, centered_norm=True, recurrent=True, foreign=("attention_bias",))  # fmt: skip
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
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
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
        norm_after_rope=True, rope_alpha=True, foreign=("use_cla",)),
    "HyperCLOVAXForCausalLM": Family(
        "hyperclovax", {"eos_token_id": 2, "use_post_norm": True}, attention_bias=True, mlp_bias=True,
        multipliers=True, mup=True),
    "ArceeForCausalLM": Family(
        "arcee", {"eos_token_id": 128001, "rms_norm_eps": 1e-5}, attention_bias=True, mlp_bias=True, gated=False,
        activation=("hidden_act", "relu2")),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
         "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256,
         "sliding_window": 4096, "sliding_window_pattern": 6, "final_logit_softcapping": None,
         "tie_word_embeddings": True, "eos_token_id": 1},
        attention_bias=True, qk_norm=True, window="sliding_window", pattern="sliding_window_pattern",
        full_rope="stretched", activation=("hidden_activation", "gelu_pytorch_tanh"), centered_norm=True,
        scaled_embedding=True, foreign=("attn_logit_softcapping", "use_bidirectional_attention")),
    "MuseGlimmerForConditionalGeneration": Family(
        "muse_glimmer_text",
        {"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
         "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "sliding_window": 2048, "qk_scale_factor": 3.87,
         "output_multiplier": 26**-0.5, "final_logit_softcapping": 20.0, "eos_token_id": 200001},
        attention_bias=True, qk_norm=True, window="sliding_window", pattern=4, from_last=True, full_rope="listed",
        activation=("hidden_activation", "silu"), centered_norm=True, bare_norm=True, output_gate=True),
}  # fmt: skip
