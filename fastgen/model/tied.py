"""The embedding and the head of a model that config.json ties.

They are one tensor until a checkpoint or an update has another head, which is then used, as in transformers. A
checkpoint or a complete update that has only one of the two has one tensor for both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastgen.model.deltas import DELTA
from fastgen.model.weights import EMBEDDING, HEAD, OTHER

ROWS = 1024  # number of rows that are compared or hashed at a time: less memory than one tensor


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two matrices have the same shape and numbers, in whatever dtypes."""
    if one.shape != other.shape:
        return False
    parts = zip(torch.split(one, ROWS), torch.split(other, ROWS), strict=True)
    return all(torch.equal(part.double(), its.double()) for part, its in parts)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of each row of a matrix, int64 [rows] on the CPU. It depends on the numbers and their order, and
    not on their dtype."""
    if not tensor.numel():  # an empty delta
        return torch.empty(0, dtype=torch.int64, device="cpu")
    factors = torch.arange(1, tensor.shape[1] + 1, dtype=torch.float64, device=tensor.device)
    hashes = [torch.hash_tensor(part.detach() * factors, 1) for part in torch.split(tensor, ROWS)]
    return torch.cat([part.view(torch.int64) for part in hashes]).cpu()


class Tie:
    """The state of the embedding and the head of a model that config.json ties, as a Generator follows it.

    own_head: the head has its own memory. can_untie: it can get its own memory; on a GPU, CUDA graphs hold its address.
    """

    def __init__(self, own_head: bool, can_untie: bool) -> None:
        self.own_head, self._can_untie = own_head, can_untie
        self._refused = False  # the update has a head that would need its own memory
        self._last: Tensor | None = None  # fingerprint of the tensor, or delta, that was given last for the embedding

    def follow(self, tensors: Iterator[tuple[str, Tensor]], partial: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an update as they are to be written. partial: see WeightUpdate. After the last one,
        raise ValueError for a head that would need its own memory and cannot get it."""
        return self._follow_two(tensors, partial) if self.own_head else self._follow_one(tensors, partial)

    def _follow_one(self, tensors: Iterator[tuple[str, Tensor]], partial: bool) -> Iterator[tuple[str, Tensor]]:
        """Follow an update of a model that has one tensor for both."""
        self._refused = has_embedding = False
        head: tuple[str, Tensor] | None = None
        for name, tensor in tensors:
            kind = name.removesuffix(DELTA)
            if kind == HEAD:  # if it has to wait, its memory may be used for the next tensor
                head = name, tensor if has_embedding else tensor.detach().clone()
            else:
                yield name, tensor
            if kind == EMBEDDING:
                has_embedding, self._last = True, fingerprint(tensor)
            del tensor
            if head is not None and has_embedding:
                yield from self._write_head(*head)
                head = None
        if head is not None and partial:
            yield from self._write_head(*head)
        elif head is not None:
            self._last = fingerprint(head[1])
            yield EMBEDDING, head[1]
        if self._refused:
            raise ValueError(
                f"{HEAD!r} has other values than {EMBEDDING!r}, and the model was started with one tensor for both, "
                "which is final on a GPU; start it with tie_word_embeddings=false in config.json"
            )

    def _write_head(self, name: str, head: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a head, which then gets its own memory, unless it is the embedding."""
        if self._last is not None and torch.equal(fingerprint(head), self._last):
            return
        if self._can_untie:
            self.own_head = True
            yield name, head
        else:
            self._refused = True

    def _follow_two(self, tensors: Iterator[tuple[str, Tensor]], partial: bool) -> Iterator[tuple[str, Tensor]]:
        """Follow an update of a model whose head has its own memory: a complete one may give one tensor for both."""
        given: set[str] = set()
        for name, tensor in tensors:
            yield name, tensor
            if name in OTHER and not given and not partial:
                yield OTHER[name], tensor  # which the other one replaces if it comes
            given |= OTHER.keys() & {name}
            del tensor
