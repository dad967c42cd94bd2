"""EAGLE-3 heads: their drafts are those of a reference in torch, and under any schedule they change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIRST_HALF, check_idle
from handmade import let_pages_run_out
from heads import (
    PARAMS,
    PROMPTS,
    SCHEDULES,
    EagleReference,
    call_graphs,
    check_same,
    head_of,
    opposed,
    record,
    save_eagle,
)
from safetensors.torch import load_file
from test_dflash import eager

from fastgen import Generator
from fastgen.model.sampler import SampleOutput, draw

KINDS: list[tuple[dict[str, Any], int]] = [  # arguments of save_eagle, and the number of drafts
    ({"reduced": 200}, 4),
    ({"dialect": "speculators", "reduced": 200, "norm_before_residual": True, "fc_norm": True}, 3),
    ({"dialect": "DeepSpec", "features": (1, 0, 1), "qk_norm": True, "own": False, "norm_output": True}, 4),
    ({"norm_before_fc": True}, 4),
]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads draft even if nothing they draft is right, as with random weights."""
    monkeypatch.setattr("fastgen.speculation.planning.BARREN", 10**9)


@pytest.mark.parametrize(
    ("kind", "most", "page_size"), [(*kind, page_size) for kind, page_size in zip(KINDS, (64, 8, 64, 8), strict=True)]
)
def test_drafts_are_those_of_the_reference(
    kind: dict[str, Any], most: int, page_size: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no prefill is cut and no prefix is cached; forks share the page of a position that each draws a token
    for."""
    head = save_eagle(tmp_path, llama, **kind)
    params = [replace(each, n=1) for each in PARAMS]
    expected = opposed(monkeypatch, llama, PROMPTS, params)
    with Generator(llama, speculate=eager(head), page_size=page_size, max_seqs=8, prefix_cache=False) as gen:
        recorded = record(gen, monkeypatch)
        check_same(gen.generate(PROMPTS, params), expected)
        assert recorded.check_eagle(EagleReference(llama, head, kind.get("features", (0, 1))), most, expected) > 100
        assert gen.stats.head_drafted > 0
        check_idle(gen)


@pytest.mark.parametrize("token", [-1, 2**30])
def test_draws_that_are_no_tokens_read_no_embedding(
    token: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While kernels are compiled ahead, draws are what was in the memory before."""

    def unwritten(*arguments: Any) -> SampleOutput:
        drawn = draw(*arguments)
        return replace(drawn, packed=torch.full_like(drawn.packed, token))

    monkeypatch.setattr("fastgen.speculation.head.draw", unwritten)
    with Generator(llama, speculate=eager(save_eagle(tmp_path, llama))) as gen:
        head = head_of(gen)
        with torch.inference_mode():
            head.body(1)
        assert head._tokens.min() >= 0
        assert head._tokens.max() < gen.model_config.vocab_size


@pytest.mark.parametrize(
    ("family", "schedule"), list(zip(FIRST_HALF, SCHEDULES[1::2], strict=True)), indirect=["family"]
)
def test_a_head_changes_no_bit(
    schedule: dict[str, Any], family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opposed(monkeypatch, family, PROMPTS, PARAMS)
    with Generator(family, speculate=eager(save_eagle(tmp_path, family)), **schedule) as gen:
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            check_same(gen.generate(PROMPTS, PARAMS), expected)
            check_idle(gen)
        assert gen.stats.head_drafted > 0


def test_graphs_draft_the_same(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = save_eagle(tmp_path, llama)
    params = [replace(each, n=1) for each in PARAMS[:3]]
    expected = opposed(monkeypatch, llama, PROMPTS[:3], params)
    options = replace(eager(head), max_rows=128)
    with Generator(llama, max_seqs=8, page_size=16, prefix_cache=False, speculate=options) as gen:
        graphs = call_graphs(gen, monkeypatch)
        recorded = record(gen, monkeypatch)
        check_same(gen.generate(PROMPTS[:3], params), expected)
        assert recorded.check_eagle(EagleReference(llama, head), 4, expected) > 100
        assert {2, 4} <= set(graphs.ran)


def test_update_drafter(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(save_eagle(tmp_path, llama, reduced=200) / "model.safetensors")
    with Generator(llama, speculate=eager(tmp_path)) as gen:
        gen.update_drafter({**tensors, "embed_tokens.weight": tensors["fc.weight"]})
        with pytest.raises(ValueError, match=r"draft_vocab_size=200 needs a tensor d2t"):
            gen.update_drafter({name: x for name, x in tensors.items() if name != "d2t"})
        with pytest.raises(ValueError, match=r"d2t must name another token of the model for each number"):
            gen.update_drafter({**tensors, "d2t": tensors["d2t"] + gen.model_config.vocab_size})
        with pytest.raises(ValueError, match=r"missing 1 .*norm\.weight"):
            gen.update_drafter({name: x for name, x in tensors.items() if name != "norm.weight"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported; one layer is"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"target_hidden_size": 32}, "target_hidden_size=32, and the model has 64"),
        ({"eagle_config": None}, r"the layers \[1, 0, -1\] of the model"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc=True is not supported; with fc_norm"),
    ],
)
def test_what_a_head_cannot_be_is_an_error(changes: dict[str, Any], message: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(llama, speculate=save_eagle(tmp_path, llama, **changes))
