"""Conversion between text and ids: tokenizer, chat templates, incremental detokenization, stop strings."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.option import Option
from fastgen.request import Prompt
from fastgen.text.syntax_names import CALL_MARKS

if TYPE_CHECKING:  # these load with the first conversation
    from fastgen.text.chat import ChatTemplate
    from fastgen.text.special_tokens import TextGuard
    from fastgen.text.tools.parser import Syntax

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
USUAL_CHARS = 8  # most tokens have at most this number of characters
CLEARLY_MORE = 1000  # tokens; cutting a text changes far fewer
PROMPT_KINDS = ("prompt_token_ids", "prompt", "messages")  # keys of a prompt that is a dict
CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")  # further keys
BROKEN = "\ufffd"
# Options of a Generator that its Tokenizer gets.
TOKENIZER_OPTIONS = ("allow_special_tokens", "reasoning_parser", "tool_call_parser")
# Marks of reasoning and of tool calls, which texts show although some models have them as special tokens.
MARKS = {"<think>", "</think>", "[THINK]", "[/THINK]", *CALL_MARKS}

# The class that AutoTokenizer chooses for (model_type, tokenizer_class). Importing AutoTokenizer takes seconds longer:
# it imports all model families, and in some versions of transformers the compiler of torch.
DIRECT = {
    ("llama", "PreTrainedTokenizerFast"): "PreTrainedTokenizerFast",
    ("llama", "TokenizersBackend"): "PreTrainedTokenizerFast",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2TokenizerFast",
    ("qwen3", "Qwen2Tokenizer"): "Qwen2TokenizerFast",
}

# Held while parts of transformers are imported: the package replaces its own module then, and its modules import each
# other in circles, so a second thread would see incomplete modules.
importing = threading.Lock()


class Tokenizer:
    """A Hugging Face tokenizer with the methods that generation needs. Raises ValueError for files that cannot be read.

    allow_special_tokens: text in messages may become special tokens. reasoning_parser: name of the syntax of reasoning;
    None: the chat template tells (`find_reasoning` in reasoning.py). tool_call_parser: a ToolCallParser, the
    format of tool calls; None: the chat template tells.
    """

    def __init__(
        self,
        folder: Path,
        allow_special_tokens: bool = False,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
    ) -> None:
        self.allow_special_tokens = allow_special_tokens
        self.reasoning_parser, self.tool_call_parser = reasoning_parser, tool_call_parser
        plain = import_transformers()
        try:
            _check_files(folder)
            with importing:
                reader = _class_of(folder)
            self.hf: Any = reader.from_pretrained(folder, trust_remote_code=False)
            if self.hf.chat_template is None:
                self.hf.chat_template = _processor_template(folder)
        except Exception as error:  # transformers and tokenizers raise many kinds of errors, also bare Exceptions
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"the tokenizer in {folder} is custom Python code (auto_map in tokenizer_config.json), which "
                    "fastgen does not run; give another tokenizer"
                ) from error
            raise ValueError(
                f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {error}); fetch its files again, "
                "or give another one"
            ) from error
        kind = type(self.hf)
        # If the class does not override decode, its backend gives the same text in a fifth of the time, which matters
        # because text is decoded at each token.
        self._backend: Any = None
        if issubclass(kind, plain) and kind.decode is plain.decode and kind._decode is plain._decode:
            self._backend = self.hf.backend_tokenizer

    @classmethod
    def find(cls, folder: Path, **options: Any) -> Tokenizer | None:
        """Return the tokenizer of a folder, or None if the folder has none. options: see the class."""
        has_files = any((folder / name).is_file() for name in TOKENIZER_FILES)
        return cls(folder, **options) if has_files else None

    @cached_property
    def _template(self) -> ChatTemplate:
        """The chat template. Its module, and the parsers of tool calls, load when a conversation needs them."""
        from fastgen.text.chat import ChatTemplate

        return ChatTemplate(self.hf, self.tool_call_parser)

    @property
    def tool_syntax(self) -> Syntax | None:
        """The format of the model's tool calls, or None if it is unknown."""
        return self._template.syntax

    @cached_property
    def _guard(self) -> TextGuard:
        """The guard of conversations, whose module loads with the first one."""
        from fastgen.text.special_tokens import TextGuard

        return TextGuard(self.hf)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, and of tokens that begin turns although the tokenizer does not call them so."""
        return frozenset(self._guard.ids.values())

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """The ids of the added tokens, special or not, by their text."""
        return {token.content: id for id, token in self.hf.added_tokens_decoder.items()}

    @cached_property
    def _marks_and_hidden(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ids of special tokens: of MARKS, which texts show, and of the others, which they do not show."""
        special = frozenset(id for id, token in self.hf.added_tokens_decoder.items() if token.special)
        marks = special & {self.added_ids.get(mark) for mark in MARKS}
        return marks, special - marks

    @cached_property
    def hidden_texts(self) -> dict[int, str]:
        """The texts of the special tokens that texts do not show, by their ids."""
        return {id: self.hf.added_tokens_decoder[id].content for id in self._marks_and_hidden[1]}

    @property
    def eos(self) -> tuple[int, str] | None:
        """The id and the text of the token that ends a sequence, if the tokenizer has one."""
        id = self.hf.eos_token_id
        return None if id is None else (int(id), str(self.hf.eos_token))

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        """Return the ids of a text. special: add the special tokens of this tokenizer, such as BOS.

        most: the caller refuses texts with more ids than this. Of such a text only a beginning is encoded, with at
        least CLEARLY_MORE ids more than `most`: a text of megabytes would take seconds and gigabytes of memory.
        """

        def encode(text: str) -> list[int]:
            # verbose=False: no warning about a text longer than the context, which the caller refuses
            return list(self.hf(text, add_special_tokens=special, verbose=False)["input_ids"])

        return _encode_beginning(text, encode, most)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], most: int | None = None, **options: Any) -> list[int]:
        """Return the ids of a conversation. most: see `encode`. options: see `render_chat`."""
        return self.read_chat(messages, most, **options)[0]

    def read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        most: int | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> tuple[list[int], str]:
        """Return the ids and the text of a conversation. Unless `allow_special_tokens` is set, special tokens in
        messages stay text. most: see `encode`. variables, options: see `render_chat`."""
        variables = variables or {}
        # Before the guard, which then sees what was hidden by JSON's escapes.
        plain = self._template.plain(messages, variables)
        guarded = None if self.allow_special_tokens else self._guard.mark(plain, variables)
        if guarded is None:
            text = self._template.render(plain, variables, **options)
            return self.encode(text, special=False, most=most), text
        plain, variables, mark = guarded
        text = self._template.render(plain, variables, **options)
        ids = _encode_beginning(text, lambda part: self._guard.encode(part, mark), most)
        return ids, text.replace(mark, "")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """Return the text of a conversation as the chat template renders it, with the template's special tokens.

        The tool calls of earlier messages, and their reasoning (`reasoning_content`, `reasoning` or parts {"type":
        "thinking"}), are given to the template in the form that it takes; reasoning that it does not take is left out.

        variables: variables of the template, such as tools. options: add_generation_prompt (default: True), to end with
        the beginning of an assistant's message; continue_final_message, to end directly after the text of the last
        message. Raises ValueError.
        """
        variables = variables or {}
        return self._template.render(self._template.plain(messages, variables), variables, **options)

    def check_template(self, variables: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError if there is no chat template, or if it cannot take these variables."""
        self._template.check(variables)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of ids. special: include all special tokens, and not only MARKS."""
        marks, hidden = self._marks_and_hidden
        if not special and marks and not marks.isdisjoint(ids):
            ids, special = [id for id in ids if id not in hidden], True
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=not special))
        return str(self.hf.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def _encode_beginning(text: str, encode: Callable[[str], list[int]], most: int | None) -> list[int]:
    """Return the ids of a text, or of a beginning of it; see `Tokenizer.encode`."""
    if most is not None:
        size = USUAL_CHARS * (most + CLEARLY_MORE)
        while size < len(text):
            ids = _encode_beginning(text[:size], encode, None)
            if len(ids) > most + CLEARLY_MORE:  # the cut changes only the last few ids
                return ids
            size *= USUAL_CHARS
    text.encode()  # raises for a lone surrogate, with a clearer message than the tokenizer's
    return encode(text)


def import_transformers() -> Any:
    """Import the part of transformers that tokenizers need, and return their base class. It takes at least a second."""
    with importing:
        from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _check_files(folder: Path) -> None:
    """Raise ValueError for an entry of a folder that is not a regular file, such as a fifo, on which reading blocks."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path.name} is not a regular file")


def _processor_template(folder: Path) -> str | None:
    """Return the chat template in the file of a processor, which models with vision may have instead of their
    tokenizer's; None if there is no such file."""
    path = folder / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_bytes())["chat_template"]
    except (ValueError, LookupError, TypeError, RecursionError):
        template = None
    if not isinstance(template, str):
        raise ValueError(f"{path.name} is not a JSON object with a string chat_template")
    return template


