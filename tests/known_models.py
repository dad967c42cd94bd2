"""The config.json of known models, and the expected ModelConfig."""

from typing import Any

from fastgen.model.config import RopeConfig
from fastgen.model.quantization import Quantization

LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "sliding_window": 131072,
    "transformers_version": "4.40.1", "use_mrope": False,
}  # fmt: skip
QWEN_14B = {
    "hidden_size": 5120, "intermediate_size": 13824, "max_window_layers": 48, "num_attention_heads": 40,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": 131072,
}  # fmt: skip

MINISTRAL3_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn",
    "type": "yarn",
}  # fmt: skip
MINISTRAL3 = {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
    "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_parameters": MINISTRAL3_ROPE, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 131072,
}  # fmt: skip
MISTRAL_SMALL = {
    "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
    "sliding_window": None, "use_cache": True, "vocab_size": 131072,
}  # fmt: skip
PIXTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24, "patch_size": 14},
    "vision_feature_layer": -1,
}  # fmt: skip
MISTRAL_FP8 = {
    "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}  # fmt: skip

# Name -> (config.json, generation_config.json or None, expected fields, number of parameters).
KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], int]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        {**LLAMA, **LLAMA_8B, "eos_token_id": [128001, 128008, 128009], "transformers_version": "4.42.3"},
        {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009], "temperature": 0.6},
        {"head_size": 128, "num_kv_heads": 8, "eos_ids": (128001, 128008, 128009), "norm_eps": 1e-5,
         "rope": RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192), "windows": (0,) * 32, "max_position": 131072},
        8_030_261_248,
    ),
    "meta-llama/Llama-3.2-1B": (
        {**LLAMA, "eos_token_id": 128001, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
         "num_attention_heads": 32, "num_hidden_layers": 16, "tie_word_embeddings": True,
         "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0}, "transformers_version": "4.45.0.dev0"},
        {"_from_model_config": True, "bos_token_id": 128000, "eos_token_id": 128001},
        {"head_size": 64, "tied": True, "rope": RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)},
        1_235_814_400,
    ),
    "mistralai/Mistral-7B-v0.1": (
        MISTRAL,
        {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
        {"head_size": 128, "windows": (4096,) * 32, "max_position": 32768, "rope": RopeConfig(theta=10000.0),
         "vocab_size": 32000, "eos_ids": (2,), "qkv_bias": False, "o_bias": False},
        7_241_732_096,
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        None,
        {"windows": (0,) * 32, "rope": RopeConfig(theta=1000000.0), "eos_ids": (2,)},
        7_248_023_552,
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        {**MISTRAL, "attention_dropout": 0.0, "head_dim": 128, "intermediate_size": 12288, "num_hidden_layers": 36,
         "rope_theta": 100000000.0, "sliding_window": 32768, "transformers_version": "4.46.0.dev0",
         "vocab_size": 131072},
        None,
        {"windows": (32768,) * 36, "max_position": 32768, "rope": RopeConfig(theta=1e8), "head_size": 128},
        8_019_808_256,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": (
        {**LLAMA, "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_size": 8192,
         "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
         "transformers_version": "4.47.0.dev0"},
        {"bos_token_id": 128000, "do_sample": True, "eos_token_id": 128001, "temperature": 0.6, "top_p": 0.95},
        {"eos_ids": (128001,), "num_heads": 64, "num_kv_heads": 8, "num_layers": 80, "head_size": 128},
        70_553_706_496,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": (
        {**QWEN, **QWEN_14B, "transformers_version": "4.43.1"},
        {"bos_token_id": 151646, "do_sample": True, "eos_token_id": 151643, "temperature": 0.6, "top_p": 0.95},
        {"windows": (0,) * 48, "norm_eps": 1e-5, "eos_ids": (151643,), "qkv_bias": True, "o_bias": False},
        14_770_033_664,
    ),
    "Qwen/Qwen2.5-7B": (
        {**QWEN, **QWEN_7B},
        {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
        {"windows": (0,) * 28, "num_heads": 28, "num_kv_heads": 4, "head_size": 128, "norm_eps": 1e-6,
         "rope": RopeConfig(theta=1000000.0), "qkv_bias": True, "o_bias": False, "qk_norm": False},
        7_615_616_512,
    ),
    "Qwen/Qwen3-8B": (
        {**QWEN, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "eos_token_id": 151645,
         "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
         "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
         "sliding_window": None, "transformers_version": "4.51.0", "vocab_size": 151936},
        {"bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20,
         "top_p": 0.95},
        {"windows": (0,) * 36, "qk_norm": True, "qkv_bias": False, "eos_ids": (151645, 151643), "max_position": 40960},
        8_190_735_360,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": (  # the text; with vision, which is not loaded, they are 0.4 more
        {**PIXTRAL, "text_config": MINISTRAL3, "dtype": "bfloat16", "quantization_config": MISTRAL_FP8},
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11, "max_length": 262144},
        {"num_layers": 34, "head_size": 128, "max_position": 262144, "eos_ids": (2,), "tied": False,
         "rope": RopeConfig("yarn", 1e6, 16.0, original_max_position=16384, mscale=1.0, mscale_all_dim=1.0,
                            query_growth=0.1),
         "quantization": Quantization("tensor", ("model.vision_tower", "model.multi_modal_projector", "lm_head"))},
        8_489_553_920,
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (  # the text
        {**PIXTRAL, "text_config": MISTRAL_SMALL, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"},
        {"bos_token_id": 1, "eos_token_id": 2},
        {"num_heads": 32, "head_size": 128, "hidden_size": 5120, "rope": RopeConfig(theta=1e9), "tied": False,
         "windows": (0,) * 40, "quantization": None},
        23_572_403_200,
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
         "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
         "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
         "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
         "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
         "use_cache": False, "use_sliding_window": False, "vocab_size": 128256},
        {"do_sample": True, "eos_token_id": 128012, "temperature": 0.6, "top_p": 0.95},
        {"head_size": 128, "tied": True, "rope": RopeConfig(theta=5e6), "other_rope": RopeConfig("none"),
         "other_layers": (3, 7, 11, 15, 19, 23, 27, 31, 35), "windows": (0,) * 36},
        3_075_098_624,
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        {"architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
         "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
         "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
         "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
         "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
         "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49159},
        {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        {"tied": True, "embedding_scale": 12.0, "attention_scale": 1 / 128, "branch_scale": 0.22,
         "logits_divisor": 16.0, "rope": RopeConfig(theta=1e7), "eos_ids": (0,), "head_size": 128},
        8_170_864_640,
    ),
    "microsoft/phi-4": (
        {"architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120,
         "initializer_range": 0.02, "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3",
         "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
         "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0,
         "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "sliding_window": None,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352},
        {"bos_token_id": 100257, "eos_token_id": [100257, 100265], "pad_token_id": 100349},
        {"fused_tensors": True, "head_size": 128, "num_kv_heads": 10, "windows": (0,) * 40,
         "eos_ids": (100257, 100265), "max_position": 16384},
        14_659_507_200,
    ),
}  # fmt: skip
