"""The rollout of verl on one GPU: the weights go through memory that trainer and engine share (CUDA IPC)."""

from __future__ import annotations

import pytest
import torch
from verl_stand_in import use_rollout

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
    pytest.mark.timeout(280),
]


def test_an_engine_gets_the_weights_of_each_step() -> None:
    use_rollout("cuda:0", "ipc")
