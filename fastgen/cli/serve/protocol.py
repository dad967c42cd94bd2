"""Requests of OpenAI's API: strict checks of their fields, and their sampling parameters.

An unsupported field of a request is an error that names it, unless the field cannot change the answer. Unknown keys of
messages are dropped. The default of every field is null.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, FiniteFloat, field_validator, model_validator

from fastgen.cli.serve.checking import ApiError
from fastgen.cli.serve.fields import FILL_GAP, Body, Items, Some, Strict, wrong
from fastgen.cli.serve.parts import (
    STRUCTURES,
    ChatMessage,
    ChosenTools,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Tool,
    ToolMode,
)
from fastgen.request import MAX_BIASES, MAX_LOGPROBS, SamplingParams

COMPLETION_TOKENS = 16  # default max_tokens of /completions, as in OpenAI's API
MAX_CHOICES = 128
MAX_STOPS = 64  # maximum number of stop strings, and of bad_words
MAX_WORD = 1000  # maximum number of characters of one of the bad_words
INT32 = 2**31 - 1

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "untruncated_logprobs"]
_TokenId = Annotated[int, Field(ge=0, le=INT32)]
_Biased = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Bias = Annotated[FiniteFloat, Field(ge=-100, le=100)]
_Word = Annotated[str, Field(pattern=r"\S", max_length=MAX_WORD)]
_Stop = Annotated[str, Field(min_length=1)]  # an empty one would end every answer at once


class GenerationFields(Body):
    """The fields that both generating endpoints share. SamplingParams documents most of them. Fields about billing,
    caching and safety and hints for other models have no effect."""

    without_effect = frozenset({
        "best_of", "metadata", "modalities", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier", "store", "verbosity",
    }) | Body.without_effect  # fmt: skip

    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)  # must equal n
    modalities: Items[Literal["text"]] | None = None
    model: str | None = None
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: FiniteFloat | None = Field(None, ge=0, le=1, description="0 is off, as 1 is")
    top_k: int | None = Field(None, ge=-1, le=INT32, description="0 and -1 are all")
    min_p: FiniteFloat | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    repetition_penalty: FiniteFloat | None = Field(None, gt=0)
    repeat_penalty: FiniteFloat | None = Field(None, gt=0, description="the same as repetition_penalty")
    logit_bias: dict[_Biased, _Bias] | None = Field(None, max_length=MAX_BIASES)
    allowed_token_ids: Some[_TokenId] | None = None
    logprob_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_LOGPROBS, fail_fast=True)] | None = None
    bad_words: Annotated[list[_Word], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=INT32)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="logprobs name tokens as token_id:5")
    logprobs_mode: LogprobsMode | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Some[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, bias: Any) -> Any:
        """Check the size before pydantic checks each entry and reports all wrong ones, which could take seconds."""
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:
            raise wrong("logit_bias", f"has {len(bias)} tokens; it may have {MAX_BIASES}")
        return bias

    @model_validator(mode="after")
    def _check_counts(self) -> GenerationFields:
        if self.best_of not in (None, self.choices):
            raise wrong("best_of", "must equal n: answers are not ranked", "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is only allowed when stream is true")
        if (
            None not in (self.repeat_penalty, self.repetition_penalty)
            and self.repeat_penalty != self.repetition_penalty
        ):
            raise wrong("repeat_penalty", "and repetition_penalty mean the same and differ; give one of them")
        if len(names := list(self.structures)) > 1:
            raise wrong(names[1], f"is given together with {names[0]}; give one of them")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "is not available when stream is true; leave one of them out")
        return self

    @property
    def structures(self) -> dict[str, StructuredOutputs]:
        """The structure of the answers by the name of its field; a checked request has at most one.

        Clients that know several versions of vLLM send older names too, which structured_outputs overrides."""
        if self.structured_outputs is not None:
            return {"structured_outputs": self.structured_outputs}
        found: dict[str, StructuredOutputs] = {}
        for name, part in STRUCTURES.items():
            if (value := getattr(self, name)) is not None:
                structure = StructuredOutputs(**{part: value})
                if structure not in found.values():
                    found[name] = structure
        return found

    @property
    def drawn(self) -> str:
        """The name of the list of an Event that is reported as logprobs."""
        return drawn_name(self.logprobs_mode or "raw_logprobs")

    def with_mode(self, default: str) -> Self:
        """Return the request with the server's default of logprobs_mode. Where it asks for values that are always raw,
        of alternatives or of the prompt, all its logprobs stay raw."""
        if self.logprobs_mode is not None or default == "raw_logprobs" or self._has_raw:
            return self
        return self.model_copy(update={"logprobs_mode": default})

    @property
    def _has_raw(self) -> bool:
        return False

    @property
    def choices(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def streamed(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def _sampling_params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        given: dict[str, Any] = {name: value for name in COPIED if (value := getattr(self, name)) is not None}
        if self.top_p is not None:
            given["top_p"] = float(self.top_p) or 1.0
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if self.stop == "":
            given["stop"] = None
        return replace(defaults, **given | others)


def drawn_name(mode: str) -> str:
    """Return the name of the list of an Event or a Completion that has the logprobs of a mode."""
    return "logprobs" if mode == "processed_logprobs" else mode


# Fields with the same name and meaning in SamplingParams.
COPIED = (GenerationFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()) - {"top_p", *STRUCTURES}


class Reasoning(Strict):
    """The reasoning that is asked for, in OpenRouter's form and that of /responses."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    without_effect = frozenset({"max_tokens", "summary", "generate_summary", "context", "mode"})


