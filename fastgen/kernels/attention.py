"""Attention over the paged KV pool, of a list of items (see fastgen.kernels.items), for decodes and prefills alike.

A unit of work is an item and a KV head: the query rows are the item's tokens times the head's group of query heads, in
one tile. As many programs run as the chip holds; each takes units until there are none. Where a tile's keys are split,
partial results go through a workspace, and the last program to end merges them, in the order of the splits, so that
the result does not depend on who was last.

Of keys that rows of a decode step share, a launch of its own attends with tiles of these rows (SHARED), which leaves
partial results; those of the private keys follow (PRIVATE) and merge them with their own.

In deterministic mode on Hopper, decodes that share nothing are those of fastgen.kernels.hopper_decode.

Shape letters: T tokens in the step, H query heads, K KV heads, D head size, P page size, G = H / K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgen.kernels import hopper_decode
from fastgen.kernels.blocks import join, left, nothing, softmax_block, softmax_block_swapped
from fastgen.kernels.items import (
    BEGIN,
    END,
    FIELDS,
    FIRST,
    HEADER,
    LANE,
    PART,
    POSITION,
    SPLIT,
    SPLITS,
    TOKENS,
    SharedRows,
    dependent,
)
from fastgen.kernels.launch import Chip, Kernel, jit, tl
from fastgen.kernels.merging import fold, leave, merge, merge_fixed
from fastgen.kernels.tiles import REGISTERS, Config, power_of_two
from fastgen.kernels.units import ask, deal, item_at

PLAIN, SHARED, PRIVATE = 0, 1, 2  # what a list's items are: see the top
OPEN_ROUNDS = 2  # of units that are not dealt out: who is done first takes the next


@dataclass(frozen=True)
class Items:
    """A list on the device (see fastgen.kernels.items), the most items that it can have, and how they are run.

    kind: PLAIN, SHARED or PRIVATE. Of SHARED ones: rows, whose list it is; bases and kv_lens, int32 [S], of this list's
    window. alone: see fastgen.model.attention.interface.Attention.plan_decode.
    """

    list: Tensor
    most: int
    config: Config
    kind: int = PLAIN
    rows: SharedRows | None = None
    bases: Tensor | None = None
    kv_lens: Tensor | None = None
    alone: bool = False


@dataclass(frozen=True)
class Workspace:
    """Where the splits of tiles meet. parts: float32 [slots, H, D]; lse: float32 [slots, H], log2 of the softmax's sum
    (where that is fixed: its peak, with the sum in `totals`); arrivals: int32 [slots, K], zeros between launches."""

    parts: Tensor
    lse: Tensor
    totals: Tensor
    arrivals: Tensor

    @staticmethod
    def empty(slots: int, num_heads: int, num_kv: int, head_size: int, device: torch.device) -> Workspace:
        return Workspace(
            torch.empty(slots, num_heads, head_size, dtype=torch.float32, device=device),
            torch.empty(slots, num_heads, dtype=torch.float32, device=device),
            torch.empty(slots, num_heads, dtype=torch.float32, device=device),
            torch.zeros(slots, num_kv, dtype=torch.int32, device=device),
        )


@jit("layer", "num_pages", "table_width")
def _attention_kernel(
    q_ptr, out_ptr, keys_ptr, values_ptr, table_ptr, list_ptr, parts_ptr, lse_ptr, totals_ptr, arrivals_ptr,
    members_ptr, bases_ptr, lens_ptr, layer, num_pages, table_width,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, PEEL: tl.constexpr, FIXED: tl.constexpr,
    SWAP: tl.constexpr, DEALT: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr, KIND: tl.constexpr,
    OPEN_ROUNDS: tl.constexpr, PLAIN: tl.constexpr, SHARED: tl.constexpr, PRIVATE: tl.constexpr,
    HEADER: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Units are taken in order: the first by the program's number, others from the layer's counter in the header. Where
    they are short (DEALT) all but the last rounds are dealt out, so that an item is read while another is worked on."""
    # PRIVATE ones begin beside SHARED ones, and wait for them only where their partial results are wanted (where the
    # order is fixed, from the start): so these say that the next may come when they know that all before has ended.
    if PDL and KIND == SHARED:
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL and (KIND == PLAIN or (KIND == PRIVATE and FIXED)):
        tl.extra.cuda.gdc_wait()
    G: tl.constexpr = H // K
    unit, programs = tl.program_id(0), tl.num_programs(0)
    # An item is read together with the number of items, and not after it, which is what a small step waits for.
    count = tl.load(list_ptr)
    item = item_at(list_ptr + HEADER + unit // K * FIELDS)
    dealt = programs
    if DEALT:
        unit, programs, dealt = deal(unit, programs, count * K, OPEN_ROUNDS)
    while unit < count * K:
        next_unit = unit + programs
        if DEALT:
            next_item = item_at(list_ptr + HEADER + tl.minimum(next_unit // K, count - 1) * FIELDS)
        first, tokens, lane, position, begin, end, part, split = item
        head = unit % K
        row = tl.arange(0, ROWS)
        token, q_head = row // G, head * G + row % G
        dim = tl.arange(0, DIMS)[None, :]
        here = (token < tokens % SPLITS)[:, None] & (dim < D)
        query_row, query = first + token, position + token
        low, high = position, position + tokens % SPLITS - 1
        if KIND == SHARED:
            query_row = tl.load(members_ptr + query_row, mask=token < tokens, other=0)
            query = tl.load(lens_ptr + query_row) - 1
            low, high = end, tl.max(query, 0)  # all positions are behind the range
        q = tl.load(q_ptr + ((query_row * H + q_head)[:, None] * D + dim), mask=here, other=0.0)
        acc, peak, total = nothing(ROWS, DIMS, SWAP)
        if KIND == PRIVATE and FIXED:  # where the shared keys end, unless `merge_fixed` goes on from there
            prior = (token < tokens % SPLITS) & (tokens // SPLITS > 0) & (split // SPLITS == 1)
            slot = part * H + q_head
            acc, peak, total = left(parts_ptr, lse_ptr, totals_ptr, slot, prior, tl.arange(0, DIMS), D, SWAP)
        acc, peak, total = _softmax(
            acc, peak, total, q, query, low, high, begin, end, keys_ptr, values_ptr, table_ptr + lane * table_width,
            layer * num_pages, head, K, D, P, WINDOW, SCALE, ROWS, KEYS, DIMS, PEEL, FIXED, SWAP,
        )  # fmt: skip
        if KIND == SHARED:
            slot = (tl.load(bases_ptr + query_row) + split) * H + q_head
            if FIXED:
                tl.store(totals_ptr + slot, total, mask=token < tokens)
                leave(acc, peak, parts_ptr, lse_ptr, slot, token < tokens, D, DIMS)
            else:
                acc = acc / total[:, None]
                leave(acc, peak + tl.log2(total), parts_ptr, lse_ptr, slot, token < tokens, D, DIMS)
        else:
            _finish(
                acc, peak, total, out_ptr, parts_ptr, lse_ptr, totals_ptr, arrivals_ptr, first, tokens, part, split,
                head, H, K, D, ROWS, DIMS, MERGE_ROWS, MERGE_SPLITS, SPLITS, KIND == PRIVATE, FIXED, PDL,
            )  # fmt: skip
        if not DEALT or next_unit >= dealt:
            next_unit = ask(list_ptr, layer, count * K, dealt)
            next_item = item_at(list_ptr + HEADER + tl.minimum(next_unit // K, count - 1) * FIELDS)
        unit, item = next_unit, next_item


@jit()
def _softmax(
    acc, peak, total, q, query, low, high, begin, end, keys_ptr, values_ptr, table_ptr, first_page, head,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, PEEL: tl.constexpr, FIXED: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """The softmax of q [ROWS, DIMS] at positions query [ROWS], from low to high, over keys before and those of
    [begin, end), not yet divided by its sum: acc [ROWS, DIMS], and peak and total [ROWS], the sum in units of 2**peak.
    A row that has seen no keys has a peak (-1e20 or less) that weighs nothing beside another."""
    full_begin = begin
    full_end = end
    if PEEL:
        if WINDOW > 0:  # the first block that the last query sees from its first key on
            full_begin = begin + tl.cdiv(tl.maximum(high + 1 - WINDOW - begin, 0), KEYS) * KEYS
            full_begin = tl.minimum(full_begin, end)
            acc, peak, total = _blocks(
                acc, peak, total, q, query, begin, full_begin, end, keys_ptr, values_ptr, table_ptr, first_page, head,
                K, D, P, WINDOW, SCALE, KEYS, DIMS, True, FIXED, SWAP,
            )  # fmt: skip
        full_end = full_begin + tl.maximum(tl.minimum(end, low + 1) - full_begin, 0) // KEYS * KEYS
        acc, peak, total = _blocks(
            acc, peak, total, q, query, full_begin, full_end, end, keys_ptr, values_ptr, table_ptr, first_page, head,
            K, D, P, WINDOW, SCALE, KEYS, DIMS, False, FIXED, SWAP,
        )  # fmt: skip
        full_begin = full_end
    acc, peak, total = _blocks(
        acc, peak, total, q, query, full_begin, end, end, keys_ptr, values_ptr, table_ptr, first_page, head,
        K, D, P, WINDOW, SCALE, KEYS, DIMS, True, FIXED, SWAP,
    )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
        total = tl.max(total, 0)
    return acc, peak, total


@jit()
def _blocks(
    acc, peak, total, q, query, begin, end, limit, keys_ptr, values_ptr, table_ptr, first_page, head,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr, FIXED: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Go on with the keys [begin, end), of which those from `limit` on are not there: what is in the pool in their
    place may be anything, so that it is not loaded."""
    number = tl.arange(0, KEYS)
    dim = tl.arange(0, DIMS)[None, :]
    next_page = tl.load(table_ptr + tl.minimum(begin, limit - 1) // P)
    for start in range(begin, end, KEYS):
        key = start + number
        if P % KEYS == 0:  # the block lies in one page, whose number was read an iteration ago
            base = (((first_page + next_page).to(tl.int64) * K + head) * P + start % P) * D
            next_page = tl.load(table_ptr + tl.minimum(start + KEYS, limit - 1) // P)
            at = number[:, None] * D + dim
        else:
            page = (first_page + tl.load(table_ptr + key // P, mask=key < limit, other=0)).to(tl.int64)
            base = tl.zeros([], tl.int64)
            at = ((page * K + head) * P + key % P)[:, None] * D + dim
        if MASKED:
            here = (key < limit)[:, None] & (dim < D)
            k = tl.load(keys_ptr + base + at, mask=here, other=0.0)
            v = tl.load(values_ptr + base + at, mask=here, other=0.0)
        elif DIMS == D:
            k = tl.load(keys_ptr + base + at)
            v = tl.load(values_ptr + base + at)
        else:
            k = tl.load(keys_ptr + base + at, mask=dim < D, other=0.0)
            v = tl.load(values_ptr + base + at, mask=dim < D, other=0.0)
        if FIXED:
            seen = None
            if MASKED:
                seen = _seen(key, query, limit, WINDOW, SWAP)
            if SWAP:
                next_acc, next_peak, next_total = softmax_block_swapped(q, k, v, seen, SCALE)
            else:
                next_acc, next_peak, next_total = softmax_block(q, k, v, seen, SCALE)
            acc, peak, total = join(acc, peak, total, next_acc, next_peak, next_total, SWAP)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if MASKED:
                scores = tl.where(_seen(key, query, limit, WINDOW, False), scores * SCALE, -1e30)
                higher = tl.maximum(peak, tl.max(scores, 1))
                weights = tl.exp2(scores - higher[:, None])
            else:  # a fused multiply-add, which would not do for -1e30: it takes a rounded product from an exact one
                higher = tl.maximum(peak, tl.max(scores, 1) * SCALE)
                weights = tl.exp2(scores * SCALE - higher[:, None])
            shrink = tl.exp2(peak - higher)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            peak = higher
    return acc, peak, total


@jit()
def _seen(key, query, limit, WINDOW: tl.constexpr, SWAP: tl.constexpr):
    """Whether keys [KEYS] are seen by queries [ROWS]: [ROWS, KEYS], or the other way round."""
    if SWAP:
        key = key[:, None]
        query = query[None, :]
    else:
        key = key[None, :]
        query = query[:, None]
    seen = (key <= query) & (key < limit)
    if WINDOW > 0:
        seen = seen & (key > query - WINDOW)
    return seen


@jit()
def _finish(
    acc, peak, total, out_ptr, parts_ptr, lse_ptr, totals_ptr, arrivals_ptr, first, tokens, part, split, head,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr, SPLITS: tl.constexpr, PRIORS: tl.constexpr,
    FIXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the answer of a tile, or of one of its splits the partial results; who is last merges them."""
    if PRIORS and PDL and not FIXED:  # for the launch that left them
        tl.extra.cuda.gdc_wait()
    priors = tokens // SPLITS
    tokens = tokens % SPLITS
    splits = split // SPLITS
    split = split % SPLITS
    token = tl.arange(0, ROWS) // (H // K)
    q_head = head * (H // K) + tl.arange(0, ROWS) % (H // K)
    dim = tl.arange(0, DIMS)[None, :]
    here = (token < tokens)[:, None] & (dim < D)
    if splits == 1:
        if PRIORS and not FIXED:
            acc, peak, total = fold(acc, peak, total, parts_ptr, lse_ptr, part, priors, q_head, here, H, D, DIMS)
        at = ((first + token) * H + q_head)[:, None] * D + dim
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=here)
    else:
        slot = part + priors + split * tokens + token
        if FIXED:
            tl.store(totals_ptr + slot * H + q_head, total, mask=token < tokens)
            leave(acc, peak, parts_ptr, lse_ptr, slot * H + q_head, token < tokens, D, DIMS)
        else:
            acc = acc / total[:, None]
            leave(acc, peak + tl.log2(total), parts_ptr, lse_ptr, slot * H + q_head, token < tokens, D, DIMS)
        tl.debug_barrier()  # all of the program's results are written before it counts as arrived
        arrived = tl.atomic_add(arrivals_ptr + part * K + head, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            if FIXED:
                merge_fixed(
                    tl.zeros([MERGE_ROWS, DIMS], tl.float32), tl.arange(0, MERGE_ROWS), tl.arange(0, DIMS),
                    out_ptr, parts_ptr, lse_ptr, totals_ptr, first, tokens, part, priors + splits, head,
                    H, H // K, D, MERGE_ROWS, MERGE_SPLITS,
                )  # fmt: skip
            else:
                merge(
                    out_ptr, parts_ptr, lse_ptr, first, tokens, part, priors + splits, head,
                    H, H // K, D, DIMS, MERGE_ROWS, MERGE_SPLITS,
                )  # fmt: skip
            tl.store(arrivals_ptr + part * K + head, 0)


def _launch(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, items: Items, workspace: Workspace,
    layer: int, window: int,
) -> None:  # fmt: skip
    (_, num_heads, head_size), (_, num_pages, num_kv, page_size, _), config = q.shape, keys.shape, items.config
    group, dims = num_heads // num_kv, power_of_two(head_size)
    assert q.shape == out.shape
    assert q.dtype == out.dtype == keys.dtype == values.dtype
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert keys.shape == values.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.shape[4] == head_size
    assert num_heads == group * num_kv
    assert group <= config.rows
    assert page_table.dtype == items.list.dtype == torch.int32
    assert page_table.stride(1) == 1
    assert layer < HEADER - 1
    assert max(q.numel(), workspace.parts.numel(), page_table.numel()) < 2**31
    assert (items.kind == SHARED) == (items.rows is not None)
    members = items.rows.members if items.rows is not None else None
    chip = Chip.of(q.device)
    pdl, scale = dependent(chip), head_size**-0.5 * math.log2(math.e)
    if config.swap and items.kind == PLAIN and hopper_decode.streams(chip, q.dtype, group, head_size, page_size):
        assert config.keys == hopper_decode.KEYS
        partials = workspace.parts, workspace.lse, workspace.totals, workspace.arrivals
        hopper_decode.launch(
            q, out, keys, values, page_table, items.list, items.most, items.alone, partials, layer, window, scale,
            (config.merge_rows, config.merge_splits),
        )  # fmt: skip
        return
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    if config.fixed:  # one phase's compilation might fuse a multiplication with an addition, and another's not
        options["enable_fp_fusion"] = False
    if config.registers < REGISTERS:
        options["maxnreg"] = config.registers
    _attention_kernel[(min(items.most * num_kv, chip.processors * config.programs),)](
        q, out, keys, values, page_table, items.list, workspace.parts, workspace.lse, workspace.totals,
        workspace.arrivals, members, items.bases, items.kv_lens, layer, num_pages, page_table.stride(0),
        num_heads, num_kv, head_size, page_size, window, scale,
        config.rows, config.keys, dims, config.peel, config.fixed, config.swap, config.dealt, config.merge_rows,
        config.merge_splits, items.kind, OPEN_ROUNDS, PLAIN, SHARED, PRIVATE, HEADER, FIELDS, SPLITS, pdl,
        num_warps=config.warps, num_stages=config.stages, **options,
    )  # fmt: skip


def _twin(
    q: Tensor, out: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, items: Items, workspace: Workspace,
    layer: int, window: int,
) -> None:  # fmt: skip
    """Causal attention of the items' query tokens, of q [T, H, D], into the same rows of out; others are left.

    keys, values: [layers, pages, K, P, D], of which a layer is read; page_table: int32 [lanes, slots]. A query at
    position p sees the positions (p - window, p], all up to p where window is 0. In float32, from numbers of any dtype.
    A list serves each layer once. Takes an item at a time. Of SHARED items only their partial results are written.
    """
    found = items.list.cpu()
    all_items = found[HEADER : HEADER + int(found[0]) * FIELDS].view(-1, FIELDS).tolist()
    if items.rows is not None:
        assert items.bases is not None
        assert items.kv_lens is not None
        for item in all_items:
            members = items.rows.members[item[FIRST] : item[FIRST] + item[TOKENS]].long()
            key = torch.arange(item[BEGIN], item[END], device=q.device)
            query = items.kv_lens[members] - 1
            answer, lse = _exact(q[members], query, key, keys, values, page_table, item, layer, window)
            slots = items.bases[members].long() + item[SPLIT]
            workspace.parts[slots], workspace.lse[slots] = answer, lse
        return
    tiles: dict[int, list[list[int]]] = {}
    for item in all_items:
        tiles.setdefault(item[FIRST], []).append(item)
    for first, splits in tiles.items():
        priors, tokens = divmod(splits[0][TOKENS], SPLITS)
        key = torch.cat([torch.arange(item[BEGIN], item[END], device=q.device) for item in splits])
        query = splits[0][POSITION] + torch.arange(tokens, device=q.device)
        rows = slice(first, first + tokens)
        answer, lse = _exact(q[rows], query, key, keys, values, page_table, splits[0], layer, window)
        if priors:
            before = slice(splits[0][PART], splits[0][PART] + priors)
            weights = torch.cat([workspace.lse[before], lse]).mul(math.log(2)).softmax(0)  # [priors + 1, H]
            answer = (weights[:, :, None] * torch.cat([workspace.parts[before], answer])).sum(0, keepdim=True)
        out[rows] = answer.to(out.dtype)


def _exact(
    q: Tensor, query: Tensor, key: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, item: list[int],
    layer: int, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of q [t, H, D] at positions `query` [t] to positions `key` of the item's lane, in float32: [t, H, D],
    and log2 of the softmax's sum, [t, H], -1e30 where it has seen nothing."""
    group, page_size = q.shape[1] // keys.shape[2], keys.shape[3]
    pages = page_table[item[LANE], key // page_size].long()
    k, v = (pool[layer][pages, :, key % page_size].float() for pool in (keys, values))  # [keys, K, D]
    scores = torch.einsum("tkgd,nkd->kgtn", q.float().unflatten(1, (-1, group)), k) * q.shape[2] ** -0.5
    ahead = query[:, None] - key
    scores = scores.masked_fill((ahead < 0) | (ahead >= window) if window else ahead < 0, -1e30)
    answer = torch.einsum("kgtn,nkd->tkgd", scores.softmax(-1), v).flatten(1, 2)
    lse = (scores.logsumexp(-1) / math.log(2)).clamp(min=-1e30)
    return answer, lse.permute(2, 0, 1).flatten(1)


attention = Kernel(_launch, _twin)
sharing = Kernel(_launch, _twin)  # of SHARED and PRIVATE items: where a chip refuses these, the others still run
