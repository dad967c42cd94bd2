"""Steps whose layers run in one call have the bits of steps that run layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HYBRIDS, Checkpoint, random_ids
from handmade import make_runner, siblings

from fastgen import Generator, SamplingParams
from fastgen.engine.runner import Runner
from fastgen.model import packed
from fastgen.model.native_layers import NativeLayers
from fastgen.model.native_linear import NativeLinear
from fastgen.model.transformer import StepPart

DTYPES = [dtype for dtype in ("float32", "bfloat16") if packed.packing(getattr(torch, dtype)) is NativeLinear]
pytestmark = pytest.mark.skipif(not DTYPES, reason="the kernels do not run on this CPU")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "windows": ("Mistral", {"head_dim": 64, "sliding_window": 20}),
    "windows in some layers": (
        "Qwen2",
        {"hidden_size": 128, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "norms of heads": ("Qwen3", {"head_dim": 32, "num_attention_heads": 8}),
}


def count_calls(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that receives whether each step ran in one call."""
    layers, calls = runner.model.in_one_call, list[bool]()
    assert isinstance(layers, NativeLayers)
    run = layers.run

    def counted(part: StepPart, numbers: range) -> bool:
        calls.append(run(part, numbers))
        return calls[-1]

    monkeypatch.setattr(layers, "run", counted)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_one_call_has_the_bits_of_one_layer_by_layer(
    name: str, dtype: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefills, decodes of several sequences, and steps with both, until they are longer than a window."""
    kind, fields = MODELS[name]
    runner, other = (make_runner(checkpoint(kind, **fields), dtype=dtype) for _ in range(2))
    calls = count_calls(runner, monkeypatch)
    found = siblings(runner, random_ids(7), forked=True, steps=40)[0]
    assert len(calls) == 42
    assert all(calls)
    other.model.in_one_call = None
    assert found == siblings(other, random_ids(7), forked=True, steps=40)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_step_in_one_call_has_the_bits_of_one_layer_by_layer(
    dtype: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields = MODELS["llama"]
    folder, options = checkpoint(kind, **fields), {"dtype": dtype, "max_step_tokens": 512, "max_model_len": 512}
    runner, other = (make_runner(folder, **options) for _ in range(2))
    calls = count_calls(runner, monkeypatch)
    found = siblings(runner, random_ids(500), forked=False, steps=3)
    assert all(calls)
    other.model.in_one_call = None
    assert found == siblings(other, random_ids(500), forked=False, steps=3)


def test_a_model_with_more_operations_runs_layer_by_layer(checkpoint: Checkpoint) -> None:
    for kind, fields in (
        ("Olmo3", {}),
        ("Granite", {"head_dim": 32, "residual_multiplier": 0.3}),
        ("Llama", {"head_dim": 8}),
        HYBRIDS["qwen3_5"],
    ):
        assert make_runner(checkpoint(kind, **fields), dtype=DTYPES[0]).model.in_one_call is None


def test_weights_that_onednn_multiplies_run_layer_by_layer(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_is_native", lambda dtype, deterministic: False)
    kind, fields = MODELS["llama"]
    runner = make_runner(checkpoint(kind, **fields), dtype=DTYPES[0])
    calls = count_calls(runner, monkeypatch)
    siblings(runner, random_ids(7), forked=True, steps=1)
    assert not any(calls)


def test_new_weights_are_used(checkpoint: Checkpoint) -> None:
    kind, fields = MODELS["norms of heads"]
    params = SamplingParams(max_tokens=8, logprobs=1, seed=3)
    folder = checkpoint(kind, **fields)
    with Generator(folder, dtype=DTYPES[0], device="cpu") as gen:
        before = gen.generate([random_ids(5)], params)[0].completions[0]
        weights = {
            name: tensor.to(getattr(torch, DTYPES[0])) * (0.5 if "proj" in name else 1.5)
            for name, tensor in weights_of(folder).items()
        }
        gen.update_weights(weights.items())
        after = gen.generate([random_ids(5)], params)[0].completions[0]
        gen._loop.runner.model.in_one_call = None
        again = gen.generate([random_ids(5)], params)[0].completions[0]
    assert before.logprobs != after.logprobs
    assert (after.token_ids, after.logprobs) == (again.token_ids, again.logprobs)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
