"""From a checked request to the engine's input: prompt ids, sampling parameters and grammar.

The routes about tokens are also here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastgen.cli.serve.openai_input import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    TokenizeRequest,
)
from fastgen.cli.serve.openai_output import ChatReply, CompletionReply, PromptTokens, Vocabulary
from fastgen.cli.serve.tools import Calling
from fastgen.cli.serve.validation import ApiError
from fastgen.request import SamplingParams
from fastgen.text.grammar import MAX_GRAMMAR, json_rule, params_rule
from fastgen.text.reasoning import AnswerParser, ReasoningCounter, find_reasoning, starts_open
from fastgen.text.tokenizer import CLEARLY_MORE, Tokenizer

# Maximum number of prompt tokens, logprobs and alternatives in a response; making so large a response needs 1 GB.
MAX_ECHOED = 4_000_000
# Maximum number of tokens of a text that may exceed the context, to be counted or cut; longer texts would take seconds
# and gigabytes of memory.
MAX_COUNTED = 100_000
THINKING = "enable_thinking"  # the variable of chat templates that turns thinking on or off
EFFORT = "reasoning_effort"  # the variable of some chat templates that says how much to think

GenerationRequest = ChatRequest | CompletionRequest
GenerationReply = ChatReply | CompletionReply


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that requests need.

    defaults: the model's sampling parameters for fields that a request leaves out. max_model_len: maximum number of
    tokens of a prompt and its answer together.
    """

    name: str
    tokenizer: Tokenizer | None
    vocabulary: Vocabulary | None
    defaults: SamplingParams
    vocab_size: int
    max_model_len: int

    @property
    def max_counted(self) -> int:
        """Maximum number of tokens of a text that is counted or cut."""
        return max(self.max_model_len, MAX_COUNTED)


def prepare(
    model: ModelFacts,
    request: GenerationRequest,
    make_reply: Callable[..., ChatReply] = ChatReply,
    strict: bool = False,
) -> tuple[GenerationReply, SamplingParams]:
    """Tokenize and check a request. Return its reply, which has no events yet, and its sampling parameters with its
    grammar. make_reply: class of the reply to a chat. strict: as in `_check_prompt`. Raises ApiError. This may take
    long, so call it in a thread."""
    reply: GenerationReply
    if isinstance(request, ChatRequest):
        reply, grammar = _prepare_chat(model, request, make_reply)
    else:
        prompts = [_encode_prompt(prompt, request, model) for prompt in request.prompts]
        reply = CompletionReply(request, model.name, prompts, model.vocabulary)
        rule = structure_rule(request)
        grammar = None if rule is None else f"start: {rule}"
    _check_size(request, reply)
    if grammar is not None and len(grammar) > MAX_GRAMMAR:
        message = f"it makes a grammar of {len(grammar)} characters, above the maximum of {MAX_GRAMMAR}; simplify it"
        raise refused(ValueError(f"grammar: {message}"), grammar_field(request))
    reply.params = params = replace(request.sampling_params(model.defaults), grammar=grammar)
    try:
        params.validate(model.vocab_size)
    except (ValueError, TypeError) as error:
        raise refused(error) from None
    for prompt in reply.prompts:
        _check_prompt(prompt.ids, request, model, strict)
    return reply, params


def _prepare_chat(
    model: ModelFacts, request: ChatRequest, make_reply: Callable[..., ChatReply]
) -> tuple[ChatReply, str | None]:
    tokenizer = needed(model.tokenizer)
    calling = calling_of(request, tokenizer)
    ids = truncated(encode_chat(request, tokenizer, calling, most_ids(request, model)), request, model)
    rule = structure_rule(request)
    try:
        grammar = calling.grammar(rule)
    except ValueError as error:
        raise refused(error, grammar_field(request)) from None
    syntax, inside = find_reasoning(tokenizer), starts_open(tokenizer, ids)
    shown = None if request.separate_reasoning is False else syntax
    counter = None if syntax is None else partial(ReasoningCounter, tokenizer, inside)
    parsing = (lambda: AnswerParser(shown, inside, calling.parser())), counter
    prompt = PromptTokens(ids, tokenizer.decode(ids, special=True) if request.return_prompt_text else "")
    return make_reply(request, model.name, prompt, model.vocabulary, *parsing), grammar


