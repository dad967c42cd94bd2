"""tokenizer.py and detokenizer.py: prompts of all kinds, incremental detokenization, and stop strings."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB
from hypothesis import strategies as some
from properties import EXAMPLES, holds_for
from transformers import AutoTokenizer
from transformers.generation.stopping_criteria import StopStringCriteria

from fastgen.model.loader import BUNDLED
from fastgen.text.chat import PROBE
from fastgen.text.detokenizer import Detokenizer, OutputText, StopFinder
from fastgen.text.tokenizer import BROKEN, CLEARLY_MORE, Tokenizer, encode_prompt


@pytest.fixture(scope="module")
def tokenizer(talker: Path) -> Tokenizer:
    found = Tokenizer.find(talker)
    assert found is not None
    return found


def pieces(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], chunks: list[int], special: bool = False
) -> list[str]:
    """Return the texts that a Detokenizer adds for chunks of these sizes, and for the rest of the ids at last."""
    detokenizer, iterator = Detokenizer(tokenizer, prompt, special), iter(ids)
    new = [detokenizer.push(list(itertools.islice(iterator, size))) for size in chunks]
    return [*new, detokenizer.push(list(iterator), last=True)]


TEXTS = [
    "hello world, the quick brown fox",
    " leading and  double  spaces ",
    "emoji 😀😀😀😀 and a family 👨‍👩‍👧‍👦, é and ß\ttabs\tand\nnew lines\r\n",
    "",
]
ANY_TEXT = some.text(max_size=12) | some.text(some.sampled_from("ab \n▁é😀👨‍👩‍👧中\u0300\ufffd\x00"), max_size=12)
CHUNKS = some.lists(some.integers(1, 4), max_size=12)


@pytest.fixture(scope="module", params=["byte fallback", "byte level"])
def either(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer like Llama 2's, and one like Llama 3's."""
    return tokenizer if request.param == "byte fallback" else Tokenizer(BUNDLED)


@EXAMPLES
def test_any_text_is_decoded_alike_however_it_is_cut(examples: int, either: Tokenizer) -> None:
    marked = either.decode(either.encode("▁", special=False)) != "▁"  # this tokenizer writes a space as ▁

    @holds_for(examples, ANY_TEXT, ANY_TEXT, CHUNKS)
    def holds(before: str, text: str, chunks: list[int]) -> None:
        ids = either.encode(text, special=False)
        back = either.decode(ids, special=True)
        assert back == text if not marked else back.lstrip(" ") == text.replace("▁", " ").lstrip(" ")
        prompt = either.encode(before.replace(BROKEN, ""))
        assert either.decode(prompt) + "".join(pieces(either, prompt, ids, chunks)) == either.decode(prompt + ids)


def test_only_a_beginning_of_a_long_text_is_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = tokenizer.hf

    def noted(text: str, **options: Any) -> Any:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "hf", noted)
    for text in ("hello world " * 5_000, "a" * 40_000, " " * 40_000):
        for most in (50, 400):
            seen.clear()
            ids, whole = tokenizer.encode(text, most=most), encode(text)["input_ids"]
            assert most + CLEARLY_MORE < len(ids) < len(whole)
            assert sum(seen) < len(text) / 2
            assert tokenizer.encode(text, most=len(text)) == whole


def test_a_stripped_space_and_a_broken_character(tokenizer: Tokenizer) -> None:
    ids = [3, 3 + 0x20, 3 + 0x80]
    assert pieces(tokenizer, [], ids, [1, 1, 1]) == ["\x00", " ", "", BROKEN]
    assert pieces(tokenizer, [], ids, [2]) == ["\x00 ", BROKEN]


