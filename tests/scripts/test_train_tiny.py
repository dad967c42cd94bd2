"""The training script of the bundled model: a smoke run, its data, and the folder that ships."""

import hashlib
import inspect
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "tiny"))

import tiny_about  # noqa: E402
import tiny_data  # noqa: E402
import tiny_model  # noqa: E402
import tiny_questions  # noqa: E402
import train_tiny  # noqa: E402
from tiny_task import is_held_out  # noqa: E402

import fastgen  # noqa: E402
from fastgen.cli import chat  # noqa: E402
from fastgen.cli.gen import main as gen  # noqa: E402
from fastgen.cli.serve import options as serve  # noqa: E402

SHIPPED = ROOT / "fastgen" / "tiny"


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a smoke run writes: one run, shared by all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    with FileLock(f"{folder}.lock"):
        if not (folder / "README.md").exists():  # the card is written last
            train_tiny.main(["--smoke", "--out", str(folder)])
    return folder


@pytest.fixture(params=["smoke", "shipped"])
def folder(request: pytest.FixtureRequest, smoke: Path) -> Path:
    """A folder that the script wrote: just now, or the one that ships."""
    return SHIPPED if request.param == "shipped" else smoke


def test_training_goes_on_from_a_folder(tmp_path: Path) -> None:
    """The weights are near those of the folder, and the facts of both runs are kept."""
    train_tiny.make_folder(train_tiny.parse(["--smoke", "--from", str(SHIPPED), "--out", str(tmp_path)]))
    before, after = (load_file(folder / "model.safetensors") for folder in (SHIPPED, tmp_path))
    distances = [float((after[name].float() - before[name].float()).norm() / before[name].norm()) for name in before]
    assert 0 < max(distances) < 0.1
    facts = json.loads((tmp_path / "accuracy.json").read_text())["training"]
    assert facts["before"] == json.loads((SHIPPED / "accuracy.json").read_text())["training"]
    assert "--from" in facts["command"]


def test_mean_of_runs(tmp_path: Path) -> None:
    """The weights are the mean in the given shares, and the facts are those of the last run."""
    runs = [tmp_path / name for name in ("first", "last")]
    for folder, value in zip(runs, (1.0, 2.0), strict=True):
        shutil.copytree(SHIPPED, folder)
        weights = load_file(folder / "model.safetensors")
        save_file({name: torch.full_like(w, value) for name, w in weights.items()}, folder / "model.safetensors")
    train_tiny.write_mean(train_tiny.parse(["--mean", f"{runs[0]}:0.25", f"{runs[1]}:0.75", "--out", str(tmp_path)]))
    assert all(bool((w == 1.75).all()) for w in load_file(tmp_path / "model.safetensors").values())
    assert json.loads((tmp_path / "accuracy.json").read_text())["training"]["shares"] == [0.25, 0.75]


