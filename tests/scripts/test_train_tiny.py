"""The bundled model's training script, its corpus, and the folder that ships."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "tiny"))

import tiny_data  # noqa: E402
import tiny_questions  # noqa: E402
import tiny_talk  # noqa: E402
import tiny_tools  # noqa: E402
import train_tiny  # noqa: E402
from tiny_task import Task, Turn, is_held_out  # noqa: E402

import fastgen  # noqa: E402
from fastgen.cli import chat  # noqa: E402
from fastgen.cli.gen import options as gen  # noqa: E402
from fastgen.cli.serve import options as serve  # noqa: E402
from fastgen.text.tokenizer import Tokenizer  # noqa: E402
from fastgen.text.tool_calls import parse_message  # noqa: E402
from fastgen.text.tools.formats import HERMES  # noqa: E402

SHIPPED = ROOT / "fastgen" / "tiny"


def check_folder(folder: Path) -> None:
    """Transformers loads the folder; the tokenizer keeps every text; the card has the measured numbers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.dtype, model.config.tie_word_embeddings) == (torch.bfloat16, True)
    assert sum(p.numel() for p in model.parameters()) == 6_951_168
    generation = GenerationConfig.from_pretrained(folder)
    assert tokenizer.eos_token_id in generation.eos_token_id == model.config.eos_token_id
    assert (generation.temperature, len(tokenizer)) == (0.2, 4096)
    for text in ("  two  spaces\n\n\ttab", "🙂 👩‍👩‍👧 中文 naïve ▁", "a\r\nb\x00", "12 + 30 = 42.", "<0x41>", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer("2048", add_special_tokens=False)["input_ids"]) == 4, "digits are tokens of their own"
    scores = json.loads((folder / "accuracy.json").read_text())["skills"]
    card = (folder / "README.md").read_text()
    rows = {m[1]: (m[2], m[3]) for m in re.finditer(r"^\| (\w+) \| .* \| ([\d.]+) % \| (\d+) \|$", card, re.M)}
    assert rows == {name: (f"{100 * s['accuracy']:.1f}", str(s["prompts"])) for name, s in scores.items()}
    assert set(scores) == {*tiny_data.SKILLS, "after_long_conversation"}


@pytest.mark.long
def test_training_from_scratch_runs_small(tmp_path: Path) -> None:
    train_tiny.main(["--smoke", "--out", str(tmp_path)])
    check_folder(tmp_path)


@pytest.mark.long
def test_training_goes_on_from_the_shipped_folder(tmp_path: Path) -> None:
    check_folder(SHIPPED)
    train_tiny.make_folder(train_tiny.parse(["--smoke", "--from", str(SHIPPED), "--out", str(tmp_path)]))
    before, after = (load_file(folder / "model.safetensors") for folder in (SHIPPED, tmp_path))
    distances = [float((after[name].float() - before[name].float()).norm() / before[name].norm()) for name in before]
    assert 0 < max(distances) < 0.1
    facts = json.loads((tmp_path / "accuracy.json").read_text())["training"]
    assert facts["before"] == json.loads((SHIPPED / "accuracy.json").read_text())["training"]


def test_the_shipped_model_is_as_good_as_the_readme_says() -> None:
    facts = json.loads((SHIPPED / "accuracy.json").read_text())
    assert facts["skills"]["add_2digit"]["accuracy"] > 0.95
    assert facts["skills"]["multiply_2digit"]["accuracy"] < 0.60
    questions, found = tiny_questions.FIRST_QUESTIONS, facts["first_questions"]
    assert len(questions) == len(tiny_questions.HELD_OUT_WORDINGS) == 150
    judged = [
        tiny_questions.is_sensible(question, entry["replies"])
        for question, entry in zip(questions, found["asked"], strict=True)
    ]
    assert judged == [entry["sensible"] for entry in found["asked"]]
    assert sum(judged) == found["sensible"] >= 138


def test_the_corpus_is_that_of_the_shipped_model() -> None:
    """Training text, system prompts, held-out tasks and first questions are those that the model was made with.

    Another hash is right only together with a newly trained model.
    """
    rng = random.Random(0)
    texts = [*tiny_data.corpus(0, 5000), *(str(tiny_data.new_conversation(rng).system) for _ in range(200))]
    assert not {tiny_questions.plain(text) for text in texts[:10_000:2]} & tiny_questions.HELD_OUT_WORDINGS
    for name, (weight, make) in tiny_data.SKILLS.items():
        held_out = tiny_data.evaluation_tasks(name, 20, 0)
        trained = [tiny_data.draw(random.Random(5), make) for _ in range(20)]
        assert all(is_held_out(task.keys[-1]) for task in held_out)
        assert not any(is_held_out(key) for task in trained for key in task.keys)
        assert all(task.is_right(task.turns[-1].reply) for task in (*held_out, *trained))
        assert not any(task.is_right("I am not sure: 123456789 zzz") for task in held_out)
        texts += [f"{name} {weight}", *map(repr, held_out)]
    texts += map(repr, tiny_questions.FIRST_QUESTIONS)
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "3ed9e364af0a6c38"


