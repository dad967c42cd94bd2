"""Requests of OpenAI's API: their parts, strict checks of their fields, and their sampling parameters.

An unsupported field of a request is an error that names it, unless the field cannot change the answer. Unknown keys of
messages are dropped. The default of every field is null.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, FiniteFloat, WithJsonSchema, model_validator
from typing_extensions import TypedDict

from fastgen.cli.serve.sampling_fields import INT32, STRUCTURE_ALIASES, SamplingFields, Size, TokenId
from fastgen.cli.serve.validation import Items, MessagePart, Neutral, Some, Strict, wrong
from fastgen.request import MAX_LOGPROBS, SamplingParams

TEXT_ONLY = "the model reads text only"
FUNCTION_NAME = "^[A-Za-z0-9_.-]{1,128}$"  # names from MCP servers have dots; all formats of calls allow these


class StreamOptions(Strict):
    """Options of a stream.

    include_usage: add a last chunk with the usage. continuous_usage_stats: also add the usage so far to every chunk,
    unless include_usage is false.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def usage(self) -> bool:
        """True if a chunk with the usage ends the stream."""
        return bool(self.continuous_usage_stats if self.include_usage is None else self.include_usage)


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


class GivenText(TypedDict):
    """A text part as clients may send it; see `_read_part`."""

    type: Literal["text", "input_text", "output_text"]
    text: str


def _read_part(part: Any) -> Any:
    """Return a part, of the type text if it is a string or has another name of this type, as vLLM takes them. Refuse a
    part that is not text with a reason, instead of the list of types."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and (kind := part.get("type")) not in ("text", "refusal"):
        if kind in ("input_text", "output_text"):
            return {**part, "type": "text"}
        if kind is None:
            raise wrong("type", "is required", "missing_required_parameter")
        raise wrong("type", f"is {kind!r:.40}, and {TEXT_ONLY}; give parts of the type text")
    return part


_Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class CalledFunction(MessagePart):
    """A call of a function. arguments: a JSON object as text, which is incomplete if max_tokens has cut it off."""

    name: str
    arguments: str


class ToolCall(MessagePart):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


_GivenPart = str | GivenText | RefusalPart
Content = str | Items[Annotated[_Part, BeforeValidator(_read_part, json_schema_input_type=_GivenPart)]]


def reasoning_texts(parts: Any) -> list[str]:
    """Return the texts of a list of parts of reasoning. Other values have none, as encrypted parts."""
    objects = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = (part.get("text") or part.get("summary") for part in objects)
    return [text for text in texts if isinstance(text, str)]


def _is_thought(part: Any) -> bool:
    """Return whether a part of an answer's content is reasoning."""
    return isinstance(part, dict) and part.get("type") == "thinking" and isinstance(part.get("thinking"), str)


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier answer with its reasoning in one field, wherever its server has put it."""
    content, thoughts = message.get("content"), list[str]()
    if isinstance(content, list):
        thoughts = [part["thinking"] for part in content if _is_thought(part)]
        content = [part for part in content if not _is_thought(part)]
    joined = "".join(reasoning_texts(message.get("reasoning_details")))  # OpenRouter's
    candidates = (message.get("reasoning_content"), message.get("reasoning"), joined, "".join(thoughts))
    thought = next((text for text in candidates if isinstance(text, str) and text), None)
    return {**message, "content": content, "reasoning_content": thought}


class ChatMessage(MessagePart):
    """A message of a chat. reasoning_content: reasoning of an earlier answer, which may also have other names."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: Annotated[str | None, WithJsonSchema({})] = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def texts(self) -> str | list[dict[str, str]] | None:
        """The content, with all parts of the type text."""
        if not isinstance(self.content, list):
            return self.content
        texts = (part["text"] if part["type"] == "text" else part["refusal"] for part in self.content)
        return [{"type": "text", "text": text} for text in texts]

    @property
    def text(self) -> str | None:
        """The content in one text."""
        texts = self.texts
        return "\n".join(part["text"] for part in texts) if isinstance(texts, list) else texts

    @model_validator(mode="before")
    @classmethod
    def _find_reasoning(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return _with_thought(data) if data.get("role") == "assistant" else {**data, "reasoning_content": None}

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise wrong("content", "is required, except in a message of the assistant", "missing_required_parameter")
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) and self.role != role:
                raise wrong(field, f"is only allowed in a message of the role {role}", "unsupported_parameter")
        return self