def _class_of(folder: Path) -> Any:
    """Return the class of transformers that reads the tokenizer in a folder."""
    import transformers

    try:
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        model = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return transformers.AutoTokenizer
    names = (model.get("model_type"), tokenizer.get("tokenizer_class"))
    name = "AutoTokenizer" if "auto_map" in tokenizer else DIRECT.get(names, "AutoTokenizer")
    if names[1] == "TokenizersBackend" and transformers.__version__.startswith("4."):  # saved by transformers 5
        name = "PreTrainedTokenizerFast"
    return getattr(transformers, name)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[list[int], str | None]:
    """Return the ids of a prompt of any kind, and its text or None. Raises ValueError or TypeError for other values."""
    if isinstance(prompt, str):
        return _needed(tokenizer).encode(prompt), prompt
    if type(prompt) is list and prompt and type(prompt[0]) is int:  # the usual case; other checks take longer
        return _read_ids(prompt), None
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer)
    if _is_chat(prompt):
        return _encode_mapping({"messages": prompt}, tokenizer)
    return _read_ids(prompt), None


def check_needs(prompt: Any, tokenizer: Tokenizer | None) -> None:
    """Raise ValueError if a prompt of this kind needs a tokenizer or a chat template that the model does not have."""
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_token_ids") is not None:
            return
        prompt = prompt.get("prompt") or prompt.get("messages")
    if _is_chat(prompt):
        _needed(tokenizer).check_template()
    elif isinstance(prompt, str):
        _needed(tokenizer)