def as_messages(task: Task, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return a task as a client would send it: calls and results are messages of their own kinds."""
    messages: list[dict[str, Any]] = []
    for turn in task.turns:
        results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn.user, re.DOTALL)
        messages += [{"role": "tool", "content": text} for text in results] or [{"role": "user", "content": turn.user}]
        thought = f"<think>\n{turn.thought}\n</think>\n\n" if turn.thought else ""
        message = parse_message(turn.reply, tokenizer, task.tools)
        messages.append(message | ({"content": thought + (message["content"] or "")} if thought else {}))
    return messages


@pytest.mark.parametrize("name", ["follow_up_sum", "think_product", "tool_call_arguments", "tool_answer", "tool_none"])
def test_rows_are_what_the_chat_template_writes(name: str) -> None:
    """A turn is trained in exactly the ids that the template gives, and only the reply is a target."""
    tokenizer = Tokenizer(SHIPPED)
    assert tokenizer.tool_syntax is HERMES

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    for seed in range(12):
        rng = random.Random(seed)
        box = tiny_tools.toolbox(rng) if name in tiny_tools.SKILLS else ()
        make = tiny_data.SKILLS[name][1]
        drawn = tiny_data.draw(rng, partial(make, box=box) if box else make)
        packed = [i for turn in drawn.turns for i in tiny_data.turn_ids(encode, turn, turn.reply)]
        head = [tiny_data.SYSTEM, *encode(tiny_tools.tools_text(box)), tiny_data.END] if box else []
        ids = [tiny_data.BOS, *head, *(i & (tiny_data.TARGET - 1) for i in packed)]
        tools = {"tools": list(drawn.tools)} if box else {}
        assert ids == tokenizer.encode_chat(as_messages(drawn, tokenizer), variables=tools, add_generation_prompt=False)
        asked = tiny_data.prompt(drawn)
        begun = tokenizer.encode_chat(asked.pop("messages"), variables=asked.pop("chat_template_kwargs", {}) | asked)
        assert ids[: len(begun)] == begun
        inputs, following = train_tiny.split_targets(torch.tensor([packed], dtype=torch.int16))
        learned = following[0] != -100
        assert (following[0, :-1][learned[:-1]] == inputs[0, 1:][learned[:-1]]).all()
        replies = [f"{turn.thought}\n</think>\n\n{turn.reply}" if turn.thought else turn.reply for turn in drawn.turns]
        assert tokenizer.decode(following[0][learned].tolist(), special=True) == "".join(f"{r}<|end|>" for r in replies)


def test_a_reply_whose_keys_a_grammar_gives_is_learned_without_them() -> None:
    """The ids are those of the whole reply, so that a grammar's text and the learned values join."""
    tokenizer = Tokenizer(SHIPPED)
    reply = '{"name": "Ada \\"x\\": 1", "tags": ["a", "b"], "at": {"x": 1.5, "ok": true}, "all": [{"n": 1}, {"n": 2}]}'
    turn = Turn("Who?", reply, given="keys")
    packed = tiny_data.turn_ids(lambda text: tokenizer.encode(text, special=False), turn, reply)
    learned = [i - tiny_data.TARGET for i in packed if i & tiny_data.TARGET]
    assert tokenizer.decode(learned, special=True) == ' "Ada \\"x\\": 1", ["a", "b"], 1.5, true}, [{" 1}, 2}]}<|end|>'
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": reply}]
    ids = [tiny_data.BOS, *(i & (tiny_data.TARGET - 1) for i in packed)]
    assert ids == tokenizer.encode_chat(messages, add_generation_prompt=False)


def test_plain_rows_are_texts_without_a_chat() -> None:
    tokenizer = Tokenizer(SHIPPED)
    row = tiny_data.plain_row(random.Random(1), lambda text: tokenizer.encode(text, special=False), 192)
    texts = tokenizer.decode([i & (tiny_data.TARGET - 1) for i in row], special=True).split("<|end|>")
    assert len(row) == 192
    assert all(text.startswith("<s>") and "<|" not in text for text in texts[:-1])
    assert len(texts) > 2
    assert all(i & tiny_data.TARGET for i in row if i & (tiny_data.TARGET - 1) == tiny_data.END)


def test_the_template_drops_earlier_thinking() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"}
    messages = [{"role": "user", "content": "2+3"}, thought, {"role": "user", "content": "and 1?"}]
    asked = "<s><|user|>2+3<|end|><|assistant|>5<|end|><|user|>and 1?<|end|><|assistant|>"
    tokenizer = Tokenizer(SHIPPED)
    assert tokenizer.render_chat(messages) == asked
    assert tokenizer.render_chat(messages, variables={"enable_thinking": False}) == asked
    assert tokenizer.render_chat(messages, variables={"enable_thinking": True}) == f"{asked}<think>\n"


def test_replies_about_fastgen_name_what_exists() -> None:
    text = " ".join(reply for _, replies in (*tiny_talk.ABOUT, *tiny_talk.FEATURES) for reply in replies)
    options, parameters = re.findall(r"Generator\(path, (\w+)=", text), re.findall(r"SamplingParams\((\w+)=", text)
    assert {*options, "memory_fraction", "max_model_len"} <= {*inspect.signature(fastgen.Generator).parameters}
    assert {*parameters} <= {*inspect.signature(fastgen.SamplingParams).parameters}
    assert all(hasattr(fastgen.Generator, name) for name in re.findall(r"\bgen\.(\w+)", text))
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:docs|scripts)/[\w./-]*\w", text))
    flags = re.findall(r"(fg\w+) (?:with )?(--[\w-]+)", text)
    assert min(len(options), len(parameters), len(flags)) > 2
    parsers: dict[str, Any] = {"fgchat": chat._parser(), "fggen": gen.make_parser(), "fgserve": serve.make_parser()}
    assert all(flag in parsers[tool].format_help() for tool, flag in flags)
