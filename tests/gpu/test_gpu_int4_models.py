"""Models in int4 on a GPU: answers have the bits of the dequantized checkpoint, under any schedule and after updates
and sleep, and weights take their memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, random_options, random_requests
from int4_forms import Form, awq_form, compressed_form, gptq_form
from safetensors.torch import load_file, save_file

from fastgen import Generator, SamplingParams
from fastgen.kernels.launch import kernels_of
from fastgen.model.int4_linear import Int4Linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels_of(torch.device("cuda", 0)) == "torch",
    reason="there is no GPU with Triton",
)
SIZES = {"architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
         "torch_dtype": "bfloat16"}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cuda", "seed": 0, "num_pages": 200}
FORMS = {
    "awq": awq_form(128),
    "gptq": gptq_form(32, symmetric=True),
    "packed": compressed_form(128, symmetric=True),
    "packed asymmetric": compressed_form(64, symmetric=False),
    "packed channel": compressed_form(-1, symmetric=True),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, in bfloat16."""
    return write_source(tmp_path_factory.mktemp("source"))


def write_source(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of random weights. changes: fields of config.json."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **changes}))
    with Generator(folder, load="dummy", **OPTIONS) as gen:
        shards = gen._runner.model.parameters.targets()
        save_file({name: shard.view.cpu().contiguous() for name, shard in shards.items()}, folder / "model.safetensors")
    return folder


def plain_of(source: Path, form: Form, folder: Path) -> tuple[Path, Path]:
    """Write the form of a checkpoint, and a checkpoint of the weights that it represents."""
    meant = form.write(source, folder / "int4")
    (folder / "plain").mkdir()
    shutil.copy(source / "config.json", folder / "plain")
    save_file(meant, folder / "plain" / "model.safetensors")
    return folder / "int4", folder / "plain"


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in FORMS), ("awq", "float16"), ("packed asymmetric", "float16")]
)
def test_answers_have_the_bits_of_the_dequantized_checkpoint(
    name: str, dtype: str, source: Path, tmp_path: Path
) -> None:
    check_bits(*plain_of(source, FORMS[name], tmp_path), dtype)


def test_a_model_without_a_gate(tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    source.mkdir()
    written.mkdir()
    write_source(source, architectures=["ArceeForCausalLM"], hidden_act="relu2")
    check_bits(*plain_of(source, FORMS["packed"], written), "bfloat16")


def check_bits(folder: Path, plain: Path, dtype: str) -> None:
    """Compare the answers of a checkpoint in int4 with those of the weights that it represents."""
    requests = random_requests(4096, 24, 300, 40)
    with Generator(plain, dtype=dtype, deterministic=True, **OPTIONS) as gen:
        expected = alone(gen, requests)
    with Generator(folder, dtype=dtype, deterministic=True, **OPTIONS) as gen:
        assert isinstance(gen._runner.model.layers[0].qkv, Int4Linear)
        assert "weights in int4" in gen.config.summary
        assert answers(gen, requests) == expected
        gen.sleep()
        gen.wake()
        assert answers(gen, requests) == expected


@pytest.mark.parametrize("name", ["awq", "packed"])
def test_the_schedule_never_shows(name: str, source: Path, tmp_path: Path) -> None:
    folder, _ = plain_of(source, FORMS[name], tmp_path)
    requests = random_requests(4096, 24, 300, 40)
    with Generator(folder, deterministic=True, **OPTIONS) as gen:
        expected = alone(gen, requests)
    for seed in range(2):
        with Generator(folder, **{**OPTIONS, **random_options(seed, 400)}, deterministic=True) as gen:
            assert answers(gen, requests) == expected


@pytest.mark.parametrize("name", ["awq", "packed"])
def test_updates_are_rounded_under_graphs(name: str, source: Path, tmp_path: Path) -> None:
    """Weights that int4 represents already are rounded to themselves."""
    folder, _ = plain_of(source, FORMS[name], tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    weights = load_file(source / "model.safetensors")
    with Generator(folder, **OPTIONS) as gen:
        expected = gen.generate([[5] * 40], params)[0].completions[0]
        gen.update_weights({key: tensor * 1.5 for key, tensor in weights.items()}, requantize=True)
        assert gen.generate([[5] * 40], params)[0].completions[0].raw_logprobs != expected.raw_logprobs
        gen.update_weights(weights, requantize=True)
        assert gen.generate([[5] * 40], params)[0].completions[0].raw_logprobs == expected.raw_logprobs


def test_a_kv_cache_in_fp8(source: Path, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no E4M3")
    folder, plain = plain_of(source, FORMS["packed"], tmp_path)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    found = []
    for each in (folder, plain):
        with Generator(each, kv_cache_dtype="fp8", deterministic=True, **OPTIONS) as gen:
            found.append(gen.generate([[5] * 40], params)[0].completions[0].raw_logprobs)
    assert found[0] == found[1]


def test_weights_take_their_memory(source: Path, tmp_path: Path) -> None:
    folder, _ = plain_of(source, FORMS["packed"], tmp_path)
    with Generator(folder, **OPTIONS) as gen:
        parameters = gen._runner.model.parameters
        linears = [linear for layer in parameters.layers for linear in layer.linears]
        held = sum(
            each.nbytes
            for linear in linears
            if isinstance(linear, Int4Linear)
            for each in (linear.weight, linear.scales, linear.zeros)
            if each is not None
        )
        weights = sum(8 * linear.weight.numel() for linear in linears)
        assert held == weights * (4 + 16 / 128) / 8
