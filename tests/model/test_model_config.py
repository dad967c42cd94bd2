"""model/config.py and generation_config.py: known models, agreement with transformers, errors for unknown models."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Checkpoint, random_ids
from hypothesis import strategies as some
from known_models import KNOWN, LLAMA, LLAMA3_ROPE, LLAMA_8B, MISTRAL
from properties import EXAMPLES, holds_for

from fastgen import Generator
from fastgen.model.config import ModelConfig, parse_config, read_config
from fastgen.model.generation_config import sampling_defaults
from fastgen.model.rope import rope_tables
from fastgen.model.sampler import MAX_VOCAB


def count_parameters(c: ModelConfig) -> int:
    q_size, kv_size = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    attention = c.hidden_size * ((1 + (c.recurrent is not None)) * q_size + 2 * kv_size) + q_size * c.hidden_size
    attention += c.qkv_bias * (q_size + 2 * kv_size) + c.o_bias * c.hidden_size
    attention += (c.qk_norm and not c.bare_norm) * 2 * c.head_size + c.output_gate * c.hidden_size * q_size
    attention += c.wide_norm * (q_size + kv_size)
    inner = (1 + c.gated) * c.intermediate_size  # outputs of gate and up
    mlp = c.hidden_size * (inner + c.intermediate_size) + c.mlp_bias * (inner + c.hidden_size)
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tied else 2)
    total = embeddings + c.num_layers * (attention + mlp + (4 if c.peri_norm else 2) * c.hidden_size) + c.hidden_size
    if (r := c.recurrent) is not None:  # products, taps of the convolution, A_log, dt_bias and norm
        products = c.hidden_size * (r.outputs + r.value_size)
        total += len(r.layers) * (products + 4 * r.channels + 2 * r.value_heads + 128 - attention)
    return total


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of transformers 4 in the form of transformers 5."""
    config = dict(config)
    if "text_config" in config:
        dtype = config.pop("torch_dtype", None) or config.get("dtype") or config["text_config"]["dtype"]
        inner = {"torch_dtype": dtype, **config["text_config"]}
        return {**config, "text_config": as_transformers_5(inner) if "rope_theta" in inner else inner, "dtype": dtype}
    plain = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    scaling = config.pop("rope_scaling", None) or {}
    rope = {**plain, "rope_type": scaling.get("type", "default"), **scaling}
    if config["model_type"] in ("olmo3", "gemma3_text"):
        theta = config.pop("rope_local_base_freq", plain["rope_theta"])
        rope = {"full_attention": rope, "sliding_attention": {**plain, "rope_theta": theta}}
    return {**config, "rope_parameters": rope, "dtype": config.pop("torch_dtype")}


