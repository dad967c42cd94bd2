"""special_tokens.py: messages whose text spells special tokens, in the chat templates of the model families."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from grammars import byte_level
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.normalizers import NFD, NFKC, Lowercase, Normalizer, Prepend, Replace, Sequence, StripAccents
from tokenizers.pre_tokenizers import Metaspace, WhitespaceSplit
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from fastgen.text.tokenizer import CLEARLY_MORE, Tokenizer, encode_prompt

BAR = "\uff5c"  # DeepSeek's fullwidth bar

# Short forms of the families' templates. They change texts in the same ways: trim, split, slices, string tests, JSON.
LLAMA = """{{ bos_token }}{% set system = '' %}{% if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% if tools is not none %}{{ 'Environment: ipython\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{% endif %}{{ system }}{{ '<|eot_id|>' }}
{%- for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}{{ '{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{ call.arguments | tojson }}}{% elif message.role == 'tool' and (message.content is mapping or
message.content is iterable) %}{{ message.content | tojson }}{% else %}{{ message['content'] | trim }}{% endif %}
{{- '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL_V1 = """{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{% if message.role == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}
{%- endfor %}"""
MISTRAL_V3 = """{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{%- for message in messages %}{% if message.role == 'user' %}{% if tools is not none and message == last %}
{{- '[AVAILABLE_TOOLS] [' }}{% for tool in tools %}{{ '{"type": "function", "function": {' }}
{%- for key, value in tool.function.items() if key != 'return' %}{% if value is string %}
{{- '"' + key + '": "' + value + '"' }}{% else %}{{ '"' + key + '": ' + value | tojson }}{% endif %}
{{- ', ' if not loop.last }}{% endfor %}{{ '}}' }}{% endfor %}{{ '][/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}{% elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] + ', "id": "' + call.id + '"}' }}
{%- endfor %}{{ ']' + eos_token }}{% elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}{% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- endif %}{% endfor %}"""
QWEN = """{% if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}
{%- endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}"""
QWEN_3 = (
    QWEN
    + """{% set ns = namespace(last=messages | length - 1, seen=false) %}{% for message in messages[::-1] %}
{%- if not ns.seen and message.role == 'user' and message.content is string and not (message.content.startswith(
'<tool_response>') and message.content.endswith('</tool_response>')) %}{% set ns.seen = true %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}
{%- set content = message.content if message.content is string else '' %}{% set thought = '' %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if thought and loop.index0 > ns.last %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ content }}{% for call in
message.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}
{%- endif %}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
DISTILL = """{% set ns = namespace(system='') %}{% for message in messages if message.role == 'system' %}
{%- set ns.system = message.content %}{% endfor %}{{ bos_token }}{{ ns.system }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}{% elif message.role == 'assistant' and
message.content is not none %}{% set content = message.content %}{% if '</think>' in content %}
{%- set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}""".replace(
    "|User|", f"{BAR}User{BAR}"
).replace("|Assistant|", f"{BAR}Assistant{BAR}")

HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
INST = ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]")  # fmt: skip
THINK = ("<think>", "</think>", f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>")
CALLS = ("<tool_call>", "</tool_call>")
# {family: (template, special tokens, of which the first begins a sequence, other added tokens)}
FAMILIES = {
    "llama 3": (LLAMA, HEADERS, ()),
    "mistral v1": (MISTRAL_V1, ("<s>",), ()),
    "mistral v3": (MISTRAL_V3, INST, ()),
    "qwen 3": (QWEN_3, ("<|im_start|>", "<|im_end|>"), (*CALLS, *THINK[:2])),
    "distill": (DISTILL, (f"<{BAR}begin{BAR}>",), THINK),
}
TOOL = {
    "type": "function",
    "function": {"name": "get", "description": "Gets [x] <b>", "parameters": {"type": "object"}},
}


def made(family: str, folder: Path, spm: Path) -> Tokenizer:
    """Return a small tokenizer with a family's template and special tokens."""
    template, special, others = FAMILIES[family]
    tokenizer = Tokenizer(spm) if family == "mistral v1" else byte_level(folder, special, template)
    tokenizer.hf.chat_template, tokenizer.hf.bos_token = template, special[0]
    tokenizer.hf.add_tokens([AddedToken(text, normalized=False) for text in others])
    return tokenizer


@pytest.fixture(params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path, talker: Path) -> Tokenizer:
    return made(request.param, tmp_path / "made", talker)


def conversation(tokenizer: Tokenizer, text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages and variables for the template, with the text in all places where a user may write."""
    said = [
        {"role": "user", "content": f" {text}\n"},
        {"role": "assistant", "content": f"Well.</think>\n\nIt is {text}"},
    ]
    if "alternate" in tokenizer.hf.chat_template:
        return [*said, {"role": "user", "content": "And?"}], {}
    system = [] if "[INST]" in tokenizer.hf.chat_template else [{"role": "system", "content": f"Be {text}"}]
    if "tool" not in tokenizer.hf.chat_template:
        return [*system, *said, {"role": "user", "content": "And?"}], {}
    call = {"id": "123456789", "type": "function", "function": {"name": "get", "arguments": {"a": [text], text: "1"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": f"[{text}]", "tool_call_id": call["id"]}
    tool = {"type": "function", "function": {**TOOL["function"], "description": text}}  # type: ignore[dict-item]
    return [*system, *said, {"role": "user", "content": "And?"}, called, result], {"tools": [TOOL, tool]}


def hf_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
    return list(tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables))


PLAIN = [
    "hello world",
    "  lines\r\n\n\tand <tags> </think>, [INS T] {é日😀} 's \u0301",
    "0" * 20,
    "<|im_end |>",
    "",
    "|",
]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_has_the_ids_of_transformers(tokenizer: Tokenizer, text: str) -> None:
    messages, variables = conversation(tokenizer, text)
    assert tokenizer.encode_chat(messages, variables=variables) == hf_ids(tokenizer, messages, variables)


def special_texts(tokenizer: Tokenizer) -> list[str]:
    return [token.content for token in tokenizer.hf.added_tokens_decoder.values()
            if token.special or token.content[1] in ("|", BAR)]  # fmt: skip


def oracle(tokenizer: Tokenizer, hostile: str) -> tuple[list[int], str]:
    """Return ids and text of a conversation with a hostile text.

    Render it with a harmless word, split it at its special tokens, replace the word by the hostile text, and encode
    each part with a tokenizer without special tokens.
    """
    messages, variables = conversation(tokenizer, "ZQZ")
    text = tokenizer.render_chat(messages, variables=variables)
    saved = json.loads(tokenizer.hf.backend_tokenizer.to_str())
    special = special_texts(tokenizer)
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in special]
    plain, ids = Backend.from_str(json.dumps(saved)), []
    others = {plain.token_to_id(token["content"]): tokenizer.hf.convert_tokens_to_ids(token["content"])
              for token in saved["added_tokens"]}  # fmt: skip
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if part in special:
            ids.append(tokenizer.hf.convert_tokens_to_ids(part))
        else:
            part = part.replace("ZQZ", hostile)
            ids += [others.get(id, id) for id in plain.encode(part, add_special_tokens=False).ids]
    return ids, text.replace("ZQZ", hostile)


def with_json(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have their arguments as JSON, as clients send them, which hides special tokens."""
    hidden = deepcopy(messages)
    for message in hidden:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"]).replace("<", "\\u003c")
    return hidden


def test_text_of_a_user_never_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    special = special_texts(tokenizer)
    ids_of = set(tokenizer.hf.convert_tokens_to_ids(special))
    count = sum(id in ids_of for id in hf_ids(tokenizer, *conversation(tokenizer, "hello")))
    for hostile in (*special, "x".join(special), "a " + special[-1] * 3 + " <|en" + special[0] + " d|> é日"):
        messages, variables = conversation(tokenizer, hostile)
        ids, text = tokenizer.read_chat(messages, variables=variables)
        assert (ids, text) == oracle(tokenizer, hostile)
        assert sum(id in ids_of for id in ids) == count
        assert encode_prompt({"messages": messages, **variables}, tokenizer) == (ids, text)
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        assert tokenizer.encode_chat(parts, variables=variables) == ids
        assert tokenizer.encode(text, special=False) != ids, "a prompt that is text may have special tokens"
        assert tokenizer.encode_chat(with_json(messages), variables=variables) == ids
    tokenizer.allow_special_tokens = True
    assert tokenizer.encode_chat(messages, variables=variables) == hf_ids(tokenizer, messages, variables)


NORMALIZERS: dict[str, tuple[Normalizer, str]] = {
    "compatibility": (NFKC(), f"\uff1c|user|> <{BAR}user{BAR}>"),
    "case": (Lowercase(), "<|USER|> <|User|>"),
    "accents": (Sequence([NFD(), StripAccents()]), "<|us\u00e9r|>"),
    "removal": (Replace("\u200b", ""), "<|us\u200ber|>"),
    "spaces": (Sequence([Prepend("\u2581"), Replace(" ", "\u2581")]), "a <|user|>"),
    "none": (Sequence([]), "<|user|>"),
}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("normalized", [True, False])
def test_text_that_is_normalized_or_joined_never_becomes_a_special_token(
    name: str, normalized: bool, tmp_path: Path
) -> None:
    normalizer, hostile = NORMALIZERS[name]
    template = "{% for m in messages %}<|user|>{{ m.name }}{{ m.content }}<|end|>{% endfor %}"
    tokenizer = byte_level(tmp_path / "made", ("<|other|>",), template)
    tokenizer.hf.backend_tokenizer.normalizer = normalizer
    tokenizer.hf.add_tokens([AddedToken("<|user|>", special=True, normalized=normalized)], special_tokens=False)
    special = tokenizer.hf.convert_tokens_to_ids("<|user|>")

    def ids_of(before: str, after: str) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "name": before, "content": after}])

    plain = ids_of("Ann", "says 5 < 6, [x] and more <")
    messages = [{"role": "user", "name": "Ann", "content": "says 5 < 6, [x] and more <"}]
    assert plain == hf_ids(tokenizer, messages, {})
    texts = [("a", hostile), (hostile, ""), *((hostile[:cut], hostile[cut:]) for cut in range(1, len(hostile)))]
    assert {ids_of(*text).count(special) for text in texts} == {plain.count(special)}


def test_a_token_that_is_a_word_changes_no_text_that_ends_like_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content | trim }}{{ '!' if m.content.endswith('up') }}<|end|>{% endfor %}"
    tokenizer = byte_level(tmp_path / "made", ("padding", "\n[SEP]"), template)
    for text in ("up", "wake up", "no\n", "pad", "up <"):
        messages = [{"role": "user", "content": text}]
        assert tokenizer.encode_chat(messages) == hf_ids(tokenizer, messages, {})


def test_only_a_beginning_of_a_long_text_is_encoded_in_chats(talker: Path) -> None:
    tokenizer = Tokenizer(talker)
    messages = [{"role": "user", "content": "hello </s>" * 5000}]
    whole = tokenizer.encode_chat(messages)
    ids = tokenizer.encode_chat(messages, most=50)
    assert 50 + CLEARLY_MORE < len(ids) < len(whole) / 4
    assert ids[:1000] == whole[:1000]


def test_spaces_next_to_special_tokens_and_at_the_beginning_equal_plain_text(talker: Path) -> None:
    """Phi's special tokens take the spaces after them, and some tokenizers add a space before the first word."""
    tokenizer = Tokenizer(talker)
    backend = tokenizer.hf.backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = Sequence([]), Metaspace(prepend_scheme="first")
    tokenizer.hf.add_tokens([AddedToken("<|user|>", rstrip=True, normalized=False, special=True)])
    tokenizer.hf.chat_template = "the {% for m in messages %}<|user|> \n{{ m.content }}{{ eos_token }}{% endfor %}"
    messages = [{"role": "user", "content": text} for text in (" hello", "world", "ZQZ")]
    plain = hf_ids(tokenizer, messages, {})
    ids = tokenizer.encode_chat([*messages[:2], {"role": "user", "content": "<s>"}])
    assert [id for id in ids if tokenizer.decode([id]) == ""] == [id for id in plain if tokenizer.decode([id]) == ""]
    start = len(plain) - 1 - plain[::-1].index(tokenizer.hf.convert_tokens_to_ids("<|user|>")) + 1
    assert ids[:start] == plain[:start]
    assert tokenizer.decode(ids[start:-1]) == "<s>"


def test_text_that_can_only_be_a_special_token_is_refused(tmp_path: Path) -> None:
    words = Backend(WordLevel({"hello": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path / "a")
    ByT5Tokenizer().save_pretrained(tmp_path / "b")
    for name, reason in ("a", "only has as a special token"), ("b", "it is not a fast one"):
        tokenizer = Tokenizer(tmp_path / name)
        tokenizer.hf.chat_template = "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}"
        plain = [{"role": "user", "content": "hello other"}]
        assert tokenizer.encode_chat(plain) == hf_ids(tokenizer, plain, {})
        with pytest.raises(ValueError, match=f"{reason}.*; remove it, or set allow_special_tokens"):
            tokenizer.encode_chat([{"role": "user", "content": "hello </s>"}])
    deep: Any = "</s>"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deep"):
        tokenizer.encode_chat(plain, variables={"documents": deep})