def answer_rule(form: ResponseFormat | None) -> str | None:
    """Return the grammar rule of a response_format; None for plain text. Objects have only the listed properties, as
    in vLLM, also in a schema that is not strict. Raises ValueError."""
    if form is not None and form.json_schema is not None:
        return json_rule(form.json_schema.schema_, strict=bool(form.json_schema.strict), closed=True)
    return None if form is None or form.type == "text" else json_rule({"type": "object"}, strict=True)


def structure_rule(request: GenerationRequest) -> str | None:
    """Return the grammar rule of the structure that a request asks for, or None for plain text. Raises ApiError."""
    try:
        for structure in request.structures.values():
            return params_rule(structure.params)
        return answer_rule(request.response_format)
    except (ValueError, TypeError) as error:
        raise refused(error, grammar_field(request)) from None


def calling_of(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer) -> Calling:
    """Return the tool calling of a request. Raises ApiError."""
    choice, parallel = None, None
    if isinstance(request, ChatRequest):
        choice, parallel = request.tool_choice, request.parallel_tool_calls
    try:
        return Calling(tokenizer, request.tools or (), choice=choice or "auto", parallel=parallel is not False)
    except ValueError as error:
        raise refused(error, "tools") from None


def grammar_field(request: GenerationRequest) -> str:
    """Return the name of the field that a request's grammar comes from."""
    for field in request.structures:
        return field
    form = request.response_format
    return "tools" if form is None or form.type == "text" else "response_format"


def most_ids(request: GenerationRequest, model: ModelFacts) -> int:
    """Return `most` of Tokenizer.encode. A prompt that loses its first tokens is encoded to its end."""
    return model.max_model_len if request.truncate_prompt_tokens is None else model.max_counted


def truncated(ids: list[int], request: GenerationRequest, model: ModelFacts, special: int = 0) -> list[int]:
    """Return the ids that `truncate_prompt_tokens` leaves of a prompt: all, if max_tokens fills the context already, or
    if the tokenizer may not have read the prompt to its end. special: number of special tokens at its beginning, which
    stay unless the request says at which side to truncate, as in vLLM."""
    count, room = request.truncate_prompt_tokens, model.max_model_len
    if count == -1:
        limit = request.sampling_params(model.defaults).max_tokens
        count = room - (1 if limit is None else limit)
    if count is None or count < 0 or len(ids) <= count:
        return ids
    if request.truncation_side == "right":
        return ids[:count]
    if len(ids) > model.max_counted:
        return ids
    begins = 0 if request.truncation_side == "left" else min(special, count)
    return ids[:begins] + ids[len(ids) - (count - begins) :]


def _encode_prompt(prompt: str | list[int], request: CompletionRequest, model: ModelFacts) -> PromptTokens:
    """Tokenize a prompt of /completions, and truncate it. Raises ApiError."""
    echo, special = bool(request.echo), request.add_special_tokens is not False
    tokens = encode_text(prompt, model, echo, special, most_ids(request, model))
    if request.truncate_prompt_tokens is None:
        return tokens
    begins = _special_ids(needed(model.tokenizer))[0] if special and isinstance(prompt, str) else []
    kept = truncated(tokens.ids, request, model, len(begins))
    return tokens if len(kept) == len(tokens.ids) else encode_text(kept, model, echo)


def encode_text(
    prompt: str | Sequence[int], model: ModelFacts, echo: bool = False, special: bool = True, most: int | None = None
) -> PromptTokens:
    """Tokenize a text, or take ids. echo: also decode ids, with special tokens. special, most: as in
    Tokenizer.encode. Raises ApiError."""
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        return PromptTokens(needed(tokenizer).encode(prompt, special, most), prompt)
    ids = list(prompt)
    return PromptTokens(ids, tokenizer.decode(ids, special=True) if echo and tokenizer is not None else "")


