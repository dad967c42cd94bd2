"""generator.py: a Generator that has slept answers as before. (Ranks do in test_tensor_parallel.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FEW, families_in_turn, new_weights
from fake_driver import FakeDriver
from invariants import check_scheduler
from test_updating import LONG, OPTIONS, SHORT, SYSTEM, answers, old_weights, refuses

from fastgen import Generator
from fastgen.device.gpu_memory import DeviceMemory
from fastgen.device.memory import Memory

pytestmark = pytest.mark.timeout(60)


class FakeGPU:
    """A fake GPU, whose memory is overwritten while it is given back."""

    def __init__(self) -> None:
        self.made: list[FakeDriver] = []

    def memory(self, device: torch.device, huge_pages: bool = True) -> Memory:
        self.made.append(FakeDriver())
        return DeviceMemory(self.made[-1], device)

    @property
    def mapped(self) -> int:
        return sum(sum(driver.mapped.values()) for driver in self.made)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """A fake GPU that replaces the CPU's memory, and holds all weights, which a GPU does not pack."""
    made = FakeGPU()
    monkeypatch.setattr("fastgen.model.parameters.packing", lambda dtype, deterministic: None)
    for module in ("kv_pool", "parameters"):
        monkeypatch.setattr(f"fastgen.model.{module}.memory_on", made.memory)
    yield made
    assert not any(driver.ranges or driver.mapped for driver in made.made), "all is given back at the end"


def pools(gen: Generator) -> tuple[int, int]:
    """Return the addresses of the KV pool and of a weight."""
    return gen._runner.pool.whole.data_ptr(), gen._runner.model.parameters.embedding.data_ptr()


@pytest.mark.parametrize(("family", "dtype"), families_in_turn(["float32", "bfloat16"]), indirect=["family"])
def test_answers_are_the_same_after_a_sleep(family: Path, dtype: str) -> None:
    with Generator(family, dtype=dtype, **OPTIONS) as gen:
        before, where = answers(gen), pools(gen)
        for tags in (("weights", "kv_cache"), "kv_cache", ["weights"], ("kv_cache", "weights")):
            gen.sleep(tags)
            gen.wake()
            assert answers(gen) == before
        assert pools(gen) == where


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_answers_are_the_same_where_all_memory_was_given_back(family: Path, gpu: FakeGPU) -> None:
    with Generator(family, dtype="bfloat16", host_cache_gb=2e-3, **OPTIONS | {"num_pages": 20}) as gen:
        before, where, size = answers(gen), pools(gen), gpu.mapped
        for _ in range(2):
            gen.sleep()
            assert gpu.mapped == 0
            gen.wake("kv_cache")
            assert 0 < gpu.mapped < size
            gen.wake()
            assert gpu.mapped == size
            assert answers(gen) == before
        assert pools(gen) == where
        gen.sleep("weights")
        gen.sleep("kv_cache")


def test_nothing_is_said_before_dropped_weights_come_with_an_update(llama: Path, gpu: FakeGPU) -> None:
    new = new_weights(llama)
    with Generator(llama, dtype="bfloat16", **OPTIONS) as gen:
        before = answers(gen)
        gen.sleep(keep_weights=False)
        assert gpu.mapped == 0
        with pytest.raises(RuntimeError, match="the weights are asleep; call wake first, of 'weights' at least"):
            gen.update_weights(new)
        refuses(gen, r"asleep: kv_cache, weights; call wake first")
        gen.wake(["weights"])
        refuses(gen, r"asleep: kv_cache; call wake first")
        with pytest.raises(RuntimeError, match="dropped by sleep; call update_weights with all of them"):
            gen.update_weights({"model.norm.weight": new["model.norm.weight"]}, partial=True)
        with pytest.raises(ValueError, match="missing"):
            gen.update_weights({})
        gen.wake()
        refuses(gen, "the weights were dropped by sleep; call update_weights with all of them")
        assert gen.update_weights(new) == gen.weight_version == 1
        other = answers(gen)
        gen.sleep(keep_weights=False)
        gen.sleep(keep_weights=True)  # does not bring them back
        gen.wake("weights")
        gen.update_weights(iter(old_weights(llama).items()))
        gen.wake("kv_cache")
        assert answers(gen) == before != other


