"""Train heads that draft for the bundled model, and write their folders: dflash and medusa.

    python scripts/tiny/train_heads.py --out fastgen/tiny              # about 2 minutes on one H100
    python scripts/tiny/train_heads.py --smoke --out /tmp/heads        # a few steps on the CPU, as a check

The text is what the bundled model was trained on, and a draft is learned from what the bundled model says of it: the
loss is the cross-entropy to its distribution of the drafted token. Drafts further ahead count less, since they are of
use only if all before them are right (DFlash's weights). All heads learn from the same steps of the target. No row is
seen twice, so the printed agreement is of rows that were not trained on: the mean number of drafts after an anchor that
are the target's most likely tokens, up to the first that is not.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from tiny_heads import Anchors, DFlash, Medusa
from tiny_model import Optimizers
from tokenizers import Tokenizer
from torch import Tensor
from train_tiny import batches, generate, learning_rate, split_targets
from transformers import LlamaForCausalLM

TARGET_FOLDER = Path(__file__).parents[2] / "fastgen" / "tiny"
OTHERS_LR = 0.002  # of the norms and biases
DECAY = 4.0  # draft number j weighs exp(-j / DECAY)
ANCHOR_EVERY = 8  # a row has one anchor for so many tokens
SHAPE = (3, 6), 2, 128  # of the DFlash head: features, layers, width of the MLP


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options; `--smoke` makes everything tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the folders of the heads")
    parser.add_argument("--minutes", type=float, default=1.5, help="time for training, without data")
    parser.add_argument("--smoke", action="store_true", help="two steps on the CPU")
    parser.set_defaults(steps=None, data_tokens=100_000_000, batch_tokens=49_152)
    parser.set_defaults(workers=min(16, os.cpu_count() or 1), seed=0)
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.data_tokens, args.batch_tokens, args.workers, args.device = 2, 12_000, 400, 1, "cpu"
    return args


class Learner:
    """A head and its optimizers. means: running means of the loss and of the number of right drafts after an anchor,
    float32 [2] on the device, so that no step waits for them."""

    def __init__(self, head: DFlash | Medusa) -> None:
        self.head = head
        self.means: Tensor | None = None
        parameters = list(head.parameters())
        matrices, vectors = ([p for p in parameters if p.dim() == n] for n in (2, 1))
        self.optimizers = Optimizers(matrices, vectors, OTHERS_LR)

    def step(
        self, rate: float, ids: Tensor, states: tuple[Tensor, ...], anchors: Anchors, said: Tensor, embedding: Tensor
    ) -> None:
        """Learn from a batch. rate: the share of the full learning rates. said: the target's probabilities, [N, V], of
        the N wanted drafts, in the order of anchors.wanted."""
        drafts = self.head.drafts
        of_head = anchors.wanted[..., :drafts]
        rows = self.head(states, anchors, ids, embedding)[of_head]
        said = said[anchors.wanted.nonzero()[:, 2] < drafts]
        logits = (rows @ embedding.T).float()
        losses = -(said * logits.log_softmax(1)).sum(1)
        weights = torch.exp(-of_head.nonzero()[:, 2] / DECAY)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers.step(rate)
        with torch.no_grad():
            hits = torch.zeros_like(of_head)
            hits[of_head] = logits.argmax(1) == said.argmax(1)
            begun = of_head[..., 0].sum().clamp(min=1)
            found = torch.stack((loss, hits.cumprod(-1).sum() / begun))
            self.means = found if self.means is None else torch.lerp(self.means, found, 0.05)

    def read(self) -> tuple[float, float]:
        """Return the loss and the number of right drafts, running means."""
        assert self.means is not None, "after a step"
        loss, right = self.means.tolist()
        return loss, right


def train(
    learners: dict[str, Learner], target: LlamaForCausalLM, data: dict[int, Tensor], args: argparse.Namespace
) -> int:
    """Train the heads until the time or the number of steps is used up; return the number of steps."""
    most = max(learner.head.drafts for learner in learners.values())
    draw = torch.Generator(args.device).manual_seed(args.seed)
    embedding: Tensor = target.get_input_embeddings().weight.detach()
    start, last = time.perf_counter(), 0.0
    for step, packed in enumerate(batches(data, args.batch_tokens, args.seed)):
        seconds = time.perf_counter() - start
        share = step / args.steps if args.steps else seconds / (60 * args.minutes)
        if share >= 1:
            return step
        ids, following = split_targets(packed.to(args.device))
        learned = torch.zeros_like(ids, dtype=torch.bool)
        learned[:, 1:] = following[:, :-1] >= 0
        anchors = Anchors.drawn(learned, ids.shape[1] // ANCHOR_EVERY, most, draw)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            with torch.no_grad():
                states = target.model(ids, output_hidden_states=True).hidden_states
                ends = torch.stack([anchors.pick(states[-1], offset) for offset in range(most)], 2)
                said = (ends[anchors.wanted] @ embedding.T).float().softmax(1)
            for learner in learners.values():
                learner.step(learning_rate(step, share), ids, states, anchors, said, embedding)
        if step < 3 or seconds > last + 10:
            last = seconds
            found = ", ".join(f"{name} {x.read()[0]:.3f} {x.read()[1]:.3f}" for name, x in learners.items())
            print(f"step {step:5d} {seconds:4.0f} s  loss, right drafts: {found}", flush=True)
    raise AssertionError("batches have no end")


def main(argv: list[str] | None = None) -> None:
    """Train, and write the folders."""
    args = parse(argv)
    start = time.perf_counter()
    data = generate(args, Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json")))
    tokens = sum(rows.numel() for rows in data.values())
    print(f"data: {tokens / 1e6:.1f} M tokens, {time.perf_counter() - start:.1f} s", flush=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    target = LlamaForCausalLM.from_pretrained(TARGET_FOLDER, dtype=torch.float32).to(args.device).eval()
    dflash = DFlash(*SHAPE)
    dflash.norm.weight.data.copy_(target.model.norm.weight)  # the scale of logits
    heads: dict[str, DFlash | Medusa] = {"dflash": dflash, "medusa": Medusa()}
    learners = {name: Learner(head.to(args.device)) for name, head in heads.items()}
    steps = train(learners, target, {n: rows.to(args.device) for n, rows in data.items()}, args)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    for name, learner in learners.items():
        folder = args.out / name
        learner.head.save(folder)
        loss, right = learner.read()
        facts = {
            "command": f"python scripts/tiny/train_heads.py --out fastgen/tiny --minutes {args.minutes:g}",
            "hardware": hardware, "torch": torch.__version__, "seed": args.seed, "steps": steps,
            "tokens": steps * args.batch_tokens, "loss": round(loss, 4), "right_drafts": round(right, 4),
        }  # fmt: skip
        (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{name}: {facts}", flush=True)


if __name__ == "__main__":
    main()
