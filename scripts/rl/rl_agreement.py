"""Compares the logprobs of generated tokens with those that a trainer computes.

    python scripts/rl/rl_agreement.py                  # the bundled model, on a GPU if there is one
    python scripts/rl/rl_agreement.py --smoke          # the same in seconds, to see that it runs

The trainer is transformers in the dtype of the Generator, in bfloat16 for one in fp8: a forward pass over prompt and
answer, whose logits are divided by the temperature in float32. |its logprob - ours| of each generated token, in three
comparisons: of `untruncated_logprobs` with the whole vocabulary, of `logprobs` with only the ids of the sampling mask,
and of `score` with the whole vocabulary. Tokens of which a model is certain hide what fp8 changes, so that --smoke, in
which nearly all are, says nothing about it. Fails where a float32 difference is 1e-4 or more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen import Generator, RequestOutput, SamplingParams

LIMIT = 1e-4  # of float32
FAR = 0.1
FP8: dict[str, dict[str, Any]] = {
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "kv-fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
QUESTIONS = [
    "hello", "who are you?", "what can you do?", "tell me a joke", "what is 12 + 30?", "what is 47 * 86?",
    "spell banana", "reverse banana", "sort 5, 2, 9, 1", "capital of France?", "what day comes after friday?",
    "write a poem", "47 * 86 step by step", "how many r's are in strawberry?", "100 - 37", "what is fastgen?",
]  # fmt: skip
SAMPLING = {
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "temperature 1.5": SamplingParams(temperature=1.5),
    "temperature 1.2, top_p 0.95, top_k 50, min_p 0.01": SamplingParams(
        temperature=1.2, top_p=0.95, top_k=50, min_p=0.01
    ),
}


@dataclass(frozen=True)
class Agreement:
    """Statistics of |trainer's logprob - Generator's| over a number of tokens. beyond: share of tokens above FAR.
    mean_ratio: mean of exp(trainer's - Generator's)."""

    dtype: str
    sampling: str
    compared: str
    tokens: int
    max: float
    mean: float
    p50: float
    p99: float
    beyond: float
    mean_ratio: float

    @classmethod
    def of(cls, names: tuple[str, str, str], trainers: list[float], ours: list[float]) -> Agreement:
        difference = np.array(trainers, dtype=np.float64) - np.array(ours, dtype=np.float64)
        apart = np.abs(difference)
        p50, p99 = np.percentile(apart, (50, 99))
        found = (apart.max(), apart.mean(), p50, p99, (apart > FAR).mean())
        return cls(*names, len(apart), *(float(f"{x:.3g}") for x in found), round(float(np.exp(difference).mean()), 6))


class Trainer:
    """A model that computes logits as a training loop does."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
        self.model = model.to(device).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int], start: int) -> Tensor:
        """Return the logits from which the tokens from `start` on are drawn: float32 [len(token_ids) - start, V]."""
        ids = torch.tensor([token_ids], device=self.model.device)
        found: Tensor = self.model(ids).logits[0, start - 1 : -1].float()
        return found


def compare(
    gen: Generator, trainer: Trainer, outputs: list[RequestOutput], params: SamplingParams, numbers: str, name: str
) -> Iterator[Agreement]:
    """Compare one kind of sampling, called `name`. numbers: the policy's, as `measure` takes them."""
    names = ("untruncated_logprobs", "logprobs", "score")
    trainers, ours = ({key: list[float]() for key in names} for _ in range(2))
    for output in outputs:
        start = len(output.prompt_token_ids)
        for completion in output.completions:
            assert completion.sampling_mask is not None
            ids = output.prompt_token_ids + completion.token_ids
            logprobs = (trainer.logits(ids, start) / params.temperature).log_softmax(1)
            whole = logprobs[range(len(logprobs)), completion.token_ids].tolist()
            within = [
                (row[token] - row[kept].logsumexp(0)).item()
                for row, token, kept in zip(logprobs, completion.token_ids, completion.sampling_mask, strict=True)
            ]
            score = gen.score([ids], start=start, temperature=params.temperature)[0]
            for key, its in zip(names, (whole, within, whole), strict=True):
                trainers[key] += its
            for key, own in zip(names, (completion.untruncated_logprobs, completion.logprobs, score), strict=True):
                ours[key] += own
    for key in names:
        yield Agreement.of((numbers, name, key), trainers[key], ours[key])


def measure(model: str | None, dtype: str, device: str, questions: int, n: int, max_tokens: int) -> Iterator[Agreement]:
    """Make all comparisons of so many questions with n samples each. dtype: of both sides, or one of FP8."""
    chats: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS[:questions]]
    options = FP8.get(dtype, {"dtype": dtype})
    with Generator(model, **options, device=device, seed=0) as gen:
        trainer = Trainer(gen.folder, options["dtype"], device)
        for name, sampling in SAMPLING.items():
            params = replace(sampling, n=n, max_tokens=max_tokens, return_sampling_mask=True, seed=1)
            yield from compare(gen, trainer, gen.generate(chats, params), params, dtype, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id (default: the bundled model)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", *FP8])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="few tokens")
    args = parser.parse_args()
    size = (4, 1, 8) if args.smoke else (len(QUESTIONS), 8, 64)
    worst = 0.0
    for dtype in args.dtype:
        for row in measure(args.model, dtype, args.device, *size):
            worst = max(worst, row.max if row.dtype == "float32" else 0.0)
            print(f"{row.dtype:8}  {row.sampling:50}  {row.compared:20}  {row.tokens:6} tokens  "
                  f"max {row.max:.2e}  mean {row.mean:.2e}  p50 {row.p50:.2e}  p99 {row.p99:.2e}  "
                  f"beyond {row.beyond:.2e}  ratio {row.mean_ratio:.6f}")  # fmt: skip
    if worst >= LIMIT:
        raise SystemExit(f"a float32 logprob is {worst:.2e} from the trainer's; the limit is {LIMIT:g}")


if __name__ == "__main__":
    main()
