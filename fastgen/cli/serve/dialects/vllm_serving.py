"""vLLM's routes /chat/completions/batch and /generative_scoring, answered by chats and by a completion.

Source: vllm/entrypoints/openai/chat_completion/batch_serving.py and generate/generative_scoring, of vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from fastgen.cli.serve.engine_input import ModelFacts, check_ids, check_length, encode_text
from fastgen.cli.serve.http_responses import GenerationResponse, given_id, json_response, limited
from fastgen.cli.serve.openai_input import ChatMessage, ChatRequest, CompletionRequest
from fastgen.cli.serve.openai_output import token_name
from fastgen.cli.serve.routes import Post, Routes
from fastgen.cli.serve.sampling_fields import INT32, TokenId
from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import ApiError, Body, Some, check_request
from fastgen.request import MAX_LOGPROBS

NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}  # {field of a completion: its name in a scoring}
OF_PROMPTS = ("prompt_token_ids", "prompt_logprobs", "prompt_text")
"""Fields of the answer to a chat. In a batch each choice has them, as in /completions."""


class BatchRequest(ChatRequest):
    """A request to /chat/completions/batch: several chats with the same fields. The answer has a choice for each."""

    spoken = ("tools",)  # type: ignore[assignment]
    batch = "messages"

    messages: Some[Some[ChatMessage]]  # type: ignore[assignment]
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    echo: Literal[False] | None = None
    continue_final_message: Literal[False] | None = None

    @property
    def chats(self) -> list[ChatRequest]:
        """The chats one by one."""
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]


class ScoringRequest(Body):
    """A request to /generative_scoring: the probability that label_token_ids[0] follows the query and each item.

    apply_softmax: probability among the labels (default), or among all tokens. item_first: items precede the query.
    """

    batch = "items"

    model: str | None = None
    query: str | Some[TokenId]
    items: Some[str] | Some[Some[TokenId]]
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROBS, fail_fast=True)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-INT32, le=INT32)

    def completion(self, model: ModelFacts) -> CompletionRequest:
        """Translate the request into a completion of one token. Raises ApiError."""
        most, special = model.max_model_len, self.add_special_tokens is not False
        query, prompts = encode_text(self.query, model, special=special, most=most).ids, list[list[int]]()
        check_ids(query, "query", model.vocab_size)
        for item in self.items:
            ids = encode_text(item, model, special=False, most=most).ids
            prompts.append(ids + query if self.item_first else query + ids)
            if not prompts[-1]:
                raise ApiError(
                    400, f"items[{len(prompts) - 1}] and the query are empty; give text", "items", "invalid_value"
                )
            check_length(prompts[-1], "items", model)
        labels = {"logprobs": 0, "logprob_token_ids": self.label_token_ids, "return_tokens_as_token_ids": True}
        asked = {"model": self.model, "prompt": prompts, "priority": self.priority}
        return check_request(CompletionRequest, {**asked, **labels, "max_tokens": 1, "temperature": 0})

    def score(self, logprobs: Mapping[str, float]) -> float:
        """Return the score of an item. logprobs: {name of a token: its logprob}."""
        first, *others = (logprobs[token_name(id)] for id in dict.fromkeys(self.label_token_ids))
        if self.apply_softmax is False:
            return math.exp(first)
        best = max([first, *others])
        return math.exp(first - best) / sum(math.exp(logprob - best) for logprob in (first, *others))


async def _reply(response: Response, scope: Scope, request: Request) -> dict[str, Any]:
    """Return the content of a response instead of sending it. Raises what the response raises."""
    pieces = list[bytes]()

    async def keep(message: Message) -> None:
        pieces.append(message.get("body", b""))

    await response(scope, request.receive, keep)
    return cast(dict[str, Any], from_json(b"".join(pieces)))


async def _chat(service: Service, body: BatchRequest, request: Request) -> Response:
    named = body.model_copy(update={"request_id": given_id(request.scope) or body.request_id})
    mode = service.options.logprobs_mode
    try:
        async with asyncio.TaskGroup() as group:  # which ends all chats when one of them fails
            responses = [GenerationResponse(service, chat.with_mode(mode)) for chat in named.chats]
            tasks = [group.create_task(_reply(response, {**request.scope}, request)) for response in responses]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    replies = [task.result() for task in tasks]
    prompts = [{name: reply.pop(name) for name in OF_PROMPTS if name in reply} for reply in replies]
    choices = [
        {**reply["choices"][0], "index": index, **prompt}
        for index, (reply, prompt) in enumerate(zip(replies, prompts, strict=True))
    ]
    usages = [reply["usage"] for reply in replies]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = {name: sum(each[name] for each in usages) for name in names}
    return json_response({**replies[0], "choices": choices, "usage": usage})


async def _score(service: Service, body: ScoringRequest, request: Request) -> Response:
    model = service.choose(body.model)
    async with limited(service, request.scope, request.receive):
        completion = await service.compute(request.scope["large"], body.completion, model.facts)
    try:
        reply = await _reply(GenerationResponse(service, completion), request.scope, request)
    except ApiError as error:
        theirs = error.param or ""
        ours = NAMES.get(theirs, theirs)
        raise ApiError(error.status, error.message.replace(theirs, ours, 1), ours or None, error.code) from None
    scores = [body.score(choice["logprobs"]["top_logprobs"][0]) for choice in reply["choices"]]
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    shared = {name: reply[name] for name in ("created", "model", "usage")}
    id = f"generative-scoring-{given_id(request.scope) or uuid.uuid4().hex}"
    return json_response({"id": id, "object": "list", "data": data, **shared})


def routes(service: Service) -> Routes:
    chat, score = Post(BatchRequest, partial(_chat, service)), Post(ScoringRequest, partial(_score, service))
    return Routes({"/chat/completions/batch": chat, "/generative_scoring": score})