@pytest.mark.parametrize("name", KNOWN)
def test_known_models(name: str, tmp_path: Path) -> None:
    config, generation, expected, parameters = KNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    parsed = read_config(tmp_path)
    assert {field: getattr(parsed, field) for field in expected} == expected
    assert parsed.dtype == "bfloat16"
    assert count_parameters(parsed) == parameters
    assert parsed.vocab_size <= MAX_VOCAB, "the sampler takes it"
    assert parse_config(as_transformers_5(config), generation) == parsed


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": [3, 4], "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", {"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": YARN}),
    ("MistralForCausalLM", {"sliding_window": 16}),
    ("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    ("MistralForCausalLM", {}),
    ("Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
    (
        "GraniteMoeHybridForCausalLM",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 4,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
        },
    ),
    ("SmolLM3ForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("SmolLM3ForCausalLM", {**WINDOW, "no_rope_layers": [0, 1, 0], "tie_word_embeddings": False}),
    ("SeedOssForCausalLM", {"head_dim": 16, "mlp_bias": True}),
    ("SeedOssForCausalLM", {"head_dim": None, "attention_bias": False, "attention_out_bias": True}),
    ("Olmo2ForCausalLM", {"attention_bias": True}),
    ("Olmo3ForCausalLM", {"sliding_window": 16, "num_hidden_layers": 5}),
    ("Exaone4ForCausalLM", {"sliding_window": 16, "sliding_window_pattern": 3, "tie_word_embeddings": True}),
    ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ("CwmForCausalLM", {"sliding_window": 16, "num_hidden_layers": 6, "mlp_bias": True}),
    ("CwmForCausalLM", {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}),
    ("HunYuanDenseV1ForCausalLM", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    (
        "HunYuanDenseV1ForCausalLM",
        {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    ("HyperCLOVAXForCausalLM", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 0.125}),
    ("HyperCLOVAXForCausalLM", {"use_post_norm": False, "attention_multiplier": 0.1, "tie_word_embeddings": True}),
    (
        "Phi3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 2.0],
                "long_factor": [1, 4],
            },
        },
    ),
    ("Phi3ForCausalLM", {}),
    ("Phi3ForCausalLM", {"sliding_window": 16}),
    ("GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 8, "attention_multiplier": 1}),
    ("ArceeForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("ArceeForCausalLM", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    ("Gemma3ForCausalLM", {"sliding_window": 16, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0}),
    (
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "attention_bias": True,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
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
    assert parse_config({**written, "architectures": None}) == config  # model_type names the family, too
    if config.gelu:
        assert written.pop("hidden_activation") == "gelu_pytorch_tanh"
        assert config.embedding_scale == model.model.embed_tokens.scalar_embed_scale
    else:
        assert written.pop("hidden_act") == ("silu" if config.gated else "relu2")
    assert parse_config(written) == config

    attention = model.model.layers[0].self_attn
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    projection = attention.qkv_proj if config.qkv_tensor else attention.q_proj
    assert (config.qkv_bias, config.o_bias) == (projection.bias is not None, attention.o_proj.bias is not None)
    assert config.head_size == attention.head_dim
    assert config.eos_ids == (3, 4)
    assert config.norm_eps == model.config.rms_norm_eps
    assert config.tied == model.config.tie_word_embeddings
    layers = [layer.self_attn for layer in model.model.layers]
    windows = [getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", True) else 0 for layer in layers]
    if architecture in ("MistralForCausalLM", "Phi3ForCausalLM"):
        windows = [model.config.sliding_window] * 3
    assert config.windows == tuple(window or 0 for window in windows)


@pytest.mark.parametrize("fields", [{}, {"layer_rope_theta": [0.0, 1e4, 1e4, 0, 1e4]}, {"num_hidden_layers": 4}])
def test_layers_of_muse_glimmer(fields: dict[str, Any], tmp_path: Path) -> None:
    """Without "layer_rope_theta", layers without rope are counted from the last one, as those without windows are."""
    transformers = pytest.importorskip("transformers")
    text = {**SMALL, "model_type": "muse_glimmer_text", "num_hidden_layers": 5, "sliding_window": 16, **fields}
    settings = transformers.MuseGlimmerConfig(text_config=text)
    settings.architectures = ["MuseGlimmerForConditionalGeneration"]
    settings.save_pretrained(tmp_path)
    config, theirs = read_config(tmp_path), settings.text_config
    assert config.windows == tuple(16 if kind == "sliding_attention" else 0 for kind in theirs.layer_types)
    assert config.other_layers == tuple(n for n, theta in enumerate(theirs.layer_rope_theta) if not theta)
    assert parse_config({**settings.to_dict(), "text_config": text}) == config


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
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures="),
        ({"architectures": None, "model_type": "gemma2"}, "model_type='gemma2'"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (
            {
                "architectures": ["MuseGlimmerForConditionalGeneration"],
                "text_config": {"model_type": "muse_glimmer_text", "layer_rope_theta": [0, 1e4]},
            },
            r"layer_rope_theta=\[0, 10000.0\].*32 in all",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 0}, "final_logit_softcapping=0"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional_attention=True"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantization_config.quant_method='hqq'"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "0.7"}}, "mscale='0.7'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor=None is not supported; 64 numbers"),
        ({"architectures": ["InternLM3ForCausalLM"], "qkv_bias": True}, "qkv_bias=True"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters="),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"num_attention_heads": 24}, "hidden_size=4096 is not a multiple of num_attention_heads=24"),
        ({"head_dim": 63}, "head_dim=63"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_hidden_layers": 2**24}, "num_hidden_layers=16777216 is .* not an integer from 1 to 4096"),
        ({"hidden_size": 2**24 + 1}, "hidden_size=16777217 is .* not an integer from 1 to 16777216"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan is .* not a number from 0 to 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": -1}}, "beta_slow=-1"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": "</s>"}, "eos_token_id=.*</s>"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window=0"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types="),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.01}, "0.01 of head_dim=128 is 1 dim"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "partial_rotary_factor": 0.75,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 64},
            },
            "long_factor=.* is not supported; 48 numbers, one for each rotated pair, are",
        ),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG'"),
        ({"architectures": ["GraniteMoeHybridForCausalLM"], "position_embedding_type": "nope"}, "='nope'.* only rope"),
        (
            {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "position_embedding_type": "rope",
                "layer_types": ["mamba", "attention"],
            },
            "layer_types=.*'mamba'.* only attention or full_attention is",
        ),
        (
            {
                "architectures": ["GraniteMoeHybridForCausalLM"],
                "position_embedding_type": "rope",
                "layer_types": ["attention"],
            },
            "num_local_experts=8",
        ),
        ({"architectures": ["IQuestCoderForCausalLM"], "clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"], "use_cla": True}, "use_cla=True"),
        ({"architectures": ["IQuestCoderForCausalLM"], "use_sliding_window": True}, "use_sliding_window=True"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling=0"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1]}, "no_rope_layers=.*32 in all"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 32}, "layer_types="),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 32}, "switched on"),
    ],
)
def test_unsupported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**GOOD, **change})


GELU = "gelu_pytorch_tanh"