class Thinking(Strict):
    """The switch of thinking in the form of Anthropic and DeepSeek. The number of reasoning tokens is not limited."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    without_effect = frozenset({"budget_tokens", "display"})


class ChatRequest(GenerationFields):
    """A request to /chat/completions.

    separate_reasoning: false leaves the reasoning in the content, as the model has written it.
    """

    without_effect = GenerationFields.without_effect - {"reasoning_effort"}
    neutral = Body.neutral | {
        "add_special_tokens": (False, "a chat template has its own special tokens"),
        "echo": (False, "use continue_final_message, and join the texts"),
    }

    messages: Some[ChatMessage] = Field(examples=[[{"role": "user", "content": "a"}]])
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolMode | NamedTool | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = Field(
        None, description="none turns thinking off, and low or more turns it on, where the chat template can"
    )
    enable_thinking: bool | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "is only allowed when logprobs is true")
        if self._has_raw and self.drawn != "raw_logprobs":
            raise wrong("top_logprobs", "are raw; leave them out, or logprobs_mode")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens", "and max_completion_tokens mean the same and differ; give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("tools", "has two functions with the same name")
        chosen = [] if self.tool_choice is None or isinstance(self.tool_choice, str) else self.tool_choice.names
        if unknown := set(chosen).difference(names):
            raise wrong("tool_choice", f"names {min(unknown)!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise wrong("tool_choice", "is 'required', and there are no tools")
        if self.structures and self.response_format is not None:
            raise wrong("response_format", f"is given together with {next(iter(self.structures))}; give one of them")
        check_continued(self)
        return self

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens of an answer; None if the request has no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def thinks(self) -> bool | None:
        """True or False to turn thinking on or off, and None to leave it to the chat template."""
        asked = self.reasoning or Reasoning()
        stated = None if self.thinking is None else {"enabled": True, "disabled": False}.get(self.thinking.type)
        effort = asked.effort or self.reasoning_effort
        implied = None if effort in (None, "minimal") else effort != "none"
        return next((on for on in (self.enable_thinking, asked.enabled, stated, implied) if on is not None), None)

    @property
    def _has_raw(self) -> bool:
        return bool(self.top_logprobs or self.logprob_token_ids)

    @property
    def shows_reasoning(self) -> bool:
        """True if the response has the reasoning."""
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives for each token; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters for the engine. defaults: values of fields that are left out."""
        limit = defaults.max_tokens if self.limit is None else self.limit
        return self._sampling_params(defaults, max_tokens=limit, logprobs=self.alternatives)


def check_continued(request: ChatRequest | TokenizeRequest) -> None:
    """Check `continue_final_message`. Raises an error about a field."""
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise wrong("add_generation_prompt", "begins another message, so it cannot go with continue_final_message")
        if not request.messages or not request.messages[-1].text:
            raise wrong("continue_final_message", "needs text in the last message")


# A prompt may have very many ids, so prompts.py checks their range all at once.
_Id = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": INT32})]
_Prompts = str | Some[str] | Some[_Id] | Some[Some[_Id]]


class CompletionRequest(GenerationFields):
    """A request to /completions. logprobs: number of alternatives per token. echo: answers begin with the prompt."""

    without_effect = GenerationFields.without_effect | {"include_reasoning", "separate_reasoning"}
    neutral = Body.neutral | {"add_special_tokens": (True, "give the prompt as ids"), "suffix": ("", FILL_GAP)}

    prompt: _Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            message = "is 0, so the answer would be empty; give at least 1, or set echo or prompt_logprobs"
            raise wrong("max_tokens", message)
        if self._has_raw and self.drawn != "raw_logprobs":
            raise wrong("logprobs_mode", "goes with logprobs=0 and without echo: alternatives and scores are raw")
        if self.max_tokens == 0 and self.choices > 1:
            raise wrong("n", "must be 1 when max_tokens is 0")
        return self

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens of an answer; None if the request has no limit."""
        return self.max_tokens

    @property
    def _has_raw(self) -> bool:
        return bool(self.logprobs or self.echo or self.logprob_token_ids)

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str | list[int]], self.prompt)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters for the engine. defaults: values of fields that are left out."""
        limit = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        counts = [count for count in (self.logprobs if self.echo else None, self.prompt_logprobs) if count is not None]
        if limit == 0:
            counts.append(0)  # the engine requires prompt_logprobs if there is nothing to generate
        scores = max(counts, default=None)
        return self._sampling_params(defaults, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=scores)


class TokenizeRequest(Strict):
    """A request to /tokenize: a prompt, or messages for the chat template. return_token_strs: also return names."""

    model: str | None = None
    prompt: str | None = None
    messages: Some[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, and not both")
        if self.messages is not None and self.add_special_tokens is not None:
            raise wrong("add_special_tokens", "is only allowed with prompt: a chat template has its own special tokens")
        for field in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, field) is not None:
                raise wrong(field, "is only allowed with messages")
        check_continued(self)
        return self


class DetokenizeRequest(Strict):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Items[_Id]


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
