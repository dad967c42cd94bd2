"""Compare a model's greedy tokens and logprobs with transformers, and print a verdict and a row for docs/models.md.

    python scripts/check/against_transformers.py MODEL
    python scripts/check/against_transformers.py MODEL --device cuda --dtype bfloat16 --length 5000

MODEL is a folder or a hub id. fastgen answers a few prompts greedily; then transformers computes, in the same dtype,
the logits at each position of these answers. In float32 each token has to be the likeliest one for transformers, too,
and the logprobs have to be equal to 0.001. In two-byte dtypes both round, so tokens may differ where two are almost
equally likely; a wrong scale, norm or rope changes logprobs by much more than rounding does. Text that is longer than
a window or than the context before it was stretched tests these: see --length. Longrope is stretched by the context in
fastgen and by the sequence in transformers: give the original one as --max-model-len. The exit status is 0 if they
agree.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastgen import Generator, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Question: A train travels 60 km in 45 minutes. How fast is it in km/h?\nAnswer:",
]
STORY = "The lighthouse keeper counted {} ships before the fog came in, and wrote the number into the old blue book. "
# dtype -> maximum (root mean square of the differences of logprobs, how much less likely a token is than the best).
TOLERANCES = {"float32": (1e-3, 1e-3), "bfloat16": (0.15, 0.75), "float16": (0.03, 0.15)}


@dataclass(frozen=True)
class Answer:
    """A prompt's ids, the greedy answer's ids, and the answer's logprobs."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


def answer(model: str, options: dict[str, Any], tokens: int, length: int) -> tuple[Path, list[Answer]]:
    """Return the model's folder, and the greedy answers of fastgen to PROMPTS and to a text of about `length` tokens;
    for a model without a tokenizer, to random ids."""
    with Generator(model, max_seqs=4, **options) as gen:
        draw, most = np.random.default_rng(0), max(min(length, gen.max_model_len - tokens - 1), 1)
        sizes = (5, 20, 60, most)
        prompts: list[Any] = [draw.integers(0, gen.model_config.vocab_size, size).tolist() for size in sizes]
        if gen.tokenizer is not None:
            story = "".join(STORY.format(number) for number in range(most // 20 + 1))
            prompts = [gen.tokenizer.encode(text)[:most] for text in (*PROMPTS, story)]
        outputs = gen.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        if errors := [output.error for output in outputs if output.error is not None]:
            raise SystemExit(f"fastgen: {errors[0]}")
        first = [output.completions[0] for output in outputs]
        found = [Answer(ids, o.token_ids, o.raw_logprobs) for ids, o in zip(prompts, first, strict=True)]
        return gen.folder, found


def reference(folder: Path, device: str, dtype: str) -> Any:
    """Load a model in transformers, also one with vision, whose text model is used."""
    import transformers

    last: Exception | None = None
    for kind in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        try:
            options = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
            return getattr(transformers, kind).from_pretrained(folder, **options).to(device).eval()
        except (ValueError, ImportError) as error:
            last = last or error
    raise SystemExit(f"transformers cannot load the model, so there is nothing to compare with: {last}")


@torch.inference_mode()
def compare(model: Any, answers: list[Answer]) -> dict[str, Tensor]:
    """Return, for each token of the answers: difference, fastgen's logprob minus transformers', and gap, by how much
    its logprob in transformers is below the best token's."""
    found: dict[str, list[Tensor]] = {"difference": [], "gap": []}
    for each in answers:
        ids = torch.tensor([each.prompt + each.token_ids], device=model.device)
        logits = model(ids).logits[0, len(each.prompt) - 1 : -1].double()
        taken = torch.tensor(each.token_ids, device=model.device)[:, None]
        theirs = logits.log_softmax(1)
        logprobs = theirs.gather(1, taken)[:, 0].cpu()
        found["difference"].append(torch.tensor(each.logprobs).double() - logprobs)
        found["gap"].append(theirs.amax(1).cpu() - logprobs)
    return {name: torch.cat(parts) for name, parts in found.items()}


def verdict(found: dict[str, Tensor], dtype: str) -> tuple[bool, str]:
    """Return whether the two agree, and a text that says how well."""
    root, gap = float(found["difference"].square().mean().sqrt()), float(found["gap"].max())
    most, least = TOLERANCES[dtype]
    agree = root <= most and gap <= least
    same = int((found["gap"] == 0).sum())
    lines = [
        f"tokens: {same} of {len(found['gap'])} are the likeliest for transformers; the others are up to "
        f"{gap:.4f} less likely (at most {least:g})",
        f"logprobs: {root:.5f} apart (root mean square; at most {most:g}), {found['difference'].abs().max():.5f} for "
        "the most different token",
        f"verdict: {'AGREE' if agree else 'DIFFER'} in {dtype}",
    ]
    return agree, "\n".join(lines)


def row(model: str, folder: Path, device: str, dtype: str, found: dict[str, Tensor]) -> str:
    """Return a row for the table of checked checkpoints in docs/models.md."""
    checkpoint = folder.name if Path(model).exists() else f"{model} ({folder.name[:8]})"  # a folder of the hub's cache
    chip = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    same, largest = int((found["gap"] == 0).sum()), float(found["difference"].abs().max())
    return f"| {checkpoint} | {chip}, {dtype} | {same} of {len(found['gap'])}, greedy | {largest:.1e} | |"


def main(arguments: list[str] | None = None) -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument(
        "--device", default="cuda" if cuda else "cpu", help="cpu or cuda (default: a GPU if there is one)"
    )
    parser.add_argument("--dtype", choices=TOLERANCES, help="default: bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1000, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, help="context in tokens (default: the model's)")
    args = parser.parse_args(arguments)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    options = {"device": args.device, "dtype": dtype, "max_model_len": args.max_model_len}
    folder, answers = answer(args.model, options, args.tokens, args.length)
    gc.collect()
    if args.device != "cpu":
        torch.cuda.empty_cache()
    found = compare(reference(folder, args.device, dtype), answers)
    agree, text = verdict(found, dtype)
    print(row(args.model, folder, args.device, dtype, found))
    print(text)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
