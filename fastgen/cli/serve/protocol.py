"""What clients send: the requests of OpenAI's API, checked strictly, and what they mean to the engine.

A field that is not supported is an error that names it. null means the default, wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from fastgen.cli.serve.fields import ChatMessage, NamedTool, ResponseFormat, StreamOptions, Strict, Tool, wrong
from fastgen.request import MAX_BIASES, MAX_LOGPROBS, SamplingParams
from fastgen.tokenizer import CLEARLY_MORE

COMPLETION_TOKENS = 16  # of /completions without max_tokens, as OpenAI has it
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_ECHOED = 4_000_000  # tokens of prompts, their logprobs and alternatives in a reply: 1 GB while it is made
INT32 = 2**31 - 1
BIASED = "^[0-9]{1,10}$"  # the keys of logit_bias

_StopId = Annotated[int, Field(ge=0, le=INT32)]
_Stop = Annotated[str, Field(min_length=1)]  # an empty one would end every answer at once


class ApiError(Exception):
    """An answer that is an error: an HTTP status, and the body of OpenAI's errors.

    param: the field that is wrong, such as "messages[0].content"; code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# ------------------------------------------------------------------------------------------------- requests


class Sampled(Strict):
    """What the two endpoints that generate have in common; SamplingParams says what the fields mean."""

    model: str | None = None
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: FiniteFloat | None = Field(None, ge=0, le=1, description="0 is off, as 1 is")
    top_k: int | None = Field(None, ge=0, le=INT32)
    min_p: FiniteFloat | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_StopId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    repetition_penalty: FiniteFloat | None = Field(None, gt=0)
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_BIASES, json_schema_extra={"propertyNames": {"pattern": BIASED}}
    )
    min_tokens: int | None = Field(None, ge=0, le=INT32)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    COPIED: ClassVar = (
        "temperature", "top_k", "min_p", "n", "stop", "stop_token_ids", "seed", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos",
    )  # fmt: skip

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:  # before each of them is looked at
            raise wrong("logit_bias", f"has {len(bias)} tokens; it may have {MAX_BIASES}")
        return bias

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or ():
            if not re.fullmatch(BIASED, token):
                raise wrong("logit_bias", f"holds {token[:40]!r}; its keys must be token ids")
        return bias

    @model_validator(mode="after")
    def _check_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is only allowed when stream is true")
        return self

    @property
    def choices(self) -> int:
        """Answers to one prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        given = {name: value for name in self.COPIED if (value := getattr(self, name)) is not None}
        if self.top_p is not None:
            given["top_p"] = float(self.top_p) or 1.0
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return replace(defaults, **given, **others)


class ChatRequest(Sampled):
    """Of /chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "is only allowed when logprobs is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens", "and max_completion_tokens are one thing and differ; give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "has two functions of one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise wrong("tool_choice", f"names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise wrong("tool_choice", "is 'required', and there are no tools")
        return self

    @property
    def limit(self) -> int | None:
        """How many tokens the client allows an answer; None where it does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Raw alternatives a token; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """defaults: what the fields that are left out mean."""
        limit = defaults.max_tokens if self.limit is None else self.limit
        return self._sampling_params(defaults, max_tokens=limit, logprobs=self.alternatives)


def _kind_of_prompt(prompt: Any) -> str:
    """Which of the four it is to be checked as, by what it begins with."""
    if not isinstance(prompt, list) or not prompt:
        return "texts" if isinstance(prompt, list) else "text"
    return "texts" if isinstance(prompt[0], str) else "many ids" if isinstance(prompt[0], list) else "ids"


# A prompt may hold very many ids: what they may be is checked at once, where the vocabulary is known.
_Id = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": INT32})]
_Ids = Annotated[list[_Id], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[_Ids], Field(min_length=1, fail_fast=True), Tag("many ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(Sampled):
    """Of /completions. logprobs: so many raw alternatives a token; echo: the answer begins with the prompt."""

    prompt: _Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "is 0, so there would be no answer; ask for at least 1, or set echo")
        if self.max_tokens == 0 and self.choices > 1:
            raise wrong("n", "is only allowed with at least 1 of max_tokens")
        return self

    @property
    def limit(self) -> int | None:
        """How many tokens an answer may have."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """defaults: what the fields that are left out mean."""
        scores = self.logprobs if self.echo else None
        if self.limit == 0 and scores is None:
            scores = 0  # the engine takes a request for no tokens only where the prompt's are scored
        return self._sampling_params(defaults, max_tokens=self.limit, logprobs=self.logprobs, prompt_logprobs=scores)


class TokenizeRequest(Strict):
    """Of /tokenize: a prompt, or messages as the chat template writes them. return_token_strs: the tokens as text."""

    model_config = ConfigDict(
        json_schema_extra={
            "additionalProperties": {"type": "null"},
            "anyOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ],
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, one of them")
        if self.messages is not None and self.add_special_tokens is not None:
            raise wrong("add_special_tokens", "belongs with a prompt: the chat template brings its own special tokens")
        for field in ("add_generation_prompt", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, field) is not None:
                raise wrong(field, "belongs with messages")
        return self


class DetokenizeRequest(Strict):
    """Of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[_Id], Field(fail_fast=True)]


