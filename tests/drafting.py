"""Random drafts that are right, wrong, or right up to some token."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from fastgen import Generator, RequestOutput
from fastgen.kernels import drafts
from fastgen.kernels.drafts import StepDraws, Texts


def adversary(monkeypatch: pytest.MonkeyPatch, outputs: Iterable[RequestOutput], vocab: int, seed: int = 0) -> None:
    """Replace the function that proposes drafts. outputs: the right outputs, from which right drafts are made."""
    rng = random.Random(seed)
    known = [out.prompt_token_ids + completion.token_ids for out in outputs for completion in out.completions]

    def propose(text: np.ndarray, near: int, most: int) -> tuple[np.ndarray, int, int]:
        so_far = text.tolist()
        continued = [tokens[len(so_far) :] for tokens in known if tokens[: len(so_far)] == so_far]
        draft = rng.choice(continued)[: rng.randint(0, most)] if continued else []
        if rng.random() < 0.2:
            draft = [rng.randrange(vocab) for _ in range(most)]
        elif draft and rng.random() < 0.4:
            draft[rng.randrange(len(draft))] = rng.randrange(vocab)
        return np.array(draft, dtype=np.int32), 1, 0

    monkeypatch.setattr("fastgen.kernels.drafts.propose", propose)


def adversary_on_device(monkeypatch: pytest.MonkeyPatch, gen: Generator, outputs: list[RequestOutput]) -> None:
    """Replace the drafts after each step on the device, without a wait. The seed of each request must be its number and
    n must be 1; all outputs must have the same length."""
    state, vocab = gen._runner.lanes.state, gen.model_config.vocab_size
    device = state.table.device
    rows = [out.prompt_token_ids + out.completions[0].token_ids for out in outputs]
    longest = max(map(len, rows)) + 64
    script = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    right = drafts.recall

    def recall(lanes: Tensor, drawn: StepDraws, rows: Tensor, texts: Texts, tokens: Tensor, counts: Tensor) -> None:
        right(lanes, drawn, rows, texts, tokens, counts)
        numbers = state.table[lanes, 0].clamp(0, len(script) - 1)
        at = gen._runner.lanes.kv_lens[lanes].long()[:, None] + 1 + torch.arange(tokens.shape[1], device=device)
        drafted = script[numbers[:, None], at.clamp(max=longest - 1)]
        wrong = torch.rand(drafted.shape, device=device) < 0.1
        tokens[lanes] = torch.where(wrong, torch.randint(0, vocab, drafted.shape, device=device), drafted)
        counts[lanes] = torch.randint(0, tokens.shape[1] + 1, lanes.shape, device=device, dtype=torch.int32)

    monkeypatch.setattr("fastgen.speculation.drafting.recall", recall)
