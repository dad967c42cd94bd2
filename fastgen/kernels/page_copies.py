"""Copies of KV pages."""

from __future__ import annotations

import itertools

from torch import Tensor

from fastgen.kernels.launch import Kernel


def _twin(source: Tensor, target: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy the pages `sources` of `source` to the pages `targets` of `target`, in all layers.

    source, target: [2, layers, pages, E] of the same dtype, keys and then values; the E numbers of a page are
    contiguous. sources, targets: int64 [n], with no page in common if source and target are the same tensor.
    """
    # One layer at a time, because index_select on a tensor that is not contiguous would copy the whole source.
    for kv, layer in itertools.product(range(2), range(source.shape[1])):
        target[kv, layer].index_copy_(0, targets, source[kv, layer].index_select(0, sources))


copy_pages = Kernel(_twin, "fastgen.kernels.triton.page_copies:copy_pages")
