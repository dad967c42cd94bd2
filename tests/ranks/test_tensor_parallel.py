"""Tensor parallelism on the CPU: ranks, spawned here or those of a program, answer as one process does."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import ALL, CONFIG, adapter
from bitwise import alone, preempting, random_requests
from bitwise import answers as answers_of
from conftest import FAMILIES, VOCAB, Checkpoint, check_idle, new_weights
from hash_model import hopeful
from ranks_program import CLOSE, SCORED, SHORT, SOME, STARTS, answers, check_close, contents, run_ranks
from safetensors.torch import load_file

from fastgen import Generator
from fastgen.engine.options import token_bytes
from fastgen.model.config import read_config
from fastgen.ranks import start as ranks_start

pytestmark = pytest.mark.timeout(300)  # on a busy machine

OTHERS = (
    "ministral3",
    "granite",
    "exaone4",
    "phi3",
    "arcee",
    "hunyuan",
    "hyperclovax",
    "phi4_mini",
    "gemma3",
    "muse",
)  # families whose layers differ from Llama's


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint) -> Path:
    """A model with norms of heads, and with fewer KV heads than ranks."""
    return checkpoint("Qwen3", **FAMILIES["qwen3"][1], num_key_value_heads=1)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[Generator]:
    """One process, with room for everything."""
    with Generator(folder, device="cpu", seed=3) as gen:
        yield gen


@pytest.fixture(scope="module")
def split(folder: Path) -> Iterator[Generator]:
    """Two ranks that this process spawns, with few pages, a host tier of a few more, and steps of few tokens."""
    page_size = 8
    host_gb = 60 * 2 * page_size * token_bytes(read_config(folder), "float32") / 1e9  # both ranks hold the KV head
    options = {"page_size": page_size, "num_pages": 18, "max_seqs": 12, "max_step_tokens": 50, "seed": 3}
    with Generator(folder, device="cpu", tensor_parallel=2, host_cache_gb=host_gb, **options) as gen:
        gen._loop.scheduler = hopeful(gen.config)
        yield gen


def test_ranks_answer_and_score_as_one_process(split: Generator, whole: Generator) -> None:
    """Some sequences are preempted, or come from cached pages and the host tier; a second run gives the same bits."""
    assert split.config.tensor_parallel == 2
    first = answers(split)
    check_close(first, answers(whole))
    assert list(map(contents, answers(split))) == list(map(contents, first))
    check_idle(split)
    stats = split.stats
    assert min(stats.preemptions, stats.pages_saved, stats.pages_loaded, stats.cached_tokens) > 0
    expected = whole.score(SCORED, start=STARTS, temperature=0.8)
    for _ in range(2):
        for mine, its in zip(split.score(SCORED, start=STARTS, temperature=0.8), expected, strict=True):
            assert mine == pytest.approx(its, abs=CLOSE, nan_ok=True)
    for states, expected_states in zip(split.features(SCORED), whole.features(SCORED), strict=True):
        torch.testing.assert_close(states, expected_states, rtol=0, atol=10 * CLOSE)
    with pytest.raises(ValueError, match="only the states of the last layer can be read; give layers=-1"):
        split.features(SCORED, 0)


def generate_forever(gen: Generator) -> None:
    while True:
        gen.generate([[5, 6, 7]] * 8, SHORT)


def test_the_schedule_never_shows_in_the_answers_of_two_ranks(
    split: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in chunks, preempted, from cached pages and in batches have the bits that each has alone."""
    assert split.config.deterministic
    requests, before = random_requests(VOCAB, 6, 100, 20), split.stats
    expected = alone(split, requests)
    monkeypatch.setattr(split._loop, "advance", split._loop.advance)  # as it is after the test
    preempting(split, steps=19)
    for _ in range(2):
        assert answers_of(split, requests) == expected
    assert split.stats.preemptions - before.preemptions > 3
    assert split.stats.cached_tokens - before.cached_tokens > 50


def test_two_generators_of_ranks_one_of_which_is_interrupted_traced_and_loses_a_rank(
    split: Generator, llama: Path, tmp_path: Path
) -> None:
    """Steps of one Generator run between steps of the other, and it goes on after the other has died."""
    options = {"num_pages": 16, "page_size": 16, "max_seqs": 4, "seed": 3}
    with Generator(llama, device="cpu", tensor_parallel=2, **options) as other:
        for gen in (split, other):
            gen.add([5, 6, 7], SHORT)
        said: list[list[int]] = [[], []]
        while split.unfinished or other.unfinished:
            for ids, gen in zip(said, (split, other), strict=True):
                ids += [token for event in gen.step() for token in event.token_ids]

        def check_answer() -> None:
            for ids, gen in zip(said, (split, other), strict=True):
                assert ids == gen.generate([5, 6, 7], SHORT)[0].completions[0].token_ids

        interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            generate_forever(other)
        assert other.unfinished == 0
        assert not dist.is_initialized()
        check_answer()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the program's own
        check_answer()
        dist.destroy_process_group()

        other.add([5, 6, 7], SHORT, "a")
        with other.profile(tmp_path / "trace.json", steps=5):
            for _ in range(3):
                other.step()
        assert len(other.abort("a")[0].completions[0].token_ids) == 3, "tokens that came meanwhile are not lost"
        events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
        found = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        assert [found[part] for part in ("schedule", "launch", "collect", "update")] == [3, 3, 2, 2]
        assert "aten::embedding" in {event["name"] for event in events if event.get("cat") == "cpu_op"}

        (rank,) = processes = other._runner._spawned.processes
        os.kill(rank.pid, signal.SIGSTOP)
        threading.Timer(0.3, rank.send_signal, (signal.SIGCONT,)).start()
        check_answer()  # the others wait for a rank that is stopped
        threading.Timer(0.2, rank.kill).start()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1 was killed by SIGKILL .*; make a new Generator"):
            generate_forever(other)
        assert time.monotonic() - begun < 50
        assert not any(Path(f"/proc/{process.pid}").exists() for process in processes), "not even a zombie is left"
        with pytest.raises(RuntimeError, match=r"the ranks no longer agree, .*rank 1 was killed"):
            other.generate([5, 6, 7], SHORT)
        assert split.generate([5, 6, 7], SHORT)[0].completions[0].token_ids == said[0]


