"""Fields of requests: the base class of all parts, which checks them, and lists of those that this server does not use.

A field that other servers know is accepted where its value changes nothing here. Fields of which a user might expect
something are named in the log, once each. The lists hold fields of vLLM, SGLang, llama.cpp, Ollama, OpenRouter and
LiteLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, LiteralString, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from fastgen.names import nearest

UNSUPPORTED = "is not supported; leave it out"
MAX_NAMED = 200  # maximum number of fields that the log names, since clients may make up any number of them
MAX_NAME = 100  # maximum number of characters of a name in the log

_T = TypeVar("_T")
Items = Annotated[list[_T], Field(fail_fast=True)]  # checked up to the first wrong item: a body may have very many
Some = Annotated[list[_T], Field(min_length=1, fail_fast=True)]

UNUSED = frozenset({
    "spaces_between_special_tokens",  # of text that shows no special tokens
    "length_penalty", "early_stopping",  # of a beam search, and below of samplers that are off
    "mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_sequence_breakers",
    "request_id", "rid", "session_id", "chat_id", "trace", "tags", "custom_labels",  # names in other logs
    "litellm_metadata", "litellm_call_id", "litellm_session_id", "litellm_trace_id", "no-log",
    "guided_decoding_backend", "cache_prompt", "extra_key", "id_slot", "timings_per_token",  # how, not what
    "num_keep", "use_mmap", "use_mlock", "low_vram", "numa", "main_gpu",  # Ollama's, which Open WebUI sends
    "drop_params", "additional_drop_params", "allowed_openai_params", "caching", "cache", "num_retries", "max_retries",
    "custom_llm_provider",  # of a LiteLLM in between
    "stream_reasoning",
})  # fmt: skip
"""Fields that change no answer, whatever their value is."""

NOTED = {
    "cache_salt": "all clients share the cache of prefixes",
    "priority": "requests are served in their order",
    "num_ctx": "the length of the context is set at the start, by --max-model-len",
    "keep_alive": "models stay loaded",
    **dict.fromkeys(("num_gpu", "num_thread", "num_batch"), "the device is set at the start"),
    **dict.fromkeys(("provider", "models", "route", "fallbacks"), "requests are not sent on to others"),
    **dict.fromkeys(("timeout", "stream_timeout"), "--request-timeout limits the time of a request"),
    "transforms": "a prompt that is too long is a 400",
    "usage": "stream_options asks for the usage at the end of a stream",
    **dict.fromkeys(("thinking_budget", "thinking_token_budget"), "the number of reasoning tokens is not limited"),
}  # {field: what holds instead}
"""Fields that are ignored as a user would expect, and named in the log."""

_SAMPLER = "this sampler does not exist here; use temperature, top_p, top_k or min_p"
NEUTRAL: dict[str, tuple[Any, str]] = {
    "skip_special_tokens": (True, "texts never show special tokens; return_token_ids returns their ids"),
    "no_stop_trim": (False, "use include_stop_str_in_output"),
    "use_beam_search": (False, "there is no beam search"),
    "return_hidden_states": (False, "hidden states stay in the engine"),
    "plugins": ([], "the server runs no tools itself"),
    "repeat_last_n": (-1, "repetition_penalty sees all tokens, which is -1"),
    "no_repeat_ngram_size": (0, "use repetition_penalty or frequency_penalty"),
    **dict.fromkeys(("typical_p", "tfs_z"), (1, _SAMPLER)),
    **dict.fromkeys(
        ("top_a", "mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range", "smoothing_factor"), (0, _SAMPLER)
    ),
}
"""{field: (the only value that changes nothing here, what to do instead of another value)}"""

FILL_GAP = "write the tokens of your model for a text before and after a gap into the prompt"
_OLD_CALLS = "is the old form of tool calls, which is not supported; use tools, tool_choice and tool_calls"
HINTS = {
    "functions": _OLD_CALLS,
    "function_call": _OLD_CALLS,
    "suffix": f"is not supported; {FILL_GAP}",
    "truncate_prompt_tokens": "is not supported; shorten the prompt",
    "stop_regex": "is not supported; use stop",
    "structural_tag": "is not supported; use structured_outputs with json, regex, choice or grammar",
    "chat_template": "is not supported; start the server with --chat-template",
    "documents": "is not supported; give variables of the template as chat_template_kwargs",
    "thinking": "is not supported; use reasoning_effort or chat_template_kwargs",
    **dict.fromkeys(("think", "reasoning_format"), "is not supported; use enable_thinking or separate_reasoning"),
    "lora_path": "is not supported; start the server with --adapter",
    "options": "is Ollama's own form, which is not supported; give the options as fields of the request",
    "format": "is Ollama's own form, which is not supported; use response_format",
    **dict.fromkeys(("num_predict", "n_predict", "max_new_tokens"), "is not supported; use max_tokens"),
}  # {unsupported field: what to do instead}


def is_neutral(value: Any, neutral: Any) -> bool:
    """Return whether a value of a body is the neutral one of its field. In JSON, true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class FieldPolicy:
    """The policy of a server for fields that it does not use.

    strict: refuse those without effect. ignore_unknown: ignore those that are not supported, instead of an error.
    say: logs a line; by default, nothing is logged.
    """

    def __init__(
        self, strict: bool = False, ignore_unknown: bool = False, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.strict, self.ignore_unknown, self._say = strict, ignore_unknown, say
        self._named: set[str] = set()

    def note(self, field: str, reason: str) -> None:
        """Log that a field is ignored, once for each name."""
        field = field[:MAX_NAME]
        if field not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(field)
            last = "; further names are not logged" if len(self._named) == MAX_NAMED else ""
            self._say(f"the field {field!r} of a request is ignored: {reason}{last}")


# ------------------------------------------------------------------------------------------------- checks


def wrong(field: str, message: str, code: LiteralString = "invalid_value") -> PydanticCustomError:
    """Return an error about a field. message: the rest of a sentence that begins with the field's name."""
    return PydanticCustomError(code, "{field} {message}", {"field": field, "message": message})


def _describe(schema: dict[str, Any], kind: type[Strict]) -> None:
    """Add to the JSON schema of a part: other fields must be null, and some fields have no effect."""
    foreign = (UNUSED | NOTED.keys()) & kind.without_effect
    schema["additionalProperties"] = {"type": "null"}
    for name in sorted(kind.without_effect - foreign):
        schema["properties"].setdefault(name, {})["description"] = "accepted without effect"
    if foreign:  # as properties, they would be most of the schema
        patterns: dict[str, dict[str, Any]] = {"|".join(sorted(foreign)): {"description": "accepted without effect"}}
        for name, (value, advice) in sorted(kind.neutral.items()):
            patterns[name] = {"enum": [value, None], "description": f"for another value, {advice}"}
        schema["patternProperties"] = {f"^({names})$": each for names, each in patterns.items()}


class Strict(BaseModel):
    """A part of a request. Unknown fields are errors, types are not converted (but 3.0 is an integer, as in JSON), and
    null means that a field is left out. The validation's context may be a FieldPolicy.

    without_effect: names of fields that are accepted and dropped; those that the class also declares are checked.
    neutral: as NEUTRAL of fields.py, of fields that are accepted with one value.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), json_schema_extra=_describe
    )
    without_effect: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        policy, given = info.context or FieldPolicy(), {}
        for name, value in data.items():  # stops at the first unknown field, since there may be very many
            if value is None or (name in cls.neutral and is_neutral(value, cls.neutral[name][0])):
                continue
            unused = name in cls.without_effect
            if unused and name in NOTED and not policy.strict:
                policy.note(name, NOTED[name])
            if policy.strict if unused else not cls._knows(name):
                cls._refuse(name, policy)
            elif not unused or name in cls.model_fields:
                whole = isinstance(value, float) and value.is_integer() and name in _integers(cls)
                given[name] = int(value) if whole else value
        return given

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name in _names(cls)

    @classmethod
    def _refuse(cls, name: str, policy: FieldPolicy) -> None:
        """Raise an error about a field that is not supported, unless the policy ignores it."""
        if policy.ignore_unknown and name not in cls.without_effect:
            return policy.note(name, "it is not supported")
        hint = HINTS.get(name, UNSUPPORTED)
        if name in cls.neutral:
            value, advice = cls.neutral[name]
            hint = f"is only supported as {json.dumps(value)}: {advice}"
        elif hint == UNSUPPORTED and name not in cls.without_effect and (near := nearest(name, _names(cls))):
            hint = f"{UNSUPPORTED} (the nearest field is {near})"
        raise wrong(name, hint, "unsupported_parameter")


class Body(Strict):
    """The body of a request, where fields of other servers are accepted."""

    without_effect = UNUSED | NOTED.keys()
    neutral = NEUTRAL


@cache
def _names(kind: type[Strict]) -> tuple[str, ...]:
    """Return the names of the fields in a body."""
    return tuple(field.alias or name for name, field in kind.model_fields.items())


@cache
def _integers(kind: type[Strict]) -> frozenset[str]:
    """Return the names of the fields that are integers."""
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if int in (field.annotation, *get_args(field.annotation)))


class History(Strict):
    """A part of a message. Clients send messages back with keys that servers and libraries have added. These are
    dropped, except for keys that hold a part of what was said, which are errors."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=None)

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name not in ("audio", "function_call")

    @classmethod
    def _refuse(cls, name: str, policy: FieldPolicy) -> None:
        super()._refuse(name, FieldPolicy())