def encode_chat(
    request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, calling: Calling, most: int | None = None
) -> list[int]:
    """Apply the chat template to a request's messages and tools, and return the ids. most: as in Tokenizer.encode.
    Raises ApiError."""
    variables = {"tools": calling.template_tools, **(request.chat_template_kwargs or {})}
    if isinstance(request, ChatRequest) and request.documents:
        if "documents" not in str(tokenizer.hf.chat_template):
            message = "documents: the chat template of this model takes none; put their text into a message"
            raise ApiError(400, message, "documents", "invalid_value")
        variables.setdefault("documents", request.documents)
    thinks = request.thinks if isinstance(request, ChatRequest) else None
    if thinks is not None and THINKING in str(tokenizer.hf.chat_template):
        variables.setdefault(THINKING, thinks)
    effort = request.effort if isinstance(request, ChatRequest) else None
    messages, continued = request.messages or (), bool(request.continue_final_message)
    begins = request.add_generation_prompt is not False and not continued

    def encode(variables: dict[str, Any]) -> list[int]:
        ids = tokenizer.encode_chat(
            calling.template_messages(messages), most, variables=variables, add_generation_prompt=begins,
            continue_final_message=continued,
        )  # fmt: skip
        return _with_special(ids, tokenizer) if request.add_special_tokens else ids

    if effort is not None and EFFORT not in variables and EFFORT in str(tokenizer.hf.chat_template):
        with suppress(ValueError):  # if the template refuses this effort, its default is the best that it has
            return encode({**variables, EFFORT: effort})
    try:
        return encode(variables)
    except ValueError as error:
        if request.chat_template_kwargs:
            plain = request.model_copy(update={"chat_template_kwargs": None})
            encode_chat(plain, tokenizer, calling, most)  # raises if the messages are wrong
            raise refused(error, "chat_template_kwargs") from None
        raise refused(error, "messages") from None


def _with_special(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return ids with the special tokens that the tokenizer puts before and after a text."""
    before, after = _special_ids(tokenizer)
    return [*before, *ids, *after]


def _special_ids(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before and after a text."""
    bare, whole = tokenizer.encode("a", special=False), tokenizer.encode("a")
    before = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:before], whole[before + len(bare) :]


