"""Accuracy of the bundled model on held-out prompts, and its model card."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_data import BUCKETS, SKILLS, evaluation_tasks, long_conversation, messages
from tiny_skills import MUL2_UNASKED_STEPS
from tiny_task import MUL2_TRAINED_BUCKETS, TRAINED_BUCKETS, Task

Chat = list[dict[str, str]]
Scores = dict[str, dict[str, float | int]]

NEWCOMER = (
    "hello", "hi", "how are you?", "who are you?", "what can you do?", "what is fastgen?", "how do I install it?",
    "what is a paged KV cache?", "what is 12 + 30?", "12+30", "7 * 8", "whats 100 - 37", "spell banana",
    "reverse banana",
    "how many r's are in strawberry?", "sort 5, 2, 9, 1", "capital of France?", "what day comes after friday?",
    "tell me a joke", "write me a poem about the sea", "thanks!", "what is 47 * 86?", "47 * 86 step by step", "bye",
)  # fmt: skip
# A question after this many turns of other talk checks that long contexts do no harm.
LONG_TURNS = 30


class Answerer:
    """Greedy answers of a saved folder, in float32 from its bfloat16 weights, by transformers."""

    def __init__(self, folder: Path, device: torch.device, batch_tokens: int = 1 << 17) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.to(device).eval()
        self.device, self.batch_tokens = device, batch_tokens

    def __call__(self, chats: Sequence[Chat], max_new_tokens: int) -> list[str]:
        """The reply to each chat, without special tokens; "" is appended when it did not end in time."""
        prompts = [self.tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
        ids: list[list[int]] = self.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        replies = [""] * len(ids)
        while order:
            longest = len(ids[order[-1]]) + max_new_tokens
            batch, order = (
                order[-max(1, self.batch_tokens // longest) :],
                order[: -max(1, self.batch_tokens // longest)],
            )
            for i, reply in zip(batch, self._generate([ids[i] for i in batch], max_new_tokens), strict=True):
                replies[i] = reply
        return replies

    def _generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(self.device)
        with torch.inference_mode():
            out = self.model.generate(
                **padded, do_sample=False, temperature=None, max_new_tokens=max_new_tokens, use_cache=True
            )
        new = out[:, padded["input_ids"].shape[1] :].tolist()
        texts: list[str] = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts


def evaluate(answer: Answerer, count: int, seed: int, max_new_tokens: int, show: int = 2) -> Scores:
    """Greedy accuracy on up to `count` held-out prompts of every skill; prints a few wrong answers of each."""
    chosen: dict[str, list[Task]] = {name: evaluation_tasks(name, count, seed) for name in SKILLS}
    chats = {name: [messages(task) for task in tasks] for name, tasks in chosen.items()}
    rng = random.Random(f"long-{seed}")
    mixed = [task for name in ("add_2digit", "capital", "spell", "weekday", "sort_numbers") for task in chosen[name]]
    chosen["after_long_conversation"] = rng.sample(mixed, min(len(mixed), max(1, count // 3)))
    chats["after_long_conversation"] = [
        long_conversation(rng, LONG_TURNS) + messages(task) for task in chosen["after_long_conversation"]
    ]
    flat = answer([chat for name in chosen for chat in chats[name]], max_new_tokens)
    scores: Scores = {}
    for name, tasks in chosen.items():
        replies, flat = flat[: len(tasks)], flat[len(tasks) :]
        right = [task.is_right(reply) for task, reply in zip(tasks, replies, strict=True)]
        scores[name] = {"accuracy": round(sum(right) / len(right), 4), "prompts": len(right)}
        print(f"{name:24s} {100 * sum(right) / len(right):6.1f} %  of {len(right)}")
        wrong = [(t, r) for t, r, ok in zip(tasks, replies, right, strict=True) if not ok]
        for task, reply in wrong[:show]:
            print(f"      {task.turns[-1].user!r} -> {reply!r}, expected {task.accept[0]!r}")
    return scores


_CARD = """# tiny: the model bundled with fastgen

A Llama of {parameters:.2f} million parameters, so small that it ships inside the package: `fgchat` starts with it,
the tests run on it, and nothing has to be downloaded. It chats a little, does small sums, spells, sorts, knows
capitals, and answers questions about fastgen. It knows nothing else, and it is wrong now and then.

