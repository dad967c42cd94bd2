"""Medusa heads: their drafts are those of a reference in torch, under any schedule, and they change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_idle
from drafting import adversary
from handmade import let_pages_run_out
from heads import MedusaReference, head_of, record, save_medusa
from safetensors.torch import load_file
from test_dflash import PARAMS, PROMPTS, SCHEDULES, eager

from fastgen import Generator


@pytest.mark.parametrize(
    ("own", "blocks", "suffix", "schedule"),
    [
        (True, 1, "pt", SCHEDULES[0]),
        (False, 2, "safetensors", SCHEDULES[1]),
        (True, 1, "pt", SCHEDULES[2]),
        (False, 2, "safetensors", SCHEDULES[3]),
    ],
)
def test_drafts_are_those_of_the_reference(
    own: bool, blocks: int, suffix: str, schedule: dict[str, Any], llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("fastgen.engine.speculation.planning.BARREN", 10**9)
    head = save_medusa(tmp_path, llama, blocks=blocks, own=own, suffix=suffix)
    path = head / f"medusa_lm_head.{suffix}"
    tensors = torch.load(path) if suffix == "pt" else load_file(path)
    with Generator(llama, speculate=False) as gen:
        expected = gen.generate(PROMPTS, PARAMS)
    adversary(monkeypatch, expected, gen.model_config.vocab_size)
    with Generator(llama, speculate=eager(head), **schedule) as gen:
        assert head_of(gen).most == 3, "not the number in config.json, which may be too small"
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            recorded = record(gen, monkeypatch)
            found = gen.generate(PROMPTS, PARAMS)
            assert [output.completions for output in found] == [output.completions for output in expected]
            assert recorded.check(MedusaReference(llama, tensors), 0, 3, expected) > 100
            check_idle(gen)
        assert gen.stats.head_drafted > 0


def test_wrong_files_are_errors(llama: Path, tmp_path: Path) -> None:
    head = save_medusa(tmp_path, llama)
    tensors = load_file(head / "medusa_lm_head.safetensors")
    with Generator(llama, speculate=eager(head)) as gen:
        gen.update_drafter({f"medusa_head.{name}": x for name, x in tensors.items()})
        with pytest.raises(ValueError, match=r"tensor '1.1.weight' has shape"):
            gen.update_drafter({**tensors, "1.1.weight": tensors["1.1.weight"][:-1]})
    (head / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"none of the files medusa_lm_head.safetensors"):
        Generator(llama, speculate=head)
