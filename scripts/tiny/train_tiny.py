"""Train the bundled model from scratch and write its folder: tokenizer, weights, accuracy and model card.

    python scripts/tiny/train_tiny.py --out fastgen/tiny            # about 8 minutes on one H200
    python scripts/tiny/train_tiny.py --from fastgen/tiny --minutes 3 --out fastgen/tiny  # go on, after a fact changed
    python scripts/tiny/train_tiny.py --smoke --out /tmp/tiny       # a few steps on the CPU; only checks that it runs
    python scripts/tiny/train_tiny.py --eval-only --out fastgen/tiny

The data is made up by `tiny_data.py` of the texts in `data`. Training is bounded by time (`--minutes`), and the
learning rate follows the clock.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_data import BUCKETS, TARGET, corpus, shard
from tiny_eval import ask_first_questions, evaluate, write_card
from tiny_model import Optimizers, new_model, save_folder, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from fastgen import Generator

SHARD_TOKENS = 2_000_000
OTHERS_LR = 0.004  # of the embedding and the norms
CONTINUED = 0.4  # share of these rates for a model that was trained before
# The rate rises for so many steps (the first ones compile, so that time does not measure them), is constant to this
# share of the run, and then falls to zero.
WARM_UP_STEPS, DECAY_FROM = 200, 0.35


@dataclass
class Progress:
    """The progress of training. seconds: time spent; loss: a running mean."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; `--smoke` makes everything tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--from", type=Path, dest="start", metavar="FOLDER", help="go on from a trained folder, at a lower rate"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="time for training, without data and evaluation")
    parser.add_argument("--eval-only", action="store_true", help="only measure the folder again")
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU")
    parser.set_defaults(steps=None, data_tokens=400_000_000, batch_tokens=65_536, corpus_turns=100_000)
    parser.set_defaults(prompts=300, max_new_tokens=560, workers=min(16, os.cpu_count() or 1), seed=0)
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.data_tokens, args.batch_tokens, args.corpus_turns = 2, 12_000, 400, 6000
        args.prompts, args.max_new_tokens, args.workers, args.device = 1, 3, 1, "cpu"
    return args