def _check_tokenizer(tokenizer: Any) -> None:
    assert len(tokenizer) == 4096
    for text in (
        "hello",
        "  two  spaces\n\n\ttab",
        "🙂 👩‍👩‍👧 中文 naïve ▁",
        "a\r\nb\x00",
        "12 + 30 = 42.",
        "<0x41>",
        "",
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    digits = tokenizer("2048", add_special_tokens=False)["input_ids"]
    assert len(digits) == 4


def _check_template(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "what is 12 + 30?"},
    ]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert text.startswith("<s><|system|>")
    assert text.endswith("<|assistant|>")
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_folder_loads(folder: Path) -> None:
    """Transformers loads the folder; shapes, tying, dtype and end ids are what they should be."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert config.tie_word_embeddings
    assert config.num_key_value_heads == 2
    assert config.max_position_embeddings == 2048
    assert sum(p.numel() for p in model.parameters()) == 6_951_168
    assert (folder / "model.safetensors").stat().st_size < 14_000_000
    generation = GenerationConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert generation.eos_token_id == config.eos_token_id
    assert tokenizer.eos_token_id in config.eos_token_id
    assert generation.do_sample
    assert 0.1 <= generation.temperature <= 0.3
    _check_tokenizer(tokenizer)
    _check_template(tokenizer)


def test_card_has_the_measured_numbers(folder: Path) -> None:
    """Every accuracy in the card is the one in accuracy.json."""
    scores = json.loads((folder / "accuracy.json").read_text())["skills"]
    card = (folder / "README.md").read_text()
    rows = {m[1]: (m[2], m[3]) for m in re.finditer(r"^\| (\w+) \| .* \| ([\d.]+) % \| (\d+) \|$", card, re.M)}
    assert rows == {name: (f"{100 * s['accuracy']:.1f}", str(s["prompts"])) for name, s in scores.items()}
    assert set(scores) == {*tiny_data.SKILLS, "after_long_conversation"}


def test_shipped_accuracy() -> None:
    """What the README promises: sums are right, two-digit products are not."""
    scores = json.loads((SHIPPED / "accuracy.json").read_text())["skills"]
    assert scores["add_2digit"]["accuracy"] > 0.95
    assert scores["multiply_2digit"]["accuracy"] < 0.60
    assert min(scores[name]["prompts"] for name in ("add_2digit", "multiply_2digit")) >= 300


def test_first_questions() -> None:
    """There are 100 first questions; at least 90 of the shipped replies to them are sensible, by the rules."""
    questions = tiny_questions.FIRST_QUESTIONS
    assert len(questions) == len(tiny_questions.HELD_OUT_WORDINGS) == 100
    found = json.loads((SHIPPED / "accuracy.json").read_text())["first_questions"]
    judged = []
    for question, entry in zip(questions, found["asked"], strict=True):
        assert tuple(entry["turns"]) == question.turns
        assert tiny_questions.is_sensible(question, entry["replies"]) == entry["sensible"]
        judged.append(entry["sensible"])
    assert sum(judged) == found["sensible"] >= 90


def test_the_rules_of_first_questions_can_fail() -> None:
    """Replies that fit another question, that say nothing, or that did not end are not sensible."""
    questions = tiny_questions.FIRST_QUESTIONS
    unable = "I am a very small model, so I do not know that. I can do sums, capitals, and questions about fastgen."
    passed = [question for question in questions if tiny_questions.is_sensible(question, [unable])]
    assert len(passed) == sum(question.sensible == tiny_questions.UNABLE for question in questions) < 5
    greeting = "Hello! How can I help you today? You can ask me for a sum, a capital, or what fastgen is."
    assert sum(tiny_questions.is_sensible(question, [greeting]) for question in questions) < 15
    assert not any(tiny_questions.is_sensible(question, [""]) for question in questions)
    assert not any(tiny_questions.is_sensible(question, [greeting, greeting]) for question in questions)
    assert not tiny_questions.is_sensible(questions[0], [greeting + tiny_questions.UNFINISHED])
    known = tiny_questions.Question(("what is 1 + 1?",), r"\b2\b")
    assert [tiny_questions.is_sensible(known, [reply]) for reply in ("1 + 1 = 2.", "12")] == [True, False]


def test_first_questions_are_never_trained() -> None:
    """No conversation that training draws has the wording of a first question."""
    rng = random.Random(11)
    conversation = tiny_data.Conversation(None, lambda turn: turn.reply)
    drawn = [tiny_data.next_task(rng, conversation) for _ in range(20_000)]
    wordings = {tiny_questions.plain(turn.user) for task in drawn for turn in task.turns}
    assert not wordings & tiny_questions.HELD_OUT_WORDINGS


def test_training_model_is_the_llama_of_transformers(smoke: Path) -> None:
    """The model that is trained computes what transformers computes from its checkpoint."""
    model = tiny_model.TinyLlama()
    with safe_open(smoke / "model.safetensors", "pt") as file:
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    theirs = AutoModelForCausalLM.from_pretrained(smoke, dtype=torch.float32)
    ids = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_orthogonalize() -> None:
    """Newton-Schulz brings all singular values near 1, for wide, tall and square matrices."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 8, 32), (2, 32, 8), (1, 16, 16)):
        values = torch.linalg.svdvals(tiny_model.orthogonalize(torch.randn(shape, generator=generator)))
        assert values.max() < 1.4
        assert values.median() > 0.6


def test_shards_are_reproducible(smoke: Path) -> None:
    """The same seed and index give the same rows; others give others."""
    tokenizer = AutoTokenizer.from_pretrained(smoke).backend_tokenizer
    one, same, other = (tiny_data.shard(tokenizer, *seed, tokens=10_000) for seed in ((0, 1), (0, 1), (0, 2)))
    assert all((one[n] == same[n]).all() and one[n].shape[1] == n for n in tiny_data.BUCKETS)
    assert any(one[n].shape != other[n].shape or (one[n] != other[n]).any() for n in tiny_data.BUCKETS)


