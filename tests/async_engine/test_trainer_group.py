"""What a vLLM trainer sends: NCCL's id, which is pickled, and tensors packed into buffers."""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nccl import IN_PROGRESS, REMOTE_ERROR, SUCCESS, FakeNccl, use
from vllm_trainer import Structure, pickled

from fastgen.async_engine.trainer_group import ID_KEY, TrainerGroup, decode_id, find_id, packed, read_id, unpacked
from fastgen.processes.errors import DepartedError

ID = bytes(range(128))


def test_the_id_of_a_trainer_is_read() -> None:
    for protocol in (3, 4, 5):
        assert read_id(pickled(Structure.from_buffer_copy(ID), protocol)) == ID


class Evil:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


@pytest.mark.parametrize(
    "value",
    [Evil(), [Evil()], ID, {"a": 1}, time.sleep, Structure, ctypes.c_int(3)],
    ids=["call", "nested", "bytes", "dict", "function", "type", "int"],
)
def test_no_other_pickle_is_read(value: Any, capsys: Any) -> None:
    with pytest.raises(ValueError, match=r"known senders are vLLM 0.22 to 0.33"):
        read_id(pickled(value))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"cos\nsystem\n(S'echo it ran'\ntR.",
        b"c_ctypes\n_unpickle\n(S'x'\n(}S'y'\nttR.",
        b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n(tR.",
        b"c_ctypes\n_unpickle\n.",
    ],
)
def test_no_handmade_pickle_is_read(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"known senders are"):
        read_id(data)


def test_the_store_of_a_trainer() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    address = ("127.0.0.1", store.port)
    with pytest.raises(DepartedError, match=r"has no NCCL id after 0.1 seconds"):
        find_id(address, 0.1, lambda: None)
    store.set(ID_KEY, pickled(Structure.from_buffer_copy(ID)))
    assert find_id(address, 5, lambda: None) == ID
    assert decode_id(base64.b64encode(ID).decode()) == ID
    with pytest.raises(ValueError, match=r"not the base64 of 128 bytes"):
        decode_id("ä")


def test_a_client_that_goes_ends_the_wait() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def gone() -> None:
        raise DepartedError("it has gone")

    with pytest.raises(DepartedError, match="it has gone"):
        find_id(("127.0.0.1", store.port), 5, gone)


def group(seconds: float, check: Callable[[], None] = lambda: None) -> TrainerGroup:
    return TrainerGroup(ID, (1, 2), torch.device("cpu"), None, seconds, check)


def test_a_trainer_that_never_joins_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeNccl(lambda looks: IN_PROGRESS), monkeypatch)
    begun = time.monotonic()
    with pytest.raises(DepartedError, match=r"not all 2 ranks .* within 0.2 seconds; .* with a new id"):
        group(0.2)
    assert time.monotonic() - begun < 50
    assert fake.called == ["init", "abort"]


def test_a_trainer_that_goes_before_it_joins_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeNccl(lambda looks: REMOTE_ERROR if looks > 3 else IN_PROGRESS), monkeypatch)
    with pytest.raises(DepartedError, match=r"cannot join the trainer's group \(NCCL: error 6\)"):
        group(60)
    assert fake.called == ["init", "abort"]


def test_a_client_that_goes_ends_the_wait_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise DepartedError("it has gone")

    fake = use(FakeNccl(lambda looks: IN_PROGRESS), monkeypatch)
    with pytest.raises(DepartedError, match=r"^it has gone"):
        group(60, gone)
    assert fake.called == ["init", "abort"]


def test_an_operation_is_waited_for_when_it_is_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeNccl(lambda looks: SUCCESS if looks > 3 else IN_PROGRESS), monkeypatch)
    joined = group(60)
    assert fake.called == ["init", "all_reduce", "event"]
    assert len(list(joined.receive([("a", "float32", [3])], None, lambda: None))) == 1
    assert fake.called[3:] == ["broadcast", "event"]
    assert not joined.broken


@pytest.mark.parametrize("launched", [True, False])
def test_a_trainer_that_sends_nothing_is_left(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeNccl(lambda looks: SUCCESS), monkeypatch)
    joined = group(0.2)
    use(fake, monkeypatch, sends=False)
    fake.state = lambda looks: SUCCESS if launched else IN_PROGRESS
    reason = "sent nothing for" if launched else "not connected within"
    with pytest.raises(DepartedError, match=rf"has {reason} 0.2 seconds"):
        list(joined.receive([("a", "float32", [3])], None, lambda: None))
    assert joined.broken
    assert fake.called[3:] == (["broadcast", "event", "abort"] if launched else ["broadcast", "abort"])


def test_a_group_that_fails_at_its_start_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(FakeNccl(lambda looks: REMOTE_ERROR if "all_reduce" in fake.called else SUCCESS), monkeypatch)
    with pytest.raises(RuntimeError, match="NCCL: error 6"):
        group(60)
    assert fake.called == ["init", "all_reduce", "abort"]


def test_buffers_end_where_a_sender_ends_them() -> None:
    """A buffer ends with the tensor that makes it larger than the agreed size, as in vLLM's packed_tensor.py."""
    header = [("a", "float32", [3]), ("b", "bfloat16", [1]), ("c", "float32", [2, 2]), ("d", "float32", [])]
    names = [[name for name, _ in each] for each in packed(header, 12)]
    assert names == [["a", "b"], ["c"], ["d"]]
    assert [[name for name, _ in each] for each in packed(header, 1 << 30)] == [["a", "b", "c", "d"]]
    assert [len(each) for each in packed(header, None)] == [1, 1, 1, 1]
    sent = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, dtype, shape in header}
    (tensors,) = packed(header, 1 << 30)
    memory = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent.values()])
    found = dict(unpacked(memory, tensors))
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