def needed(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises ApiError if the model has none."""
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer files; give the prompt as token ids", code="invalid_value")
    return tokenizer


def refused(error: ValueError | TypeError, param: str | None = None) -> ApiError:
    """Return the ApiError for an error of the engine, a template or a grammar.

    param: the field that is at fault, which replaces the engine's name `grammar` in the message. None: a field that the
    message begins with, if any.
    """
    message = re.sub("^grammar: ", f"{param}: " if param else "", str(error))
    named = re.match(r"[a-z]+(_[a-z]+)*", message)
    if param is None and named and named[0] in ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys():
        param = named[0]
    return ApiError(400, message, param, "invalid_value")


# ------------------------------------------------------------------------------------------------- checks


def _check_prompt(ids: Sequence[int], request: GenerationRequest, model: ModelFacts, strict: bool) -> None:
    """Check the ids of a prompt, and that it fits into the context with one token of an answer. Raises ApiError.

    A longer answer ends where the context ends, unless `strict` is true: then there must be room for `max_tokens`.
    """
    param, context = "messages" if isinstance(request, ChatRequest) else "prompt", model.max_model_len
    if not ids:
        raise ApiError(400, f"{param} is empty; give at least one token", param, "invalid_value")
    check_ids(ids, param, model.vocab_size)
    answer = 1 if request.limit is None else request.limit if strict else min(request.limit, 1)
    if len(ids) + answer > context:
        least = "at least " if len(ids) > context + CLEARLY_MORE else ""  # the tokenizer has stopped there
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested {least}"
            f"{len(ids) + answer} tokens ({least}{len(ids)} in the prompt, {answer} for the answer). "
            "Shorten one of them.",
            param,
            "context_length_exceeded",
        )


def check_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raise ApiError for an id outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(id for id in ids if not 0 <= id < vocab_size)
        message = f"{param} holds the id {bad}, which is out of vocabulary: the model has {vocab_size} tokens"
        raise ApiError(400, message, param, "invalid_value")


def _check_size(request: GenerationRequest, reply: GenerationReply) -> None:
    """Check the size of a response that repeats its prompts, those of completions for each choice. Raises ApiError."""
    entries, copies = {}, 1  # entries: the number of entries for each token of a prompt, by field
    if request.prompt_logprobs is not None:
        entries["prompt_logprobs"] = 2 * (1 + request.prompt_logprobs)  # objects, which take more memory
    if isinstance(request, CompletionRequest):
        copies = request.choices
        if request.echo:
            entries["echo"] = 1 + (request.logprobs or 0)
        elif request.return_token_ids:
            entries["return_token_ids"] = 1
    if (count := reply.prompt_tokens * copies * sum(entries.values())) > MAX_ECHOED:
        param = max(entries, key=lambda name: entries[name])
        each = " for each choice" if copies > 1 else ""
        message = f"{param} repeats the prompt{each}: {count} tokens and logprobs, above the maximum of {MAX_ECHOED}. "
        raise ApiError(400, f"{message}Send fewer prompts, or lower n or {param}.", param, "invalid_value")


# ------------------------------------------------------------------------------------------------- routes


def tokenize(request: TokenizeRequest, model: ModelFacts) -> dict[str, Any]:
    """Answer /tokenize. Raises ApiError."""
    tokenizer, vocabulary = needed(model.tokenizer), model.vocabulary
    assert vocabulary is not None
    if request.messages is not None:
        ids = encode_chat(request, tokenizer, calling_of(request, tokenizer), model.max_counted)
    else:
        ids = tokenizer.encode(request.prompt or "", request.add_special_tokens is not False, model.max_counted)
    if len(ids) > model.max_counted:
        check_length(ids, "prompt" if request.messages is None else "messages", model)
    names = [vocabulary.name(id) for id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": names}


def check_length(ids: Sequence[int], param: str, model: ModelFacts) -> None:
    """Check that ids without an answer fit into the context. Raises ApiError."""
    if len(ids) > model.max_model_len:
        least = "at least " if len(ids) > model.max_model_len + CLEARLY_MORE else ""  # the tokenizer may have stopped
        message = f"{param} has {least}{len(ids)} tokens, above this model's maximum context length of "
        raise ApiError(400, f"{message}{model.max_model_len}; shorten it", param, "context_length_exceeded")


def count_tokens(chat: ChatRequest, model: ModelFacts) -> int:
    """Return the number of tokens of a chat's prompt. Raises ApiError."""
    tokenizer = needed(model.tokenizer)
    ids = encode_chat(chat, tokenizer, calling_of(chat, tokenizer), model.max_model_len)
    check_length(ids, "messages", model)
    return len(ids)


def detokenize(request: DetokenizeRequest, model: ModelFacts) -> dict[str, str]:
    """Answer /detokenize. The text shows special tokens. Raises ApiError."""
    tokenizer = needed(model.tokenizer)
    check_length(request.tokens, "tokens", model)
    check_ids(request.tokens, "tokens", model.vocab_size)
    return {"prompt": tokenizer.decode(request.tokens, special=True)}


def tokenizer_info(tokenizer: Tokenizer) -> dict[str, Any]:
    """Answer /tokenizer_info, for clients that count tokens or apply the chat template themselves."""
    hf = tokenizer.hf
    named = {name: getattr(hf, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": type(hf).__name__,
        "vocab_size": len(hf),
        **{name: None if token is None else str(token) for name, token in named.items()},
        "chat_template": hf.chat_template,
    }
