"""gathering.py: each tensor is gathered once, for all senders, and only one is held at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sending import Sharded
from torch import Tensor

from fastgen.rl.gathering import Gathering, Sender

TENSORS = [(f"t{number}", torch.full((2,), float(number))) for number in range(20)]


def taken(gathering: Gathering, sender: Sender) -> list[Tensor]:
    try:
        return [share.full_tensor() for _, share in sender.named]
    finally:
        gathering.leave(sender)


@pytest.mark.parametrize("keep", [False, True])
def test_senders_get_each_tensor_which_is_gathered_once(keep: bool) -> None:
    Sharded.gathered = 0
    gathering = Gathering([(name, Sharded(tensor)) for name, tensor in TENSORS], keep)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(taken, gathering, gathering.join()) for _ in range(3)]
        gathering.run()
        gathering.run()
        found = [each.result() for each in running]
    assert Sharded.gathered == len(TENSORS)
    for tensors in found:
        torch.testing.assert_close(tensors, [tensor for _, tensor in TENSORS])
    if keep:
        assert gathering.copies is not None
        torch.testing.assert_close(gathering.copies, dict(TENSORS))
        assert gathering.copies["t3"].data_ptr() != TENSORS[3][1].data_ptr()
    else:
        assert gathering.copies is None


def test_the_next_tensor_waits_for_the_slowest_sender() -> None:
    Sharded.gathered = 0
    gathering = Gathering([(name, Sharded(tensor)) for name, tensor in TENSORS], False)
    fast, slow = gathering.join(), gathering.join()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(taken, gathering, fast)
        gathers = pool.submit(gathering.run)
        gathering.take(slow, 0)
        gathering.take(slow, 1)
        assert Sharded.gathered <= 3
        gathering.leave(slow)
        gathers.result()
        assert len(running.result()) == len(TENSORS)


def test_an_error_of_a_tensor_reaches_all_senders_and_the_others_are_gathered() -> None:
    Sharded.gathered = 0
    tensors = [(name, Sharded(tensor, KeyError("t1") if name == "t1" else None)) for name, tensor in TENSORS]
    gathering = Gathering(tensors, True)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(taken, gathering, gathering.join()) for _ in range(2)]
        gathering.run()
        assert [type(each.exception()) for each in running] == [KeyError, KeyError]
    assert (Sharded.gathered, gathering.copies) == (len(TENSORS), None)


def test_senders_of_an_interrupted_trainer_end() -> None:
    class Interrupted(Sharded):
        def full_tensor(self) -> Tensor:
            raise KeyboardInterrupt

    gathering, failed = Gathering([("a", Interrupted(torch.ones(1)))], False), threading.Event()
    sender = gathering.join()

    def take() -> None:
        with pytest.raises(RuntimeError, match="interrupted"):
            gathering.take(sender, 0)
        failed.set()

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gathering.run()
    thread.join(10)
    assert failed.is_set()
