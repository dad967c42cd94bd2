"""Random ragged steps over a paged pool for the tests of attention, with the expected answers and their tolerances."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from reference_attention import ReferenceAttention
from torch import Tensor

from fastgen.kernels import fp8_pages as pages_in_fp8
from fastgen.model.attention.interface import StepLayout
from fastgen.model.kv_pool import KVPool

KV_HEADS = 2
LAYERS = 2
LAYER = 1  # the layer with the case's keys and values; the other has garbage
QUERIES = (1, 2, 31, 64, 127, 128, 130, 300)
KNOWN = (0, 1, 63, 64, 65, 127, 128, 129, 500)


class Ragged:
    """A step of some decodes followed by some prefill chunks, with shuffled pages and lanes.

    query_lens, kv_lens: query length and KV length of each sequence, by default some of each kind. q: [T, H, D] of
    `dtype`, on the CPU, like everything here unless a device is given. fp8: whether keys and values are kept in fp8.
    clean: pool in float32 with exactly the keys and values of the sequences, and zeros elsewhere.
    """

    def __init__(
        self,
        head_size: int,
        group: int,
        page_size: int,
        dtype: torch.dtype,
        seed: int = 0,
        query_lens: Sequence[int] | None = None,
        kv_lens: Sequence[int] | None = None,
        fp8: bool = False,
    ) -> None:
        rng = np.random.default_rng((seed, head_size, group, page_size))
        random = torch.Generator().manual_seed(seed)
        if query_lens is None:
            query_lens = [1] * int(rng.integers(1, 6)) + rng.choice(QUERIES, rng.integers(2, 6)).tolist()
        self.query_lens = list(query_lens)
        self.kv_lens = list(kv_lens or [length + int(rng.choice(KNOWN)) for length in self.query_lens])
        self.dtype, self.fp8 = dtype, fp8
        self.q = torch.randn(sum(self.query_lens), KV_HEADS * group, head_size, generator=random).to(dtype)
        slots = [-(-length // page_size) for length in self.kv_lens]
        num_pages, lanes = sum(slots) + 3, len(slots) + 2
        self.lanes = torch.from_numpy(rng.permutation(lanes)[: len(slots)])
        # The page table is random after a sequence's last page.
        self.table = torch.from_numpy(rng.integers(0, num_pages, (lanes, max(slots) + 1))).int()
        own = torch.split(torch.from_numpy(rng.permutation(num_pages)[: sum(slots)]).int(), slots)
        self.clean = self._new_pool(num_pages, page_size, torch.float32, "cpu")
        self._written = torch.zeros(num_pages + 1, page_size, dtype=torch.bool)
        for lane, pages, length in zip(self.lanes, own, self.kv_lens, strict=True):
            self.table[lane, : len(pages)] = pages
            positions = torch.arange(length)
            self._written[pages[positions // page_size], positions % page_size] = True
        for tensor in (self.clean.keys[LAYER], self.clean.values[LAYER]):
            numbers = torch.randn(tensor.shape, generator=random).to(dtype).float()
            tensor.copy_(numbers.where(self._written[:, None, :, None], 0.0))
        if fp8:  # numbers that have been rounded once are not rounded again
            rows, kept = self._rows(), self.pool()
            for clean, own_pages in ((self.clean.keys, kept.keys), (self.clean.values, kept.values)):
                clean[LAYER].view(-1, head_size)[rows] = pages_in_fp8.read(own_pages[LAYER], rows, 1)[:, 0]

    def _rows(self) -> Tensor:
        """Return the numbers of the rows of a pool's layer that are written: one for each head of a token."""
        return self._written[:, None].expand(-1, KV_HEADS, -1).flatten().nonzero().flatten()

    def _new_pool(self, num_pages: int, page_size: int, dtype: torch.dtype, device: str, fp8: bool = False) -> KVPool:
        head_size = self.q.shape[-1]
        return KVPool(LAYERS, num_pages, KV_HEADS, page_size, head_size, dtype, torch.device(device), fp8)

    def pool(self, device: str = "cpu", garbage: float = 1e4) -> KVPool:
        """Return a pool of `dtype` with the keys and values of the sequences. Unwritten values are `garbage`, and
        unwritten keys NaN; in fp8 both are NaN."""
        pool = self._new_pool(self.clean.spare, self.clean.page_size, self.dtype, device, self.fp8)
        if self.fp8:
            pool.whole.fill_(255)  # NaN in E4M3, and the exponent of an infinite scale
            rows = self._rows()
            for clean, kept in ((self.clean.keys, pool.keys), (self.clean.values, pool.values)):
                numbers = clean[LAYER].view(-1, clean.shape[-1])[rows]
                pages_in_fp8.put(kept[LAYER], rows.to(device), numbers.to(device, self.dtype))
            return pool
        written = self._written[:, None, :, None]
        pool.keys.fill_(torch.nan)
        pool.values.fill_(garbage)
        pool.keys[LAYER] = self.clean.keys[LAYER].where(written, torch.nan).to(self.dtype)
        pool.values[LAYER] = self.clean.values[LAYER].where(written, garbage).to(self.dtype)
        return pool

    def layout(self, device: str = "cpu", lens: Sequence[int] | None = None) -> StepLayout:
        """Return the layout of the step. lens: other KV lengths than the case's."""
        ends = [length == 1 for length in self.query_lens] + [False]
        lens = self.kv_lens if lens is None else lens
        host = np.array(self.query_lens), np.array(lens)
        return StepLayout(*host, ends.index(False), self.lanes.numpy(), self.table.to(device))

    def expected(self, window: int, lens: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the answer [T, H, D] in float32, and by how much each number of an answer in `dtype` may differ from
        it.

        The weights of the keys and the answer are rounded to `dtype`, each by at most half a unit in the last place.
        Together they change an answer by less than a unit of the answer for |values|.
        """
        layout, pool = self.layout(lens=lens), self.clean
        answer = self._reference(pool, layout, window)
        positive = self._new_pool(pool.spare, pool.page_size, torch.float32, "cpu")
        positive.keys[LAYER], positive.values[LAYER] = pool.keys[LAYER], pool.values[LAYER].abs()
        unit = torch.finfo(self.dtype).eps
        return answer, unit * self._reference(positive, layout, window) + 1e-5

    def _reference(self, pool: KVPool, layout: StepLayout, window: int) -> Tensor:
        attention = ReferenceAttention(pool, self.q.shape[1])
        return attention.attend(attention.plan(layout), LAYER, self.q.float(), window)


def assert_within(answer: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """Check that an answer is within the tolerance; NaN never is."""
    exact, slack = expected
    excess = ((answer.float().cpu() - exact).abs() / slack).nan_to_num(torch.inf)
    assert answer.shape == exact.shape
    assert excess.max() <= 1, f"{excess.max():.2f} times the tolerance, at {excess.argmax().item()}"
