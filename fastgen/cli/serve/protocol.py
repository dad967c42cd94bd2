"""Requests of OpenAI's API: strict checks of their fields, and their sampling parameters.

A field that is not supported is an error that names it. null is the default of every field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, cast

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

COMPLETION_TOKENS = 16  # max_tokens of /completions where it is left out, as OpenAI has it
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_ECHOED = 4_000_000  # prompt tokens, logprobs and alternatives in a response, which needs 1 GB to be made
INT32 = 2**31 - 1
BIASED = "^[0-9]{1,10}$"  # keys of logit_bias

_StopId = Annotated[int, Field(ge=0, le=INT32)]
_Stop = Annotated[str, Field(min_length=1)]  # an empty one would end every answer at its beginning


class ApiError(Exception):
    """An error response: an HTTP status and a body in the form of OpenAI's errors.

    param: the wrong field, such as "messages[0].content". code: an identifier for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# ------------------------------------------------------------------------------------------------- requests


class GenerationFields(Strict):
    """The common fields of both generating endpoints; SamplingParams documents most of them."""

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

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:  # before each is checked
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
    def _check_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is only allowed when stream is true")
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def _sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        given = {name: value for name in COPIED if (value := getattr(self, name)) is not None}
        if self.top_p is not None:
            given["top_p"] = float(self.top_p) or 1.0
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return replace(defaults, **given, **others)


# Fields that SamplingParams has under the same name and with the same meaning.
COPIED = (GenerationFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()) - {"top_p", "logit_bias"}