@pytest.mark.parametrize("architecture", [*dict(FAMILIES), "InternLM3ForCausalLM", "MiMoForCausalLM"])
def test_another_activation_is_named(architecture: str) -> None:
    config = {**GOOD, "architectures": [architecture]}
    if architecture == "GraniteMoeHybridForCausalLM":
        dense = {"num_local_experts": 0, "shared_intermediate_size": 48, "position_embedding_type": "rope"}
        config |= {**dense, "layer_types": ["full_attention"] * 32}
    field, own = {"ArceeForCausalLM": ("hidden_act", "relu2"), "Gemma3ForCausalLM": ("hidden_activation", GELU)}.get(
        architecture, ("hidden_act", "silu")
    )
    parsed = parse_config({**config, field: own})
    assert (parsed.gated, parsed.gelu) == (own != "relu2", own == GELU)
    for value in {"silu", "relu2", "gelu", None} - {own}:
        with pytest.raises(ValueError, match=f"{field}={value!r} is not supported; only {own} is"):
            parse_config({**config, field: value})
    inner = {"model_type": "ministral3", **GOOD, "hidden_act": "gelu"}
    with pytest.raises(ValueError, match="hidden_act='gelu' is not supported; only silu is"):
        parse_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner})


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
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "architectures": ["GemmaForCausalLM"]}))
    with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json: architectures=\['Gemma.*fastgen runs LlamaForC"):
        read_config(tmp_path)
    for change in ({"architectures": 5}, {"architectures": [[]]}, {"rope_scaling": "yarn"}, {"layer_types": 1}):
        (tmp_path / "config.json").write_text(json.dumps({**GOOD, "architectures": ["MistralForCausalLM"], **change}))
        with pytest.raises(ValueError, match=r"config\.json has a field of a wrong type .*; fetch it again"):
            read_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/generation_config\.json is not JSON"):
        read_config(tmp_path)


NUMBERS = some.sampled_from([0, 1, -1, 2, 0.5, 4.0, 1e-320, 1e30, 2**25, 1e308, math.nan, math.inf]) | some.floats()
VALUES = NUMBERS | some.sampled_from([None, True, "", "yarn", [], {}, ["full_attention"], [[]], "LlamaForCausalLM"])
ROPES = some.fixed_dictionaries(
    {"rope_type": some.sampled_from(["default", "linear", "llama3", "yarn"])},
    optional=dict.fromkeys(
        ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "rope_theta",
         "original_max_position_embeddings", "mscale", "mscale_all_dim", "llama_4_scaling_beta"], NUMBERS),
)  # fmt: skip
FIELDS = sorted({"layer_types", "head_dim", *(field for config, *_ in KNOWN.values() for field in config)})
CHANGES = some.dictionaries(some.sampled_from(FIELDS), VALUES, max_size=3)


@EXAMPLES
def test_any_config_is_read_or_a_value_error(examples: int, tmp_path: Path) -> None:
    configs = some.sampled_from([config for config, *_ in KNOWN.values()])

    @holds_for(examples, configs, CHANGES, some.none() | ROPES, some.none() | VALUES)
    def holds(config: dict[str, Any], change: dict[str, Any], rope: dict[str, Any] | None, eos: Any) -> None:
        changed = {**config, **change, **({} if rope is None else {"rope_scaling": rope})}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": eos}))
        try:
            found, _ = read_config(tmp_path), sampling_defaults(tmp_path)
        except ValueError:
            return
        assert all(table.isfinite().all() for table in rope_tables(found, 16))
        assert len(found.windows) == found.num_layers
        assert 0 <= found.norm_eps <= 1

    (tmp_path / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="is not JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0}),
        ({"do_sample": False, "top_k": 5, "repetition_penalty": 1.3}, {"temperature": 0, "repetition_penalty": 1.3}),
        ({"top_p": 0.9}, {}),
        ({"top_p": 0.9, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
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


def test_fields_that_are_not_used_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"max_length": 20, "num_beams": 1, "no_repeat_ngram_size": 0, "bad_words_ids": []}))
    assert (sampling_defaults(tmp_path), caplog.messages) == ({}, [])
    file.write_text(json.dumps({"max_new_tokens": 9, "stop_strings": ["x"], "no_repeat_ngram_size": 3}))
    sampling_defaults(tmp_path)
    assert caplog.messages == [
        f"{file} has fields that are not used: max_new_tokens (use max_tokens), stop_strings (use stop), "
        "no_repeat_ngram_size"
    ]


def test_greedy_with_a_penalty_is_what_transformers_generates(checkpoint: Checkpoint, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, ids = tmp_path / "model", random_ids(20)
    shutil.copytree(checkpoint("Llama"), folder)
    written = {"do_sample": False, "repetition_penalty": 1.5, "temperature": 0.7, "max_new_tokens": 24}
    (folder / "generation_config.json").write_text(json.dumps(written))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = model.generate(torch.tensor([ids]), eos_token_id=None)[0, len(ids) :].tolist()
    with Generator(folder) as gen:
        (output,) = gen.generate([ids], {"max_tokens": 24, "ignore_eos": True})
    assert output.completions[0].token_ids == expected


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"temperature": -1}, {"top_k": 0.5}, {"top_p": 0}])
def test_wrong_sampling_defaults_are_those_of_the_file(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **wrong}))
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"generation_config.json: {name}.*; correct it, or ignore the file with gen"):
        sampling_defaults(tmp_path)
