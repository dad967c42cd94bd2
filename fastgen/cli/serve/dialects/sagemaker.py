"""/invocations, by which SageMaker calls a server: a body of /chat/completions, /completions or /embeddings."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fastgen.cli.serve import embeddings
from fastgen.cli.serve.engine_input import GenerationRequest
from fastgen.cli.serve.http_responses import GenerationResponse
from fastgen.cli.serve.openai_input import ChatRequest, CompletionRequest
from fastgen.cli.serve.routes import Post, Routes
from fastgen.cli.serve.service import Service


def routes(service: Service) -> Routes:
    async def generate(body: GenerationRequest, request: Request) -> Response:
        return GenerationResponse(service, body.with_mode(service.options.logprobs_mode))

    others = {"prompt": Post(CompletionRequest, generate), "input": embeddings.routes(service).posts["/embeddings"]}
    return Routes({"/invocations": Post(ChatRequest, generate, others)})
