"""attention/flash.py without its package. tests/gpu/test_gpu_attention.py compares the package with the reference."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from ragged import Ragged
from torch import Tensor

from fastgen.model.attention.flash import FlashAttention


def install(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    module = ModuleType("flash_attn.cute")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


def make(case: Ragged) -> FlashAttention:
    return FlashAttention(case.pool(), case.q.shape[1], (0,), 16, max(case.kv_lens))


def test_a_package_that_does_not_run_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: Tensor, **arguments: Any) -> None:
        raise AssertionError("paged KV not supported on SM 8.0")

    case = Ragged(64, 1, 16, torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", None)
        with pytest.raises(
            ValueError, match=r"not run here \(ModuleNotFoundError: .*install.*fastgen\[flash\].*'auto'"
        ):
            make(case)
    install(monkeypatch)
    with pytest.raises(ValueError, match=r"ImportError: cannot import name 'flash_attn_varlen_func'"):
        make(case)
    install(monkeypatch, flash_attn_varlen_func=refuse)
    with pytest.raises(ValueError, match=r"\(AssertionError: paged KV not supported on SM 8.0\): it needs Hopper or"):
        make(case)
    with pytest.raises(ValueError, match="the head size is 256, above 128"):
        make(Ragged(256, 1, 16, torch.bfloat16))
