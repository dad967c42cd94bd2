"""Each family on a GPU: as near to float32 as transformers is, and equal bits under any schedule."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, preempting, random_options, random_requests
from families import FAMILIES, SIZES, load_reference, save_random, with_fitting_rope

from fastgen import Generator, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

DEVICE = "cuda"
CONTEXT = 300
WORSE = 1.1
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "dtype": "bfloat16", "seed": 0, "max_model_len": CONTEXT, "page_size": 64, "num_pages": 80,
    "max_seqs": 8, "max_step_tokens": 256,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def make(family: str, head_size: int, folder: Path) -> tuple[Path, dict[torch.dtype, Any]]:
    """Save a model with weights in bfloat16 whose heads the kernels in Gluon take, and load it in both dtypes."""
    name, extra = FAMILIES[family]
    heads = {"num_attention_heads": 512 // head_size // 2 * 2, "num_key_value_heads": 2}
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "initializer_range": 0.06, **heads}
    extra = {**extra, "head_dim": head_size} if "head_dim" in extra else extra
    save_random(name, with_fitting_rope({**SIZES, **extra, **sizes}), folder, torch.bfloat16)
    return folder, {dtype: load_reference(folder, dtype).to(DEVICE) for dtype in (torch.bfloat16, torch.float32)}


@torch.inference_mode()
def logprobs(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Return transformers' logprobs of all tokens at each position of each sequence, float64 [length, vocabulary]."""
    return [model(torch.tensor([ids], device=DEVICE)).logits[0].double().log_softmax(1).cpu() for ids in sequences]


def check_logprobs(folder: Path, models: dict[torch.dtype, Any]) -> dict[str, float]:
    """Compare greedy answers and scores with transformers in float32 and in bfloat16."""
    requests = [ids for ids, _ in random_requests(1000, 12, 200, 2)]
    with Generator(folder, **OPTIONS) as gen:
        outputs = [output.completions[0] for output in gen.generate(requests, GREEDY)]
        sequences = [ids + output.token_ids for ids, output in zip(requests, outputs, strict=True)]
        scored = gen.score(sequences)
    exact, theirs = (logprobs(models[dtype], sequences) for dtype in (torch.float32, torch.bfloat16))
    names = "prefill", "decode", "transformers' prefill", "transformers' decode", "below the best"
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for ids, output, mine, true, its in zip(sequences, outputs, scored, exact, theirs, strict=True):
        taken, start = torch.tensor(ids)[1:, None], len(ids) - len(output.token_ids)
        right = true[:-1].gather(1, taken)[:, 0]
        found["prefill"].append(torch.tensor(mine).double()[1:] - right)
        found["decode"].append(torch.tensor(output.raw_logprobs).double() - right[start - 1 :])
        found["transformers' prefill"].append(its[:-1].gather(1, taken)[:, 0] - right)
        found["transformers' decode"].append(found["transformers' prefill"][-1][start - 1 :])  # of the same tokens
        found["below the best"].append(true[start - 1 : -1].amax(1) - right[start - 1 :])
    return {name: float(torch.cat(errors).square().mean().sqrt()) for name, errors in found.items()}


def check_schedules(folder: Path, page_size: int = 64) -> None:
    """Hold answers in batches, chunks and after preemptions to the answer of each request by itself."""
    requests = random_requests(1000, 10, 200, 24)
    pages = {"page_size": page_size, "num_pages": 5120 // page_size}
    with Generator(folder, **OPTIONS | pages, prefix_cache=False) as gen:
        assert gen.config.deterministic == (torch.cuda.get_device_capability()[0] == 9)
        expected = alone(gen, requests)
        assert answers(gen, requests) == expected
    with Generator(folder, **OPTIONS | random_options(2, CONTEXT)) as gen:
        preempting(gen, steps=29)
        assert answers(gen, requests) == expected
        assert gen.stats.preemptions > 0


@pytest.mark.parametrize(("family", "head_size"), [("exaone4", 64), ("olmo3", 64), ("muse", 128), ("gemma3", 256)])
def test_freed_windows_change_no_bit(family: str, head_size: int, tmp_path: Path) -> None:
    """In decodes from graphs, in chunks, from cached prefixes and after preemptions."""
    folder, _ = make(family, head_size, tmp_path)
    requests, options = random_requests(1000, 16, 280, 24), {**OPTIONS, "deterministic": True, "max_step_tokens": 128}
    with Generator(folder, **options | {"prefix_cache": False}) as gen:
        expected = alone(gen, requests)
    with Generator(folder, **options, free_windows=True) as gen:
        for _ in range(2):
            assert answers(gen, requests) == expected
        assert gen.stats.cached_tokens > 0
        preempting(gen, steps=29)
        assert answers(gen, requests) == expected
        assert gen.stats.preemptions > 0


@pytest.mark.parametrize(("family", "head_size"), [*itertools.product(FAMILIES, (64, 128)), ("gemma3", 256)])
def test_a_family_is_as_near_to_float32_as_transformers_is(family: str, head_size: int, tmp_path: Path) -> None:
    folder, models = make(family, head_size, tmp_path)
    found = check_logprobs(folder, models)
    print(family, head_size, {part: f"{error:.5f}" for part, error in found.items()})
    for part in ("prefill", "decode"):
        assert 0 < found[part] <= WORSE * found[f"transformers' {part}"], found
    assert found["below the best"] <= 3 * found["transformers' decode"], found


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the promise is for Hopper"
)
@pytest.mark.parametrize(
    ("family", "head_size", "page_size"),
    [
        *((family, 64, 64) for family in FAMILIES),
        *(("gemma3", 256, 64), ("mistral", 32, 64), ("qwen3", 40, 16), ("mistral", 96, 48), ("qwen3", 160, 64)),
    ],
)
def test_the_schedule_never_shows(family: str, head_size: int, page_size: int, tmp_path: Path) -> None:
    check_schedules(make(family, head_size, tmp_path)[0], page_size)
