"""tied.py: what an update writes to the embedding and to the head of a model that config.json ties, in any order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fastgen.model.deltas import DELTA, Delta, DeltaTarget
from fastgen.model.tied import Tie, are_equal, fingerprint
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import EMBEDDING, HEAD, Shard

OLD = torch.arange(12.0).view(4, 3)
A, B = OLD + 100, OLD.flip(1) + 100  # each row of one has the numbers of the other's row
Given = list[tuple[str, Tensor | tuple[Tensor, Tensor]]]


class Model:
    """A model with a tie, as ranks have it: the head gets its own memory when it is written."""

    def __init__(self, can_untie: bool = True) -> None:
        self.embedding = OLD.clone()
        self.head = self.embedding
        self.tie = Tie(own_head=False, can_untie=can_untie)

    def update(self, given: Given | Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        update = WeightUpdate(given, {EMBEDDING: Shard.whole(OLD.to("meta"))}, partial, tie=self.tie)
        update.check()
        for name, tensor in update.tensors():
            if name.startswith(HEAD) and self.head is self.embedding:
                self.head = self.embedding.clone()
            target = self.head if name.startswith(HEAD) else self.embedding
            if name.endswith(DELTA):
                DeltaTarget(Shard.whole(target)).write(tensor)
            else:
                target.copy_(tensor)

    def check(self, embedding: Tensor, head: Tensor, is_one: bool) -> None:
        assert torch.equal(self.embedding, embedding)
        assert torch.equal(self.head, head)
        assert (self.head is self.embedding) == is_one == (not self.tie.own_head)


@pytest.mark.parametrize("given", [[(EMBEDDING, A)], [(HEAD, A)], [(EMBEDDING, A), (HEAD, A.double())]])
def test_one_tensor_for_both(given: Given) -> None:
    """Whichever names it has. A head that has its own memory becomes equal."""
    for order in (given, given[::-1]):
        model = Model()
        model.update(order)
        model.check(A, A, is_one=True)
        model.update([(EMBEDDING, A), (HEAD, B)])
        model.update(order)
        model.check(A, A, is_one=False)


@pytest.mark.parametrize("partial", [False, True])
def test_another_head_is_used(partial: bool) -> None:
    for names in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
        model, values = Model(), {EMBEDDING: A, HEAD: B}
        buffer = torch.empty(4, 3)
        model.update(((name, buffer.copy_(values[name])) for name in names), partial)  # all in the same memory
        model.check(A, B, is_one=False)


def test_parts_that_come_in_several_updates() -> None:
    """A trainer of a tied model may give both names in any order, and one of an untied model too."""
    model = Model()
    model.update([(EMBEDDING, A)], partial=True)
    model.update([(HEAD, A)], partial=True)
    model.check(A, A, is_one=True)
    model.update([(HEAD, B)], partial=True)
    model.check(A, B, is_one=False)
    model.update([(EMBEDDING, B)], partial=True)
    model.check(B, B, is_one=False)
    model.update([(EMBEDDING, OLD)], partial=True)
    model.check(OLD, B, is_one=False)


def test_deltas() -> None:
    """Equal deltas of a tied model are one; another one unties it."""
    change = torch.tensor([1, 7]), torch.tensor([50.0, 51.0])
    other = torch.tensor([2]), torch.tensor([60.0])
    changed, head = OLD.clone(), OLD.clone()
    Delta.of(EMBEDDING, change).applied_to(changed)
    Delta.of(HEAD, other).applied_to(head)
    model = Model()
    model.update([(HEAD, change), (EMBEDDING, change)], partial=True)
    model.check(changed, changed, is_one=True)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    model.update([(EMBEDDING, nothing), (HEAD, nothing)], partial=True)
    model.check(changed, changed, is_one=True)
    model = Model()
    model.update([(HEAD, other)], partial=True)
    model.check(OLD, head, is_one=False)


def test_memory_that_cannot_be_had() -> None:
    """On a GPU a mapping with another head is refused before anything is written, and an iterator at its end."""
    model = Model(can_untie=False)
    for order in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
        given = [(name, {EMBEDDING: A, HEAD: B}[name]) for name in order]
        with pytest.raises(ValueError, match=r"start it with tie_word_embeddings=false in config\.json"):
            model.update(given)
        model.check(OLD, OLD, is_one=True)
        with pytest.raises(ValueError, match=r"'lm_head\.weight' has other values"):
            model.update(iter(given))
        model.embedding.copy_(OLD)
    model.update([(HEAD, A), (EMBEDDING, A)])
    model.check(A, A, is_one=True)


def test_numbers_are_compared_in_their_order_and_not_in_their_dtype() -> None:
    assert are_equal(A, A.double())
    assert not are_equal(A, A[:3])
    assert torch.equal(fingerprint(A), fingerprint(A.bfloat16()))
    changed = A.clone()
    changed[2, 1] += 1
    for other in (B, A.flip(0), changed):
        assert not are_equal(A, other)
        assert not torch.equal(fingerprint(A), fingerprint(other))
