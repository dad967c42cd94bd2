"""What /openapi.json says, where FastAPI can not know it: requests that routes read themselves, errors and streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from fastgen.cli.serve.fields import Strict
from fastgen.cli.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from fastgen.cli.serve.shapes import ChatChunk

PLACE = "#/components/schemas/"
REQUESTS: tuple[type[Strict], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_TEXT, _NAME = {"type": "string"}, {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _NAME, "code": _NAME},
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error", "content": {"application/json": {"schema": {"$ref": f"{PLACE}Error"}}}}
}


def body(request: type[Strict]) -> dict[str, Any]:
    """A route's part: what is posted to it."""
    content = {"application/json": {"schema": {"$ref": PLACE + request.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def stream(chunk: str) -> dict[str, Any]:
    """Content of an answer: events, each with a chunk of this shape, or with the error that ends them; then [DONE]."""
    told = {"anyOf": [{"$ref": PLACE + chunk}, {"$ref": f"{PLACE}Error"}]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
    event = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}
    return {"text/event-stream": {"itemSchema": event}}


def describe(app: FastAPI) -> dict[str, Any]:
    """What an application's routes, whose parts are made as above, come to."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        for request in REQUESTS:
            schema = request.model_json_schema(ref_template=f"{PLACE}Request{{model}}")
            parts = schema.pop("$defs", {})
            schemas.update({f"Request{name}": part for name, part in parts.items()}, **{request.__name__: schema})
        chunk = TypeAdapter(ChatChunk).json_schema(ref_template=f"{PLACE}{{model}}")
        schemas.update(chunk.pop("$defs"), ChatChunk=chunk, Error=ERROR)
        app.openapi_schema = described
    return app.openapi_schema
