"""Checks that the bits of packed products depend neither on the number of rows nor on the number of threads."""

import torch

from fastgen.model.transformer import PACKED_ROW_TILE, Linear

SHAPES = [(16, 64), (128, 64), (128, 128), (200, 96), (256, 704), (512, 256), (896, 1024), (1024, 3072), (4096, 256)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 11, 16, 25, 33, 64, 150, 256]  # of PACKED_ROW_TILE


def check(outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    plain, packed, x = Linear(weight, bias), Linear(weight, bias), torch.randn(ROWS[-1] * PACKED_ROW_TILE, inputs)
    torch.set_num_threads(32)
    packed.pack()
    packed.unpack()
    assert torch.equal(packed.weight, weight)
    packed.pack()
    expected, stream = packed(x), torch.randn(len(x), outputs)
    torch.testing.assert_close(expected, plain(x), atol=1e-3, rtol=1e-5)
    added = packed.add_to(stream.clone(), x)
    torch.testing.assert_close(added, stream + expected, atol=1e-3, rtol=1e-5)
    for threads in (1, 3, 64):
        torch.set_num_threads(threads)
        for rows in ROWS:
            part = slice(rows * PACKED_ROW_TILE)
            assert torch.equal(packed(x[part]), expected[part]), (outputs, inputs, threads, rows)
            assert torch.equal(packed.add_to(stream[part].clone(), x[part]), added[part])


torch.manual_seed(0)
for shape in SHAPES:
    check(*shape)
print("equal")
