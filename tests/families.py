"""A small random model of each family, with all that the family adds."""

from __future__ import annotations

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
    "phi3": ("Phi3", {"sliding_window": 20, "pad_token_id": 0}),
    "granite4": ("GraniteMoeHybrid", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3, "logits_scaling": 0.7,
        "num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4}),
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 20.0, "original_max_position_embeddings": 32,
        "mscale": 1.0}}),
}  # fmt: skip

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS,
    "initializer_range": 0.2,
}  # fmt: skip


def save_random(name: str, config: dict[str, Any], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a random model of transformers' `name`ForCausalLM. dtype: that of its weights."""
    import transformers

    settings = getattr(transformers, f"{name}Config")(**config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(settings).float()
        for parameter in model.parameters():  # transformers begins with biases of 0 and norms of 1
            if parameter.dim() == 1:
                parameter.data += torch.randn_like(parameter) * 0.2
    model.to(dtype).save_pretrained(folder)
