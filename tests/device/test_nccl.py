"""The communicator of NCCL, over a library without GPUs."""

from __future__ import annotations

import pytest
import torch
from fake_nccl import IN_PROGRESS, REMOTE_ERROR, SUCCESS, FakeNccl, use

from fastgen.device.nccl import ID_BYTES, Communicator

ID = bytes(ID_BYTES)


def test_a_communicator_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is the one of NCCL 2.14, which all later versions read."""
    fake = use(FakeNccl(lambda looks: SUCCESS if looks > 2 else IN_PROGRESS), monkeypatch)
    group = Communicator(2, ID, 1)
    assert fake.config == [24, 0xCAFEBEEF, 21400, 0]
    assert [group.ready() for _ in range(3)] == [False, False, True]
    group.all_reduce(torch.zeros(1))
    assert not group.ready(), "the operation has not been launched"
    group.close()
    group.close()
    assert fake.called == ["init", "all_reduce", "abort"]


def test_errors_that_come_later_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeNccl(lambda looks: REMOTE_ERROR), monkeypatch)
    with pytest.raises(RuntimeError, match="NCCL: error 6"):
        Communicator(2, ID, 1).ready()