def generate(args: argparse.Namespace, tokenizer: Any) -> dict[int, Tensor]:
    """Return all rows, by length: int16 [rows, length]. Shards come in order, whatever the number of workers."""
    count = max(1, round(args.data_tokens / SHARD_TOKENS))
    make = partial(shard, tokenizer, args.seed, tokens=args.data_tokens // count)
    if args.workers == 1:
        shards = [make(index) for index in range(count)]
    else:
        # Forked before CUDA starts; the workers only make up text and tokenize it, each in one thread.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with multiprocessing.get_context("fork").Pool(args.workers) as pool:
            shards = pool.map(make, range(count), chunksize=1)
    return {n: torch.from_numpy(np.concatenate([rows[n] for rows in shards])) for n in BUCKETS}


def batches(data: dict[int, Tensor], batch_tokens: int, seed: int) -> Iterator[Tensor]:
    """Yield batches without end, each of one row length; every row of a length is used before one comes again."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    weights = [data[n].numel() for n in BUCKETS]

    def of_length(rows: Tensor) -> Iterator[Tensor]:
        size = max(1, batch_tokens // rows.shape[1])
        size = min(size, len(rows))
        while True:
            order = torch.randperm(len(rows), generator=generator).to(rows.device)
            for start in range(0, len(rows) - size + 1, size):
                yield rows[order[start : start + size]]

    streams = [of_length(data[n]) for n in BUCKETS]
    while True:
        yield next(rng.choices(streams, weights)[0])


def split_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split packed rows [B, L] into ids and the ids to predict at each place, -100 where nothing is learned."""
    packed = rows.long()
    ids = packed & (TARGET - 1)
    following = torch.where(packed & TARGET != 0, ids, -100)
    return ids, F.pad(following[:, 1:], (0, 1), value=-100)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the targets."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def learning_rate(steps: int, share: float) -> float:
    """Return the share of the full rate after that many steps and that share of the run."""
    return min(1.0, (steps + 1) / WARM_UP_STEPS, max(0.0, (1 - share) / (1 - DECAY_FROM)))


def train(model: LlamaForCausalLM, data: dict[int, Tensor], args: argparse.Namespace) -> Progress:
    """Train in place until the time (or the number of steps) is used up."""
    layers = model.model.layers
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in layers.parameters() if p.dim() == 2]
    optimizers = Optimizers(matrices, [*vectors, model.model.embed_tokens.weight], OTHERS_LR)
    loss_of = next_token_loss
    if args.device == "cuda":
        for layer in layers:  # one at a time: all share their code, so that compilation takes seconds
            layer.compile(dynamic=False)
        loss_of = torch.compile(next_token_loss, dynamic=False)
    done, start, last = Progress(), time.perf_counter(), 0.0
    for rows in batches(data, args.batch_tokens, args.seed):
        share = done.steps / args.steps if args.steps else (time.perf_counter() - start) / (60 * args.minutes)
        if share >= 1:
            break
        ids, targets = split_targets(rows)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            loss = loss_of(model(ids).logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(learning_rate(done.steps, share) * (CONTINUED if args.start else 1))
        done.steps += 1
        done.tokens += ids.numel()
        if done.steps % 20 == 0 or done.steps < 4:  # reading the loss waits for the device, so the clock stays honest
            done.loss = loss.item() if done.steps < 40 else 0.8 * done.loss + 0.2 * loss.item()
            if not math.isfinite(done.loss):
                raise FloatingPointError(f"the loss is {done.loss} at step {done.steps}")
            done.seconds = time.perf_counter() - start
            if done.seconds > last + 10 or done.steps < 4:
                last, speed = done.seconds, done.tokens / done.seconds / 1e6
                times = f"{done.seconds:5.0f} s  {speed:.2f} Mtok/s"
                print(f"step {done.steps:6d}  {times}  loss {done.loss:.4f}", flush=True)
    done.seconds = time.perf_counter() - start
    return done


def measure(args: argparse.Namespace) -> None:
    """Write the accuracy of the saved folder and its replies to first questions to accuracy.json and the card."""
    torch.set_float32_matmul_precision("highest")
    facts = json.loads((args.out / "accuracy.json").read_text())
    with Generator(args.out, dtype="float32", device=args.device, memory_fraction=0.5) as gen:
        facts["first_questions"] = ask_first_questions(gen, args.max_new_tokens)
        facts["skills"] = evaluate(gen, args.prompts, args.seed, args.max_new_tokens)
    write_card(args.out, facts)


def make_folder(args: argparse.Namespace) -> None:
    """Write tokenizer, weights, and in accuracy.json how they were trained."""
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(corpus(args.seed, args.corpus_turns))
    save_tokenizer(tokenizer, args.out)
    print(f"tokenizer: {time.perf_counter() - start:.1f} s", flush=True)
    data = generate(args, tokenizer)
    data_tokens, data_seconds = sum(rows.numel() for rows in data.values()), time.perf_counter() - start
    print(f"data: {data_tokens / 1e6:.1f} M tokens, {data_seconds:.1f} s", flush=True)

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    model = new_model()
    if args.start:
        weights = load_file(args.start / "model.safetensors")  # there is no lm_head, as that is the embedding
        model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    model.to(device)
    done = train(model, {n: rows.to(device) for n, rows in data.items()}, args)
    save_folder(model, args.out)
    print(f"trained: {done.steps} steps, {done.tokens / 1e6:.0f} M tokens, {done.seconds:.0f} s", flush=True)
    facts: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weight_bytes": (args.out / "model.safetensors").stat().st_size,
        "training": {
            "command": f"python scripts/tiny/train_tiny.py{' --from fastgen/tiny' if args.start else ''} "
            f"--out fastgen/tiny --minutes {args.minutes:g}",
            "hardware": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "seed": args.seed,
            "steps": done.steps,
            "batch_tokens": args.batch_tokens,
            "tokens": done.tokens,
            "seconds": round(done.seconds, 1),
            "data_tokens": data_tokens,
            "data_seconds": round(data_seconds, 1),
            "loss": round(done.loss, 4),
        },
    }
    if args.start:
        facts["training"]["before"] = json.loads((args.start / "accuracy.json").read_text())["training"]
    (args.out / "accuracy.json").write_text(json.dumps(facts, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Train, and measure what was written."""
    args = parse(argv)
    start = time.perf_counter()
    if not args.eval_only:
        make_folder(args)
    measure(args)
    print(f"wrote {args.out} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
