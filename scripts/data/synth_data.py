"""Synthetic data in four stages, with the bundled model: topics, questions, answers, and a filter by a scorer.

    python scripts/data/synth_data.py FOLDER            # again with the same folder: it goes on where it was ended
    python scripts/data/synth_data.py FOLDER --smoke    # a few topics, in seconds

    topics.jsonl     two numbers, of which one is in words
    questions.jsonl  the model reads the words; of its answer two questions are made for each topic
    answers.jsonl    each question several times, at temperature 1
    data.jsonl       each answer once, with its score: the mean logprob of its tokens for the same model after
                     the question "step by step"; data that has a score above the bound is kept
    report.json      how many were made, kept and right, and how long they are

The bundled model mostly guesses a product when it is not asked to work it out, so there is something to filter: the
scorer knows no product, but it has another prompt, after which a guess is unlikely. Whether it works can be seen from
the products, which only the report looks at. The stages that generate are fggen's, which does no row twice; the others
are short, and each writes its file as a whole.

This file needs only fastgen: copy it, and change the topics, the templates and the scorer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fastgen import Generator
from fastgen.cli.gen.main import main as fggen

Record = dict[str, Any]

BOUND = -0.05  # of the score, which is the mean logprob of a token
SCORED = 256  # answers in one call
ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
QUESTIONS = ("What is {a} * {b}?", "{a} * {b} step by step")


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a file so that it is there as a whole or not at all."""
    beside = path.with_suffix(".tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    beside.replace(path)


def read(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def once(path: Path, make: Callable[[], Iterable[Record]]) -> Path:
    """Return the file, which is made unless it exists."""
    if not path.exists():
        write(path, make())
    return path


def generate(source: Path, output: Path, *options: str) -> Path:
    """Run a stage of fggen. Ends the program where fggen ends with an error or a Ctrl-C."""
    command = ["fastgen-tiny", str(source), "-o", str(output), "--chat", "--ordered", "--strict", "--seed", "0"]
    if fggen([*command, *options]) != 0:
        raise SystemExit(f"{output.name} is not complete; the same command goes on")
    return output


def in_words(number: int) -> str:
    """Return a number from 10 to 99 in English: 42 is forty-two."""
    tens, ones = divmod(number, 10)
    return TEENS[ones] if tens == 1 else TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def topics(count: int) -> Iterator[Record]:
    draw = random.Random(0)
    for _ in range(count):
        a, b = (10 * draw.randrange(1, 10) + draw.randrange(1, 10) for _ in range(2))
        yield {"words": in_words(a), "b": b}


def questions(read_numbers: Path) -> Iterator[Record]:
    for record in read(read_numbers):
        if found := re.search(r"\d+", record["completions"][0]):  # else the model has not understood
            for form in QUESTIONS:
                yield {"a": int(found[0]), "b": record["b"], "prompt": form.format(a=found[0], b=record["b"])}


def scored(gen: Generator, answers: Path) -> Iterator[Record]:
    """Yield the answers, one by one, with their scores."""
    samples = (
        {"question": record["prompt"], "a": record["a"], "b": record["b"], "answer": text, "token_ids": ids}
        for record in read(answers)
        for text, ids in zip(record["completions"], record["token_ids"], strict=True)
    )
    while chunk := list(islice(samples, SCORED)):
        for sample, mean in zip(chunk, scores(gen, chunk), strict=True):
            yield {**sample, "score": mean, "kept": mean > BOUND}


def scores(gen: Generator, samples: Sequence[Record]) -> list[float]:
    """Return the mean logprob of each answer's tokens, after the question that asks for the steps."""
    assert gen.tokenizer is not None, "the bundled model has one"
    asked = [[{"role": "user", "content": QUESTIONS[1].format(**sample)}] for sample in samples]
    prompts = [gen.tokenizer.encode_chat(messages) for messages in asked]
    sequences = [prompt + sample["token_ids"] for prompt, sample in zip(prompts, samples, strict=True)]
    found = gen.score(sequences, start=[len(prompt) for prompt in prompts])
    return [sum(logprobs) / len(logprobs) for logprobs in found]


def report(seeds: Path, data: Path) -> dict[str, Any]:
    """Return counts, shares of right answers, and the lengths of the kept answers, in tokens."""
    made = kept = right = kept_right = 0
    lengths: dict[int, int] = {}
    for sample in read(data):
        is_right = re.findall(r"\d+", sample["answer"])[-1:] == [str(sample["a"] * sample["b"])]
        made, right = made + 1, right + is_right
        if sample["kept"]:
            kept, kept_right = kept + 1, kept_right + is_right
            lengths[len(sample["token_ids"])] = lengths.get(len(sample["token_ids"]), 0) + 1
    return {
        "topics": sum(1 for _ in read(seeds)),
        "answers": made,
        "kept": kept,
        "right_share": right / max(made, 1),
        "right_share_of_kept": kept_right / max(kept, 1),
        "lengths_of_kept": dict(sorted(lengths.items())),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--topics", type=int, default=200)
    parser.add_argument("--samples", type=int, default=8, help="number of answers per question (default 8)")
    parser.add_argument("--smoke", action="store_true", help="4 topics, 2 samples")
    arguments = parser.parse_args(argv)
    count, samples = (4, 2) if arguments.smoke else (arguments.topics, arguments.samples)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    seeds = once(folder / "topics.jsonl", lambda: topics(count))
    numbers = generate(seeds, folder / "numbers.jsonl", "--template", "{words} in digits", "--temperature", "0")
    asked = once(folder / "questions.jsonl", lambda: questions(numbers))
    answers = generate(asked, folder / "answers.jsonl", "--n", str(samples), "--temperature", "1", "--logprobs")
    with Generator() as gen:
        data = once(folder / "data.jsonl", lambda: scored(gen, answers))
    found = report(seeds, data)
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "lengths_of_kept"}))
    return found


if __name__ == "__main__":
    main()
