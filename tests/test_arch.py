"""arch.py: known models by name, agreement with transformers, and one clear error for whatever is not supported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastgen.arch import ModelConfig, RopeConfig, parse_config, read_config, sampling_defaults
from fastgen.rope import rope_frequencies

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

# name -> (config.json, generation_config.json or None, what has to come out, the number of parameters)
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
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        {**LLAMA, **LLAMA_8B, "eos_token_id": 128001, "transformers_version": "4.43.0.dev0"},
        {"bos_token_id": 128000, "do_sample": True, "eos_token_id": 128001, "temperature": 0.6, "top_p": 0.95},
        {"eos_ids": (128001,), "rope": RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192), "head_size": 128},
        8_030_261_248,
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
    "Qwen/Qwen2.5-14B": (
        {**QWEN, **QWEN_14B, "transformers_version": "4.43.1"},
        {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
        {"windows": (0,) * 48, "num_heads": 40, "num_kv_heads": 8, "max_position": 131072},
        14_770_033_664,
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
}  # fmt: skip


def count_parameters(c: ModelConfig) -> int:
    q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    attention = c.hidden_size * (q_size + 2 * kv_size) + q_size * c.hidden_size
    attention += c.qkv_bias * (q_size + 2 * kv_size) + c.o_bias * c.hidden_size + c.qk_norm * 2 * c.head_size
    mlp = 3 * c.hidden_size * c.intermediate_size + c.mlp_bias * (2 * c.intermediate_size + c.hidden_size)
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tied else 2)
    return embeddings + c.num_layers * (attention + mlp + 2 * c.hidden_size) + c.hidden_size


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 writes it."""
    config = dict(config)
    rope = {"rope_type": "default", **(config.pop("rope_scaling", None) or {}), "rope_theta": config.pop("rope_theta")}
    return {**config, "rope_parameters": rope, "dtype": config.pop("torch_dtype")}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str, tmp_path: Path) -> None:
    config, generation, expected, parameters = KNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    parsed = read_config(tmp_path)
    assert {field: getattr(parsed, field) for field in expected} == expected
    assert parsed.architecture == config["architectures"][0]
    assert parsed.dtype == "bfloat16"
    assert count_parameters(parsed) == parameters
    assert parse_config(as_transformers_5(config), generation) == parsed


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": [3, 4],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", {"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": YARN}),
    ("MistralForCausalLM", {"sliding_window": 16}),
    ("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    ("MistralForCausalLM", {}),
    ("Qwen2ForCausalLM", {**WINDOW, "max_window_layers": 2}),
    ("Qwen2ForCausalLM", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 16}),
    ("Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 16}),
    ("Qwen3ForCausalLM", {**WINDOW, "max_window_layers": 1, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("architecture", "extra"), FAMILIES)
def test_what_transformers_saves(architecture: str, extra: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**{**SMALL, **extra}))
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert parse_config({**written, "architectures": None}) == config  # model_type stands in

    attention = model.model.layers[0].self_attn
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    assert (config.qkv_bias, config.o_bias) == (attention.q_proj.bias is not None, attention.o_proj.bias is not None)
    assert config.head_size == attention.head_dim
    assert config.eos_ids == (3, 4)
    assert config.norm_eps == model.config.rms_norm_eps
    assert config.tied == model.config.tie_word_embeddings
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if architecture == "MistralForCausalLM":
        windows = [model.config.sliding_window] * 3
    assert config.windows == tuple(window or 0 for window in windows)
    inverse, factor = rope_frequencies(config.rope, config.head_size, config.max_position)
    assert inverse.equal(model.model.rotary_emb.inv_freq)
    assert factor == model.model.rotary_emb.attention_scaling


def test_mistral_with_layer_types_is_what_automodel_makes_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = {**MISTRAL, **SMALL, "layer_types": kinds, "sliding_window": 16, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).windows == (0, 16, 16)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert [layer.self_attn.sliding_window for layer in theirs.model.layers] == [None, 16, 16]


GOOD = {**LLAMA, **LLAMA_8B, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures="),
        ({"architectures": None, "model_type": "gemma3"}, "model_type='gemma3'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config={'quant_method': 'awq'"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"vision_config": {"depth": 32}}, "vision_config="),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling=.*dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters="),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"num_attention_heads": 24}, "hidden_size=4096 is not a multiple of num_attention_heads=24"),
        ({"head_dim": 63}, "head_dim=63"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": "</s>"}, "eos_token_id=.*</s>"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window=0"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types="),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 32}, "layer_types="),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 32}, "switched on"),
    ],
)
def test_unsupported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**GOOD, **change})


def test_forms_that_mean_the_same() -> None:
    plain = parse_config(GOOD)
    for change in ({"pretraining_tp": 2}, {"head_dim": None}, {"head_dim": 128}, {"quantization_config": None},
                   {"torch_dtype": "torch.bfloat16"}, {"partial_rotary_factor": 1.0}):  # fmt: skip
        assert parse_config({**GOOD, **change}) == plain
    assert parse_config({**GOOD, "num_key_value_heads": None}).num_kv_heads == 32
    absent = {field: value for field, value in GOOD.items() if field not in ("bos_token_id", "eos_token_id")}
    assert parse_config(absent).eos_ids == (2,)
    assert parse_config({**GOOD, "eos_token_id": None, "bos_token_id": None}).eos_ids == ()
    assert parse_config(GOOD, {"eos_token_id": 0}).eos_ids == (0,)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="does not hold a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=f"{tmp_path.name}.*hidden_act='relu'"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"config\.json: architectures=\['GemmaForCausalLM'\].*fastgen runs LlamaForC"):
        read_config(tmp_path)
    for change in ({"architectures": 5}, {"architectures": [[]]}, {"rope_scaling": "yarn"}, {"layer_types": 1}):
        (tmp_path / "config.json").write_text(json.dumps({**GOOD, "architectures": ["MistralForCausalLM"], **change}))
        with pytest.raises(ValueError, match=r"config\.json has a field of a wrong type .*; fetch it again"):
            read_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/generation_config\.json is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0}),
        ({"top_p": 0.9}, {}),
        ({"temperature": 0.3, "top_p": None}, {"temperature": 0.3}),
        ({"do_sample": True, "top_k": 20, "top_p": 0.95}, {"top_k": 20, "top_p": 0.95}),
        (
            {"do_sample": True, "temperature": 0.6, "min_p": 0.05, "repetition_penalty": 1.05, "max_length": 99},
            {"temperature": 0.6, "min_p": 0.05, "repetition_penalty": 1.05},
        ),
    ],
)
def test_sampling_defaults(generation: dict[str, Any] | None, expected: dict[str, float], tmp_path: Path) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert sampling_defaults(tmp_path) == expected


def test_arch_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, fastgen.arch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
