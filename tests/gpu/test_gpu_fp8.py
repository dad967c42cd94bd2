"""fp8 on a GPU: products are near their twin, with the same bits for any number of tokens; whole answers have the same
bits under any schedule; and weights are updated under graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, random_options, random_requests
from test_gpu_deterministic import SHAPES, TOKENS
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.device.chip import Chip
from fastgen.kernels import fp8
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.launch import kernels_of
from fastgen.kernels.triton import fp8 as fp8_kernels
from fastgen.kernels.triton.compile_ahead import compile_ahead

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels_of(torch.device("cuda", 0)) != "gluon", reason="there is no Hopper GPU"
)
MOST = 2500  # more than the tokens whose tiles share the weight's
SIZES = {"architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096,
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
         "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "head"])
def test_a_row_of_a_product_does_not_depend_on_their_number(name: str, blocks: bool) -> None:
    outputs, inputs = SHAPES[name]
    torch.manual_seed(0)
    weight = fp8.quantize_weight(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5, blocks)
    x, x_scales = fp8.quantize(torch.randn(MOST, inputs, device="cuda", dtype=torch.bfloat16))
    residual = torch.randn(MOST, outputs, device="cuda", dtype=torch.bfloat16)

    def rows(tokens: int, product: Any = fp8.product.launch) -> Tensor:
        add = residual[:tokens].clone() if name in ("o", "down") else None
        fused = Fused(add=add, swiglu=name.startswith("gate_up"), out_dtype=torch.bfloat16)
        out: Tensor = product(x[:tokens], x_scales[:tokens].clone(), weight, None, fused)
        return out

    compile_ahead(lambda: [rows(tokens) for tokens in (*TOKENS, MOST)], x.device)  # on all cores
    expected = rows(MOST)
    for tokens in TOKENS:
        assert torch.equal(rows(tokens), expected[:tokens]), tokens
    torch.testing.assert_close(expected, rows(MOST, fp8.product.twin), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up"])
def test_all_kinds_of_kernels_give_the_same_bits(name: str, blocks: bool) -> None:
    outputs, inputs = SHAPES[name]
    torch.manual_seed(0)
    weight = fp8.quantize_weight(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5, blocks)
    x, x_scales = fp8.quantize(torch.randn(256, inputs, device="cuda", dtype=torch.bfloat16))
    residual = torch.randn(256, outputs, device="cuda", dtype=torch.bfloat16)

    def rows(kind: fp8_kernels.Kind) -> Tensor:
        tokens = 256 if isinstance(kind, int) else kind.tokens * kind.token_tiles
        tokens -= tokens > 8  # so that a tile is not full
        add = residual[:tokens].clone() if name == "o" else None
        fused = Fused(add=add, swiglu=name.startswith("gate_up"), out_dtype=torch.bfloat16)
        return fp8_kernels.launch_as(kind, x[:tokens], x_scales[:tokens].clone(), weight, None, fused)

    kinds = fp8_kernels.kinds_of(outputs, inputs, Chip.of(x.device))
    compile_ahead(lambda: [rows(kind) for kind in kinds], x.device)
    expected = rows(kinds[-1])
    for kind in kinds:
        found = rows(kind)
        assert torch.equal(found, expected[: len(found)]), kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [1536, 4096, 28672])
def test_a_weight_is_quantized_to_the_same_bits_as_on_the_cpu(inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(700, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1], weight[2, 3] = 0, 1e4
    last = torch.cuda.device_count() - 1  # the current GPU is the first
    found, expected = fp8.quantize_weight(weight.to(f"cuda:{last}")), fp8.quantize_weight(weight)
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))


@pytest.fixture(params=[{}, {"architectures": ["ArceeForCausalLM"], "hidden_act": "relu2"}], ids=["gated", "ungated"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **request.param}))
    return tmp_path


OPTIONS: dict[str, Any] = {"load": "dummy", "device": "cuda", "seed": 0, "num_pages": 200, "quantization": "fp8"}


def test_the_schedule_never_shows(folder: Path) -> None:
    requests = random_requests(4096, 24, 300, 40)
    with Generator(folder, **OPTIONS) as gen:
        assert gen.config.deterministic
        expected = alone(gen, requests)
    for seed in range(2):
        with Generator(folder, **{**OPTIONS, **random_options(seed, 400)}, deterministic=True) as gen:
            assert answers(gen, requests) == expected


def test_updates_are_quantized_under_graphs(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with Generator(folder, **OPTIONS) as gen, Generator(folder, **{**OPTIONS, "quantization": None}) as plain:
        weights = {
            name: shard.view.clone()
            for name, shard in plain._runner.model.parameters.targets().items()
            if shard.is_whole
        }
        expected = gen.generate([[5] * 40], params)[0].completions[0]
        gen.update_weights({name: tensor * 1.5 for name, tensor in weights.items()})
        assert gen.generate([[5] * 40], params)[0].completions[0].raw_logprobs != expected.raw_logprobs
        gen.update_weights(weights)
        found = gen.generate([[5] * 40], params)[0].completions[0]
        other = plain.generate([[5] * 40], params)[0].completions[0]
        assert abs(found.raw_logprobs[0] - other.raw_logprobs[0]) < 0.2
