"""The tensors of the paged KV cache."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fastgen.device.memory import Memory
from fastgen.device.new_memory import memory_on
from fastgen.kernels import fp8_pages
from fastgen.kernels.page_copies import copy_pages


class KVPool:
    """Keys and values of all layers in pages: `keys[layer]` and `values[layer]`, each [pages, K, P, D].

    `whole` holds both: [2, layers, pages, K x P x D], with K KV heads, P tokens per page and head size D. Within a
    page, heads come before tokens, so the tokens of one head are a contiguous block of P x D. One more page than
    num_pages is allocated: no sequence holds page `spare`, and padding is written there.

    dtype: dtype of the numbers that attention multiplies. fp8: keys and values are stored in E4M3; `whole` is then
    uint8 and includes the scales (fastgen.kernels.fp8_pages). memory: for the tensors; None: memory of its own.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.page_size = page_size
        self.dtype, self.fp8 = dtype, fp8
        self.spare = num_pages
        shape = (2, num_layers, num_pages + 1, num_kv_heads)
        # Without huge pages, since a new sequence is often the first to touch its pages.
        self.memory = memory or memory_on(device, huge_pages=False)
        if fp8:
            whole = self.memory.zeros((*shape, fp8_pages.head_bytes(page_size, head_size)), torch.uint8)
            both = fp8_pages.numbers_of(whole, page_size, head_size)
        else:
            whole = both = self.memory.zeros((*shape, page_size, head_size), dtype)
        self.keys, self.values = both.unbind(0)
        self.whole = whole.flatten(3)

    def part(self, first: int, end: int) -> KVPool:
        """Return the pool of layers first to end - 1, in the same memory."""
        part = copy.copy(self)
        part.whole, part.keys, part.values = self.whole[:, first:end], self.keys[first:end], self.values[first:end]
        return part

    def slots_of_windows(self, slots: Tensor) -> Tensor | None:
        """Return the slots of tokens, int64 [T], in layers with windows, if these have pages of their own."""
        return None

    def wipe(self, fresh: Tensor) -> None:
        """Zero the values of pages `fresh`, int64 [n]. A masked key has weight 0, but 0 times a left-over NaN is
        NaN."""
        self.whole[1].index_fill_(1, fresh, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages `sources` to pages `targets`, both int64 [n]. No page is in both."""
        copy_pages(self.whole, self.whole, sources, targets)
