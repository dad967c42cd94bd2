"""The heads that draft for the bundled model: their training script, and the folders that ship."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from heads import head_of, record
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "tiny"))

import tiny_data  # noqa: E402
import tiny_heads  # noqa: E402
import train_heads  # noqa: E402

from fastgen import Generator, SamplingParams, Speculation  # noqa: E402

SHIPPED = ROOT / "fastgen" / "tiny"
PARAMS = SamplingParams(temperature=0, max_tokens=60)
PROMPTS = [
    tiny_data.prompt(tiny_data.evaluation_tasks(name, 1, 0)[0]) for name in ("count_range", "follow_up_sum", "spell")
]


def trained(name: str) -> tiny_heads.DFlash | tiny_heads.Medusa:
    """Return a shipped head as the training script makes it."""
    (path,) = (SHIPPED / name).glob("*.safetensors")
    head = tiny_heads.DFlash(*train_heads.SHAPE) if name == "dflash" else tiny_heads.Medusa()
    head.load_state_dict(load_file(path))
    return head.float()


@torch.no_grad()
def right_drafts(head: tiny_heads.DFlash | tiny_heads.Medusa, ids: list[int], start: int, count: int) -> list[int]:
    """Return the most likely drafts after the token at position `start`, by the code that trained the head."""
    target = LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    tokens = torch.tensor([ids[: start + 1]])
    states = target.model(tokens, output_hidden_states=True).hidden_states
    at = torch.tensor([[start]])
    anchors = tiny_heads.Anchors(at, torch.ones(1, 1, head.drafts, dtype=torch.bool))
    embedding = target.get_input_embeddings().weight
    found = head(states, anchors, tokens, embedding)[0, 0, :count] @ embedding.T
    return found.argmax(1).tolist()


@pytest.mark.parametrize("name", ["dflash", "medusa"])
def test_a_shipped_head_drafts_as_it_was_trained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And many of its drafts are right. Its answers are the plain ones."""
    with Generator(device="cpu", dtype="float32") as gen:
        plain = gen.generate(PROMPTS, PARAMS)
    speculate = Speculation(head=f"fastgen-tiny/{name}", history_tokens=0, row_cost=0.0)
    with Generator(device="cpu", dtype="float32", speculate=speculate, max_seqs=1) as gen:
        drafts = record(gen, monkeypatch).drafts
        for prompt, expected in zip(PROMPTS, plain, strict=True):
            drafts.clear()
            (found,) = gen.generate([prompt], PARAMS)
            assert found.completions == expected.completions
            ids = found.prompt_token_ids + found.completions[0].token_ids
            inside = [draft for draft in drafts if draft.start < len(ids)]
            for draft in inside[:3]:
                assert draft.tokens == right_drafts(trained(name), ids, draft.start, len(draft.tokens))
        assert head_of(gen).most == trained(name).drafts
        assert gen.stats.head_accepted > 15


def test_the_shipped_heads_are_small() -> None:
    files = [path for name in ("dflash", "medusa") for path in (SHIPPED / name).glob("*.safetensors")]
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) <= 2_000_000


@pytest.mark.long
def test_training_runs_small(tmp_path: Path) -> None:
    train_heads.main(["--smoke", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"dflash", "medusa"}