# ------------------------------------------------------------------------------------------------- checks


RequestT = TypeVar("RequestT", bound=Strict)


def read_request(kind: type[RequestT], body: bytes) -> RequestT:
    """The request in a body. Raises ApiError, which names the field that is wrong."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return check_request(kind, data)


def check_request(kind: type[RequestT], data: Any) -> RequestT:
    """The same of a body's value."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _api_error(error, data) from None


def _api_error(error: ValidationError, data: Any) -> ApiError:
    """About the deepest field that is wrong: of the types that a field may have, the one that came closest."""
    found = [(_path(details, data), details) for details in error.errors(include_url=False)]
    path, details = max(found, key=lambda pair: len(pair[0]))  # the first of them
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
    kind = details["type"]
    if kind in ("missing", "union_tag_not_found"):
        return ApiError(400, f"{param} is required", param, "missing_required_parameter")
    if kind in ("invalid_value", "unsupported_parameter"):
        field = details["ctx"]["field"]
        inside = param if path[-1:] == (field,) else f"{param}.{field}".removeprefix(".")
        return ApiError(400, f"{inside} {details['ctx']['message']}", inside, kind)
    if kind == "union_tag_invalid":
        return ApiError(400, f"{param} should be one of {details['ctx']['expected_tags']}", param, "invalid_value")
    messages = dict.fromkeys(other["msg"] for at, other in found if at == path)
    said = ", or ".join(_plain(message) for message in messages)
    said = f"{param or 'the body'} {said}"
    return ApiError(400, said, param or None, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _plain(message: str) -> str:
    """What pydantic says of a value, without its words for values and types of Python."""
    message = re.sub(r"dictionary or (instance of \w+|object to extract fields from)|dictionary", "object", message)
    return re.sub(r"^(Input|String|List|Dictionary|Value) ", "", message)


def _path(details: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Where in the body an error is: its place without the names that pydantic gives to the types of a union."""
    path: list[str | int] = []
    for step in details["loc"]:
        if isinstance(data, dict) and (step in data or (details["type"] == "missing" and step is details["loc"][-1])):
            path.append(step)
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int):
            path.append(step)
            data = data[step] if step < len(data) else None
    if details["type"].startswith("union_tag"):  # the field that tells the type
        path.append(details["ctx"]["discriminator"].strip("'"))
    return tuple(path)


def choose_model(wanted: str | None, served: Sequence[str]) -> str:
    """The model that a request is for. Where one is served, any name is its name."""
    if len(served) == 1:
        return served[0]
    if wanted is None:
        raise ApiError(
            400, f"model is required; it is one of {', '.join(served)}", "model", "missing_required_parameter"
        )
    if wanted not in served:
        known = ", ".join(served)
        raise ApiError(404, f"the model {wanted[:100]!r} is not served; there is {known}", "model", "model_not_found")
    return wanted


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """What needs the vocabulary to be checked. Raises ApiError."""
    try:
        params.validate(vocab_size)
    except (ValueError, TypeError) as error:
        raise refused(error) from None


def check_prompt(ids: Sequence[int], request: ChatRequest | CompletionRequest, context: int, vocab_size: int) -> None:
    """Whether a prompt and its answer have room. Raises ApiError.

    context: tokens of prompt and answer together, at most. Where the client does not say how many tokens it wants, the
    answer may be cut short by the context, and one token has to have room.
    """
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    if not ids:
        raise ApiError(400, f"{param} is empty; give at least one token", param, "invalid_value")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        message = f"{param} holds the id {wrong}, outside the vocabulary of {vocab_size} tokens"
        raise ApiError(400, message, param, "invalid_value")
    limit = request.limit if isinstance(request, ChatRequest) else request.max_tokens
    answer = 1 if limit is None else limit
    if len(ids) + answer > context:
        least = "at least " if len(ids) > context + CLEARLY_MORE else ""  # only so many of them were made
        wanted = f"{least}{len(ids)} in the prompt, {answer} for the answer"
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {least}"
            f"{len(ids) + answer} tokens ({wanted}). Shorten one of them."
        )
        raise ApiError(400, message, param, "context_length_exceeded")


def check_echo(request: CompletionRequest, lengths: Sequence[int]) -> None:
    """Whether a reply can hold all prompts, of so many tokens, once a choice, and their logprobs. Raises ApiError."""
    if not request.echo and not request.return_token_ids:
        return
    count = sum(lengths) * request.choices * (1 + (request.logprobs or 0 if request.echo else 0))
    if count > MAX_ECHOED:
        param = "echo" if request.echo else "return_token_ids"
        raise ApiError(
            400,
            f"{param} repeats the prompt for each choice: {count} tokens and logprobs, of which a reply may have "
            f"{MAX_ECHOED}. Send fewer prompts, or lower n or logprobs.",
            param,
            "invalid_value",
        )


def refused(error: ValueError | TypeError, param: str | None = None) -> ApiError:
    """What the engine, a template or a grammar does not take; the message may begin with a field's name."""
    named = re.match(r"[a-z]+(_[a-z]+)*", str(error))
    if param is None and named and named[0] in ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys():
        param = named[0]
    return ApiError(400, str(error), param, "invalid_value")
