"""How the programs of attention's kernels take units, an item of a list (see fastgen.kernels.items) and a KV head."""

from __future__ import annotations

from fastgen.kernels.launch import jit, tl


@jit()
def deal(unit, programs, units, OPEN_ROUNDS: tl.constexpr):
    """A program's first unit, how many programs take any, and how many units are dealt out. As few programs as need no
    more rounds: the last round's, were they few, would not fill the memory."""
    programs = tl.cdiv(units, tl.maximum(tl.cdiv(units, programs), 1))
    dealt = tl.maximum(units // tl.maximum(programs, 1) - OPEN_ROUNDS, 1) * programs
    return tl.where(unit < programs, unit, units), programs, dealt


@jit()
def ask(list_ptr, layer, units, dealt):
    """The next of the units that are not dealt out."""
    next_unit = units
    if units > tl.num_programs(0):
        next_unit = dealt + tl.atomic_add(list_ptr + 1 + layer, 1, sem="relaxed")
    return next_unit


@jit()
def item_at(item_ptr):
    first = tl.load(item_ptr)
    tokens = tl.load(item_ptr + 1)
    lane = tl.load(item_ptr + 2)
    position = tl.load(item_ptr + 3)
    begin = tl.load(item_ptr + 4)
    end = tl.load(item_ptr + 5)
    part = tl.load(item_ptr + 6)
    split = tl.load(item_ptr + 7)
    return first, tokens, lane, position, begin, end, part, split
