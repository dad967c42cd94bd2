"""A small random model of each family, with all that the family adds."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

VOCAB = 320
EOS = 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 5000.0}),
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 24,
                        "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_attention_heads": 8}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.5}}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24,
                            "pad_token_id": 0}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3,
                            "logits_scaling": 0.7, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": 20, "attention_bias": True, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                           "original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "exaone4": ("Exaone4", {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 24}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_bias": True}),
    "cwm": ("Cwm", {"head_dim": 24, "sliding_window": 20, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True,
                                   "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0,
                                                       "rope_theta": 10000.0}}),
    "hyperclovax": ("HyperCLOVAX", {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "logits_scaling": 0.7,
                                    "residual_multiplier": 0.3}),
    "phi4_mini": ("Phi3", {"pad_token_id": 0, "tie_word_embeddings": True, "original_max_position_embeddings": 512,
                           "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "attention_factor": 1.2,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 2.0, 3.0], "long_factor": [1.0, 1.2, 2.0, 4.0, 9.0, 16.0]}}),
    "phi3": ("Phi3", {"sliding_window": 20, "pad_token_id": 0}),
    "granite4": ("GraniteMoeHybrid", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 0.7,
        "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4}),
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 20.0, "original_max_position_embeddings": 32,
        "mscale": 1.0}}),
    "gemma3": ("Gemma3", {"head_dim": 32, "sliding_window": 20, "sliding_window_pattern": 2, "attention_bias": True,
                          "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0, "pad_token_id": 0,
                          "tie_word_embeddings": True, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}),
    "muse": ("MuseGlimmer", {"head_dim": 24, "sliding_window": 20, "num_hidden_layers": 5, "attention_bias": True,
                             "qk_scale_factor": 2.0, "output_multiplier": 1.5, "final_logit_softcapping": 6.0,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
}  # fmt: skip
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {
        "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}}),
}  # fmt: skip

"""Families with recurrent layers, with which some options and a Policy do not work."""

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS,
    "initializer_range": 0.2,
}  # fmt: skip

_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 14}  # fmt: skip
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
_MUSE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ministral3": ("Mistral3", FAMILIES["ministral3"][1] | {"model_type": "ministral3"}, _PIXTRAL),
    "mistral": ("Mistral3", FAMILIES["mistral"][1] | {"model_type": "mistral", "tie_word_embeddings": True}, _PIXTRAL),
    "qwen3_vl": ("Qwen3VL", {"head_dim": 16, "rope_parameters": _MROPE, "tie_word_embeddings": True},
                 {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1,
                                  "rope_parameters": {**_MROPE, "rope_type": "mrope"}}, _QWEN),
    "gemma3_vl": ("Gemma3", FAMILIES["gemma3"][1] | {"model_type": "gemma3_text", "final_logit_softcapping": None},
                  _SIGLIP),
    "muse_vl": ("MuseGlimmer", FAMILIES["muse"][1] | {"model_type": "muse_glimmer_text", "output_multiplier": 0.8,
                "final_logit_softcapping": 20.0}, _MUSE),
    "exaone4_5": ("Exaone4_5_", FAMILIES["exaone4"][1] | {"model_type": "exaone4_5_text", "head_dim": 16},
                  {**_QWEN, "num_key_value_heads": 2}),
    "qwen3_5_vl": ("Qwen3_5", HYBRIDS["qwen3_5"][1] | {"rope_parameters": {
        **_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}}, {**_QWEN, "num_position_embeddings": 4}),
}  # fmt: skip
"""Models with vision: (class of transformers, fields of the text, fields of vision)."""


def with_fitting_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose rope_parameters fit its size of heads."""
    pairs = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    rope = dict(config.get("rope_parameters", {}))
    if "mrope_section" in rope:
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = (rope[name] * pairs)[: int(pairs * rope["partial_rotary_factor"])]
    return {**config, "rope_parameters": rope} if rope else config


def save_random(name: str, config: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model of transformers' `name`ForCausalLM, and return it. dtype: that of its weights."""
    import transformers

    if not hasattr(transformers, f"{name}ForCausalLM"):  # the text model inside a model with vision
        (key,) = (key for key, (kind, *_) in VISION.items() if kind == name)
        return save_random_with_vision(key, folder, config, dtype)
    settings = getattr(transformers, f"{name}ForCausalLM").config_class(**config)
    return _save(f"{name}ForCausalLM", settings, folder, dtype)


def save_random_with_vision(
    name: str, folder: Path, text: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """Save a random model of VISION, and return it. text: the config of its text model, if it is not the usual one."""
    import transformers

    kind, usual, vision = deepcopy(VISION[name])  # transformers changes them
    text = {**SIZES, **usual} if text is None else text
    tied = text.get("tie_word_embeddings", False)
    settings = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    return _save(f"{kind}ForConditionalGeneration", settings, folder, dtype)


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a folder, in `dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    with_vision = AutoConfig.from_pretrained(folder).model_type == "muse_glimmer"  # which has no causal model
    models: Any = AutoModelForImageTextToText if with_vision else AutoModelForCausalLM
    return models.from_pretrained(folder, dtype=dtype).eval()


def _save(name: str, settings: Any, folder: Path, dtype: torch.dtype) -> Any:
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)(settings).float().eval()
        for parameter in model.parameters():  # transformers begins with biases of 0 and norms of 1
            if parameter.dim() == 1:
                parameter.data += torch.randn_like(parameter) * 0.2
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):  # with theirs, states forget almost all at each token
                parameter.data.uniform_(-6, 1)
    model.to(dtype).save_pretrained(folder)
    return model
