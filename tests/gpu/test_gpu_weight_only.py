"""Products with only the weight in fp8, as GPUs other than Hopper compute them: for any number of tokens and under any
schedule, results have the bits of the dequantized weight. On Hopper, products in Gluon are off here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, random_options, random_requests
from safetensors.torch import load_file, save_file
from test_gpu_deterministic import SHAPES
from test_gpu_fp8 import SIZES
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.kernels import batch_invariant, fp8, launch
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.launch import kernels_of
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.triton.compile_ahead import compile_ahead
from fastgen.model import quantized
from fastgen.model.quantized import WeightOnlyFp8

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels_of(torch.device("cuda", 0)) == "torch",
    reason="there is no GPU with Triton",
)
MOST = 4096
OPTIONS: dict[str, Any] = {"device": "cuda", "seed": 0, "num_pages": 200}
FP8 = {**OPTIONS, "quantization": "fp8"}
AS_AMPERE = """
import sys
import pytest
import triton
from fastgen.device.chip import Chip

assert triton.knobs.runtime.override_arch == "sm80"
chip = Chip((8, 0), 108, 166_912)
Chip.of = staticmethod(lambda device: chip)
sys.exit(pytest.main(["-n", "0", "-v", *sys.argv[1:]]))
"""


@pytest.fixture(autouse=True)
def without_gluon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "GLUON", False)
        patch.setattr(quantized, "kernels_of", lambda device: "triton")
        yield


@pytest.mark.parametrize(
    ("name", "blocks", "dtype"),
    [
        *((name, blocks, torch.bfloat16) for name in ("qkv", "o", "gate_up", "down") for blocks in (False, True)),
        ("o", False, torch.float16), ("gate_up", True, torch.float16),
    ],
)  # fmt: skip
def test_a_row_has_the_bits_of_the_dequantized_weight(name: str, blocks: bool, dtype: torch.dtype) -> None:
    outputs, inputs = SHAPES[name]
    torch.manual_seed(0)
    weight = fp8.quantize_weight(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5, blocks)
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    layer, dense = WeightOnlyFp8(weight.values, bias, True, scales=weight.scales), weight.dequantized().to(dtype)
    x, residual = (torch.randn(MOST, size, device="cuda", dtype=dtype) for size in (inputs, outputs))
    angles, slots = torch.randn(MOST, 64, device="cuda"), torch.randperm(MOST, device="cuda")
    pool = torch.zeros(2, MOST // 64, 8, 64, 128, device="cuda", dtype=dtype)

    def rows(tokens: int, of_dense: bool = False) -> list[Tensor]:
        """Return all results of the product for the first tokens, with one row per token."""
        where = torch.arange(tokens, device="cuda")
        mapping = SlotMapping(where, slots[:tokens], angles.cos(), angles.sin(), tokens, 8, 64)
        fused = Fused(
            add=residual[:tokens].clone() if name in ("o", "down") else None,
            swiglu=name.startswith("gate_up"),
            rope=RopeWrite(mapping, *pool) if name == "qkv" else None,
        )
        pool.zero_()
        if of_dense:
            out = batch_invariant.product.launch(x[:tokens], dense, bias, fused)
        else:
            out = layer.product(x[:tokens], fused)
        kept = pool.transpose(2, 3).flatten(1, 2)[:, slots[:tokens]]  # [keys and values, tokens, K, D]
        return [out, *kept] if name == "qkv" else [out]

    sizes = [*range(1, 67), 100, 128, 129, 256, 257, 1000, MOST]
    compile_ahead(lambda: [rows(tokens) for tokens in sizes], x.device)  # on all cores
    expected = rows(MOST, of_dense=True)
    for tokens in sizes:
        for found, wanted in zip(rows(tokens), expected, strict=True):
            assert torch.equal(found, wanted[: len(found)]), f"{tokens} tokens"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of random weights in bfloat16, and the weights that its fp8 form represents."""
    source, meant = (tmp_path_factory.mktemp(name) for name in ("source", "meant"))
    (source / "config.json").write_text(json.dumps(SIZES))
    shutil.copy(source / "config.json", meant)
    with Generator(source, load="dummy", **OPTIONS) as gen:
        shards = gen._runner.model.parameters.targets()
        weights = {name: shard.view.clone() for name, shard in shards.items()}
    for folder in (source, meant):
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        for name in weights:
            if name.endswith("_proj.weight"):
                weights[name] = fp8.quantize_weight(weights[name]).dequantized().bfloat16()
    return source, meant


def test_answers_have_the_bits_of_the_dequantized_weights(folders: tuple[Path, Path]) -> None:
    source, meant = folders
    requests = random_requests(4096, 24, 300, 40)
    with Generator(meant, deterministic=True, **OPTIONS) as gen:
        expected = alone(gen, requests)
    with Generator(source, deterministic=True, **FP8) as gen:
        assert isinstance(gen._runner.model.layers[0].qkv, WeightOnlyFp8)
        assert "weights in fp8" in gen.config.summary
        assert answers(gen, requests) == expected
        gen.sleep()
        gen.wake()
        assert answers(gen, requests) == expected
    for seed in range(2):
        with Generator(source, **{**FP8, **random_options(seed, 400)}, deterministic=True) as gen:
            assert answers(gen, requests) == expected


def test_updates_are_quantized_under_graphs(folders: tuple[Path, Path]) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    weights = load_file(folders[0] / "model.safetensors")
    with Generator(folders[0], **FP8) as gen:
        expected = gen.generate([[5] * 40], params)[0].completions[0]
        gen.update_weights({name: tensor * 1.5 for name, tensor in weights.items()})
        assert gen.generate([[5] * 40], params)[0].completions[0].raw_logprobs != expected.raw_logprobs
        gen.update_weights(weights)
        assert gen.generate([[5] * 40], params)[0].completions[0].raw_logprobs == expected.raw_logprobs


def test_products_by_cublas() -> None:
    """A layer that is not batch-invariant multiplies many tokens by a copy, and few by its own kernel."""
    weight = fp8.quantize_weight(torch.randn(1024, 512, device="cuda") * 512**-0.5)
    layer = WeightOnlyFp8(weight.values, None, scales=weight.scales)
    x = torch.randn(500, 512, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ weight.dequantized().double().t()
    for tokens in (1, 64, 65, 500):
        found = layer.product(x[:tokens], Fused())
        assert (found - exact[:tokens]).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.long
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="there is no Hopper GPU"
)
def test_kernels_for_ampere_on_hopper() -> None:
    """All of the above once more, with an A100's configurations and as Triton compiles for one: it has the instruction
    and the asynchronous loads of Ampere, which ptxas translates for this GPU."""
    environment = {**os.environ, "TRITON_OVERRIDE_ARCH": "sm80"}
    command = [sys.executable, "-c", AS_AMPERE, __file__]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout.lower()