class ToolFunction(Strict):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def takes(self) -> dict[str, Any]:
        """The JSON schema of the arguments; without `parameters`, the function takes none."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters


class Tool(Strict):
    type: Literal["function"] = "function"
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template, with all fields in the order that models were trained on."""
        given = self.function
        function = {"name": given.name, "description": given.description or "", "parameters": given.takes}
        return {"type": "function", "function": function}


ToolMode = Literal["none", "auto", "required"]


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    """The name of a function. As a tool_choice it means exactly one call of this function."""

    type: Literal["function"] = "function"
    function: NamedFunction
    required: ClassVar[bool] = True

    @property
    def names(self) -> list[str]:
        """The name of the only function that may be called."""
        return [self.function.name]


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Some[NamedTool]


class ChosenTools(Strict):
    """A tool_choice of some of the tools. The chat template still shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> list[str]:
        """The names of the functions that may be called."""
        return [tool.function.name for tool in self.allowed_tools.tools]

    @property
    def required(self) -> bool:
        """True if one of these functions must be called."""
        return self.allowed_tools.mode == "required"


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            code = "missing_required_parameter" if self.json_schema is None else "unsupported_parameter"
            raise wrong("json_schema", "belongs to the type 'json_schema', which requires it", code)
        return self


# ------------------------------------------------------------------------------------------------- requests

COMPLETION_TOKENS = 16  # default max_tokens of /completions, as in OpenAI's API
MAX_CHOICES = 128
MAX_REQUEST_ID = 256  # characters

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "untruncated_logprobs"]


class GenerationFields(SamplingFields):
    """The fields that both generating endpoints share. Fields about billing, caching and safety and hints for other
    models have no effect.

    truncate_prompt_tokens: maximum number of tokens of a prompt, which loses its first tokens or, with truncation_side
    "right", its last ones; -1: as many as leave room for `max_tokens`.
    """

    without_effect = SamplingFields.without_effect - {"length_penalty", "request_id"}
    neutral: ClassVar[Neutral] = {
        name: pair for name, pair in SamplingFields.neutral.items() if name != "use_beam_search"
    }
    implied_logprobs: ClassVar[bool | int]  # the value of `logprobs` that asks for no alternatives

    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)  # must equal n
    modalities: Items[Literal["text"]] | None = None
    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LOGPROBS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="logprobs name tokens as token_id:5")
    logprobs_mode: LogprobsMode | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32)
    truncation_side: Literal["left", "right"] | None = None
    user: str | None = None
    request_id: str | None = Field(None, max_length=MAX_REQUEST_ID, description="the end of the answer's id")
    use_beam_search: bool | None = Field(None, description="return the n best-scoring answers, best first")
    length_penalty: FiniteFloat | None = Field(None, description="for beam search; values above 0 favor long answers")

    @model_validator(mode="before")
    @classmethod
    def _imply_logprobs(cls, data: Any) -> Any:
        """Let logprob_token_ids ask for logprobs, as in vLLM."""
        if isinstance(data, dict) and data.get("logprob_token_ids") and data.get("logprobs") is None:
            return {**data, "logprobs": cls.implied_logprobs}
        return data

    @model_validator(mode="after")
    def _check_counts(self) -> GenerationFields:
        if self.best_of not in (None, self.choices):
            raise wrong("best_of", "must equal n: answers are not ranked", "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "is not available when stream is true; leave one of them out")
        if self.use_beam_search and self.stream:
            raise wrong("stream", "is not available with use_beam_search: the best answer is only known at the end")
        if self.structures and self.response_format is not None:
            raise wrong("response_format", f"is given together with {next(iter(self.structures))}; give one of them")
        return self

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
        if self.budget is not None:
            given["thinking_token_budget"] = self.budget
        if self.logprob_token_ids and others["logprobs"]:
            others["logprobs"] = 0  # as in vLLM, these ids replace the best ones
        return replace(defaults, **given | others)


def drawn_name(mode: str) -> str:
    """Return the name of the list of an Event or a Completion that has the logprobs of a mode."""
    return "logprobs" if mode == "processed_logprobs" else mode


# Fields with the same name and meaning in SamplingParams.
_SHARED = GenerationFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()
COPIED = _SHARED - {"top_p", *STRUCTURE_ALIASES}


class Reasoning(Strict):
    """The options of reasoning, in the form of OpenRouter and of /responses. max_tokens: its budget."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Size | None = None


