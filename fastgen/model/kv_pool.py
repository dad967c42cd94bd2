"""The paged KV tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.device.memory import memory_on
from fastgen.kernels.state import copy_pages


class KVPool:
    """Keys and values of all layers: `keys[layer]` and `values[layer]` are [pages, K, P, D]; `whole` is both of them,
    [2, layers, pages, K x P x D].

    K KV heads, P tokens a page, D head size. The heads stand outside a page's tokens, so that a head's page is one
    contiguous piece of P x D. There is one page more than `num_pages`, `spare`, which no sequence ever holds: padding
    is written there.
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
    ) -> None:
        self.page_size = page_size
        self.spare = num_pages
        shape = (2, num_layers, num_pages + 1, num_kv_heads, page_size, head_size)
        self.memory = memory_on(device)
        both = self.memory.zeros(shape, dtype)
        self.keys, self.values = both.unbind(0)
        self.whole = both.flatten(3)

    def wipe(self, pages: Tensor) -> None:
        """Zero the values of pages that change hands: a masked key weighs 0, but 0 times a NaN left there is NaN."""
        self.values.index_fill_(1, pages, 0)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages, int64 [n] each; no page is in both."""
        copy_pages(self.whole, self.whole, sources, targets)

    def rows(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Index of (page, head, offset) in a layer's `keys.view(-1, D)`, for pages and offsets [...]: [..., K]."""
        _, _, num_kv_heads, page_size, _ = self.keys.shape
        heads = torch.arange(num_kv_heads, device=pages.device)
        return (pages[..., None] * num_kv_heads + heads) * page_size + offsets[..., None]