class ChatRequest(GenerationFields):
    """A request to /chat/completions."""

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
            raise wrong("max_tokens", "and max_completion_tokens mean the same and differ; give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "has two functions with the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise wrong("tool_choice", f"names {self.tool_choice.function.name!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise wrong("tool_choice", "is 'required', and there are no tools")
        return self

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer; None if the request has no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives for each token; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters of the engine. defaults: for fields that are left out."""
        limit = defaults.max_tokens if self.limit is None else self.limit
        return self._sampling_params(defaults, max_tokens=limit, logprobs=self.alternatives)


def _kind_of_prompt(prompt: Any) -> str:
    """Return the tag of the type that a prompt is checked as, which its first item decides."""
    if not isinstance(prompt, list) or not prompt:
        return "texts" if isinstance(prompt, list) else "text"
    return "texts" if isinstance(prompt[0], str) else "many ids" if isinstance(prompt[0], list) else "ids"


# A prompt may have very many ids; check_prompt checks their range at once.
_Id = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": INT32})]
_Ids = Annotated[list[_Id], Field(min_length=1, fail_fast=True)]
_Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[_Ids], Field(min_length=1, fail_fast=True), Tag("many ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(GenerationFields):
    """A request to /completions. logprobs: number of alternatives for a token; echo: answers begin with the prompt."""

    prompt: _Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "is 0, so the answer would be empty; give at least 1, or set echo")
        if self.max_tokens == 0 and self.choices > 1:
            raise wrong("n", "must be 1 when max_tokens is 0")
        return self

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters of the engine. defaults: for fields that are left out."""
        scores = self.logprobs if self.echo else None
        if self.limit == 0 and scores is None:
            scores = 0  # without tokens to generate, the engine requires prompt_logprobs
        return self._sampling_params(defaults, max_tokens=self.limit, logprobs=self.logprobs, prompt_logprobs=scores)


class TokenizeRequest(Strict):
    """A request to /tokenize: a prompt, or messages for the chat template. return_token_strs: return names too."""

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
            raise wrong("prompt", "or messages is required, and not both")
        if self.messages is not None and self.add_special_tokens is not None:
            raise wrong("add_special_tokens", "is only allowed with prompt: a chat template has its own special tokens")
        for field in ("add_generation_prompt", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, field) is not None:
                raise wrong(field, "is only allowed with messages")
        return self


class DetokenizeRequest(Strict):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Annotated[list[_Id], Field(fail_fast=True)]


# ------------------------------------------------------------------------------------------------- checks


RequestT = TypeVar("RequestT", bound=Strict)


def read_request(kind: type[RequestT], body: bytes) -> RequestT:
    """Parse and check a body. Raises ApiError, which names the wrong field."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    return check_request(kind, data)


def check_request(kind: type[RequestT], data: Any) -> RequestT:
    """Check the value of a body. Raises ApiError, which names the wrong field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _api_error(error, data) from None


def _api_error(error: ValidationError, data: Any) -> ApiError:
    """Describe the deepest wrong field: among the types of a union, it belongs to the closest one."""
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
    reason = ", or ".join(_plain(message) for message in messages)
    return ApiError(
        400,
        f"{param or 'the body'} {reason}",
        param or None,
        "invalid_type" if kind.endswith("_type") else "invalid_value",
    )


def _plain(message: str) -> str:
    """Return a message of pydantic without its terms for Python's values and types."""
    message = re.sub(r"dictionary or (instance of \w+|object to extract fields from)|dictionary", "object", message)
    return re.sub(r"^(Input|String|List|Dictionary|Value) ", "", message)


def _path(details: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Return the path of an error in the body, without the names that pydantic adds for the types of a union."""
    path: list[str | int] = []
    for step in details["loc"]:
        if isinstance(data, dict) and (step in data or (details["type"] == "missing" and step is details["loc"][-1])):
            path.append(step)
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int):
            path.append(step)
            data = data[step] if step < len(data) else None
    if details["type"].startswith("union_tag"):  # the field that selects the type
        path.append(details["ctx"]["discriminator"].strip("'"))
    return tuple(path)


def choose_model(wanted: str | None, served: Sequence[str]) -> str:
    """Return the name of the model for a request. A single model answers to any name. Raises ApiError."""
    if len(served) == 1:
        return served[0]
    if wanted is None:
        raise ApiError(
            400, f"model is required; give one of {', '.join(served)}", "model", "missing_required_parameter"
        )
    if wanted not in served:
        known = ", ".join(served)
        raise ApiError(
            404, f"the model {wanted[:100]!r} is not served; give one of {known}", "model", "model_not_found"
        )
    return wanted


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Check parameters against the vocabulary. Raises ApiError."""
    try:
        params.validate(vocab_size)
    except (ValueError, TypeError) as error:
        raise refused(error) from None


def check_prompt(ids: Sequence[int], request: ChatRequest | CompletionRequest, context: int, vocab_size: int) -> None:
    """Check the ids of a prompt, and that prompt and answer fit in the context. Raises ApiError.

    context: maximum tokens of prompt and answer together. A request without a limit needs room for one token.
    """
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    if not ids:
        raise ApiError(400, f"{param} is empty; give at least one token", param, "invalid_value")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(id for id in ids if not 0 <= id < vocab_size)
        message = f"{param} holds the id {bad}, outside the vocabulary of {vocab_size} tokens"
        raise ApiError(400, message, param, "invalid_value")
    limit = request.limit if isinstance(request, ChatRequest) else request.max_tokens
    answer = 1 if limit is None else limit
    if len(ids) + answer > context:
        least = "at least " if len(ids) > context + CLEARLY_MORE else ""  # encoding has stopped there
        wanted = f"{least}{len(ids)} in the prompt, {answer} for the answer"
        message = (
            f"This model's maximum context length is {context} tokens. However, you requested {least}"
            f"{len(ids) + answer} tokens ({wanted}). Shorten one of them."
        )
        raise ApiError(400, message, param, "context_length_exceeded")


def check_echo(request: CompletionRequest, lengths: Sequence[int]) -> None:
    """Check the size of a response that repeats a prompt for each choice. lengths: of prompts, in tokens. Raises
    ApiError."""
    if not request.echo and not request.return_token_ids:
        return
    count = sum(lengths) * request.choices * (1 + (request.logprobs or 0 if request.echo else 0))
    if count > MAX_ECHOED:
        param = "echo" if request.echo else "return_token_ids"
        raise ApiError(
            400,
            f"{param} repeats the prompt for each choice: {count} tokens and logprobs, above the maximum of "
            f"{MAX_ECHOED}. Send fewer prompts, or lower n or logprobs.",
            param,
            "invalid_value",
        )


def refused(error: ValueError | TypeError, param: str | None = None) -> ApiError:
    """Return the response for an error of the engine, a template or a grammar, whose message may begin with a field."""
    named = re.match(r"[a-z]+(_[a-z]+)*", str(error))
    if param is None and named and named[0] in ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys():
        param = named[0]
    return ApiError(400, str(error), param, "invalid_value")