def test_any_ids_are_decoded_alike_however_they_are_cut(tokenizer: Tokenizer) -> None:
    """Also ids of bytes that are no character; broken characters wait for the end."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        low, high = [(3, VOCAB), (3, 259), (3 + 0x80, 3 + 0xF8), (0, VOCAB)][rng.integers(4)]
        ids = rng.integers(low, high, rng.integers(1, 30)).tolist()
        ids += tokenizer.encode("😀好")[2:] * int(rng.integers(3)) + tokenizer.encode("a")[1:]
        prompt = tokenizer.encode("hello")
        special = bool(rng.integers(2))
        by_id = pieces(tokenizer, prompt, ids, [1] * len(ids), special)
        assert not any(new.endswith(BROKEN) for new in by_id[:-1])
        sizes = rng.integers(1, 6, len(ids)).tolist()
        assert "".join(pieces(tokenizer, prompt, ids, sizes, special)) == "".join(by_id)
        assert "".join(pieces(tokenizer, prompt, ids, [], special)) == "".join(by_id)


# Stop strings.


def test_stop_strings_are_found_wherever_the_text_is_cut() -> None:
    """Against a search in ever longer beginnings of the text."""
    rng = np.random.default_rng(0)
    letters = list("ab")
    for _ in range(3000):
        text = "".join(rng.choice(letters, rng.integers(0, 12)))
        stops = ["".join(rng.choice(letters, rng.integers(1, 5))) for _ in range(rng.integers(1, 4))]
        cuts = sorted({*rng.integers(0, len(text) + 1, rng.integers(0, 6)).tolist(), len(text)})
        include = bool(rng.integers(2))
        finder, shown, found = StopFinder(stops, include), "", None
        for start, end in itertools.pairwise([0, *cuts]):
            new, found = finder.push(text[start:end])
            shown += new
            places = [(at, stop) for stop in stops if (at := text[:end].find(stop)) >= 0]
            if places:
                at, first = min(places, key=lambda pair: pair[0])
                assert (shown, found) == (text[:at] + first * include, first)
                break
            assert found is None
            assert text.startswith(shown)
        else:
            assert shown + finder.flush() == text


def test_stop_strings_are_found_at_the_token_where_transformers_finds_them(either: Tokenizer) -> None:
    """Also those that have special tokens, or parts of them."""
    rng = random.Random(0)
    special = [id for id in either.hidden_texts if id != either.hf.unk_token_id]
    usual = [either.encode(text, special=False)[-1] for text in ("hello", " world", "\n", "<", "|", ">", "s")]
    for _ in range(15):
        ids = [rng.choice(special if rng.random() < 0.3 else usual) for _ in range(8)]
        text = either.hf.decode(ids, skip_special_tokens=False)
        stop = text[(at := rng.randrange(len(text))) : at + rng.randrange(1, 14)]
        theirs, ours = StopStringCriteria(either.hf, [stop]), OutputText(either, usual, [stop])
        for count, id in enumerate(ids, 1):
            ended = bool(theirs(torch.tensor([ids[:count]]), None)[0])
            assert ours.push([id]) == (stop if ended else None), (stop, ids)
            if ended:
                break
        else:
            raise AssertionError("the stop string is in the text")
        special_texts = re.compile("|".join(map(re.escape, either.hidden_texts.values())))
        assert special_texts.sub("", text).lstrip().startswith(ours.text.lstrip())


def test_a_special_token_is_searched_and_not_shown() -> None:
    def push(finder: StopFinder, *texts: str) -> list[tuple[str, str | None]]:
        return [finder.push(text, hidden=text.startswith("<")) for text in texts]

    assert push(StopFinder(["<end>"]), "a", "<begin>", "b", "<end>") == [
        ("a", None),
        ("", None),
        ("b", None),
        ("", "<end>"),
    ]
    assert push(StopFinder(["b<end>\n"]), "ab", "<end>", "\nc") == [("a", None), ("", None), ("", "b<end>\n")]
    assert push(StopFinder(["b<end>\n"]), "ab", "<end>", "c") == [("a", None), ("", None), ("bc", None)]
    assert push(StopFinder(["b<end>", "x"], shown=True), "ab", "<end>") == [("a", None), ("b<end>", "b<end>")]
    assert push(StopFinder(["abc"]), "ab", "<end>", "cd") == [("", None), ("", None), ("", "abc")], (
        "what is shown has it"
    )
    finder = StopFinder(["<end>x", "d>y"])
    assert push(finder, "a", "<end>", "y") == [("a", None), ("", None), ("", "d>y")]
    finder = StopFinder(["b<end>x"])
    assert push(finder, "ab", "<end>") == [("a", None), ("", None)]
    assert finder.flush() == "b"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopFinder(["END", "EX"])
    assert finder.push("the E") == ("the ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("E") == ("EN", None)
    assert finder.push("xE") == ("Ex", None)
    assert finder.flush() == "E"
    assert finder.flush() == ""


# Prompts.


def test_text_gets_special_tokens_and_messages_get_no_second_bos(tokenizer: Tokenizer) -> None:
    text, written = encode_prompt("hello", tokenizer)
    assert written == "hello"
    assert text[0] == 1
    assert tokenizer.decode(text) == "hello"
    messages = [{"role": "user", "content": "hello"}, {"role": "answer", "content": "the"}]
    chat, written = encode_prompt(messages, tokenizer)
    assert str(written).startswith("<s>[user]")
    assert chat.count(1) == 1
    assert chat[0] == 1
    assert chat.count(2) == 2
    assert tokenizer.decode(chat).replace(" ", "") == "[user]hello[answer]the[answer]"


def test_text_parts_of_a_message_are_lines(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "the", "cache_control": None}]
    written = tokenizer.render_chat([{"role": "user", "content": parts}])
    assert written == tokenizer.render_chat([{"role": "user", "content": "hello\nthe"}])
    assert "hello" in written


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), range(5, 7), torch.tensor([5, 6]), np.array([5, 6])])
def test_ids_in_any_sequence_are_a_prompt(ids: Any) -> None:
    assert encode_prompt(ids, None) == ([5, 6], None)
    assert encode_prompt({"prompt_token_ids": ids, "prompt": "as told", "multi_modal_data": None}, None) == (
        [5, 6],
        "as told",
    )


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        (5, TypeError, "not int"),
        (None, TypeError, "not NoneType"),
        ({"role": "user", "content": "hello"}, TypeError, "not 'content'"),
        ({"prompt": "hello", "tools": []}, TypeError, "not 'tools'"),
        ({"prompt": None}, TypeError, "and one does not"),
        ({"prompt": "a", "messages": []}, TypeError, "'messages' or 'prompt', not both"),
        ({"messages": "hello"}, TypeError, "messages must be a list of dicts, not 'hello'"),
        ([5, "six"], TypeError, "not 'six'; give each text as a separate prompt"),
        ("\ud800", ValueError, "surrogates not allowed"),
        ({"messages": []}, TypeError, "messages must be a list of dicts, not \\[\\]"),
        ([5, 6.0], TypeError, "not 6.0"),
        ([True], TypeError, "not True"),
        (torch.tensor([0.5]), TypeError, "not 0.5"),
        ([{"role": "critic", "content": "bad"}], ValueError, "no critics"),
        ([{"content": "hello"}, "more"], ValueError, "a message must be a dict with a role, not {'content': 'hello'}"),
        ([{"role": "user", "text": "hello"}], ValueError, "a message needs content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            ValueError,
            "must be .*, and not {'type': 'image_url'}",
        ),
        ([{"role": "user", "content": ["hello"]}], ValueError, "and not 'hello'"),
        ([{"role": "user", "content": {"a": 1}}], ValueError, "must be a text or a list of parts, and not {'a': 1}"),
        ([{"role": "user", "content": 7}], ValueError, "must be a text or a list of parts, and not 7"),
    ],
)
def test_other_prompts_are_refused(tokenizer: Tokenizer, prompt: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        encode_prompt(prompt, tokenizer)


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_cannot_be_read_are_an_error_with_their_folder(broken: str, talker: Path, tmp_path: Path) -> None:
    shutil.copytree(talker, tmp_path, dirs_exist_ok=True)
    assert Tokenizer(tmp_path).encode("hello")
    os.mkfifo(tmp_path / "special_tokens_map.json")
    with pytest.raises(ValueError, match=r"special_tokens_map\.json is not a regular file"):
        Tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / broken).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=rf"the tokenizer in {tmp_path} cannot be read \(.*; fetch its files again"):
        Tokenizer(tmp_path)


EACH = "{% for m in messages %}[{{ m.role }}]"
LOOP = "{% for p in m.content %}{{ p.text }}{% endfor %}"
STRING = "{{ m.content if m.content is string else raise_exception('a text is needed') }}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"
LISTED = "{{ raise_exception('parts are needed') if m.content is string }}"


@pytest.mark.parametrize(
    ("template", "in_parts"),
    [
        (LOOP, ("system", "user", "assistant")),
        (
            "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] | trim }}{% endfor %}",
            ("system", "user", "assistant"),
        ),
        ("{{ m.content[0].text }}", ("system", "user", "assistant")),
        ("{{ m.content | map(attribute='text') | join('|') }}", ("system", "user", "assistant")),
        (LISTED + LOOP, ("system", "user", "assistant")),
        (
            "{{ raise_exception('no system message') if messages[0].role != 'system' }}" + LOOP,
            ("system", "user", "assistant"),
        ),
        ("{% if m.role == 'user' %}" + LOOP + "{% else %}" + STRING + "{% endif %}", ("user",)),
        ("{% if m.role == 'user' %}" + LISTED + LOOP + "{% else %}" + STRING + "{% endif %}", ("user",)),
        ("{% if m.role == 'user' %}" + STRING + "{% else %}" + LISTED + LOOP + "{% endif %}", ("system", "assistant")),
        (EITHER, ()),
        ("{{ m.content }}", ()),
        ("{{ m.content | upper }}", ()),
        (STRING, ()),
    ],
)
def test_a_template_that_reads_only_parts_gets_parts(talker: Path, template: str, in_parts: tuple[str, ...]) -> None:
    """As it gets them from transformers, which passes content on as it is."""
    tokenizer = Tokenizer(talker)
    tokenizer.hf.chat_template = EACH + template + "{% endfor %}"
    said = [("system", "be brief"), ("user", "hello"), ("assistant", "the </s>"), ("user", "fox")]
    messages = [{"role": role, "content": text} for role, text in said]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
    mixed = [part if part["role"] in in_parts else message for message, part in zip(messages, parts, strict=True)]
    expected = tokenizer.hf.apply_chat_template(mixed, tokenize=False)
    assert all(text.lower() in expected.lower() for _, text in said)
    assert tokenizer.render_chat(messages) == tokenizer.render_chat(parts) == expected
    assert tokenizer.read_chat(messages)[1] == expected
    assert 2 not in tokenizer.encode_chat(messages), "</s> in a message stays text"


def test_parts_are_found_with_the_variables_that_a_template_needs(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(talker)
    tokenizer.hf.chat_template = "{{ raise_exception('no day') if not day }}" + EACH + LOOP + "{% endfor %}"
    template, rendered = tokenizer._template, []
    render = template.render
    monkeypatch.setattr(template, "render", lambda *args, **kwargs: (rendered.append(1), render(*args, **kwargs))[1])
    with pytest.raises(ValueError, match="no day"):
        tokenizer.render_chat([{"role": f"r{number}", "content": "hello"} for number in range(100)])
    assert len(rendered) < 10, "what failed is tried once for all messages"
    assert tokenizer.render_chat([{"role": "user", "content": "hello"}], {"day": "1"}) == "[user]hello"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LOOP, "the dog"),
        (EITHER, "the dog"),
        ("{{ m.content if m.content is string else m.content | map(attribute='text') | join('\n\n') }}", "the\n\n dog"),
        ("{{ m.content }}", "the\n dog"),
        ("{{ m.content if m.content is string else m.content | tojson }}", "the\n dog"),
        ("{{ m.content if m.content is string else m.content[0].text }}", "the\n dog"),
        (STRING, "the\n dog"),
        ("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ loop.index }}: {{ p.text }}"
         "{{ ' | ' if not loop.last }}{% endfor %}{% endif %}", "1: the | 2:  dog"),
    ],
)  # fmt: skip
def test_several_parts_come_as_they_are(talker: Path, template: str, expected: str, role: str) -> None:
    """So that a template joins them in its own way, as under transformers, also if it takes texts as well (Qwen3.5). To
    one that cannot read them, they are lines."""
    tokenizer = Tokenizer(talker)
    tokenizer.hf.chat_template = EACH + template + "{% endfor %}"
    message = {"role": role, "content": [{"type": "text", "text": text} for text in ("the", " dog")]}
    messages = [{"role": "user", "content": "fox"}, message] if role == "assistant" else [message]
    assert tokenizer.render_chat(messages).endswith(f"[{role}]{expected}")
    alone = {"role": role, "content": [{"type": "text", "text": "fox"}]}
    assert tokenizer.render_chat([*messages[:-1], alone]).endswith(f"[{role}]fox"), "what was found is of several parts"


def test_what_one_conversation_shows_of_a_template_does_not_change_others(talker: Path) -> None:
    """A variable may change how the template reads content, or contain the text that it is tried with."""
    tokenizer = Tokenizer(talker)
    tokenizer.hf.chat_template = (
        EACH + "{% if flat %}{{ m.content }}{% else %}" + LOOP + "{% endif %}{% endfor %}{{ x }}"
    )
    messages = [{"role": "user", "content": "hello"}]
    for variables, expected in (({}, "hello"), ({"flat": True}, "hello"), ({"x": PROBE}, None), ({}, "hello")):
        for flat in ({}, {"flat": True}):
            written = tokenizer.render_chat(messages, {**variables, **flat})
            assert expected is None or written == f"[user]{expected}"


def test_results_of_tools_come_in_the_form_that_the_template_reads(talker: Path) -> None:
    tokenizer = Tokenizer(talker, tool_call_parser="hermes")
    call = {"id": "a", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "content": "the fox", "tool_call_id": "a"}
    calls = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    picky = "{{ raise_exception('no other tool') if m.role == 'tool' and m.name != 'get' }}" + LOOP
    for form in (
        LOOP,
        picky,
        "{% if m.role == 'tool' %}" + STRING + "{% else %}" + LOOP + "{% endif %}",
        "{{ m.content }}",
    ):
        tokenizer.hf.chat_template = EACH + form + calls + "{% endfor %}"
        assert tokenizer.render_chat([*asked, result]) == "[user]hello[assistant]get[tool]the fox"


@pytest.mark.parametrize("named", ["Own", None])
def test_code_of_a_tokenizer_is_not_run(
    named: str | None, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask on the terminal whether to run it."""
    shutil.copytree(talker, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": named, "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match=r"is custom Python code .*, which fastgen does not run; give another tok"):
        Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_chat_template_of_a_processor(talker: Path, tmp_path: Path) -> None:
    """It is used if the tokenizer has none."""
    shutil.copytree(talker, tmp_path, dirs_exist_ok=True)
    messages = [{"role": "user", "content": "hello"}]
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }} there"}))
    assert Tokenizer(tmp_path).render_chat(messages) == Tokenizer(talker).render_chat(messages)
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer(tmp_path).render_chat(messages) == "hello there"
    for wrong in ('{"chat_template": 3}', '{"chat_template": null}', "{}", "[]", '{"chat_template":', "[" * 100_000):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=r"chat_template\.json is not a JSON object with a string chat_template"):
            Tokenizer(tmp_path)