def test_the_corpus_is_that_of_the_shipped_model() -> None:
    """Training text, system prompts, held-out tasks and first questions are those that the model was made with.

    Another hash is right only together with a newly trained model.
    """
    rng = random.Random(0)
    texts = [*tiny_data.corpus(0, 5000), *(str(tiny_data.new_conversation(rng).system) for _ in range(200))]
    for name, (weight, _) in tiny_data.SKILLS.items():
        texts += [f"{name} {weight}", *map(repr, tiny_data.evaluation_tasks(name, 20, 0))]
    texts += map(repr, tiny_questions.FIRST_QUESTIONS)
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == "adcc7f6b9a0d2c49"


def test_tokenizer_training_is_reproducible() -> None:
    """The same corpus gives the same tokenizer."""
    one, same = (tiny_model.train_tokenizer(tiny_data.corpus(0, 6000)).to_str() for _ in range(2))
    assert one == same


def test_rows_are_what_the_chat_template_writes(smoke: Path) -> None:
    """A turn is trained in exactly the ids that the template gives, and only the reply is a target."""
    tokenizer = AutoTokenizer.from_pretrained(smoke)
    drawn = tiny_data.draw(random.Random(3), tiny_data.SKILLS["follow_up_sum"][1])
    chat = [*tiny_data.messages(drawn), {"role": "assistant", "content": drawn.turns[-1].reply}]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    packed = [i for turn in drawn.turns for i in tiny_data.turn_ids(encode, turn.user, turn.reply)]
    ids = [i & (tiny_data.TARGET - 1) for i in packed]
    assert [tiny_data.BOS, *ids] == tokenizer.apply_chat_template(chat)["input_ids"]
    targets = tokenizer.decode([i & (tiny_data.TARGET - 1) for i in packed if i & tiny_data.TARGET])
    assert targets == "".join(f"{turn.reply}<|end|>" for turn in drawn.turns)
    inputs, following = train_tiny.split_targets(torch.tensor([packed], dtype=torch.int16))
    learned = following[0] != -100
    assert (following[0, :-1][learned[:-1]] == inputs[0, 1:][learned[:-1]]).all()
    assert int(learned.sum()) == sum(i & tiny_data.TARGET != 0 for i in packed)


def test_replies_about_fastgen_name_what_exists() -> None:
    """Options, parameters, methods, flags and files in the replies are those of fastgen today."""
    text = " ".join(reply for _, replies in (*tiny_about.ABOUT, *tiny_about.FEATURES) for reply in replies)
    options = {*re.findall(r"Generator\(path, (\w+)=", text), "memory_fraction", "max_model_len"}
    parameters = {*re.findall(r"SamplingParams\((\w+)=", text)}
    assert len(options) > 5
    assert len(parameters) > 2
    assert options <= {*inspect.signature(fastgen.Generator).parameters}
    assert parameters <= {*inspect.signature(fastgen.SamplingParams).parameters}
    assert all(hasattr(fastgen.Generator, name) for name in re.findall(r"\bgen\.(\w+)", text))
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:docs|scripts)/[\w./-]*\w", text))
    parsers = {"fgchat": chat._parser(), "fggen": gen.make_parser(), "fgserve": serve.make_parser()}
    flags = re.findall(r"(fg\w+) (?:with )?(--[\w-]+)", text)
    assert len(flags) > 5
    assert all(flag in parsers[tool].format_help() for tool, flag in flags)


@pytest.mark.parametrize("name", tiny_data.SKILLS)
def test_held_out_tasks_are_never_trained(name: str) -> None:
    """Evaluation asks only what training never draws, and the reference replies are graded as right."""
    rng, make = random.Random(5), tiny_data.SKILLS[name][1]
    held_out = tiny_data.evaluation_tasks(name, 60, 0)
    assert held_out
    assert all(is_held_out(task.keys[-1]) for task in held_out)
    trained = [tiny_data.draw(rng, make) for _ in range(300)]
    assert not any(is_held_out(key) for task in trained for key in task.keys)
    assert all(task.is_right(task.turns[-1].reply) for task in (*held_out, *trained))
    wrong = "I am not sure: 123456789 zzz"
    assert not any(task.is_right(wrong) for task in held_out)


def test_files_are_short() -> None:
    """No file of the script exceeds 400 lines."""
    for path in sorted((ROOT / "scripts" / "tiny").glob("*.py")):
        assert len(path.read_text().splitlines()) < 400, path
