"""The table of routes: modules that are imported when a request needs one of their routes, and installed ones.

Each module has a function `routes(service)` that returns its Routes. Other packages add theirs as entry points of the
group `fastgen.routes` (docs/ideas.md, "A route").
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import Lock
from types import ModuleType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import FieldPolicy, Limits, Strict, check_counts, check_request, parse

GROUP = "fastgen.routes"

LimitsOf = Callable[[Any], Limits]
Answerer = Callable[[Any, Request], Awaitable[Response]]  # answers a post, given its checked body
Handler = Callable[[Request], Awaitable[Response]]  # answers a GET


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
        fields = data if isinstance(data, dict) else {}
        post = next((other for name, other in self.dialects.items() if name in fields), self)
        check_counts(post.kind, fields, limits(fields.get("model")))
        return check_request(post.kind, data, policy), post.answer

    @property
    def kinds(self) -> list[type[Strict]]:
        """The classes of all its bodies."""
        return list(dict.fromkeys([self.kind, *(post.kind for post in self.dialects.values())]))


@dataclass(frozen=True)
class Routes:
    """The routes of a module, by their paths, which do not begin with /v1; the server adds it.

    dialects: {path of another module's post: {field: post that takes the bodies with this field}}.
    """

    posts: Mapping[str, Post] = field(default_factory=dict)
    gets: Mapping[str, Handler] = field(default_factory=dict)
    dialects: Mapping[str, Mapping[str, Post]] = field(default_factory=dict)


MakeRoutes = Callable[[Service], Routes]


@dataclass(frozen=True)
class RouteModule:
    """A module with routes. posts, gets, dialects: the paths of its Routes, which are known before it is imported."""

    name: str
    posts: tuple[str, ...] = ()
    gets: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Import the module here, by its name, so that fgserve starts without the modules that nobody asks for."""
        return import_module(f"fastgen.cli.serve.{self.name}")


ANTHROPIC = RouteModule("dialects.anthropic", ("/messages", "/messages/count_tokens"))
RESPONSES = RouteModule("dialects.openai_responses", ("/responses", "/responses/input_tokens"))
MODULES = (
    RouteModule("embeddings", ("/embeddings",)),
    RouteModule("dialects.sagemaker", ("/invocations",)),
    RESPONSES,
    ANTHROPIC,
    RouteModule("dialects.vllm_serving", ("/chat/completions/batch", "/generative_scoring")),
)

TRAINER_MODULES = (
    RouteModule(
        "rollout",
        (
            "/generate", "/init_weight_group", "/close_weight_group", "/abort", "/score", "/fleet_seed",
            "/update_weights", "/update_adapter", "/wake",
        ),
        gets=("/weight_version",),
    ),
    RouteModule(
        "dialects.vllm",
        (
            "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/release_kv_cache_memory",
            "/reset_prefix_cache", "/init_weight_transfer_engine", "/start_weight_update",
            "/start_draft_weight_update", "/finish_weight_update", "/update_weight_version", "/inference/v1/generate",
            "/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/unload_lora_adapter", "/weight_checker",
        ),
        gets=("/get_world_size", "/is_paused", "/is_sleeping", "/weight_info"),
        dialects=("/update_weights",),
    ),
    RouteModule(
        "dialects.sglang",
        (
            "/update_weights_from_disk", "/pause_generation", "/continue_generation", "/flush_cache",
            "/release_memory_occupation", "/resume_memory_occupation", "/abort_request", "/weights_checker",
        ),
        gets=("/flush_cache", "/get_weight_version", "/loads", "/health_generate"),
        dialects=("/generate",),
    ),
    RouteModule(
        "dialects.server_info", gets=("/server_info", "/get_server_info", "/model_info", "/get_model_info")
    ),
)  # fmt: skip
"""The routes of --rollout."""


class RouteTable:
    """All routes of a service. posts, gets: {path: its module}.

    own: routes that are always loaded. Raises ValueError for an installed module that cannot be used.
    """

    def __init__(self, service: Service, own: Routes, modules: Sequence[RouteModule]) -> None:
        self._service = service
        self._loaded: dict[RouteModule, Routes] = {}
        self._posts: dict[str, Post] = {}
        self._lock = Lock()
        self.posts: dict[str, RouteModule] = {}
        self.gets: dict[str, RouteModule] = {}
        self._modules: list[RouteModule] = []
        self._add_loaded("", own)
        for module in modules:
            self._add(module)
        for entry in entry_points(group=GROUP):
            self._add_installed(entry)
        for path in own.posts:
            self._load_post(path)

    async def post(self, path: str) -> Post:
        """Return the post of a path, whose modules are imported by the first call."""
        if path not in self._posts:
            await asyncio.to_thread(self._load_post, path)
        return self._posts[path]

    async def get(self, path: str) -> Handler:
        """Return the handler of a path's GETs, whose module is imported by the first call."""
        module = self.gets[path]
        if module not in self._loaded:
            await asyncio.to_thread(self._load, module)
        return self._loaded[module].gets[path]

    def _load_post(self, path: str) -> None:
        """Load the post of a path, with the dialects that other modules add to it."""
        post = self._load(self.posts[path]).posts[path]
        others = [self._load(module).dialects[path] for module in self._modules if path in module.dialects]
        dialects = {name: other for each in others for name, other in each.items()}
        self._posts[path] = replace(post, dialects={**post.dialects, **dialects})

    def _load(self, module: RouteModule) -> Routes:
        with self._lock:  # routes have state, which all threads share
            if module not in self._loaded:
                make: MakeRoutes = module.load().routes
                self._loaded[module] = make(self._service)
            return self._loaded[module]

    def _add(self, module: RouteModule) -> None:
        self._modules.append(module)
        self.posts |= dict.fromkeys(module.posts, module)
        self.gets |= dict.fromkeys(module.gets, module)

    def _add_loaded(self, name: str, routes: Routes) -> None:
        module = RouteModule(name, tuple(routes.posts), tuple(routes.gets), tuple(routes.dialects))
        self._loaded[module] = routes
        self._add(module)

    def _add_installed(self, entry: EntryPoint) -> None:
        """Add the routes of an entry point. Raises ValueError if they cannot be used."""
        try:
            make: MakeRoutes = entry.load()
            routes = make(self._service)
            if not isinstance(routes, Routes):
                raise TypeError(f"it returns {type(routes).__name__} instead of fastgen.cli.serve.routes.Routes")
            for path in (*routes.posts, *routes.gets):
                if not path.startswith("/"):
                    raise ValueError(f"its path {path!r} does not begin with /")
                if path in (*self.posts, *self.gets):
                    raise ValueError(f"its path {path!r} exists already")
            if unknown := routes.dialects.keys() - self.posts.keys():
                raise ValueError(f"its dialect is for a post to {min(unknown)!r}, which does not exist")
        except Exception as error:
            place = f"{entry.name} = {entry.value}"
            package = "" if entry.dist is None else f" of the package {entry.dist.name}"
            raise ValueError(
                f"the entry point `{place}`{package} in the group {GROUP} cannot be used: {type(error).__name__}: "
                f"{error}; correct or uninstall it"
            ) from error
        self._add_loaded(entry.name, routes)