def test_the_prefix_cache_and_the_host_tier_are_empty(llama: Path) -> None:
    for tags, keep_weights, cached in (
        ((), True, 32),
        ("weights", True, 32),
        ("kv_cache", True, 0),
        ("weights", False, 0),
    ):
        with Generator(llama, host_cache_gb=2e-3, **OPTIONS | {"num_pages": 8}) as gen:
            for prompt in (SYSTEM, SYSTEM[::-1]):
                gen.generate(prompt, SHORT)
            gen.sleep(tags, keep_weights=keep_weights)
            gen.wake()
            if not keep_weights:
                gen.update_weights(old_weights(llama))
            assert gen.generate(SYSTEM, SHORT)[0].cached_tokens == cached
            check_scheduler(gen._loop.scheduler)


def test_the_bytes_that_are_told_are_those_that_went(
    llama: Path, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.model.live_weights.device_memory", lambda device: 10**9 - gpu.mapped)
    with Generator(llama, dtype="bfloat16", **OPTIONS) as gen:
        pool, whole = gen._runner.pool, gpu.mapped
        freed = gen.sleep("kv_cache", keep_weights=False)  # which concerns only weights that go to sleep
        assert freed >= pool.whole.nbytes
        assert gen.sleep() == whole - freed > 0
        assert gen.sleep() == gen.sleep("weights") == gen.sleep([], keep_weights=False) == 0
        for _ in range(2):
            gen.wake()
        assert not pool.whole.any()
        gen.generate([5, 6], SHORT)


def test_requests_in_flight_refuse_a_sleep_and_go_on(llama: Path) -> None:
    with Generator(llama, **OPTIONS) as gen:
        alone = gen.generate(SYSTEM, LONG)[0].completions[0].token_ids
        gen.add(SYSTEM, LONG)
        events = [event for _ in range(3) for event in gen.step()]
        with pytest.raises(ValueError, match=r"requests are in flight \(1\); finish or abort them before sleep"):
            gen.sleep()
        while gen.unfinished:
            events += gen.step()
        assert [token for event in events for token in event.token_ids] == alone
        gen.sleep()  # a token too many may be on its way
        gen.wake()
        assert gen.generate(SYSTEM, LONG)[0].completions[0].token_ids == alone


def test_what_cannot_be_asked(llama: Path) -> None:
    with Generator(llama, **OPTIONS) as gen:
        for call in (gen.sleep, gen.wake):
            with pytest.raises(ValueError, match="tags has 'kv', 'weight'; there are 'weights' and 'kv_cache'"):
                call(["weight", "kv_cache", "kv"])
            with pytest.raises(ValueError, match="tags has 5;"):  # vLLM's sleep takes a level
                call(5)  # type: ignore[arg-type]
        gen.sleep()
    for call in (gen.sleep, gen.wake):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_too_little_memory_leaves_it_awake_or_asleep(
    llama: Path, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Generator(llama, dtype="bfloat16", **OPTIONS) as gen:
        before, size = answers(gen), gpu.mapped
        with monkeypatch.context() as patch:
            patch.setattr("fastgen.device.pinned_memory._free_memory", lambda: 1e4)
            with pytest.raises(ValueError, match=r"keeping the weights takes .* of which 0\.0 GB are free; pass"):
                gen.sleep()
        assert gpu.mapped == size
        assert answers(gen) == before
        gen.sleep()
        for driver in gpu.made:
            driver.capacity = 5000
        with pytest.raises(torch.OutOfMemoryError):
            gen.wake()
        refuses(gen, "asleep")
        for driver in gpu.made:
            driver.capacity = driver.total
        gen.wake()
        assert answers(gen) == before


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_wake_sets_right_what_an_interrupt_has_cut_short(
    method: str, llama: Path, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Generator(llama, dtype="bfloat16", **OPTIONS) as gen:
        before, whole = answers(gen), getattr(gen._runner.weights, method)

        def cut(*arguments: Any) -> None:
            whole(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(gen._runner.weights, method, cut)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                gen.sleep()
                gen.wake()
        refuses(gen, "asleep")
        gen.wake()
        assert answers(gen) == before
