"""The routes of an SGLang server that slime's external rollout engines call, with weights from a folder.

Experimental: clients of trainers were tested, but no trainer has run its own loop over these routes.

Source: sglang/srt/entrypoints/http_server.py of SGLang 0.5.23, and slime's docs/en/advanced/external-rollout-engines.md
(`--rollout-external-engine-addrs`, `--update-weight-transport disk`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from itertools import accumulate, chain
from typing import Any, Literal

from pydantic import Field, create_model, model_validator
from starlette.datastructures import QueryParams

from fastgen.async_engine.client import AsyncGenerator, EventStream, joined
from fastgen.cli.serve.http_responses import json_bytes
from fastgen.cli.serve.rollout import (
    EventResponse,
    ModelRequest,
    TrainerRoutes,
    differing,
    sampling_fields,
    weight_version,
)
from fastgen.cli.serve.routes import Routes
from fastgen.cli.serve.sampling_fields import INT32
from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import ApiError, Items, Strict, wrong
from fastgen.names import MAX_FAULTS
from fastgen.request import SHARED, Completion, Event, Prompt, RequestOutput

Tag = Literal["weights", "kv_cache", "cuda_graph"]

RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""{field of SGLang's sampling_params: the same in SamplingParams}; those of SAME have the same name."""


class CustomParams(Strict):
    """slime's custom_params. return_top_p_token_ids: return the ids from which each token was drawn."""

    return_top_p_token_ids: bool = False


SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "logit_bias", "skip_special_tokens",
)  # fmt: skip
_Sampling = create_model("_Sampling", __base__=Strict, **sampling_fields(SAME))


class SglangSampling(_Sampling):  # type: ignore[misc, valid-type]
    """SGLang's sampling_params, as far as they are supported; SamplingParams describes them."""

    n: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    custom_params: CustomParams | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The same as parameters of the engine."""
        given = {RENAMED.get(name, name): value for name, value in dict(self).items() if value is not None}
        if "no_stop_trim" in given:
            given["include_stop_str_in_output"] = given.pop("no_stop_trim")
        if custom := given.pop("custom_params", None):
            given["return_sampling_mask"] = custom.return_top_p_token_ids
        return given


class SglangRequest(ModelRequest):
    """SGLang's body of /generate, for one prompt: ids or a text.

    rid: its name for /abort_request, unless it is streamed. stream: the response is a stream of events, each of which
    has all tokens so far. logprob_start_len: index of the first token of the prompt whose logprob is returned; -1 for
    none. A teacher scores a sequence with max_new_tokens=0. priority: as in SGLang, larger numbers go first. The fields
    without effect are added by SGLang's router.
    """

    input_ids: Items[int] | None = None
    text: str | None = None
    sampling_params: SglangSampling | None = None
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    rid: str | None = None
    stream: bool = False
    priority: int = Field(0, ge=-INT32, le=INT32)

    @property
    def scored(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    @model_validator(mode="after")
    def _check_prompt(self) -> SglangRequest:
        if (self.input_ids is None) == (self.text is None):
            raise wrong("input_ids", "or text is required, and not both")
        if self.stream and self.sampling_params is not None and self.sampling_params.n not in (None, 1):
            raise wrong("stream", "is only supported with n=1")
        return self

    @property
    def prompt(self) -> Prompt:
        return (self.input_ids or []) if self.text is None else self.text


class DiskRequest(ModelRequest):
    """A request to /update_weights_from_disk. weight_version: if it is a number, the version of the new weights.
    abort_all_request: the same as abort_all_requests, as AReaL spells it."""

    model_path: str
    abort_all_requests: bool = False
    abort_all_request: bool = False
    weight_version: str | int | None = None


class PauseRequest(ModelRequest):
    """A request to /pause_generation. mode: "abort" ends running requests, "retract" computes their KV again after the
    pause (here it stays), "in_place" leaves them as they are."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class MemoryRequest(ModelRequest):
    tags: Items[Tag] | None = None

    @property
    def parts(self) -> list[str]:
        """The parts that sleep or wake here; CUDA graphs stay valid in any case."""
        return [tag for tag in self.tags or ("weights", "kv_cache") if tag != "cuda_graph"]


class CheckRequest(ModelRequest):
    """A request to /weights_checker. checksum: return the SHA-256 of each weight. snapshot: keep these. reset_tensors:
    set all weights to 0. compare: tell whether the weights are those of the snapshot."""

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"] = "checksum"


