"""model/transformer.py: logits and tokens equal those of transformers, for each family and each flag."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES, HYBRIDS, SIZES, Checkpoint, hf_logits, random_ids
from families import VISION, save_random, save_random_with_vision, with_fitting_rope
from handmade import make_runner
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model.attention.interface import StepLayout
from fastgen.model.config import read_config
from fastgen.model.linear import ROW_TILE
from fastgen.model.transformer import StepPart

PROMPTS = [random_ids(length) for length in (1, 130, 16, 37)]


def prefill_logits(folder: Path, prompts: list[list[int]], dtype: str = "float32") -> list[Tensor]:
    """Return the logits [T, V] at every position of each prompt, from one forward pass over all of them."""
    runner = make_runner(folder, dtype=dtype)
    size = runner.pool.page_size
    lens = torch.tensor([len(prompt) for prompt in prompts])
    most = -(-int(lens.max()) // size)
    order = torch.randperm(runner.config.num_pages, generator=torch.Generator().manual_seed(0))
    table = order[: len(prompts) * most].view(len(prompts), most)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    owner = torch.repeat_interleave(torch.arange(len(prompts)), lens)
    padding = -len(positions) % ROW_TILE
    slots = table[owner, positions // size] * size + positions % size
    mapping = runner.model.slot_mapping(
        runner.pool,
        torch.nn.functional.pad(positions, (0, padding)),
        torch.nn.functional.pad(slots, (0, padding), value=-1),
        len(positions),
    )
    step = StepPart(
        token_ids=torch.tensor([token for prompt in prompts for token in prompt] + [0] * padding),
        mapping=mapping,
        plan=runner.attention.plan(StepLayout(lens.numpy(), lens.numpy(), 0, np.arange(len(prompts)), table.int())),
    )
    with torch.inference_mode():
        logits = runner.model.logits(runner.model.forward([step], runner.pool, runner.attention))
    return list(torch.split(logits[: len(positions)], lens.tolist()))


def tolerance(folder: Path) -> float:
    """Return the largest difference of logits. With recurrent layers, these small models in float32 are up to 2e-4 from
    float64, in transformers as well."""
    return 5e-4 if read_config(folder).recurrent else 1e-4


def check_logits(folder: Path) -> None:
    for prompt, logits in zip(PROMPTS, prefill_logits(folder, PROMPTS), strict=True):
        torch.testing.assert_close(logits, hf_logits(folder, prompt), atol=tolerance(folder), rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS], indirect=True)
def test_prefill_logits_are_those_of_transformers(family: Path) -> None:
    check_logits(family)


STRETCHED = {"factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope": ("Llama", {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0,
                                                  "high_freq_factor": 4.0, **STRETCHED}}),
    "yarn": ("Qwen3", {"rope_parameters": {"rope_type": "yarn", **STRETCHED}}),
    "dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "attention bias": ("Llama", {"attention_bias": True}),
    "Qwen3 with attention bias": ("Qwen3", {"attention_bias": True, "head_dim": 16}),
    "mlp bias": ("Llama", {"mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "no grouping of heads": ("Mistral", {"num_key_value_heads": 4, "sliding_window": None}),
    "OLMo 2": ("Olmo2", {"num_key_value_heads": 4}),
    "EXAONE 4 without windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "EXAONE 4 whose layers have no window": ("Exaone4", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}),
    "HyperCLOVA X with norms of inputs only": ("HyperCLOVAX", {"use_post_norm": False, "logits_scaling": 0.5}),
    "one KV head": ("Qwen2", {"num_key_value_heads": 1}),
    "Gemma 3 with heads of 256": ("Gemma3", {"head_dim": 256, "sliding_window": 16, "pad_token_id": 0}),
}  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_mean_what_transformers_means(flag: str, checkpoint: Checkpoint) -> None:
    name, config = FLAGS[flag]
    check_logits(checkpoint(name, num_hidden_layers=2, **config))


# Families that transformers computes as Llama, or not at all: (fields of a Llama, fields that are put into its file).
# TeleChat3's own code grows cos and sin by 0.07 log(factor) instead of 0.1 log(factor).
_TELECHAT3 = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "iquest": ({}, {"architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder"}),
    "telechat3": (
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": {
            **_TELECHAT3, "rope_type": "yarn", "attention_factor": 1 + 0.07 * math.log(4)}},
        {"architectures": ["Telechat3ForCausalLM"], "model_type": "telechat3",
         "rope_parameters": {**_TELECHAT3, "rope_type": "telechat3-yarn"}}),
}  # fmt: skip

# Families of which tests of the engine run few, or none.
IN_SHAPES = ("cwm", "hunyuan", "hyperclovax", "phi4_mini", "gemma3", *VISION, *LLAMAS)
SHAPES: dict[str, dict[str, Any]] = {
    "a KV head per head": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "one layer": {"num_hidden_layers": 1},
    "five layers": {"num_hidden_layers": 5},
    "eight heads": {"num_attention_heads": 8, "hidden_size": 128, "head_dim": 16},
    "heads of 24": {"hidden_size": 96, "head_dim": 24},
    "odd sizes": {"intermediate_size": 56, "vocab_size": 331, "rms_norm_eps": 1e-3},
    "another head": {"tie_word_embeddings": None},  # the other value
}


def in_shape(config: dict[str, Any], shape: str) -> dict[str, Any]:
    """Return a config in one of SHAPES."""
    config = {**SIZES, "tie_word_embeddings": False, **config}
    changed = {**config, **SHAPES[shape]}
    if changed["tie_word_embeddings"] is None:
        changed["tie_word_embeddings"] = not config["tie_word_embeddings"]
    if "linear_attention" in changed.get("layer_types", ()):
        changed["layer_types"] = ["linear_attention"] * (changed["num_hidden_layers"] - 1) + ["full_attention"]
    return with_fitting_rope(changed)


def put_into_file(folder: Path, fields: dict[str, Any]) -> None:
    """Change fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check_shape(name: str, shape: str, folder: Path) -> None:
    if name in VISION:
        model = save_random_with_vision(name, folder, in_shape(VISION[name][1], shape))
    elif name in LLAMAS:
        fields, own = LLAMAS[name]
        model = save_random("Llama", in_shape(fields, shape), folder)
        put_into_file(folder, own)
    else:
        model = save_random(FAMILIES[name][0], in_shape(FAMILIES[name][1], shape), folder)
    for prompt, logits in zip(PROMPTS, prefill_logits(folder, PROMPTS), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, atol=tolerance(folder), rtol=0)


