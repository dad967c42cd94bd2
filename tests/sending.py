"""Trainers that send weights to fgserve, for tests on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

KEY = "secret"

SENDER = """
import os, signal, sys, threading
from safetensors.torch import load_file
from fastgen.rl.remote import RemoteGenerator

url, key, folder, end, device = sys.argv[1:]
tensors = load_file(folder + "/model.safetensors", device)
class Last:
    tensor = tensors["model.norm.weight"]
    dtype, shape, device = tensor.dtype, tensor.shape, tensor.device
    def full_tensor(self):  # when all others have been sent
        print("sending", flush=True)
        os.kill(os.getpid(), getattr(signal, end))
del tensors["model.norm.weight"]
timeout = 60 if (end, device) == ("SIGKILL", "cpu") else 1  # its end is noticed at once
gen = RemoteGenerator(url, api_key=key, timeout=timeout, replace_group=True, bucket_bytes=1)
gen.update_weights({**tensors, "model.norm.weight": Last()})
"""


class Sharded:
    """A tensor that is gathered like a DTensor. before: called when it is gathered. error: raised after that."""

    device = torch.device("cpu")
    gathered = 0

    def __init__(
        self, tensor: Tensor, error: Exception | None = None, before: Callable[[], object] = lambda: None
    ) -> None:
        self._tensor, self._error, self._before = tensor, error, before
        self.dtype, self.shape = tensor.dtype, tensor.shape

    def full_tensor(self) -> Tensor:
        Sharded.gathered += 1
        self._before()
        if self._error is not None:
            raise self._error
        return self._tensor


def refusal(call: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)
