"""The text model of a checkpoint with vision: its files, a trainer's names, adapters and the form in fp8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import CONFIG
from conftest import VOCAB, random_ids
from families import VISION, save_random_with_vision
from int4_forms import awq_form
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model.config import read_config

OPTIONS: dict[str, Any] = {"page_size": 16, "max_seqs": 4, "max_step_tokens": 64}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
       "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}  # fmt: skip
PROMPTS = [random_ids(length) for length in (3, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=VISION)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a random model with vision, as transformers writes it, and the model."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_random_with_vision(request.param, folder)


def check_answers(gen: Generator, model: Any) -> None:
    """Compare greedy tokens and their logprobs with those of transformers."""
    for prompt, output in zip(PROMPTS, gen.generate(PROMPTS, GREEDY), strict=True):
        found = output.completions[0]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert found.token_ids == logits.argmax(1).tolist()
        expected = logits.log_softmax(1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.raw_logprobs), expected, atol=1e-4, rtol=0)


def changed(model: Any) -> dict[str, Tensor]:
    """Return other weights of the model by the names of transformers, and put them into it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
    return dict(model.state_dict())


def test_text_is_generated_and_the_weights_are_replaced_by_a_trainers_names(
    made: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = made
    assert any("vis" in name for name in load_file(folder / "model.safetensors"))
    with Generator(folder, **OPTIONS) as gen:
        assert [text for text in caplog.messages if "cannot read images" in text] == caplog.messages[-1:]
        check_answers(gen, model)
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert "model.language_model.layers.0.mlp.up_proj.weight" in old
        gen.update_weights(changed(model))
        check_answers(gen, model)
        model.load_state_dict(old)
        drafting = {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}  # as EXAONE 4.5 has it
        gen.update_weights({**load_file(folder / "model.safetensors"), **drafting})  # the names of the file
        check_answers(gen, model)


@pytest.mark.parametrize("given", [["q_proj", "down_proj"], r".*language_model.*\.(q_proj|down_proj)"])
def test_adapters_have_the_names_of_the_whole_model(given: str | list[str], made: tuple[Path, Any]) -> None:
    folder, model = made
    draw, state = torch.Generator().manual_seed(0), {}
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, weight in plain.items():
        if "language_model" in name and name.endswith(("q_proj.weight", "down_proj.weight")):
            a, b = (torch.randn(shape, generator=draw) * 0.1 for shape in ((4, weight.shape[1]), (len(weight), 4)))
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            state |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
            model.state_dict()[name].add_(1.5 * b @ a)
    try:
        with Generator(folder, **OPTIONS) as gen:
            gen.update_adapter(state, CONFIG | {"target_modules": given})
            check_answers(gen, model)
    finally:
        model.load_state_dict(plain)


def test_the_form_of_mistral_in_fp8(made: tuple[Path, Any], tmp_path: Path) -> None:
    """One scale per tensor, static scales of activations that are not read, and vision that is not quantized."""
    folder, _ = made
    if read_config(folder).recurrent:
        pytest.skip("models with recurrent layers are not quantized")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name, weight in meant.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            layer, scale = name.removesuffix(".weight"), weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{layer}.weight_scale_inv": scale, f"{layer}.activation_scale": torch.tensor(0.5)}
            meant[name] = tensors[name].float() * scale
    save_file(tensors, tmp_path / "model.safetensors")
    with Generator(tmp_path, **OPTIONS) as gen, Generator(folder, **OPTIONS) as other:
        other.update_weights(meant)
        ids = [random_ids(2, seed=seed) for seed in range(40)]
        found, exact = (torch.tensor(each.score(ids))[:, 1:] for each in (gen, other))
        assert (found - exact).abs().mean() < 0.15  # the inputs of the products are rounded to fp8, too
        assert found.std() > 1


def test_int4_of_the_text_beside_vision_with_biases(tmp_path: Path) -> None:
    save_random_with_vision("qwen2_5_vl", tmp_path / "whole")
    meant = awq_form(16, ignored=("visual",)).write(tmp_path / "whole", tmp_path / "int4")
    ids = [random_ids(30)]
    with Generator(tmp_path / "int4", **OPTIONS) as gen, Generator(tmp_path / "whole", **OPTIONS) as other:
        other.update_weights(meant)
        assert gen.score(ids)[0][1:] == pytest.approx(other.score(ids)[0][1:], abs=1e-3)


def test_what_is_wrong_is_named(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = made
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": None}))
    message = r"text_config=None is not supported; the fields of the text model|num_hidden_layers=None is missing"
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
    inner = {**config["text_config"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": inner}))
    with pytest.raises(ValueError, match=r"model_type='mamba'\) is not supported; .*Mistral3ForConditionalGeneration"):
        read_config(tmp_path)
    with Generator(folder, **OPTIONS) as gen:
        assert gen.model_config.vocab_size == VOCAB
        with pytest.raises(ValueError, match=r"unexpected tensor 'audio_tower\.weight'"):
            gen.update_weights({"audio_tower.weight": torch.zeros(1)}, partial=True)