class AbortRidRequest(ModelRequest):
    """A request to /abort_request."""

    rid: str = ""
    abort_all: bool = False


class SglangEngine(TrainerRoutes):
    """The routes of an SGLang server."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._snapshots: dict[AsyncGenerator, list[dict[str, str]]] = {}

    def routes(self) -> Routes:
        post = self.post
        generate = post(SglangRequest, self._generate, timed=True)
        posts = {
            "/update_weights_from_disk": post(DiskRequest, self._update),
            "/pause_generation": post(PauseRequest, _pause, bodiless=True),
            "/continue_generation": post(ModelRequest, _continue, bodiless=True),
            "/flush_cache": post(ModelRequest, _flush, bodiless=True),
            "/release_memory_occupation": post(MemoryRequest, _release, bodiless=True),
            "/resume_memory_occupation": post(MemoryRequest, _take, bodiless=True),
            "/abort_request": post(AbortRidRequest, _abort),
            "/weights_checker": post(CheckRequest, self._check, bodiless=True),
        }
        version = self.get(weight_version)
        gets = {
            "/flush_cache": self.get(_flush),
            "/get_weight_version": version,
            "/loads": self.get(_loads),
            "/health_generate": version,  # an engine that answers a call runs its loop
        }
        return Routes(posts, gets, {"/generate": {"input_ids": generate, "text": generate}})

    async def _generate(self, engine: AsyncGenerator, body: SglangRequest, _: QueryParams) -> Any:
        params = {} if body.sampling_params is None else body.sampling_params.params
        if body.scored:
            params["prompt_logprobs"] = 0
        self.check_samples(params.get("n"))
        greedy = params.get("temperature", engine.info.default_params.temperature) == 0
        priority = -body.priority  # in fastgen, lower numbers go first
        if body.stream:
            submit = partial(engine.submit, [body.prompt], params, priority=priority)
            return SglangStream(self.service, submit, body, greedy)
        output = await engine.generate(body.prompt, params, body.rid, priority=priority)
        answers = [_answer(body, output, completion, greedy) for completion in output.completions]
        return answers[0] if params.get("n", 1) == 1 else answers

    async def _update(self, engine: AsyncGenerator, body: DiskRequest, _: QueryParams) -> Any:
        named = str(body.weight_version)
        in_flight = "abort" if body.abort_all_requests or body.abort_all_request else "keep"
        options = {"version": int(named) if named.isdecimal() else None, "partial": False, "in_flight": in_flight}
        with self.updating(engine):
            version = await engine.call("update_weights", body.model_path, **options)
        return {"success": True, "message": f"the weights have version {version}", "weight_version": str(version)}

    async def _check(self, engine: AsyncGenerator, body: CheckRequest, _: QueryParams) -> Any:
        if body.action == "reset_tensors":
            await self.reset_weights(engine)
            return {"success": True, "message": "all weights are 0"}
        ranks: list[dict[str, str]] = await engine.call("weight_checksums")
        if body.action == "snapshot":
            self._snapshots[engine] = ranks
        if body.action == "compare":
            if engine not in self._snapshots:
                raise ValueError("action is 'compare', and there is no snapshot; send the action 'snapshot' first")
            pairs = zip(ranks, self._snapshots[engine], strict=True)
            if names := sorted(set(chain.from_iterable(differing(*pair) for pair in pairs))):
                raise ValueError(f"{len(names)} weights differ from the snapshot: {', '.join(names[:MAX_FAULTS])}")
        return _checksums(ranks)


class SglangStream(EventResponse):
    """The response to a streamed request: server-sent events, each of which has all tokens so far. greedy: see
    _answer."""

    content_type = b"text/event-stream; charset=utf-8"
    end = b"data: [DONE]\n\n"

    def __init__(
        self, service: Service, open_stream: Callable[[], EventStream], body: SglangRequest, greedy: bool
    ) -> None:
        super().__init__(service, open_stream)
        self._body = body.model_copy(update={"rid": body.rid or uuid.uuid4().hex})
        self._greedy, self._events = greedy, list[Event]()

    def lines(self, events: list[Event]) -> bytes:
        self._events = joined(self._events + events)
        (event,) = self._events
        known_at_end = {"finish_reason": event.finish_reason or "", "weight_versions": event.weight_versions or []}
        completion = Completion(**{name: getattr(event, name) for name in SHARED} | known_at_end)
        ids = event.prompt_token_ids or self._body.input_ids or []
        output = RequestOutput("", ids, [], prompt_logprobs=event.prompt_logprobs, cached_tokens=event.cached_tokens)
        answer = _answer(self._body, output, completion, self._greedy)
        return b"data: " + json_bytes(answer) + b"\n\n"

    def error_line(self, failure: ApiError) -> bytes:
        return b"data: " + json_bytes(failure.body) + b"\n\n" + self.end


def _answer(body: SglangRequest, output: RequestOutput, completion: Completion, greedy: bool) -> dict[str, Any]:
    """Return the response for a sample. The logprobs are, as SGLang's, those of the whole vocabulary after the
    temperature; of a greedy sample, and of the prompt, at temperature 1."""
    count, versions = len(completion.token_ids), completion.weight_versions
    meta: dict[str, Any] = {
        "id": body.rid or uuid.uuid4().hex,
        "finish_reason": _reason(completion),
        "prompt_tokens": len(output.prompt_token_ids) or None,  # a stream of a text knows it at the end
        "completion_tokens": count,
        "cached_tokens": output.cached_tokens,
        "weight_version": str(versions[-1][0]) if versions else None,
        "weight_versions": versions,
        "e2e_latency": None if output.timings is None else output.timings.finished,
    }
    if body.return_logprob:
        values = completion.raw_logprobs if greedy else completion.untruncated_logprobs
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(values, completion.token_ids, strict=True)
        ]
    if completion.sampling_mask is not None:
        meta["top_p_token_ids"] = list(chain(*completion.sampling_mask))
        meta["top_p_token_offsets"] = list(accumulate(map(len, completion.sampling_mask), initial=0))
    if body.scored and output.prompt_logprobs is not None:  # which come at the end of a stream
        pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        meta["input_token_logprobs"] = [[*pair, None] for pair in pairs][body.logprob_start_len :]
    return {"text": completion.text, "output_ids": completion.token_ids, "meta_info": meta}


def _checksums(ranks: list[dict[str, str]]) -> dict[str, Any]:
    """Return the answer with the checksums of each rank's weights, by name."""
    totals = [_checksum(chain.from_iterable(sorted(sums.items()))) for sums in ranks]
    listed = [
        {"checksums": sums, "per_gpu_checksum": total, "parallelism_info": {"tp_rank": rank, "tp_size": len(ranks)}}
        for rank, (sums, total) in enumerate(zip(ranks, totals, strict=True))
    ]
    return {"success": True, "message": "Success.", "ranks": listed, "per_engine_checksum": _checksum(totals)}


