"""Gathering: the tensors of a trainer, gathered once for several senders that send them at the same time."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class Share:
    """A tensor of one sender, which behaves like a DTensor: `full_tensor` waits until it is gathered."""

    def __init__(self, gathering: Gathering, sender: Sender, index: int, like: Any) -> None:
        self.dtype, self.shape, self.device = like.dtype, like.shape, like.device
        self._gathering, self._sender, self._index = gathering, sender, index

    def full_tensor(self) -> Tensor:
        return self._gathering.take(self._sender, self._index)


class Sender:
    """A sender to one engine. named: its tensors, which it takes once each, in their order."""

    def __init__(self, gathering: Gathering, tensors: list[tuple[str, Any]]) -> None:
        self.named = [(name, Share(gathering, self, index, like)) for index, (name, like) in enumerate(tensors)]


class Gathering:
    """Tensors that are gathered one at a time: the next one after all senders have taken the last one.

    tensors: named tensors, or DTensors. keep: keep a copy of each in host memory.
    copies: {name: its copy}; None without `keep`, or if a tensor could not be gathered.
    """

    def __init__(self, tensors: list[tuple[str, Any]], keep: bool) -> None:
        self._tensors = tensors
        self.copies: dict[str, Tensor] | None = {} if keep else None
        self._senders, self._waiting = set[Sender](), set[Sender]()
        self._index, self._current, self._ended = -1, torch.empty(0), False
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def join(self) -> Sender:
        """Return another sender. Call this before `run`."""
        sender = Sender(self, self._tensors)
        self._senders.add(sender)
        return sender

    def run(self) -> None:
        """Gather all tensors in this thread, unless that was done. All ranks of a sharded trainer call this, since all
        take part."""
        if self._ended:
            return
        try:
            for index, (name, tensor) in enumerate(self._tensors):
                error = None
                try:
                    full = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
                    if self.copies is not None:
                        self.copies[name] = full.to("cpu", copy=True)
                except Exception as raised:  # the senders raise it; other ranks go on with the next tensor
                    full, error, self.copies = torch.empty(0), raised, None
                with self._changed:
                    self._index, self._current, self._error = index, full, error
                    self._waiting = set(self._senders)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._waiting)
                    self._current = torch.empty(0)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def take(self, sender: Sender, index: int) -> Tensor:
        """Wait for a tensor and return it. Raises the error of gathering it."""
        with self._changed:
            self._changed.wait_for(lambda: self._index >= index or self._ended)
            if self._index != index:
                raise RuntimeError("the trainer was interrupted while it gathered its weights")
            current, error = self._current, self._error
            self._waiting.discard(sender)
            self._changed.notify_all()
        if error is not None:
            raise error
        return current

    def leave(self, sender: Sender) -> None:
        """Take no more tensors."""
        with self._changed:
            self._senders.discard(sender)
            self._waiting.discard(sender)
            self._changed.notify_all()
