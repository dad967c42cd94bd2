"""The linear layers on the CPU whose weights are packed, that is, kept in the order in which products read them.

On processors with AVX-512 (for bfloat16: AVX512-BF16), fastgen's own kernels compute them (native_linear.py), and on
others, or without a compiler, oneDNN (onednn_linear.py). Their bits depend neither on the number of rows, padded to
`row_tile`, nor on the number of threads. Intel's processors are different: in float32, and with AMX in bfloat16, oneDNN
sums rows in an order that depends on their number. There MKL computes the products in float32 (mkl_linear.py); in
bfloat16 with AMX they are oneDNN's, which are much faster, unless they have to be deterministic.
"""

from __future__ import annotations

import torch

from fastgen.device.processor import has_amx, is_intel
from fastgen.model.linear import Linear, NewTensor, PackedLinear


def packing(dtype: torch.dtype, deterministic: bool = False) -> type[PackedLinear] | None:
    """Return the class of packed layers for a dtype on this processor, or None if none has been tested on it. The
    module of each kind loads where it is chosen. deterministic: see `Parameters`."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return None
    if dtype == torch.float32 and is_intel():
        from fastgen.device.mkl_packed import PACKS
        from fastgen.model.mkl_linear import MklLinear

        return MklLinear if PACKS else None
    if _is_native(dtype, deterministic):
        from fastgen.model.native_linear import NativeLinear

        return NativeLinear
    if has_onednn(dtype) and not (deterministic and dtype == torch.bfloat16 and has_amx()):
        from fastgen.model.onednn_linear import OneDnnLinear

        return OneDnnLinear
    return None


def _is_native(dtype: torch.dtype, deterministic: bool) -> bool:
    from fastgen.kernels.native.calls import function

    by_amx = dtype == torch.bfloat16 and has_amx() and not deterministic
    return not by_amx and function("multiply", dtype) is not None


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of a dtype on this processor."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack(linear: Linear, kind: type[PackedLinear], new: NewTensor, gated: bool = False) -> Linear:
    """Return a packed form of a linear layer. kind: from `packing`. new: makes the memory of the packed weight. gated:
    the layer is only applied with SwiGLU."""
    if isinstance(linear, PackedLinear):
        return linear
    return kind.pack_gated(linear, new) if gated else kind.pack(linear, new)


def unpack(linear: Linear) -> Linear:
    """Return a linear layer with a plain weight."""
    return linear.unpack() if isinstance(linear, PackedLinear) else linear