def _needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises ValueError if there is none."""
    if tokenizer is None:
        raise ValueError("this model has no tokenizer files, so a prompt must be a list of token ids")
    return tokenizer


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _encode_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[list[int], str | None]:
    given = {name: value for name, value in prompt.items() if value is not None}
    kinds = [name for name in PROMPT_KINDS if name in given]
    unknown = given.keys() - {*PROMPT_KINDS, *(CHAT_FIELDS if "messages" in kinds else ())}
    if unknown or not kinds:
        name = f"not {min(unknown)!r}" if unknown else "and one does not"
        raise TypeError(f"a prompt that is a dict has 'prompt', 'prompt_token_ids' or 'messages', {name}")
    if "messages" in kinds and len(kinds) > 1:
        raise TypeError(f"a prompt that is a dict has 'messages' or {kinds[0]!r}, not both")
    if "prompt_token_ids" in given:
        return _read_ids(given["prompt_token_ids"]), given.get("prompt")
    if "messages" not in given:
        return encode_prompt(given["prompt"], tokenizer)
    if not _is_chat(given["messages"]):
        raise TypeError(f"messages must be a list of dicts, not {given['messages']!r:.80}")
    return _needed(tokenizer).read_chat(given["messages"], **chat_arguments(given))


def chat_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Tokenizer.render_chat` for the fields in CHAT_FIELDS. Raises ValueError or TypeError."""
    given = {name: value for name, value in fields.items() if value is not None}
    tools, variables = given.get("tools", []), given.get("chat_template_kwargs", {})
    if not isinstance(tools, list | tuple):
        raise TypeError(f"tools must be a list of functions or dicts, not {type(tools).__name__}")
    if not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, not {type(variables).__name__}")
    for name in ("continue_final_message", "add_generation_prompt"):
        Option(name, bool).check(given.get(name))
    continued = given.get("continue_final_message", False)
    begins = given.get("add_generation_prompt", not continued)
    if begins and continued:
        raise ValueError("add_generation_prompt begins another message, so it cannot go with continue_final_message")
    variables = {"tools": list(tools) or None, **variables}
    return {"add_generation_prompt": begins, "variables": variables, "continue_final_message": continued}


def _read_ids(prompt: Any) -> list[int]:
    """Return the ids of a prompt that consists of ids. Raises TypeError for other values."""
    if isinstance(prompt, bytes | bytearray):
        raise TypeError("a prompt cannot be bytes; decode them to a string")
    if not isinstance(prompt, Sequence) and hasattr(prompt, "tolist"):  # a tensor or array of ids
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise TypeError(f"a prompt is a string, a list of ids or a list of messages, not {type(prompt).__name__}")
    if set(map(type, prompt)) == {int}:  # the usual case; a check of each token takes many times longer
        return list(prompt)
    for token in prompt:
        if not isinstance(token, Integral) or isinstance(token, bool):
            hint = "; give each text as a separate prompt" if isinstance(token, str) else ""
            raise TypeError(f"a prompt of ids must hold integers, not {token!r}{hint}")
    return [int(token) for token in prompt]
