"""The norm and the rope of native.cpp against their torch twins, and the library: where it is kept, and what happens
without a compiler. Its attention is in tests/model/test_attention_cpu.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastgen.kernels.native import calls, library
from fastgen.kernels.norm import RMSNorm, rms_norm
from fastgen.kernels.rope import HeadNorm, SlotMapping, rope_write
from fastgen.model.attention.native import NativeAttention
from fastgen.model.kv_pool import KVPool

needs_library = pytest.mark.skipif(library.library() is None, reason="there is no C++ compiler for this CPU")
DTYPES = [torch.float32, torch.bfloat16]
SIZE, PAGE, KV_HEADS = 32, 16, 2


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that tensors differ by a few roundings of their dtype."""
    error = 8 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, atol=error, rtol=error)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_agrees_with_its_twin_and_has_the_same_bits_in_any_batch(dtype: torch.dtype, centered: bool) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(torch.randn(576).to(dtype), 1e-5, centered)
    for rows in (1, 3, 300):  # the last one is divided among threads
        x, delta = torch.randn(rows, 576).to(dtype), torch.randn(rows, 576).to(dtype)
        sums, twin_sums = x.clone(), x.clone()
        found, expected = calls.rms_norm(sums, norm, delta), rms_norm.twin(twin_sums, norm, delta)
        assert found is not None
        close(found, expected)
        assert torch.equal(sums, twin_sums)
        assert torch.equal(found[-1:], rms_norm(x[-1:].clone(), norm, delta[-1:].clone()))


@needs_library
def test_a_norm_keeps_nan_and_infinity() -> None:
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    found = calls.rms_norm(x, RMSNorm(torch.ones(16, dtype=torch.bfloat16), 1e-5))
    assert found is not None
    assert found[0].isnan().all()
    assert found[1, 5].isnan()
    assert found[2].isfinite().all()


def mapping_of(tokens: int, real: int, half: int) -> SlotMapping:
    positions = torch.arange(tokens) * 3
    slots = torch.randperm(4 * PAGE)[:tokens]
    slots[real:] = -1
    angles = torch.rand(3 * tokens, half)
    return SlotMapping(positions, slots, angles.cos(), angles.sin(), real, KV_HEADS, PAGE)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("normed", ["", "plain", "centered"])
def test_rope_agrees_with_its_twin(dtype: torch.dtype, half: int, normed: str) -> None:
    """Also if only the first half of each head is rotated. Padding is not written to the pool."""
    torch.manual_seed(0)
    size, tokens = 64, 12
    norm = None
    if normed:
        norm = HeadNorm(torch.rand(size).to(dtype), torch.rand(size).to(dtype), 1e-6, centered=normed == "centered")
    mapping = mapping_of(tokens, 10, half)
    qkv = torch.randn(tokens, (3 + 2 * KV_HEADS) * size).to(dtype)
    pools = [torch.zeros(2, 4, KV_HEADS, PAGE, size, dtype=dtype) for _ in range(2)]
    found = calls.rope_write(qkv, mapping, *pools[0], norm)
    expected = rope_write.twin(qkv, mapping, *pools[1], norm)
    assert found is not None
    close(found, expected)
    torch.testing.assert_close(
        *pools, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=1e-5 if dtype == torch.float32 else 2e-2
    )
    assert torch.equal(pools[0] == 0, pools[1] == 0)


@needs_library
def test_what_the_kernels_cannot_compute_is_left_to_torch() -> None:
    x = torch.randn(4, 24)
    assert calls.rms_norm(x, RMSNorm(torch.ones(24), 1e-5)) is None, "24 is not a multiple of a vector"
    assert calls.rms_norm(torch.randn(32, 4).t(), RMSNorm(torch.ones(32), 1e-5)) is None
    assert calls.rms_norm(x[:, :16].half(), RMSNorm(torch.ones(16).half(), 1e-5)) is None
    learned = torch.randn(4, 32, requires_grad=True)
    assert calls.rms_norm(learned, RMSNorm(torch.ones(32), 1e-5)) is None, "torch computes its gradient"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, in which no library is yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library.cache_clear()
    calls.function.cache_clear()
    yield tmp_path / "fastgen"
    library.library.cache_clear()
    calls.function.cache_clear()


@needs_library
def test_the_library_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, source = library.compiler(), fresh.parent / "small.cpp"  # the real one takes seconds
    assert compiler is not None
    source.write_text("int answer() { return 42; }")
    monkeypatch.setattr(library, "SOURCE", source)
    path = library.compiled(compiler)
    assert list(fresh.iterdir()) == [path]
    written = path.stat().st_mtime_ns
    assert library.compiled(compiler) == path
    assert path.stat().st_mtime_ns == written
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-DOTHER"))
    assert library.compiled(compiler) != path


def test_without_a_compiler_torch_computes(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(fresh))
    pool = KVPool(1, 2, KV_HEADS, PAGE, SIZE, torch.float32, torch.device("cpu"))
    assert not NativeAttention.fits(pool)
    x, norm = torch.randn(3, SIZE), RMSNorm(torch.randn(SIZE), 1e-5)
    assert torch.equal(rms_norm(x, norm), rms_norm.twin(x, norm))


def test_a_compiler_that_fails_is_reported(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = fresh.parent / "cxx"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such instruction" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert library.library() is None
    assert "no such instruction" in caplog.text
    with pytest.raises(subprocess.CalledProcessError):
        library.compiled(str(program))
