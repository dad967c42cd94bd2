"""Recurrent layers on a GPU, in Triton: the arithmetic of on_cpu.py, with the same bits in prefills and decodes.

    K key heads, H value heads, GROUP = H / K, D = 128, C channels, OUT outputs of the layer's first product

Decodes take two launches per layer and one that seldom does anything: `decode_inputs` (convolution and gates),
`decode`, and `advance`, which moves the states of lanes whose blocks are full. Prefills work on blocks of 64
positions, whose rows before the chunk are those that the lane keeps, and whose rows after it are zero: `block_inputs`,
`sum_decays`, `matrices` (what multiplies a block's rows), `scan` (from block to block: states, and what tokens write),
`outputs`, and `keep`, which leaves the last block to the lane. At the end of both, `gate` computes the norm and the
gates of all rows.

Decodes multiply tiles of 16 rows: row 0 is the token's key, and row 8 its query. All kernels add the products of one
output in the same order, in steps of the matrix instruction (16 tokens or dimensions of 2 bytes, 8 of tf32), and
zeros add nothing. Every other sum goes through `tl.fma` or has one summand that is not zero, so that no layout changes
it. This is also why the squared lengths of keys and queries are taken from the diagonal of a product.

The lists of a step (`on_gpu.lists_of`) begin with the numbers of chunks and of blocks. A chunk has 8 numbers: its lane,
its first position, its end, the row of its first token in the step, its first block, and three zeros. A block has 2:
its chunk and its first position.
"""

from __future__ import annotations

from fastgen.kernels.triton.jit import jit, tl


@jit()
def silu(x):
    return x / (1.0 + tl.exp(-x))


@jit()
def gates_of(b, a, decay, step):
    """Return beta and the log of the decay."""
    x = a + step
    e = tl.exp(tl.minimum(x, 20.0))
    softplus = tl.where(x > 20.0, x, tl.where(e < 1e-4, e - e * e * 0.5, tl.log(1.0 + e)))
    return 1.0 / (1.0 + tl.exp(-b)), -tl.exp(decay) * softplus


@jit()
def convolved(x0, x1, x2, x3, taps, c):
    """Return the convolution of four inputs, the oldest first, with taps (C, 4)."""
    acc = x0.to(tl.float32) * tl.load(taps + c * 4).to(tl.float32)
    acc = tl.fma(x1.to(tl.float32), tl.load(taps + c * 4 + 1).to(tl.float32) + tl.zeros_like(acc), acc)
    acc = tl.fma(x2.to(tl.float32), tl.load(taps + c * 4 + 2).to(tl.float32) + tl.zeros_like(acc), acc)
    return tl.fma(x3.to(tl.float32), tl.load(taps + c * 4 + 3).to(tl.float32) + tl.zeros_like(acc), acc)


@jit()
def diagonal(square, axis: tl.constexpr):
    """Return the diagonal of a square, in the layout of its rows (axis 1) or columns (axis 0)."""
    row = tl.arange(0, square.shape[0])
    return tl.sum(tl.where(row[:, None] == row[None, :], square, 0.0), axis)


@jit()
def unit_factor(squares):
    return tl.rsqrt(squares + 1e-6)


@jit()
def decayed(products, factor_rows, factor_columns, decay_rows, decay_columns, seen):
    """Multiply products of rows and columns by their factors and the decay between them, and drop what is not seen."""
    difference = tl.minimum(decay_rows[:, None] - decay_columns[None, :], 0.0)
    decay = tl.exp(tl.where(seen, difference, -float("inf")))
    return products * (factor_rows[:, None] * factor_columns[None, :]) * decay


@jit()
def scaled(writes, factor, decay, last):
    """Return what writes (tokens, DV) add to the state, before their keys multiply them."""
    return (writes.to(tl.float32) * (tl.exp(last - decay) * factor)[:, None]).to(writes.dtype)


@jit()
def moved(state, product, last):
    return tl.fma(state, tl.zeros_like(state) + tl.exp(last), product)


@jit()
def row_of(tile, number):
    """Return a row of a tile, as a vector."""
    row = tl.arange(0, tile.shape[0])
    return tl.sum(tl.where(row[:, None] == number, tile, 0.0), 0)