class Thinking(Strict):
    """The switch of thinking in the form of Anthropic and DeepSeek."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Size | None = None


class ChatRequest(GenerationFields):
    """A request to /chat/completions.

    separate_reasoning: false leaves the reasoning in the content, as the model has written it. echo: the content begins
    with the text of the last message, if this is the assistant's. documents: a variable of the chat template.
    """

    spoken = ("messages", "tools")
    implied_logprobs = True

    messages: Some[ChatMessage] = Field(examples=[[{"role": "user", "content": "a"}]])
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    documents: Items[dict[str, Any]] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolMode | NamedTool | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = Field(None, description="return the text that the chat template makes")
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = Field(
        None,
        description="none turns thinking off, and low or more turns it on, if the template can; some read more of it",
    )
    enable_thinking: bool | None = None
    thinking: Thinking | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "is only allowed when logprobs is true")
        if self.logprob_token_ids and not self.logprobs:
            raise wrong("logprob_token_ids", "needs logprobs, which is false; leave logprobs out, or set it to true")
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
        implied = None if self.effort in (None, "minimal") else self.effort != "none"
        return next((on for on in (self.enable_thinking, asked.enabled, stated, implied) if on is not None), None)

    @property
    def effort(self) -> str | None:
        """The effort of reasoning."""
        return (self.reasoning and self.reasoning.effort) or self.reasoning_effort

    @property
    def budget(self) -> int | None:
        """See SamplingFields."""
        budgets = [super().budget]
        budgets += [] if self.thinking is None else [self.thinking.budget_tokens]
        budgets += [] if self.reasoning is None else [self.reasoning.max_tokens]
        return next((budget for budget in budgets if budget is not None), None)

    @property
    def _has_raw(self) -> bool:
        return bool(self.top_logprobs or self.logprob_token_ids)

    @property
    def shows_reasoning(self) -> bool:
        """True if the response has the reasoning."""
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def echoed(self) -> str:
        """The text of earlier messages that the content begins with."""
        last = self.messages[-1]
        return last.text or "" if self.echo and last.role == "assistant" else ""

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


# A prompt may have very many ids, so engine_input.py checks their range all at once.
_Id = Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": INT32})]
_Prompts = str | Some[str] | Some[_Id] | Some[Some[_Id]]


class CompletionRequest(GenerationFields):
    """A request to /completions. logprobs: number of alternatives per token. echo: answers begin with the prompt."""

    batch = "prompt"
    implied_logprobs = 0

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

    spoken = ("messages", "tools")

    model: str | None = None
    prompt: str | None = None
    messages: Some[ChatMessage] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is required, and not both")
        for field in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, field) is not None:
                raise wrong(field, "is only allowed with messages")
        check_continued(self)
        return self


class DetokenizeRequest(Strict):
    """A request to /detokenize."""

    model: str | None = None
    tokens: Items[_Id]
