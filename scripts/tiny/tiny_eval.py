"""The bundled model's accuracy on held-out prompts, its replies to first questions, and its model card."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tiny_data import BUCKETS, SKILLS, evaluation_tasks, long_conversation, prompt
from tiny_questions import FIRST_QUESTIONS, LONGEST, UNFINISHED, first_prompt, is_sensible
from tiny_skills import MUL2_UNASKED_STEPS
from tiny_task import ABOUT_SKILLS, MUL2_TRAINED_BUCKETS, TRAINED_BUCKETS, Task

from fastgen import Generator, SamplingParams

Prompt = dict[str, Any]
Scores = dict[str, dict[str, float | int]]
FirstQuestions = dict[str, Any]

# A question after this many turns of other talk checks that long contexts do no harm.
LONG_TURNS = 30


def answer(
    gen: Generator, prompts: Sequence[Prompt], limits: Sequence[int], schemas: Sequence[dict[str, Any] | None] = ()
) -> list[str]:
    """Return the greedy reply to each prompt, of at most that many tokens, without special tokens. schemas: of the
    replies that a grammar restricts."""
    pairs = zip_longest(limits, schemas)
    params = [SamplingParams(temperature=0, max_tokens=limit, json_schema=schema) for limit, schema in pairs]
    outputs = gen.generate(prompts, params)
    replies = [output.completions[0] for output in outputs]
    return [reply.text + UNFINISHED * (reply.finish_reason == "length") for reply in replies]


def evaluate(gen: Generator, count: int, seed: int, max_new_tokens: int, show: int = 2) -> Scores:
    """Return the greedy accuracy on up to `count` held-out prompts per skill; print a few wrong answers of each."""
    chosen: dict[str, list[Task]] = {name: evaluation_tasks(name, count, seed) for name in SKILLS}
    chats = {name: [prompt(task) for task in tasks] for name, tasks in chosen.items()}
    rng = random.Random(f"long-{seed}")
    mixed = [task for name in ("add_2digit", "capital", "spell", "weekday", "sort_numbers") for task in chosen[name]]
    chosen["after_long_conversation"] = rng.sample(mixed, min(len(mixed), max(1, count // 3)))
    chats["after_long_conversation"] = [
        prompt(task, long_conversation(rng, LONG_TURNS)) for task in chosen["after_long_conversation"]
    ]
    # A character is at least a token, but for letters outside of Latin; a reply may be longer than the reference.
    last = [task.turns[-1] for tasks in chosen.values() for task in tasks]
    limits = [min(max_new_tokens, len(turn.thought) + len(turn.reply) + 40) for turn in last]
    schemas = [task.schema for tasks in chosen.values() for task in tasks]
    flat = answer(gen, [chat for name in chosen for chat in chats[name]], limits, schemas)
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


def ask_first_questions(gen: Generator, max_new_tokens: int) -> FirstQuestions:
    """Return greedy replies to the first questions, turn by turn, judged by their rules; print all of them."""
    chats: list[Prompt] = [first_prompt(question) for question in FIRST_QUESTIONS]
    for turn in range(max(len(question.turns) for question in FIRST_QUESTIONS)):
        places = [i for i, question in enumerate(FIRST_QUESTIONS) if turn < len(question.turns)]
        for i in places:
            role, content = FIRST_QUESTIONS[i].message(turn)
            chats[i]["messages"].append({"role": role, "content": content})
        replies = answer(gen, [chats[i] for i in places], [min(max_new_tokens, LONGEST)] * len(places))
        for i, reply in zip(places, replies, strict=True):
            chats[i]["messages"].append({"role": "assistant", "content": reply})
    asked = []
    for question, chat in zip(FIRST_QUESTIONS, chats, strict=True):
        replies = [message["content"] for message in chat["messages"][1::2]]
        asked.append({"turns": question.turns, "replies": replies, "sensible": is_sensible(question, replies)})
        print(f"{'     ' if asked[-1]['sensible'] else 'WRONG'} {' / '.join(question.turns)!r} -> {replies[-1]!r}")
    sensible = sum(bool(entry["sensible"]) for entry in asked)
    print(f"first questions: {sensible} of {len(asked)} replies are sensible")
    return {"sensible": sensible, "questions": len(asked), "asked": asked}


_CARD = Path(__file__).with_name("data").joinpath("card.txt").read_text()
_RUN = """    {command}

{hardware}: {data:.0f} million tokens of data, made in {data_seconds:.0f} s; {steps:,} steps of about
{batch_tokens:,} tokens in {seconds:.0f} s ({rate:.2f} million tokens/s, {passes:.1f} passes); final loss {loss:.4f}."""

AFTER_LONG = "sums, capitals, spelling, weekdays and sorting, late in a chat"


def _transcript(asked: Sequence[dict[str, Any]]) -> str:
    """Return all first questions and replies as indented text."""
    lines = []
    for entry in asked:
        for turn, reply in zip(entry["turns"], entry["replies"], strict=True):
            lines += [f"    > {turn}", *(f"    {line}" for line in reply.splitlines())]
        if not entry["sensible"]:
            lines.append("    (wrong)")
    return "\n".join(lines)


def _runs(training: dict[str, Any]) -> Iterator[str]:
    """Yield what the card says of each run, the first one first."""
    if "before" in training:
        yield from _runs(training["before"])
    yield _RUN.format(
        data=training["data_tokens"] / 1e6,
        rate=training["tokens"] / training["seconds"] / 1e6,
        passes=training["tokens"] / training["data_tokens"],
        **training,
    )


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write accuracy.json and README.md; every number of the card is one of `facts`."""
    (folder / "accuracy.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    scores: Scores = facts["skills"]
    rows = []
    for name, score in scores.items():
        about = ABOUT_SKILLS.get(name, AFTER_LONG)
        rows.append(f"| {name} | {about} | {100 * score['accuracy']:.1f} % | {score['prompts']} |")
    (folder / "README.md").write_text(
        _CARD.format(
            parameters=facts["parameters"] / 1e6,
            megabytes=facts["weight_bytes"] / 1e6,
            skills=len(SKILLS),
            buckets=", ".join(map(str, BUCKETS)),
            held=100 - TRAINED_BUCKETS,
            mul2=MUL2_TRAINED_BUCKETS,
            steps=100 * MUL2_UNASKED_STEPS,
            runs="\n\n".join(_runs(facts["training"])),
            rows="\n".join(rows),
            long_turns=LONG_TURNS,
            sensible=facts["first_questions"]["sensible"],
            questions=facts["first_questions"]["questions"],
            transcript=_transcript(facts["first_questions"]["asked"]),
        )
    )
