"""Fields of requests about sampling and structure, which several APIs share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from fastgen.cli.serve.validation import Body, FieldPolicy, Some, Strict, wrong
from fastgen.request import MAX_BIASES, SamplingParams
from fastgen.text.grammar import MAX_GRAMMAR, lark_grammar

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR)]


class StructuredOutputs(Strict):
    """The structure of an answer, with vLLM's fields; exactly one is given."""

    json_: dict[str, Any] | GrammarText | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Some[GrammarText] | None = None
    grammar: GrammarText | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise wrong("structured_outputs", "must have one field: json, regex, choice, grammar or json_object")
        return self

    @property
    def params(self) -> SamplingParams:
        """The same structure as parameters of the engine. Raises ValueError."""
        schema = {"type": "object"} if self.json_object else self.json_
        grammar = None if self.grammar is None else lark_grammar(self.grammar)
        return SamplingParams(json_schema=schema, regex=self.regex, choice=self.choice, grammar=grammar)


# {field of a request: the field of structured_outputs that it is another name of}, in SGLang and older versions of vLLM
STRUCTURE_ALIASES = {
    "regex": "regex", "json_schema": "json", "ebnf": "grammar",
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip


MAX_STOPS = 64  # maximum number of stop strings, and of bad_words
MAX_WORD = 1000  # maximum number of characters of one of the bad_words
MAX_TEMPERATURE = 2.0  # of OpenAI's API
INT32 = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=INT32)]
_Biased = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Bias = Annotated[FiniteFloat, Field(ge=-100, le=100)]
_Word = Annotated[str, Field(pattern=r"\S", max_length=MAX_WORD)]
_RepetitionLimit = Literal["max_pattern_size", "min_pattern_size", "min_count"]
Size = Annotated[int, Field(ge=0, le=INT32)]
_Stop = Annotated[str, Field(min_length=1)]  # an empty one would end every answer at once


class SamplingFields(Body):
    """The fields for sampling and for the structure of answers. SamplingParams documents most of them, and
    fastgen.Request documents `priority`."""

    temperature: FiniteFloat | None = Field(None, ge=0, description="above 2 only with --ignore-limits")
    top_p: FiniteFloat | None = Field(None, ge=0, le=1, description="0 is off, as 1 is")
    top_k: int | None = Field(None, ge=-1, le=INT32, description="0 and -1 are all")
    min_p: FiniteFloat | None = Field(None, ge=0, le=1)
    stop: str | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: FiniteFloat | None = Field(None, ge=-2, le=2)
    repetition_penalty: FiniteFloat | None = Field(None, gt=0)
    repeat_penalty: FiniteFloat | None = Field(None, gt=0, description="the same as repetition_penalty")
    logit_bias: dict[_Biased, _Bias] | None = Field(None, max_length=MAX_BIASES)
    allowed_token_ids: Some[TokenId] | None = None
    bad_words: Annotated[list[_Word], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=INT32)
    thinking_token_budget: int | None = Field(None, ge=-1, le=INT32)
    thinking_budget: int | None = Field(None, ge=-1, le=INT32, description="the same as thinking_token_budget")
    repetition_detection: dict[_RepetitionLimit, Size] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-INT32, le=INT32)
    structured_outputs: StructuredOutputs | None = None
    regex: GrammarText | None = None
    json_schema: dict[str, Any] | GrammarText | None = None
    ebnf: GrammarText | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Some[GrammarText] | None = None
    guided_grammar: GrammarText | None = None

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float | None, info: ValidationInfo) -> float | None:
        policy = info.context or FieldPolicy()
        if policy.limited and temperature is not None and temperature > MAX_TEMPERATURE:
            raise wrong("temperature", "is above 2, OpenAI's limit; lower it, or start fgserve with --ignore-limits")
        return temperature

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, bias: Any) -> Any:
        """Check the size before pydantic checks each entry and reports all wrong ones, which could take seconds."""
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:
            raise wrong("logit_bias", f"has {len(bias)} tokens; it may have {MAX_BIASES}")
        return bias

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if (
            None not in (self.repeat_penalty, self.repetition_penalty)
            and self.repeat_penalty != self.repetition_penalty
        ):
            raise wrong("repeat_penalty", "and repetition_penalty mean the same and differ; give one of them")
        if len(names := list(self.structures)) > 1:
            raise wrong(names[1], f"is given together with {names[0]}; give one of them")
        return self

    @property
    def budget(self) -> int | None:
        """The thinking_token_budget that the request sets, under any of its names; -1: no limit. None: it sets none."""
        return self.thinking_budget if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def structures(self) -> dict[str, StructuredOutputs]:
        """The structure of the answers by the name of its field; a checked request has at most one.

        Clients that know several versions of vLLM send older names too, which structured_outputs overrides."""
        if self.structured_outputs is not None:
            return {"structured_outputs": self.structured_outputs}
        by_field: dict[str, StructuredOutputs] = {}
        for name, part in STRUCTURE_ALIASES.items():
            if (value := getattr(self, name)) is not None:
                structure = StructuredOutputs(**{part: value})
                if structure not in by_field.values():
                    by_field[name] = structure
        return by_field
