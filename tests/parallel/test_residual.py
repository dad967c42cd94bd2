"""Ranks that shard the residual stream compute the same as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Checkpoint, random_ids

from fastgen import Generator, SamplingParams
from fastgen.engine import step as step_sequences
from fastgen.parallel.group import Group
from fastgen.parallel.overlap import Exchange, ExchangeLayout, PeerMemory
from fastgen.parallel.residual import ShardedResidual

pytestmark = pytest.mark.timeout(120)
REPOSITORY = Path(step_sequences.__file__).parents[2]
NEAR_TIE = 1e-4
OPTIONS: dict[str, Any] = {
    "device": "cpu", "page_size": 16, "num_pages": 40, "max_seqs": 8, "max_step_tokens": 96, "prefix_cache": False,
}  # fmt: skip
PROMPTS = [random_ids(length) for length in (9, 96, 42, 1, 130, 13)]

RANK = """
import json, sys
import torch.distributed as dist
from gathering import cut_steps
from fastgen.parallel import residual
from fastgen.engine import step as step_sequences
from fastgen.engine import startup
from fastgen import Generator, SamplingParams

cut_steps()
rank, size, folder, prompts, options = int(sys.argv[1]), int(sys.argv[2]), *map(json.loads, sys.argv[4:])
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=size)
step_sequences.CUT_TOKENS, step_sequences.CUT_MULTIPLE = 8, 1  # halves of any size, that ranks do not divide
begin, sizes = residual.ShardedResidual.begin, []

def noted(group, exchange, half, y, following):
    sizes.append(len(y))
    return begin(group, exchange, half, y, following)

residual.ShardedResidual.begin = noted
largest = startup.largest_half
found = []
for half in (largest, lambda tokens: 0):
    startup.largest_half = half
    with Generator(folder, tp_group=dist.group.WORLD, **options) as gen:
        params = SamplingParams(max_tokens=2, temperature=0, logprobs=2, ignore_eos=True)
        alone = [gen.generate(prompt, params)[0] for prompt in prompts]
        outputs = [output.completions[0] for output in (*alone, *gen.generate(prompts, params))]
        said = [[output.token_ids, output.raw_logprobs] for output in outputs]
        tops = [[list(top.items()) for top in output.top_logprobs] for output in outputs]
        found.append({"said": said, "tops": tops, "scores": gen.score(prompts, start=1), "halves": sizes[:]})
    sizes.clear()
if rank == 0:
    print(json.dumps(found))
"""


def on_ranks(size: int, folder: Path, store: Path) -> list[dict[str, Any]]:
    """Return the answers of ranks that shard the residual stream, and of ranks that do not."""
    given = [json.dumps(value) for value in (str(folder), PROMPTS, OPTIONS)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(size), str(store), *given],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    found: list[dict[str, Any]] = json.loads(said[0])
    return found


@pytest.mark.long
def test_ranks_that_share_tokens_out_say_what_one_process_says(checkpoint: Checkpoint, tmp_path: Path) -> None:
    size, sizes = 3, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 321}
    folder = checkpoint("Llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True, **sizes)
    shared, whole = on_ranks(size, folder, tmp_path / "store")
    assert not whole.pop("halves")
    halves = shared.pop("halves")
    assert min(halves) < 8 < 40 < max(halves)
    assert any(count % size for count in halves)
    assert any(first != second for first, second in zip(halves[::2], halves[1::2], strict=True))
    assert json.dumps(shared) == json.dumps(whole), "how the residual stream is held changes no bit"

    with Generator(folder, **OPTIONS) as gen:
        params = SamplingParams(max_tokens=2, temperature=0, logprobs=2, ignore_eos=True)
        outputs = [output.completions[0] for output in gen.generate(PROMPTS, params)]
        scores = gen.score(PROMPTS, start=1)
    for output, (token_ids, logprobs), tops in zip(2 * outputs, shared["said"], shared["tops"], strict=True):
        same = next(
            (at for at, pair in enumerate(zip(output.token_ids, token_ids, strict=True)) if len({*pair}) > 1), 2
        )
        assert np.allclose(output.raw_logprobs[:same], logprobs[:same], atol=1e-4, rtol=0)
        assert same == 2 or abs(tops[same][0][1] - tops[same][1][1]) < NEAR_TIE
    for ours, theirs in zip(scores, shared["scores"], strict=True):
        assert np.allclose(ours, theirs, atol=1e-4, rtol=0)


def alone(rank: int) -> Exchange:
    """Return the exchange of one of 4 ranks, whose peers add nothing."""
    memory = torch.zeros(ExchangeLayout.of(4, 16, 8, torch.float32).end, dtype=torch.uint8)
    sides: list[Any] = [None, None]
    return Exchange(rank, PeerMemory(memory, [0] * 4, None), 16, 8, torch.float32, sides)


@pytest.mark.parametrize("count", [1, 3, 4, 10])
def test_wanted_rows_come_from_their_owners(count: int) -> None:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([0, count - 1, count // 2, 0])
    found = []
    for rank in range(4):
        made = alone(rank)
        found.append(ShardedResidual(Group(), made, 0, count, x[made.rows_of(count)]).select(rows))
    assert torch.equal(sum(found), x[rows])
    assert ShardedResidual(Group(), alone(0), 0, count, x[:1]).select(rows[:0]).shape == (0, 8)


def test_the_largest_half_is_that_of_a_step_without_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, none = np.array, np.zeros(0, dtype=np.int64)
    for tokens in range(1, 9000, 137):
        step = step_sequences.StepSequences(*(lengths([value]) for value in (0, tokens, tokens, 1)), none)
        parts = [int(part.query_lens.sum()) for part in step.parts(0)]
        assert (len(parts) == 2) == (tokens >= step_sequences.CUT_TOKENS)
        assert len(parts) == 1 or parts[1] <= parts[0] == step_sequences.largest_half(tokens)
        assert len(parts) == 2 or step_sequences.largest_half(tokens) == 0
