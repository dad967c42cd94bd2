"""Numbers of pages in fp8 in kernels: see fastgen.kernels.fp8_pages."""

from __future__ import annotations

from fastgen.kernels.triton.jit import jit, tl


@jit()
def quantized_heads(first, second):
    """Return the halves of heads, [HEADS, HALF] each, in E4M3, and the exponents of their scales, [HEADS, 1], as bytes
    of the type E4M3."""
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    bits = exponent.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return (first * power).to(tl.float8e4nv), (second * power).to(tl.float8e4nv), bits


@jit()
def dequantized(numbers, bits, DTYPE: tl.constexpr):
    """Return numbers times their scales in DTYPE. numbers, bits: as loaded, with the type E4M3."""
    numbers = numbers.to(tl.float32)  # the direct conversion takes one slow instruction per number
    return numbers.to(DTYPE) * power_of(bits).to(DTYPE)


@jit()
def power_of(bits):
    """Return the scales, in float32, of exponents as loaded, with the type E4M3. Kernels in Gluon call this, too."""
    return (bits.to(tl.uint8, bitcast=True).to(tl.int32) << 23).to(tl.float32, bitcast=True)
