"""Updates of weights on several ranks: tensors that cross between processes, and the names that ranks compare."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.model.weights import Shard, Update
from fastgen.processes.errors import raise_first
from fastgen.ranks.protocol import WriteGiven, perform
from fastgen.ranks.weights import SharedMemory, Weight, check_same_names, received

TENSORS = [torch.arange(6.0).view(2, 3), torch.arange(20).view(4, 5).bfloat16()[:, ::2], torch.ones(700, 9).double()]


def test_shared_memory_holds_one_tensor_after_the_other() -> None:
    ours = SharedMemory.make()
    its = SharedMemory(os.dup(ours.file))  # as another process has it
    for _ in range(2):
        for tensor in [*TENSORS, *reversed(TENSORS)]:
            ours.hold(tensor)
            read = its.read(tuple(tensor.shape), tensor.dtype)
            assert torch.equal(read, tensor)
            assert read.dtype == tensor.dtype
        assert os.fstat(ours.file).st_size == TENSORS[2].nbytes, "the largest"
        for memory in (its, ours):
            memory.clear()
        assert os.fstat(ours.file).st_size == 0
    its.close()
    ours.close()
    ours.close()
    with pytest.raises(RuntimeError, match="unable to open file"):
        ours.hold(TENSORS[0])


def test_tensors_arrive_until_something_else_does() -> None:
    ours, taken, found = SharedMemory.make(), [], []

    def messages() -> Iterator[object]:
        for number, tensor in enumerate(TENSORS):
            yield Weight.of(str(number), tensor.requires_grad_(tensor.is_floating_point()), ours)
        yield "something else"

    arriving = received(messages().__next__, lambda: taken.append(True), SharedMemory(os.dup(ours.file)))
    for name, tensor in arriving:
        assert len(taken) == int(name), "each is taken when the next is asked for"
        found.append(tensor.clone())
    assert len(taken) == 3
    assert all(torch.equal(got, tensor) for got, tensor in zip(found, TENSORS, strict=True))
    ours.close()


PARTS = {name: Shard.whole(torch.empty(2, device="meta")) for name in "ab"}


class Runner:
    @property
    def weights(self) -> Runner:
        return self

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.written += [name for name, _ in tensors]


def given(names: str, fails: bool = False) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, torch.ones(2)
    if fails:
        raise LookupError("lost")


@pytest.mark.parametrize(
    ("names", "fails", "once", "partial", "checked", "written"),
    [
        ("ab", False, False, False, "ab", "ab"),
        ("ab", False, True, False, "", "ab"),
        ("b", False, False, True, "b", "b"),
        ("b", False, False, False, ValueError, None),
        ("b", False, True, False, "", ValueError),
        ("abx", False, True, False, "", ValueError),
        ("ab", True, True, False, "", LookupError),
    ],
)
def test_a_rank_checks_and_writes_what_its_program_gave(
    names: str, fails: bool, once: bool, partial: bool, checked: Any, written: Any
) -> None:
    tensors = given(names, fails) if once else list(given(names, fails))
    update, runner = Update(tensors, PARTS, False), Runner()
    for number, wanted in enumerate((checked, written)):
        if wanted is None:
            return
        assert not runner.written
        result = perform(WriteGiven(7, number == 1, partial), runner, update)  # type: ignore[arg-type]
        assert result.number == 7
        if isinstance(wanted, str):
            assert (result.error, result.value) == (None, frozenset(wanted))
        else:
            assert isinstance(result.error, wanted)


def test_all_ranks_give_the_same_names() -> None:
    def check(*each: str, written: bool) -> None:
        check_same_names(dict(enumerate(map(frozenset, each))), written)

    check("ab", "ba", "ab", written=True)
    check("ab", "", "ab", written=False)  # rank 1's are seen when they are written
    check("", "ab", written=False)
    for each in (("ab", ""), ("", "b"), ("ab", "ab", "a")):
        with pytest.raises(ValueError, match=rf"rank {len(each) - 1} gives other tensors than rank 0: (a, )?b$"):
            check(*each, written=True)
    with pytest.raises(ValueError, match="rank 1 gives other tensors than rank 0: b, c"):
        check("ab", "ac", written=False)


def test_the_error_of_the_lowest_rank_is_raised() -> None:
    with pytest.raises(LookupError, match="one") as raised:
        raise_first({0: None, 1: LookupError("one"), 2: KeyError("two")})
    assert raised.value.__notes__ == ["raised on rank 1"]