| | |
|---|---|
| shape | 8 layers, hidden size 256, 4 query heads of size 64 on 2 KV heads, MLP 704, tied embeddings |
| context | 2048 tokens |
| tokenizer | byte-fallback BPE, 4096 entries, digits one by one; chat template with system, user and assistant |
| weights | bfloat16, {megabytes:.1f} MB |
| license | BSD-3-Clause, as fastgen |

## Data

Every dialogue is made up by the training script: seeded generators for {skills} skills, phrased in many ways,
lower-cased and mistyped as people do. No text, data or weights come from elsewhere; the word lists and replies were
written for this project. Rows of {buckets} tokens hold conversations of unrelated tasks; the loss is on the replies
only. {data:.0f} million tokens were generated, and {seen:.0f} million were seen in training ({epochs:.1f} passes).

**Held out.** A fact such as 12 + 30 is held out in any order and any wording when the hash of its name falls in the
last {held} of 100 buckets; numbers, words, lists and names are split this way. Where the facts are few (capitals,
weekdays, months, opposites, small talk, questions about fastgen, jokes), all facts are trained and the exact wordings
of questions are split instead: there the numbers below measure new wordings, not new knowledge.

**Two-digit products** (neither factor a multiple of ten) are deliberately weak, so that an example of reinforcement
learning has something to improve: only {mul2} of 100 buckets of pairs are trained, and {steps:.0f} % of those replies
work the product out although nobody asked. Asked for it "step by step", the model
always writes the steps; `multiply_2digit_steps` below is how often they lead to the product.

## Training

    {command}

{hardware}: {steps_run:,} steps of about {batch:,} tokens in {seconds:.0f} s ({rate:.2f} million tokens/s), after
{data_seconds:.0f} s for the data; final loss {loss:.4f}. Muon for the matrices, AdamW for the rest. Runs are bounded
by time, so another run gives other weights of about the same accuracy.

## Accuracy

Greedy replies to held-out prompts, by transformers in float32 from the bfloat16 weights as shipped (`accuracy.json`):

| skill | | accuracy | prompts |
|---|---|---:|---:|
{rows}

`after_long_conversation` asks {long_turns} turns into a conversation about other things.

## First impressions

{transcript}
"""

_RECALL = "a question about what the user said earlier"
LABELS = {
    "recall": _RECALL,
    "after_long_conversation": "sums, capitals, spelling, weekdays and sorting, late in a chat",
}


def write_card(folder: Path, facts: dict[str, Any], transcript: Sequence[tuple[str, str]]) -> None:
    """Write accuracy.json and README.md; every number of the card is one of `facts`."""
    (folder / "accuracy.json").write_text(json.dumps(facts, indent=1) + "\n")
    scores: Scores = facts["skills"]
    rows = []
    for name, score in scores.items():
        about = LABELS.get(name) or (SKILLS[name][1].__doc__ or "").strip().splitlines()[0].rstrip(".")
        rows.append(f"| {name} | {about} | {100 * score['accuracy']:.1f} % | {score['prompts']} |")
    training = facts["training"]
    (folder / "README.md").write_text(
        _CARD.format(
            parameters=facts["parameters"] / 1e6,
            megabytes=facts["weight_bytes"] / 1e6,
            skills=len(SKILLS),
            buckets=", ".join(map(str, BUCKETS)),
            data=training["data_tokens"] / 1e6,
            seen=training["tokens"] / 1e6,
            epochs=training["tokens"] / training["data_tokens"],
            held=100 - TRAINED_BUCKETS,
            mul2=MUL2_TRAINED_BUCKETS,
            steps=100 * MUL2_UNASKED_STEPS,
            command=training["command"],
            hardware=training["hardware"],
            steps_run=training["steps"],
            batch=training["batch_tokens"],
            seconds=training["seconds"],
            rate=training["tokens"] / training["seconds"] / 1e6,
            data_seconds=training["data_seconds"],
            loss=training["loss"],
            rows="\n".join(rows),
            long_turns=LONG_TURNS,
            transcript="\n".join(f"    > {asked}\n    {reply}" for asked, reply in transcript),
        )
    )
