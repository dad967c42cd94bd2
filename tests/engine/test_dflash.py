"""DFlash heads: their drafts are those of a reference in torch, under any schedule, and they change no bit."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import FIRST_HALF, check_idle, random_ids
from handmade import let_pages_run_out
from heads import (
    PARAMS,
    PROMPTS,
    SCHEDULES,
    MedusaReference,
    Reference,
    call_graphs,
    check_same,
    head_of,
    opposed,
    record,
    save_eagle,
    save_head,
    save_medusa,
    without_drafts,
)
from safetensors.torch import load_file, save_file

from fastgen import Generator, SamplingParams, Speculation
from fastgen.model.loader import BUNDLED
from fastgen.speculation.feature import find_head


def eager(head: Path) -> Speculation:
    return Speculation(row_cost=0.0, history_tokens=0, head=head)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads draft even if nothing they draft is right, as with random weights."""
    monkeypatch.setattr("fastgen.speculation.planning.BARREN", 10**9)


@pytest.mark.parametrize(
    ("dialect", "schedule"), list(zip(("z-lab", "speculators", "DeepSpec", "z-lab"), SCHEDULES, strict=True))
)
def test_drafts_are_those_of_the_reference(
    dialect: str, schedule: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """The second time, prompts are in the prefix cache or in the host tier."""
    first = int(dialect != "DeepSpec")
    head = save_head(tmp_path / "head", llama, dialect, reduced=200 if dialect == "speculators" else 0)
    expected = opposed(monkeypatch, llama, PROMPTS, PARAMS)
    reference = Reference(llama, head, first)
    with Generator(llama, speculate=eager(head), **schedule) as gen:
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            recorded = record(gen, monkeypatch)
            check_same(gen.generate(PROMPTS, PARAMS), expected)
            assert recorded.check(reference, first, 6, expected) > 100
            check_idle(gen)
        assert gen._runner.pool.whole[:, :, 0].nbytes == gen.config.page_bytes(gen.model_config)
        stats = gen.stats
        assert stats.cached_tokens > 0
        assert stats.drafted > stats.accepted > 0
        assert stats.head_drafted > 0
        if "num_pages" in schedule:
            assert stats.preemptions > 0, stats
            assert stats.pages_loaded > 0


def test_each_token_adds_to_the_logits_of_the_next_by_a_markov_head(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The confidence head of such a checkpoint is not used, which the log says."""
    head = save_head(tmp_path / "head", llama, "DeepSpec", markov=8)
    expected = opposed(monkeypatch, llama, PROMPTS, PARAMS)
    with caplog.at_level("INFO", "fastgen"), Generator(llama, speculate=eager(head), page_size=16) as gen:
        recorded = record(gen, monkeypatch)
        check_same(gen.generate(PROMPTS, PARAMS), expected)
    assert recorded.check(Reference(llama, head, 0), 0, 6, expected) > 100
    assert caplog.text.count("has a confidence head, which is not used") == 1


@pytest.mark.parametrize("family", FIRST_HALF, indirect=True)
def test_a_head_changes_no_bit(family: Path, tmp_path: Path, always: None) -> None:
    params = [replace(each, logprobs=2) for each in PARAMS]
    expected = without_drafts(family, PROMPTS, params)
    head = save_head(tmp_path, family)
    with Generator(family, speculate=eager(head), page_size=16, max_seqs=8, max_step_tokens=40) as gen:
        check_same(gen.generate(PROMPTS, params), expected)
        assert gen.stats.head_drafted > 0
        check_idle(gen)


@pytest.mark.parametrize("kind", ["dflash", "medusa"])
def test_graphs_draft_the_same(
    kind: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """Lanes that a graph has and a step does not need are padding."""
    first, block = 1, 6
    reference: Reference | MedusaReference = Reference(llama, save_head(tmp_path / "dflash", llama), 1)
    if kind == "medusa":
        tensors = load_file(save_medusa(tmp_path / "medusa", llama) / "medusa_lm_head.safetensors")
        first, block, reference = 0, 3, MedusaReference(llama, tensors)
    expected = opposed(monkeypatch, llama, PROMPTS[:3], PARAMS[:3])
    options = replace(eager(tmp_path / kind), max_rows=128)
    with Generator(llama, max_seqs=8, page_size=16, speculate=options) as gen:
        graphs = call_graphs(gen, monkeypatch)
        gen._runner.pool.keys[:, :-1].fill_(7)
        recorded = record(gen, monkeypatch)
        check_same(gen.generate(PROMPTS[:3], PARAMS[:3]), expected)
        assert recorded.check(reference, first, block, expected) > 100
        assert {2, 4} <= set(graphs.ran)
        check_idle(gen)


def test_update_drafter_replaces_the_head(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    head, other = (save_head(tmp_path / str(seed), llama, seed=seed) for seed in (0, 1))
    tensors = load_file(other / "model.safetensors")
    with Generator(llama, speculate=eager(head), page_size=16, seed=0) as gen:
        expected = gen.generate(PROMPTS, PARAMS)
        with pytest.raises(ValueError, match=r"unexpected tensor 'layers.0.mlp.bias'"):
            gen.update_drafter({**tensors, "layers.0.mlp.bias": tensors["norm.weight"]})
        with pytest.raises(ValueError, match=r"missing 1 .*fc.weight"):
            gen.update_drafter({name: x for name, x in tensors.items() if name != "fc.weight"})
        gen.sleep()
        with pytest.raises(RuntimeError, match="call wake first"):
            gen.update_drafter(tensors)
        gen.wake()
        for folder, named in ((head, None), (other, tensors)):
            if named is not None:
                gen.update_drafter(named)
            recorded = record(gen, monkeypatch)
            found = gen.generate(PROMPTS, PARAMS)
            check_same(found, expected)
            assert recorded.check(Reference(llama, folder, 1), 1, 6, found) > 100
    with Generator(llama, speculate="auto") as gen, pytest.raises(ValueError, match="give one as speculate"):
        gen.update_drafter(tensors)


def test_update_weights_keeps_the_head(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    """The head drafts from the new model's hidden states, with the new model's embedding and head."""
    head = save_head(tmp_path / "head", llama)
    changed = {name: x * 1.01 for name, x in load_file(llama / "model.safetensors").items()}
    with Generator(llama, speculate=eager(head), page_size=16) as gen:
        gen.generate(PROMPTS, PARAMS)
        gen.update_weights(changed)
        recorded = record(gen, monkeypatch)
        reference = Reference(llama, head, 1)
        reference.load(changed)
        assert recorded.check(reference, 1, 6, gen.generate(PROMPTS, PARAMS)) > 100


def test_a_head_that_drafts_nothing_right_is_switched_off(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 64 tokens of a sequence without a right draft. Another sequence begins with it again."""
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True, logit_bias={7: -100.0})
    with Generator(llama, speculate=eager(save_head(tmp_path, llama)), page_size=16) as gen:
        head, sizes = head_of(gen), list[int]()

        def body(size: int) -> None:
            sizes.append(size)
            head._counts[:-1] = 3
            head._tokens[:-1] = 7  # it is never drawn

        monkeypatch.setattr(head, "body", body)
        for _ in range(2):
            gen.generate([random_ids(9)], params)
            assert gen.stats.head_accepted == 0
            assert 60 <= len(sizes) <= 70
            sizes.clear()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}}, r"layers \[0, 2\] of the model"),
    ({"hidden_size": 32}, "hidden_size=32, and the model has 64"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3, and the model has 2"),
    ({"head_dim": 32}, "head_dim=32, and the model has 16"),
    ({"block_size": 1}, "block_size=1 must be 2 to 64"),
    ({"use_swa": True}, "use_swa=True is not supported"),
    ({"attention_value_scale": 0.5}, "attention_value_scale=0.5 is not supported"),
    ({"markov_head_type": "gated"}, "markov_head_type='gated' is not supported"),
    ({"markov_rank": -1}, "markov_rank=-1 is not supported"),
    ({"markov_rank": 256, "draft_vocab_size": 200}, "markov_rank=256 is not supported; with draft_vocab_size it is"),
    ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle' is not supported; dflash and eagle3 are"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}, "layer_types="),
    (
        {"dflash_config": None, "architectures": ["LlamaForCausalLM"]},
        "and Medusa are",
    ),
    ({"block_size": "?"}, "block_size='\\?' must be an integer"),
    ({"mask_token_id": 320, "dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id=320 is not a token"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_a_head_cannot_be_is_an_error(changes: dict[str, Any], message: str, llama: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path, llama, **changes)
    if changes.get("dflash_config", 0) is None:
        config = json.loads((head / "config.json").read_text())
        del config["dflash_config"]
        (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as raised:
        Generator(llama, speculate=head)
    assert str(head) in str(raised.value)


def test_heads_of_the_bundled_model_have_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_head("fastgen-tiny/medusa", weights=True) == BUNDLED / "medusa"
    with pytest.raises(
        ValueError,
        match=r"'fastgen-tiny/other' is neither a folder nor a head .* fastgen-tiny, which has dflash, medusa",
    ):
        find_head("fastgen-tiny/other", weights=True)
    own = Path("fastgen-tiny/own")
    own.mkdir(parents=True)
    assert find_head("fastgen-tiny/own", weights=True) == find_head(own, weights=True) == own


def test_what_does_not_fit_a_head_is_an_error(llama: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path, llama)
    with pytest.raises(ValueError, match="needs tensor_parallel=1"):
        Generator(llama, speculate=str(head), tensor_parallel=2)
    with pytest.raises(ValueError, match="the folder or hub id of a head"):
        Generator(llama, speculate="medusa")
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "layers.0.self_attn.sinks": tensors["norm.weight"].clone()}, head / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensor 'layers.0.self_attn.sinks'"):
        Generator(llama, speculate=head)
    (head / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=r"mask_embedding.pt"):
        Generator(llama, speculate=head)
    (head / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        Generator(llama, speculate=head)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash", {"kv_cache_dtype": "fp8"}),
        ("dflash", {"dtype": "bfloat16"}),
        ("eagle", {"quantization": "fp8"}),
        ("eagle", {"kv_cache_dtype": "fp8"}),
        ("medusa", {"dtype": "bfloat16"}),
        ("medusa", {"quantization": "fp8"}),
    ],
)
def test_heads_run_with_other_options(
    kind: str, options: dict[str, Any], llama: Path, tmp_path: Path, always: None
) -> None:
    save = {"dflash": save_head, "eagle": save_eagle, "medusa": save_medusa}[kind]
    params = [replace(each, max_tokens=12) for each in PARAMS]
    expected = without_drafts(llama, PROMPTS, params, page_size=64, **options)
    with Generator(llama, speculate=eager(save(tmp_path, llama)), page_size=64, **options) as gen:
        found = gen.generate(PROMPTS, params)
        assert gen.stats.head_drafted > 0
        check_same(found, expected)


@pytest.mark.parametrize("kind", ["dflash", "eagle", "medusa"])
def test_memory_is_freed_without_collecting_garbage(kind: str, llama: Path, tmp_path: Path) -> None:
    save = {"dflash": save_head, "eagle": save_eagle, "medusa": save_medusa}[kind]
    gen = Generator(llama, speculate=eager(save(tmp_path, llama)), page_size=64)
    gen.generate(PROMPTS[0], PARAMS[0])
    gc.collect()
    gc.disable()
    try:
        held = [weakref.ref(each) for each in (gen._runner.model, gen._runner.pool.whole, head_of(gen))]
        gen.close()
        del gen
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()