def _checksum(parts: Iterable[str]) -> str:
    return sha256("".join(parts).encode()).hexdigest()


def _reason(completion: Completion) -> dict[str, Any] | None:
    """Return why a sample has ended; None: it has not."""
    match completion.finish_reason:
        case "":
            return None
        case "length":
            return {"type": "length", "length": len(completion.token_ids)}
        case "stop":
            return {"type": "stop", "matched": completion.stop_reason}
    return {"type": completion.finish_reason, "message": completion.error or "the request was aborted"}


async def _pause(engine: AsyncGenerator, body: PauseRequest, _: QueryParams) -> Any:
    await engine.pause()
    if body.mode == "abort":
        await engine.cut_off()
    return {"status": "ok", "message": "paused"}


async def _continue(engine: AsyncGenerator, *_: Any) -> Any:
    await engine.resume()
    return {"status": "ok", "message": "running"}


async def _flush(*_: Any) -> Any:
    return {"status": "ok", "message": "the cache never gives KV of old weights"}


async def _release(engine: AsyncGenerator, body: MemoryRequest, _: QueryParams) -> Any:
    return {"freed": await engine.call("sleep", body.parts) if body.parts else 0}


async def _take(engine: AsyncGenerator, body: MemoryRequest, _: QueryParams) -> Any:
    if body.parts:
        await engine.call("wake", body.parts)
    return {}


async def _abort(engine: AsyncGenerator, body: AbortRidRequest, _: QueryParams) -> Any:
    await engine.cut_off(None if body.abort_all else [body.rid])
    return {}


async def _loads(engine: AsyncGenerator, *_: Any) -> Any:
    stats = engine.stats
    return {"loads": [{"num_running_reqs": stats.running, "num_waiting_reqs": stats.waiting}]}


def routes(service: Service) -> Routes:
    return SglangEngine(service).routes()