def test_a_chat_template_gets_only_variables_of_its_own(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.encode_chat(messages, variables={"mood": "glad", "tools": []}) == ids, "unused variables"
    short = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert short == ids[: len(short)] != ids
    for name in ("tokenize", "chat_template", "add_generation_prompt", "conversation", "return_tensors"):
        with pytest.raises(ValueError, match=f"{name} is not a variable"):
            tokenizer.encode_chat(messages, variables={name: "x"})
    with pytest.raises(ValueError, match="does not take these messages"):
        tokenizer.encode_chat(messages, variables={"messages": []})


def test_special_tokens_are_added_and_are_no_text(tokenizer: Tokenizer) -> None:
    ids, bare = tokenizer.encode("hello world"), tokenizer.encode("hello world", special=False)
    assert ids == [tokenizer.hf.bos_token_id, *bare]
    assert tokenizer.decode(ids) == tokenizer.decode(bare) == "hello world"
    assert tokenizer.decode(ids, special=True).startswith("<s>")
    assert "".join(pieces(tokenizer, [], [*ids, 2], [1] * len(ids))) == "hello world"


@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "Qwen2Tokenizer", None]
)
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", None])
def test_a_tokenizer_equals_the_one_of_auto_tokenizer(
    named: str | None, model: str | None, talker: Path, tmp_path: Path
) -> None:
    for file, changes in (("tokenizer_config", {"tokenizer_class": named}), ("config", {"model_type": model})):
        fields = json.loads((talker / f"{file}.json").read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not None}
        (tmp_path / f"{file}.json").write_text(json.dumps(kept))
    shutil.copy(talker / "tokenizer.json", tmp_path)
    ours, theirs = Tokenizer(tmp_path).hf, AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.init_kwargs == theirs.init_kwargs
    for field in ("chat_template", "special_tokens_map", "added_tokens_decoder", "name_or_path"):
        assert getattr(ours, field) == getattr(theirs, field)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]


def test_the_usual_tokenizers_import_little_and_in_any_thread(talker: Path) -> None:
    program = f"""
import sys, threading
from pathlib import Path
from fastgen.text.tokenizer import Tokenizer, import_transformers

beside = threading.Thread(target=import_transformers)
beside.start()
assert Tokenizer(Path({str(talker)!r})).encode("hello")
beside.join()
assert "transformers" in sys.modules
assert "transformers.models.auto.tokenization_auto" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
