"""/embeddings, in the form of OpenAI's API."""

from __future__ import annotations

import base64
import struct
from typing import Any, Literal, cast

from starlette.requests import Request
from starlette.responses import Response

from fastgen.cli.serve.engine_input import ModelFacts, check_length, encode_text
from fastgen.cli.serve.http_responses import json_response, limited
from fastgen.cli.serve.routes import Post, Routes
from fastgen.cli.serve.service import Service, engine_error
from fastgen.cli.serve.validation import Some, Strict

PROMPTS = 32  # number of inputs per call of the engine, which sends other requests' tokens between two calls


class EmbeddingRequest(Strict):
    """A request to /embeddings. encoding_format: "base64" means the bytes of little-endian float32 numbers."""

    batch = "input"

    model: str | None = None
    input: str | Some[str] | Some[int] | Some[Some[int]]
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return cast(list[str | list[int]], [self.input] if one else self.input)


def encode_inputs(request: EmbeddingRequest, model: ModelFacts) -> list[list[int]]:
    """Return the ids of each input. Raises ApiError."""
    prompts = [encode_text(prompt, model, most=model.max_model_len).ids for prompt in request.prompts]
    for ids in prompts:
        check_length(ids, "input", model)
    return prompts


async def embed(service: Service, request: EmbeddingRequest, large: bool) -> dict[str, Any]:
    """Answer /embeddings. large: its work is large. Raises ApiError."""
    model, states = service.choose(request.model), list[list[float]]()
    try:
        if many := len(request.prompts) > PROMPTS:
            await model.engine.call("embed", [])  # raises for a model without embeddings
        inputs = await service.compute(large or many, encode_inputs, request, model.facts)
        with model.queue.enter(list(map(len, inputs)), 1):
            for at in range(0, len(inputs), PROMPTS):
                states += await model.engine.call("embed", inputs[at : at + PROMPTS])
    except (ValueError, TypeError, RuntimeError) as error:
        raise engine_error(error) from None
    packed: list[Any] = list(states)
    if request.encoding_format == "base64":
        packed = [base64.b64encode(struct.pack(f"<{len(state)}f", *state)).decode() for state in states]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(packed)]
    count = sum(map(len, inputs))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "model": model.name, "data": data, "usage": usage}


def routes(service: Service) -> Routes:
    async def answer(body: EmbeddingRequest, request: Request) -> Response:
        async with limited(service, request.scope, request.receive):
            return json_response(await embed(service, body, request.scope["large"]))

    return Routes({"/embeddings": Post(EmbeddingRequest, answer)})
