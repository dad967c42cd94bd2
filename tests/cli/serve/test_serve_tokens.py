"""engine_input.py, and the Vocabulary of openai_output.py: bytes of tokens, chats, routes about tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammars import byte_level

from fastgen.cli.serve.dialects.anthropic import CountRequest, MessageRequest, count_tokens
from fastgen.cli.serve.dialects.openai_responses import ResponseRequest
from fastgen.cli.serve.engine_input import ModelFacts, detokenize, encode_chat, encode_text, tokenize
from fastgen.cli.serve.openai_input import ChatRequest, DetokenizeRequest, TokenizeRequest
from fastgen.cli.serve.openai_output import Vocabulary
from fastgen.cli.serve.tools import Calling
from fastgen.cli.serve.validation import ApiError
from fastgen.model.loader import resolve
from fastgen.request import SamplingParams
from fastgen.text.tokenizer import Tokenizer

TEXTS = [
    "hello world, the quick brown fox",
    "double  spaces ",
    "emoji 😀 and é and ß",
    "你好\tand\nnew lines",
    "~\x00\x7f\xad",
]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", params=["byte level", "byte fallback", "bundled"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "byte level":
        return byte_level(tmp_path_factory.mktemp("byte-level"), ())
    return Tokenizer(request.getfixturevalue("talker") if request.param == "byte fallback" else resolve(None))


@pytest.fixture(scope="module")
def chatty(talker: Path) -> Tokenizer:
    return Tokenizer(talker)


def facts(tokenizer: Tokenizer) -> ModelFacts:
    return ModelFacts("x", tokenizer, Vocabulary(tokenizer), SamplingParams(), len(tokenizer.hf), 77)


def test_the_bytes_of_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    rng = np.random.default_rng(0)
    letters = [chr(code) for code in (*range(32, 127), 0xE9, 0x4F60, 0x1F600)]
    for text in [*TEXTS, *("".join(rng.choice(letters, 20)) for _ in range(50))]:
        ids = tokenizer.encode(text, special=False)
        assert b"".join(map(vocabulary.raw, ids)).decode().removeprefix(" ") == text.removeprefix(" ")
        for id in ids:
            assert vocabulary.text(id) == vocabulary.raw(id).decode(errors="replace")
            assert id not in vocabulary.special
    end = tokenizer.hf.eos_token_id
    assert vocabulary.name(end) == vocabulary.text(end) == tokenizer.hf.eos_token
    assert end in vocabulary.special
    broken = next(id for id in range(len(tokenizer.hf)) if vocabulary.raw(id) == b"\xf0")
    assert (vocabulary.name(broken), vocabulary.text(broken)) == ("bytes:\\xf0", "\ufffd")
    assert vocabulary.raw(10**6) == b""


def test_tokens_go_out_and_come_back(tokenizer: Tokenizer) -> None:
    model, vocabulary = facts(tokenizer), Vocabulary(tokenizer)

    def text_of(ids: list[int]) -> str:
        return detokenize(DetokenizeRequest(tokens=ids), model)["prompt"]

    for text in TEXTS:
        request = TokenizeRequest(prompt=text, return_token_strs=True)
        reply = tokenize(request, model)
        ids, names = reply["tokens"], reply["token_strs"]
        assert ids == encode_text(text, model).ids == tokenizer.encode(text)
        assert names == [vocabulary.name(id) for id in ids]
        assert (reply["count"], reply["max_model_len"]) == (len(ids), 77)
        bare = tokenize(TokenizeRequest(prompt=text, add_special_tokens=False), model)
        assert bare["token_strs"] is None
        assert text_of(bare["tokens"]) == text
        assert text in text_of(ids).replace("> ", ">")
    end = tokenizer.hf.eos_token
    assert text_of([tokenizer.hf.eos_token_id]) == end
    for wrong in (model.vocab_size, -1):
        with pytest.raises(ApiError) as raised:
            text_of([1, wrong])
        assert raised.value.param == "tokens"


def test_an_echo_is_the_text_that_was_given(chatty: Tokenizer) -> None:
    model, ids = facts(chatty), chatty.encode("the fox")
    assert encode_text(" the <s> fox", model).text == " the <s> fox"
    assert encode_text(ids, model, echo=True).text == "<s> the fox"
    bare = replace(model, tokenizer=None)
    assert encode_text(ids, bare, echo=True).text == ""
    with pytest.raises(ApiError, match="no tokenizer"):
        encode_text("the fox", bare)


def test_special_tokens_in_texts_stay_text_in_every_dialect(chatty: Tokenizer) -> None:
    said: Any = [{"role": "user", "content": "x</s><s>"}]
    chats = [
        ChatRequest(messages=said),
        MessageRequest(messages=said, max_tokens=1).chat(),
        ResponseRequest(input=said).chat(),
    ]
    ids = chatty.encode_chat(said)
    assert [encode_chat(chat, chatty, Calling(chatty, [])) for chat in chats] == [ids] * 3
    assert (ids.count(1), ids.count(2)) == (1, 1)
    assert count_tokens(CountRequest(messages=said), facts(chatty)) == {"input_tokens": len(ids)}
