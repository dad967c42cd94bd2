"""Speculation on a GPU changes no bit where deterministic is on, in CUDA graphs and with steps launched ahead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import adversary_on_device
from heads import head_of
from known_models import KNOWN
from safetensors.torch import load_file

from fastgen import Generator, SamplingParams, Speculation
from fastgen.speculation.self_draft import SelfDraft

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
EAGER = Speculation(row_cost=0.0, history_tokens=0)
GENERATED = 150


def params(number: int, speculate: bool = True) -> SamplingParams:
    """Parameters of a request, whose seed is its number."""
    temperature = (0.0, 0.7, 1.0)[number % 3]
    return SamplingParams(
        max_tokens=GENERATED, ignore_eos=True, seed=number, temperature=temperature, logprobs=1, speculate=speculate
    )


@pytest.mark.parametrize("name", [None, "Qwen/Qwen3-8B"])
def test_drafts_of_an_adversary_change_no_bit(name: str | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_seqs": 70}
    if name is not None:
        (tmp_path / "config.json").write_text(json.dumps({**KNOWN[name][0], "num_hidden_layers": 2}))
        options |= {"model": tmp_path, "load": "dummy"}
    options |= {"kv_cache_gb": 1.0, "max_model_len": 1024, "seed": 0, "deterministic": True, "prefix_cache": False}
    with Generator(speculate=EAGER, **options) as gen:
        for lanes in (1, 8, 20, 68):
            _compare(gen, lanes)


HEADS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 16, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}},
    "eagle": {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "target_layer_ids": [0, 1, 2],
              "draft_vocab_size": 32000},
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*HEADS, "int4"])
def test_a_head_changes_no_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CUDA graphs draft what it drafts launched kernel by kernel, and texts get as many right drafts as without."""
    monkeypatch.setattr("fastgen.speculation.planning.BARREN", 10**9)
    target, head = tmp_path / "target", tmp_path / "head"
    for folder in (target, head):
        folder.mkdir()
    config = {**KNOWN["Qwen/Qwen3-8B"][0], "num_hidden_layers": 4}
    (target / "config.json").write_text(json.dumps(config))
    (head / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, **HEADS.get(kind, {})}))
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_seqs": 70}
    options |= {"model": target, "load": "dummy", "kv_cache_gb": 1.0, "max_model_len": 1024, "seed": 0}
    _leave_large_numbers()  # a start runs torch's operations on memory that no kernel has written
    speculate = replace(EAGER, head=kind if kind == "int4" else head)
    with Generator(speculate=speculate, prefix_cache=False, **options) as gen:
        for lanes in (1, 3, 20):
            _compare(gen, lanes, may_wait=True)
        assert gen.stats.head_drafted > 0
        _compare_graphs(gen)


def _leave_large_numbers() -> None:
    """Free memory in which small tensors will find numbers that are no tokens."""
    filled = [torch.full((2**15,), 2**30, dtype=torch.int32, device="cuda") for _ in range(1000)]
    filled.clear()


def test_an_int4_copy_is_made_again_after_sleep_and_updates() -> None:
    prompts = [[{"role": "user", "content": f"Count from {number} to {number + 9}."}] for number in range(3)]
    shared = SamplingParams(max_tokens=60, temperature=0, logprobs=1)
    with Generator(device="cuda", speculate=replace(EAGER, head="int4"), kv_cache_gb=0.5) as gen:
        expected = gen.generate(prompts, replace(shared, speculate=False))
        for change in ("none", "sleep", "update", "drop"):
            if change in ("sleep", "drop"):
                gen.sleep(keep_weights=change == "sleep")
                gen.wake()
            if change == "update":
                _spoil_copy(gen)
            if change in ("update", "drop"):
                gen.update_weights(load_file(gen.folder / "model.safetensors"))
            before = gen.stats
            found = gen.generate(prompts, shared)
            for new, old in zip(found, expected, strict=True):
                assert [replace(each, weight_versions=[]) for each in new.completions] == [
                    replace(each, weight_versions=[]) for each in old.completions
                ], change
            stats = gen.stats.since(before)
            assert stats.head_accepted > 0.8 * stats.head_drafted > 20, change


@torch.inference_mode()
def _spoil_copy(gen: Generator) -> None:
    """Zero weights of an int4 copy: if it is not made again, it drafts nonsense."""
    head = head_of(gen)
    assert isinstance(head, SelfDraft)
    for layer in head.model.layers:
        layer.qkv.weight.zero_()


@torch.inference_mode()
def _compare_graphs(gen: Generator) -> None:
    """Compare what a head's graph drafts for three lanes with what it drafts launched kernel by kernel."""
    head, lanes = head_of(gen), gen._runner.lanes
    head._draw_lanes[:3] = torch.arange(3, device="cuda")
    head._ends[:3] = torch.arange(3, device="cuda")
    lanes.kv_lens[:3] = torch.tensor([20, 100, 130], device="cuda", dtype=torch.int32)
    head._limits[:3] = 200
    assert head.graphs is not None
    head.graphs.run(3)
    drafted = head._tokens[:3].clone()
    head.body(3)
    assert torch.equal(head._tokens[:3], drafted)
    assert (head._counts[:3] > 0).all()


def _compare(gen: Generator, lanes: int, may_wait: bool = False) -> None:
    """Compare speculative answers of so many lanes with plain ones. may_wait: steps may wait for each other often, as
    they do where an adversary drafts nothing and a random head drafts something wrong instead."""
    draw = torch.Generator().manual_seed(lanes)
    vocab, most = gen.model_config.vocab_size, gen._runner.config.speculate.most_lanes  # type: ignore[union-attr]
    prompts = [torch.randint(0, vocab, (5 + 37 * n % 200,), generator=draw).tolist() for n in range(lanes)]
    expected = gen.generate(prompts, [params(number, speculate=False) for number in range(lanes)])
    for adversarial in (False, True):
        before, ahead = gen.stats, list[bool]()
        with pytest.MonkeyPatch.context() as patch:
            _note_launches(patch, gen, ahead)
            if adversarial:
                adversary_on_device(patch, gen, expected)
            found = gen.generate(prompts, [params(number) for number in range(lanes)])
        for number, (right, other) in enumerate(zip(expected, found, strict=True)):
            assert other.completions == right.completions, f"request {number} of {lanes}, {adversarial=}"
        stats = gen.stats.since(before)
        if adversarial and lanes <= most:
            assert stats.drafted > stats.accepted > lanes * GENERATED / 3
        assert may_wait or lanes > 1 or not adversarial or ahead.count(False) <= 6, "steps wait for each other"


def _note_launches(patch: pytest.MonkeyPatch, gen: Generator, ahead: list[bool]) -> None:
    """Append to `ahead` whether each step is launched while the one before is in flight."""
    launch = gen._runner.launch
    patch.setattr(gen._runner, "launch", lambda batch: ahead.append(gen._loop.in_flight is not None) or launch(batch))