def cut_short(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:2]
    raise LookupError("lost")


def test_ranks_take_new_weights_and_sleep(split: Generator, whole: Generator, folder: Path) -> None:
    """Weights come from a mapping or from an iterator; the prefix cache and the host tier hold KV of the old ones."""
    old, new = load_file(folder / "model.safetensors"), new_weights(folder)
    before, (first, second) = answers(split, SOME), split.weight_checksums()
    assert first.keys() == second.keys() == old.keys()
    equal = {name for name, value in first.items() if value == second[name]}
    assert equal == {name for name in old if "norm" in name or "k_proj" in name or "v_proj" in name}, "one KV head"

    def check_restored() -> None:
        assert split.weight_checksums() == [first, second]
        assert list(map(contents, answers(split, SOME))) == list(map(contents, before))
        check_idle(split)

    with pytest.raises(ValueError, match="missing 1 of"):
        split.update_weights(dict(list(new.items())[1:]))
    with pytest.raises(LookupError, match="lost"):
        split.update_weights(cut_short(new))
    for gen in (split, whole):
        assert gen.update_weights(new.items()) == 1
    assert not any(first.items() & each.items() for each in split.weight_checksums())
    check_close(answers(split, SOME), answers(whole, SOME))
    for gen in (split, whole):
        gen.update_weights(iter(old.items()), version=0)
    check_restored()
    split.sleep()
    with pytest.raises(RuntimeError, match="call wake first"):
        split.generate([5, 6, 7], SHORT)
    with pytest.raises(RuntimeError, match="the weights are asleep; call wake first"):
        split.weight_checksums()
    split.wake()
    check_restored()
    split.sleep(keep_weights=False)
    split.wake("weights")
    split.update_weights(old)
    split.wake()
    split.update_weights(old, version=0)  # as before, for the next test
    check_restored()


@pytest.mark.long
def test_ranks_merge_adapters(split: Generator, whole: Generator, folder: Path) -> None:
    before = answers(split, SOME)
    with pytest.raises(ValueError, match="missing 1 of"):
        split.update_adapter(dict(list(adapter(folder).items())[1:]), CONFIG)
    for seed, layers in enumerate((ALL, ("o_proj", "up_proj"))):
        for gen in (split, whole):
            config = CONFIG | {"target_modules": layers}
            assert gen.update_adapter(adapter(folder, layers, seed=seed), config) == seed + 1
        check_close(answers(split, SOME), answers(whole, SOME))
    for gen in (split, whole):
        gen.update_adapter(None, version=0)
    assert list(map(contents, answers(split, SOME))) == list(map(contents, before))
    check_idle(split)


@pytest.mark.parametrize("others", [("phi3",), pytest.param(OTHERS, marks=pytest.mark.long)])
def test_two_ranks_of_a_program(others: tuple[str, ...], checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The first model has biases and tied embeddings, and a window in some layers. Rank 0 is killed in the end."""
    folders = [checkpoint(FAMILIES[name][0], **FAMILIES[name][1]) for name in ("qwen2", *others)]
    assert run_ranks(2, tmp_path / "store", *folders) == [-signal.SIGKILL, 3]


@pytest.mark.long
def test_four_ranks_of_a_program(llama: Path, tmp_path: Path) -> None:
    """Two ranks each hold the same KV head. The last rank is killed in the end."""
    assert run_ranks(4, tmp_path / "store", llama) == [3, 3, 3, -signal.SIGKILL]


# ------------------------------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("options", "sizes", "kind", "text"),
    [
        ({"tensor_parallel": 3}, {}, ValueError, "num_attention_heads=4 does not divide by 3 ranks"),
        ({}, {"intermediate_size": 95}, ValueError, "intermediate_size=95 does not divide by 2 ranks"),
        ({}, {"vocab_size": 321}, ValueError, "vocab_size=321 does not divide by 2 ranks"),
        ({}, {"num_attention_heads": 6, "num_key_value_heads": 3}, ValueError, "num_key_value_heads=3 and 2 ranks"),
        ({}, {"architectures": ["Olmo2ForCausalLM"]}, ValueError, "norms of q and k of this model cannot be split"),
        ({"tp_group": 1}, {}, ValueError, "tp_group has its ranks already; leave tensor_parallel=2"),
        ({"tensor_parallel": 1, "tp_group": "tp"}, {}, TypeError, "tp_group must be a process group or a DeviceMesh"),
        ({"device": "cuda"}, {}, ValueError, "tensor_parallel is 2, and torch finds 1 GPUs here; lower it, or"),
        ({"device": "cuda:1"}, {}, ValueError, "device is 'cuda:1'; with tensor_parallel it is"),
        ({"page_size": 0}, {}, ValueError, "page_size is 0; it must be at least 1"),
    ],
)
def test_what_cannot_work_is_told_before_ranks_are_started(
    options: dict[str, Any],
    sizes: dict[str, int],
    kind: type[Exception],
    text: str,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 16, **sizes}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ranks_start, "spawn", lambda *_: pytest.fail("a rank is started"))
    with pytest.raises(kind, match=re.escape(text)):
        Generator(tmp_path, **{"device": "cpu", "tensor_parallel": 2, **options})