@pytest.mark.parametrize("name", IN_SHAPES)
def test_a_shape_of_a_family(name: str, tmp_path: Path) -> None:
    check_shape(name, [*SHAPES][IN_SHAPES.index(name) % len(SHAPES)], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IN_SHAPES)
def test_all_shapes_of_a_family(name: str, shape: str, tmp_path: Path) -> None:
    check_shape(name, shape, tmp_path)


# Of these, save_pretrained writes other files: (class, fields that are taken out of the file, fields that are put in).
FILES: dict[str, tuple[str, set[str], dict[str, Any]]] = {
    "a pattern of one layer": ("Exaone4", {"layer_types"}, {"sliding_window": 16, "sliding_window_pattern": 1}),
    "no field of windows": ("Exaone4", {"layer_types", "sliding_window", "sliding_window_pattern"}, {}),
    "OLMo 3 with another theta": ("Olmo3", {"rope_parameters"}, {"rope_theta": 2000, "sliding_window": 24}),
    "OLMo 3 of transformers 4": ("Olmo3", {"rope_parameters", "layer_types"}, {
        "rope_theta": 2000, "rope_scaling": {"rope_type": "yarn", **STRETCHED}, "sliding_window_pattern": 1}),
    "Ministral 3 without rope": ("Ministral3", {"rope_parameters"}, {"max_position_embeddings": 65536}),
    "Ministral 3 with null": ("Ministral3", set(), {"rope_parameters": None, "rope_theta": 500.0}),
    "fields of Qwen": ("Mistral", set(), {"sliding_window": 24, "max_window_layers": 1}),
    "a window in all layers": ("Phi3", set(), {"sliding_window": 24, "layer_types": ["full_attention"] * 3}),
    "CWM without layer_types and rope": ("Cwm", {"layer_types", "rope_parameters"}, {
        "sliding_window": 24, "max_position_embeddings": 16384}),
    "IQuest-Coder": ("Llama", {"rms_norm_eps"}, {"architectures": ["IQuestCoderForCausalLM"],
                                                 "model_type": "iquestcoder"}),
    "yarn with null": ("Qwen3", set(), {"rope_parameters": {"rope_type": "yarn", "truncate": None, **STRETCHED}}),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_fields_of_a_file_mean_what_transformers_means(case: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    name, absent, present = FILES[case]
    folder = checkpoint(name, head_dim=16, pad_token_id=0)
    config = json.loads((folder / "config.json").read_text())
    config = {field: value for field, value in config.items() if field not in absent}
    (tmp_path / "config.json").write_text(json.dumps({**config, **present}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    check_logits(tmp_path)


def test_longrope_is_stretched_in_a_context_above_the_original(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers decides by the length of a sequence; fastgen, which keeps keys of many, by its context."""
    name, config = FAMILIES["phi4_mini"]
    folder = checkpoint(name, **config | {"original_max_position_embeddings": 64})
    for context, lengths, warnings in ((64, (5, 60), 0), (512, (65, 130), 1)):
        prompts = [random_ids(length) for length in lengths]
        caplog.clear()
        with Generator(folder, max_model_len=context) as gen:
            assert sum("rope is stretched" in text for text in caplog.messages) == warnings
            for prompt, found in zip(prompts, gen.score(prompts), strict=True):
                exact = hf_logits(folder, prompt).log_softmax(1)[:-1].gather(1, torch.tensor(prompt)[1:, None])
                assert found[1:] == pytest.approx(exact.flatten().tolist(), abs=1e-4)


def test_telechat3_as_vllm_spells_it(tmp_path: Path) -> None:
    fields, own = LLAMAS["telechat3"]
    save_random("Llama", {**SIZES, **fields}, tmp_path)
    put_into_file(tmp_path, own)
    expected = prefill_logits(tmp_path, PROMPTS)
    put_into_file(tmp_path, {"architectures": ["TeleChat3ForCausalLM"]})
    for found, logits in zip(prefill_logits(tmp_path, PROMPTS), expected, strict=True):
        assert torch.equal(found, logits)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_head_in_the_files_of_a_tied_model(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Another head is used. An equal one, and one without an embedding, is the embedding too."""
    folder = checkpoint(name, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights.pop("model.embed_tokens.weight")
    pair = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.flip(1)}
    for case, more in {"another": pair, "one": {"lm_head.weight": embedding}}.items():
        shutil.copytree(folder, tmp_path / case)
        save_file({**weights, **more}, tmp_path / case / "model.safetensors", metadata={"format": "pt"})
        for prompt in PROMPTS[1:]:
            exact = hf_logits(tmp_path / case, prompt).log_softmax(1)[:-1].gather(1, torch.tensor(prompt)[1:, None])
            with Generator(tmp_path / case) as gen:
                assert gen.score([prompt])[0][1:] == pytest.approx(exact.flatten().tolist(), abs=1e-4)


def test_64_greedy_tokens_are_those_of_transformers(family: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with Generator(family, page_size=16, max_seqs=3, max_step_tokens=48) as gen:
        answers = [output.completions[0].token_ids for output in gen.generate(PROMPTS, params)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        likeliest = hf_logits(family, prompt + answer).argmax(1).tolist()
        assert answer == likeliest[len(prompt) - 1 : -1]


def test_bfloat16_is_as_exact_as_transformers(family: Path) -> None:
    ours, theirs = [], []
    for prompt, logits in zip(PROMPTS, prefill_logits(family, PROMPTS, "bfloat16"), strict=True):
        exact = hf_logits(family, prompt)
        ours.append((logits - exact).square().mean().item())
        theirs.append((hf_logits(family, prompt, torch.bfloat16) - exact).square().mean().item())
    assert 0 < np.mean(ours) < 1.5 * np.mean(theirs)
