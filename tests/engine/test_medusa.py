"""Medusa heads: their drafts are those of a reference in torch, under any schedule, and they change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import check_idle
from handmade import let_pages_run_out
from heads import PARAMS, PROMPTS, SCHEDULES, MedusaReference, check_same, head_of, opposed, record, save_medusa
from safetensors.torch import load_file, save_file
from test_dflash import eager

from fastgen import Generator
from fastgen.async_engine.updates import WeightUpdates


@pytest.mark.parametrize(("own", "blocks", "schedule"), [(True, 1, SCHEDULES[1]), (False, 2, SCHEDULES[3])])
def test_drafts_are_those_of_the_reference(
    own: bool, blocks: int, schedule: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgen.speculation.planning.BARREN", 10**9)
    head = save_medusa(tmp_path, llama, blocks=blocks, own=own)
    tensors = load_file(head / "medusa_lm_head.safetensors")
    expected = opposed(monkeypatch, llama, PROMPTS, PARAMS)
    with Generator(llama, speculate=eager(head), **schedule) as gen:
        assert head_of(gen).most == 3, "not the number in config.json, which may be too small"
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            recorded = record(gen, monkeypatch)
            check_same(gen.generate(PROMPTS, PARAMS), expected)
            assert recorded.check(MedusaReference(llama, tensors), 0, 3, expected) > 100
            check_idle(gen)
        assert gen.stats.head_drafted > 0


def test_wrong_files_are_errors(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = save_medusa(tmp_path, llama)
    tensors = load_file(head / "medusa_lm_head.safetensors")
    with Generator(llama, speculate=eager(head)) as gen:
        gen.update_drafter({f"medusa_head.{name}": x for name, x in tensors.items()})
        WeightUpdates(gen, lambda: None).check_drafter()
        step = tmp_path / "step"
        step.mkdir()
        save_file({name: x for name, x in tensors.items() if name != "1.1.weight"}, step / "model.safetensors")
        with pytest.raises(ValueError, match=r"missing 1 .*1\.1\.weight"):
            gen.update_drafter(step)
        with pytest.raises(ValueError, match=r"tensor '1.1.weight' has shape"):
            gen.update_drafter({**tensors, "1.1.weight": tensors["1.1.weight"][:-1]})
    (head / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, head / "medusa_lm_head.pt")  # a pickle
    with pytest.raises(ValueError, match=r"reads safetensors only, so convert a medusa_lm_head\.pt: ") as raised:
        Generator(llama, speculate=head)
    monkeypatch.chdir(head)
    exec(str(raised.value).partition("medusa_lm_head.pt: ")[2], {"torch": torch, "safetensors": safetensors})
    assert load_file("medusa_lm_head.safetensors").keys() == tensors.keys()
    Generator(llama, speculate=head).close()
