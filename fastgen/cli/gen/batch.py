"""OpenAI's batch files, whose rows are requests to its API and whose records are the responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fastgen.cli.gen.rows import Row
from fastgen.cli.gen.work import Model, Record, RowRequests, batch_record, check_json
from fastgen.cli.serve.engine_input import (
    GenerationReply,
    GenerationRequest,
    ModelFacts,
    grammar_field,
    prepare,
    refused,
)
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest
from fastgen.cli.serve.openai_output import Vocabulary
from fastgen.cli.serve.validation import ApiError, Strict, check_request
from fastgen.engine.seeds import seed_of
from fastgen.request import SHARED, Event, Request, RequestOutput, SamplingParams


class Line(Strict):
    """A row of a batch file."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class BatchJob:
    """A job on rows with a custom_id and a body. Its records have the format of OpenAI's batch output.

    name: name of the model. defaults: sampling parameters that a body does not set. seed: the job's seed, as in RowJob.
    """

    def __init__(self, model: Model, name: str, defaults: SamplingParams, seed: int) -> None:
        vocabulary = None if model.tokenizer is None else Vocabulary(model.tokenizer)
        size, context = model.model_config.vocab_size, model.max_model_len
        self._model = ModelFacts(name, model.tokenizer, vocabulary, defaults, size, context)
        self._seed = seed

    def ask(self, row: Row) -> RowRequests:
        try:
            request = self._request(row)
            reply, params = prepare(self._model, request)
        except ApiError as error:
            refusal = error
            return RowRequests([], lambda _: _failed(row, refusal))
        if params.seed is None:
            params = replace(params, seed=seed_of(self._seed, row.index))
        requests = [Request(prompt.ids, params, priority=request.priority or 0) for prompt in reply.prompts]
        field = None if params.grammar is None else grammar_field(request)
        return RowRequests(requests, lambda outputs: _answer(row, reply, outputs, field))

    def _request(self, row: Row) -> GenerationRequest:
        if row.error is not None:
            raise ApiError(400, row.error, code="invalid_json")
        line = check_request(Line, {name: row.columns.get(name) for name in Line.model_fields})
        for name in ("stream", "use_beam_search"):
            if line.body.get(name):
                raise ApiError(400, f"{name} is not supported in a batch; leave it out", name, "unsupported_parameter")
        try:
            check_json(line.body)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_json") from None
        if line.url == "/v1/chat/completions":
            return check_request(ChatRequest, line.body)
        return check_request(CompletionRequest, line.body)


def _answer(
    row: Row, reply: GenerationReply, outputs: list[RequestOutput], field: str | None
) -> tuple[Record, str | None]:
    """Return the record of a row and its error, if any. field: field of the request that its grammar comes from."""
    try:
        for output in outputs:
            if output.error is not None:
                raise refused(ValueError(output.error), field)
        body: Any = reply.whole(event for prompt, output in enumerate(outputs) for event in _events(prompt, output))
    except ApiError as error:
        return _failed(row, error)
    return batch_record(row, 200, body), None


def _events(prompt: int, output: RequestOutput) -> list[Event]:
    """Return the last events of a request, as fgserve would get them from the engine."""
    events = [
        Event(id=prompt, cached_tokens=output.cached_tokens, **{name: getattr(completion, name) for name in SHARED})
        for completion in output.completions
    ]
    events[0].prompt_logprobs, events[0].prompt_top_logprobs = output.prompt_logprobs, output.prompt_top_logprobs
    events[0].prompt_ranks = output.prompt_ranks
    return events


def _failed(row: Row, error: ApiError) -> tuple[Record, str | None]:
    return batch_record(row, error.status, error.body), error.message
