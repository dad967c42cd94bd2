"""Post routes: the class of their bodies, the function that answers them, and other dialects at the same path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fastgen.cli.serve.validation import FieldPolicy, Limits, Strict, check_counts, check_request, parse

LimitsOf = Callable[[Any], Limits]
Answerer = Callable[[Any, Request], Awaitable[Response]]  # answers a post, given its checked body


@dataclass(frozen=True)
class Post:
    """A post route.

    kind: class of its bodies. answer: function that answers a checked body. dialects: {field: post that takes the
    bodies with this field}, for servers that have another body at the same path. bodiless: a missing body stands for
    {}.
    """

    kind: type[Strict]
    answer: Answerer
    dialects: Mapping[str, Post] = field(default_factory=dict)
    bodiless: bool = False

    def read(self, body: bytes | bytearray, policy: FieldPolicy, limits: LimitsOf) -> tuple[Strict, Answerer]:
        """Return the checked body, and the function that answers it. limits: function that returns the limits of the
        model that a body names. Raises ApiError, which names the wrong field."""
        data = {} if self.bodiless and not body.strip() else parse(body)
        given = data if isinstance(data, dict) else {}
        post = next((other for name, other in self.dialects.items() if name in given), self)
        check_counts(post.kind, given, limits(given.get("model")))
        return check_request(post.kind, data, policy), post.answer

    @property
    def kinds(self) -> list[type[Strict]]:
        """The classes of all its bodies."""
        return list(dict.fromkeys([self.kind, *(post.kind for post in self.dialects.values())]))
