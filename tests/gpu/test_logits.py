"""At true sizes with random weights, fastgen in bfloat16 is as near to float32 as transformers in bfloat16 is.

Both are compared with transformers in float32, by the logprobs of the tokens of random sequences: the ones that a
prefill computes (`score`), and the ones that decodes have computed (`raw_logprobs`).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_models import KNOWN
from torch import Tensor

from fastgen import Generator, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

# Name -> number of layers: all layers of one model, and a few of the others, whose layers have biases or other norms.
MODELS = {
    "mistralai/Mistral-7B-Instruct-v0.3": 32,
    "Qwen/Qwen2.5-7B": 4,
    "Qwen/Qwen3-8B": 4,
    "tencent/Hunyuan-7B-Instruct": 4,
    "microsoft/Phi-4-mini-instruct": 4,
    "google/gemma-3-1b-it": 6,
}
SIZES = (16, 640, 256)  # sequences, tokens of their prompts, tokens generated
WORSE = 1.1


def write_config(name: str, layers: int, folder: Path, **changes: Any) -> dict[str, Any]:
    config = {**KNOWN[name][0], "num_hidden_layers": layers, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return config


@contextmanager
def reference(folder: Path, device: str) -> Iterator[Any]:
    """Yield a model of transformers in bfloat16, with normal weights of standard deviation 0.02, and norms near 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    with torch.random.fork_rng(), torch.device(device):
        model = models.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        deviation, mean = (0.1, 1.0) if name.endswith("norm.weight") else (0.02, 0.0)
        parameter.normal_(mean, deviation, generator=generator)
    try:
        yield model
    finally:
        del model, parameter
        forget()


def forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@torch.inference_mode()
def token_logprobs(model: Any, sequences: list[list[int]], device: str) -> Tensor:
    """Return the logprobs of all tokens but the first of each sequence, float64 [sequences, length - 1]."""
    found = []
    for sequence in sequences:
        ids = torch.tensor(sequence, device=device)
        logits = model(ids[None]).logits[0, :-1].float()
        taken = logits.gather(1, ids[1:, None])[:, 0].double() - logits.double().logsumexp(dim=-1)
        found.append(taken.cpu())
    return torch.stack(found)


def engine_logprobs(
    folder: Path, weights: dict[str, Tensor], options: dict[str, Any], sizes: tuple[int, int, int]
) -> tuple[list[list[int]], Tensor, Tensor]:
    """Return random prompts with fastgen's answers at temperature 1, the scores of all their tokens but the first, and
    the raw logprobs of the answers."""
    count, prompt, answer = sizes
    with Generator(folder, load="dummy", seed=0, **options) as gen:
        gen.update_weights(weights)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, gen.model_config.vocab_size, prompt).tolist() for _ in range(count)]
        outputs = gen.generate(prompts, SamplingParams(max_tokens=answer, ignore_eos=True))
        assert [out.error for out in outputs] == [None] * count
        sequences = [out.prompt_token_ids + out.completions[0].token_ids for out in outputs]
        decoded = torch.tensor([out.completions[0].raw_logprobs for out in outputs])
        scored = torch.tensor(gen.score(sequences, start=1))
    forget()
    return sequences, scored.double(), decoded.double()


def errors(folder: Path, device: str, options: dict[str, Any], sizes: tuple[int, int, int]) -> dict[str, float]:
    """Return root mean squares of the errors of logprobs, of prefills and of decodes, by fastgen and by
    transformers."""
    with reference(folder, device) as model:
        sequences, scored, decoded = engine_logprobs(folder, model.state_dict(), options, sizes)
        theirs = token_logprobs(model, sequences, device)
        exact = token_logprobs(model.float(), sequences, device)
    answers = slice(sizes[1] - 1, None)
    pairs = {
        "prefill": (scored, exact),
        "prefill, transformers": (theirs, exact),
        "decode": (decoded, exact[:, answers]),
        "decode, transformers": (theirs[:, answers], exact[:, answers]),
    }
    return {name: float((ours - true).square().mean().sqrt()) for name, (ours, true) in pairs.items()}


# With pages of 32 tokens, decodes do not run in Gluon.
@pytest.mark.parametrize(
    ("name", "page_size"), [*((name, 64) for name in MODELS), ("mistralai/Mistral-7B-Instruct-v0.3", 32)]
)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(name: str, page_size: int, tmp_path: Path) -> None:
    write_config(name, MODELS[name], tmp_path)
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_cache_gb": 4.0,
        "max_model_len": 2048,
        "max_seqs": 16,
        "page_size": page_size,
    }
    found = errors(tmp_path, "cuda", options, SIZES)
    print(name, {part: f"{error:.5f}" for part, error in found.items()})
    for part in ("prefill", "decode"):
        assert 0 < found[part] <= WORSE * found[f"{part}, transformers"], found
