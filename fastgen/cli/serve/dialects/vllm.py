"""The control routes of a vLLM server for trainers, as TRL 1.16 (vllm_mode="server"), SkyRL and prime-rl call them.

Source: vllm/entrypoints/rl/online/api_router.py and its neighbours, of vLLM 0.33. Our own /pause, /resume, /sleep and
/update_weights keep their bodies: a query (`mode`, `level`) or a field (`update_info`, `weight_dir`) tells vLLM's.

Experimental: clients of trainers were tested, but no trainer has run its own loop over these routes.

The trainer is rank 0 of a group in which each server is one rank, whatever number of GPUs its model has.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model, model_validator
from starlette.datastructures import QueryParams

from fastgen.async_engine.client import AsyncGenerator
from fastgen.cli.serve.openai_input import drawn_name
from fastgen.cli.serve.openai_output import LOWEST, prompt_scores, token_name
from fastgen.cli.serve.rollout import ModelRequest, SleepRequest, TrainerRoutes, differing, sampling_fields, sleep
from fastgen.cli.serve.routes import Post, Routes
from fastgen.cli.serve.sampling_fields import INT32, StructuredOutputs
from fastgen.cli.serve.service import Service
from fastgen.cli.serve.validation import ApiError, FieldPolicy, Items, Strict, wrong
from fastgen.engine.weight_state import TAGS
from fastgen.request import SAMPLING_OPTIONS, STRUCTURES, Completion, SamplingParams

STRUCTURED = "structured_outputs"
PAUSES = ("abort", "wait", "keep")
PACKED_BYTES = 1 << 30  # vLLM's default size of a packed buffer
TRANSFER_SECONDS = 300.0  # time without progress after which an update fails
VERSIONS = "TRL 1.16 with vLLM 0.22 to 0.31, or senders of vLLM up to 0.33, with the backend nccl"


class TransferPart(Strict):
    """A part of a request about weights that come over NCCL."""

    @classmethod
    def _refuse(cls, name: str, policy: FieldPolicy) -> None:
        raise wrong(name, f"is not known here; the weight transfer works with {VERSIONS}", "unsupported_parameter")


class Packing(TransferPart):
    """The packing of tensors into broadcasts. vLLM 0.28 and later give it once, in InitInfo, and earlier versions in
    each UpdateInfo."""

    packed: bool = False
    packed_buffer_size_bytes: int = Field(PACKED_BYTES, ge=1)
    packed_num_buffers: int | None = Field(None, ge=1)  # of the sender

    @property
    def buffer_bytes(self) -> int | None:
        """Return the size of packed buffers; None: each tensor is one broadcast."""
        return self.packed_buffer_size_bytes if self.packed else None


class InitInfo(Packing):
    """The place where the trainer is met: its store, or NCCL's unique id. See async_engine/trainer_group.py."""

    master_address: str | None = None
    master_port: int | None = Field(None, ge=1, le=65535)
    nccl_unique_id_b64: str | None = None
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)

    @model_validator(mode="after")
    def _check_meeting(self) -> InitInfo:
        if (self.master_address is None) == (self.nccl_unique_id_b64 is None):
            raise wrong("master_address", "or nccl_unique_id_b64 is required, and not both")
        if (self.master_address is None) != (self.master_port is None):
            raise wrong("master_port", "belongs to master_address, which requires it")
        if self.rank_offset >= self.world_size:
            raise wrong("rank_offset", "must be below world_size")
        return self


class UpdateInfo(Packing):
    """The tensors that the trainer broadcasts, in order."""

    names: Items[str]
    dtype_names: Items[str]
    shapes: Items[list[int]]

    @model_validator(mode="after")
    def _check_lengths(self) -> UpdateInfo:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise wrong("names", "must have as many items as dtype_names and shapes")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise wrong("shapes", "has a negative size")
        return self

    @property
    def header(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor."""
        return list(zip(self.names, self.dtype_names, self.shapes, strict=True))


class InitRequest(ModelRequest):
    init_info: InitInfo


class TransferRequest(ModelRequest):
    """vLLM's body of /update_weights."""

    update_info: UpdateInfo


class StartRequest(ModelRequest):
    """A request to /start_weight_update. Tensors have the names of a checkpoint."""


class FinishRequest(ModelRequest):
    """A request to /finish_weight_update. weight_version: see `new_version` of VersionRequest; the response has
    fastgen's version."""

    weight_version: int | str | None = None


class VersionRequest(ModelRequest):
    """A request to /update_weight_version. new_version: the trainer's name for the weights, which /weight_info
    returns. The engine's own versions count up."""

    new_version: int | str


class AbortIdsRequest(ModelRequest):
    """A request to /abort_requests. request_ids: of requests to /inference/v1/generate; None or []: all requests."""

    request_ids: Items[str] | None = None


class FolderRequest(ModelRequest):
    """prime-rl's body of /update_weights."""

    weight_dir: str


class ResetRequest(ModelRequest):
    """A request to /reset_prefix_cache. The cache never gives KV of old weights, so nothing has to be done."""


class CheckerRequest(ModelRequest):
    """A request to /weight_checker. checksum: return the SHA-256 of each weight, whose name begins with the rank.
    reset: set all weights to 0. compare: return the names of weights that differ from the `baseline`, which is the
    answer to an earlier checksum."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None

    @model_validator(mode="after")
    def _check_baseline(self) -> CheckerRequest:
        if (self.baseline is None) == (self.action == "compare"):
            raise wrong("baseline", "belongs to the action 'compare', which requires it")
        return self


OURS = (*STRUCTURES, "speculate")  # sampling parameters that are not vLLM's; return_sampling_mask is its server's
_Sampling = create_model(
    "_Sampling", __base__=Strict, **sampling_fields(name for name in SAMPLING_OPTIONS if name not in OURS)
)


class VllmSampling(_Sampling):  # type: ignore[misc, valid-type]
    """vLLM's sampling_params, as far as they are supported; SamplingParams describes them."""

    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)
    structured_outputs: StructuredOutputs | None = None

    @property
    def params(self) -> SamplingParams:
        """The same as parameters of the engine. Without max_tokens, an answer may be as long as the context, as at
        this route of vLLM. Raises ValueError."""
        base = SamplingParams() if self.structured_outputs is None else self.structured_outputs.params
        given = {name: value for name, value in dict(self).items() if value is not None and name != STRUCTURED}
        return replace(base, **given)


class TokensRequest(ModelRequest):
    """A request to /inference/v1/generate: ids in, ids out. request_id: its name for /abort_requests and /abort.
    priority: see fastgen.Request."""

    token_ids: Items[int]
    sampling_params: VllmSampling
    request_id: str | None = None
    priority: int = Field(0, ge=-INT32, le=INT32)


# ------------------------------------------------------------------------------------------------- routes


class VllmControl(TrainerRoutes):
    """The routes of a vLLM server, but those of adapters."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._mode = service.options.logprobs_mode
        # Engines between the start and the finish of an update, which run no steps and are to run again after it.
        self._holding: set[AsyncGenerator] = set()
        self._drafting: set[AsyncGenerator] = set()  # engines in an update of the head that drafts; they run steps
        self._names: dict[AsyncGenerator, tuple[int, str]] = {}  # version of the weights, the trainer's name for it

    def routes(self) -> Routes:
        post = self.post
        update = {"update_info": post(TransferRequest, self._update), "weight_dir": post(FolderRequest, self._read)}
        posts = {
            "/pause": post(ModelRequest, self._pause, bodiless=True),
            "/resume": post(ModelRequest, self._resume, bodiless=True),
            "/abort_requests": post(AbortIdsRequest, _abort, bodiless=True),
            "/sleep": post(SleepRequest, _sleep, bodiless=True),
            "/wake_up": post(ModelRequest, _wake_up, bodiless=True),
            "/release_kv_cache_memory": post(ModelRequest, _release, bodiless=True),
            "/reset_prefix_cache": post(ResetRequest, _reset, bodiless=True),
            "/init_weight_transfer_engine": post(InitRequest, self._init),
            "/start_weight_update": post(StartRequest, self._start, bodiless=True),
            "/start_draft_weight_update": post(StartRequest, self._start_draft, bodiless=True),
            "/finish_weight_update": post(FinishRequest, self._finish, bodiless=True),
            "/update_weight_version": post(VersionRequest, self._name_version),
            "/weight_checker": post(CheckerRequest, self._check_weights),
            "/inference/v1/generate": post(TokensRequest, self._generate, timed=True),
        }
        gets = {
            "/get_world_size": self.get(_world_size),
            "/is_paused": self.get(_is_paused),
            "/is_sleeping": self.get(_is_sleeping),
            "/weight_info": self.get(self._info),
        }
        return Routes(posts, gets, {"/update_weights": update})

    async def _pause(self, engine: AsyncGenerator, _: ModelRequest, query: QueryParams) -> Any:
        mode = query.get("mode", "keep")  # without a mode, it is our own /pause
        if mode not in PAUSES:
            raise ValueError(f"mode is {mode!r}; give one of {', '.join(PAUSES)}")
        if mode == "wait":
            await engine.pause_drained()
        else:
            await engine.pause()
        if mode == "abort":
            await engine.cut_off()
        self._holding.discard(engine)
        return {"status": "paused"}

    async def _resume(self, engine: AsyncGenerator, *_: Any) -> Any:
        self._holding.discard(engine)
        self._drafting.discard(engine)
        await engine.resume()
        return {"status": "resumed"}

    async def _init(self, engine: AsyncGenerator, body: InitRequest, _: QueryParams) -> Any:
        info, address = body.init_info, None
        if info.master_address is not None and info.master_port is not None:
            address = info.master_address, info.master_port
        ranks, id = (info.rank_offset, info.world_size), info.nccl_unique_id_b64
        await engine.call("join_trainer", ranks, address, id, info.buffer_bytes, TRANSFER_SECONDS)
        return {"message": "Weight transfer initialized"}

    async def _start(self, engine: AsyncGenerator, *_: Any) -> Any:
        self._drafting.discard(engine)
        if not engine.paused:
            await engine.pause()
            self._holding.add(engine)
        return {"message": "Weight update started"}

    async def _start_draft(self, engine: AsyncGenerator, *_: Any) -> Any:
        """Direct the next updates to the head that drafts. Requests continue, since no output changes."""
        await engine.call("check_drafter")
        self._drafting.add(engine)
        return {"message": "Draft weight update started"}

    async def _update(self, engine: AsyncGenerator, body: TransferRequest, _: QueryParams) -> Any:
        info = body.update_info
        with self.updating(engine):
            version = await engine.call("receive_packed", info.header, info.buffer_bytes, engine in self._drafting)
        return {"message": "Weights updated", "weight_version": version}

    async def _finish(self, engine: AsyncGenerator, body: FinishRequest, _: QueryParams) -> Any:
        self._drafting.discard(engine)
        if engine in self._holding:
            self._holding.discard(engine)
            await engine.resume()
        version = await _version(engine)
        if body.weight_version is not None:
            self._names[engine] = version, str(body.weight_version)
        return {"message": "Weight update finished", "weight_version": version}

    async def _name_version(self, engine: AsyncGenerator, body: VersionRequest, _: QueryParams) -> Any:
        self._names[engine] = await _version(engine), str(body.new_version)
        return {"success": True, "new_version": body.new_version}

    async def _info(self, engine: AsyncGenerator, *_: Any) -> Any:
        """Return the trainer's name for the weights, or their version if it gave none since the last update."""
        version = await _version(engine)
        named, name = self._names.get(engine, (None, ""))
        return {"weight_version": name if named == version else str(version)}

    async def _check_weights(self, engine: AsyncGenerator, body: CheckerRequest, _: QueryParams) -> Any:
        if body.action == "reset":
            return {"status": "reset", "weight_version": await self.reset_weights(engine)}
        ranks = enumerate(await engine.call("weight_checksums"))
        sums = {f"dp0:pp0:pcp0:tp{rank}:{name}": value for rank, each in ranks for name, value in each.items()}
        if body.baseline is None:
            return {"checksums": sums}
        mismatches = differing(sums, body.baseline)
        return {"match": not mismatches, "mismatches": mismatches}

    async def _read(self, engine: AsyncGenerator, body: FolderRequest, _: QueryParams) -> Any:
        options = {"version": None, "partial": False, "in_flight": "keep"}
        with self.updating(engine):
            if engine in self._drafting:
                await engine.call("update_drafter", body.weight_dir)
                version = await _version(engine)
            else:
                version = await engine.call("update_weights", body.weight_dir, **options)
        return {"status": "ok", "weight_version": version}

    async def _generate(self, engine: AsyncGenerator, body: TokensRequest, _: QueryParams) -> Any:
        params = body.sampling_params.params
        self.check_samples(params.n)
        output = await engine.generate(body.token_ids, params, body.request_id, priority=body.priority)
        logprobs = params.logprobs is not None or bool(params.logprob_token_ids)
        choices = [
            {
                "index": completion.index,
                "token_ids": completion.token_ids,
                "logprobs": {"content": _content(completion, drawn_name(self._mode), params)} if logprobs else None,
                "finish_reason": completion.finish_reason,
                "weight_versions": completion.weight_versions,
                "sampling_mask": completion.sampling_mask,
            }
            for completion in output.completions
        ]
        scores = None
        if params.prompt_logprobs is not None:
            scores = prompt_scores(output, output.prompt_token_ids, params.prompt_logprobs, lambda _: None)
        id = body.request_id or f"generate-{uuid.uuid4().hex}"
        return {"request_id": id, "choices": choices, "prompt_logprobs": scores, "kv_transfer_params": None}


async def _sleep(engine: AsyncGenerator, body: SleepRequest, query: QueryParams) -> Any:
    """Answer our own /sleep, or vLLM's, whose query has a level: 1 keeps the weights, and 2 drops them. vLLM's ends
    running requests."""
    if "level" not in query and "tags" not in query:
        return await sleep(engine, body, query)
    level = query.get("level", "1")
    if level not in ("1", "2"):
        raise ValueError(
            f"level is {level!r}; give 1, which keeps the weights on the host, or 2; for level 0, POST /pause"
        )
    await engine.cut_off()
    freed = await engine.call("sleep", query.getlist("tags") or TAGS, keep_weights=level == "1")
    return {"status": "sleeping", "level": int(level), "freed": freed}


async def _wake_up(engine: AsyncGenerator, _: ModelRequest, query: QueryParams) -> Any:
    tags = query.getlist("tags") or None
    await engine.call("wake", tags)
    return {"status": "sleeping" if await _asleep(engine) else "awake", "tags_woken": tags}


async def _release(engine: AsyncGenerator, *_: Any) -> Any:
    """Release only the KV cache, after a pause that ended the running requests."""
    return {"status": "kv_cache_released", "freed": await engine.call("sleep", ["kv_cache"])}


async def _abort(engine: AsyncGenerator, body: AbortIdsRequest, _: QueryParams) -> Any:
    return {"status": "aborted", "aborted": await engine.cut_off(body.request_ids or None)}


async def _is_paused(engine: AsyncGenerator, *_: Any) -> Any:
    return {"is_paused": engine.paused}


async def _is_sleeping(engine: AsyncGenerator, *_: Any) -> Any:
    return {"is_sleeping": bool(await _asleep(engine))}


async def _asleep(engine: AsyncGenerator) -> list[str]:
    """Return the parts of the memory that are asleep."""
    asleep: list[str] = (await engine.call("transfer_state"))["asleep"]
    return asleep


async def _version(engine: AsyncGenerator) -> int:
    """Return the version of the weights."""
    version: int = (await engine.call("weight_state"))["weight_version"]
    return version


async def _reset(*_: Any) -> Any:
    return {"success": True}


async def _world_size(*_: Any) -> Any:
    return {"world_size": 1}


def _content(completion: Completion, name: str, params: SamplingParams) -> list[dict[str, Any]]:
    """Return the logprobs of a completion as vLLM does without a tokenizer. name: of the list with the values."""
    values, tops = getattr(completion, name), completion.top_logprobs or [{}] * len(completion.token_ids)
    if params.logprob_token_ids:  # then vLLM also returns the token itself
        raw = zip(completion.token_ids, completion.raw_logprobs, tops, strict=True)
        tops = [{**top, token: top.get(token, logprob)} for token, logprob, top in raw]
    return [
        {**_named(token, value), "top_logprobs": [_named(*pair) for pair in top.items()]}
        for token, value, top in zip(completion.token_ids, values, tops, strict=True)
    ]


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": token_name(token), "logprob": max(LOWEST, logprob), "bytes": None}


# ------------------------------------------------------------------------------------------------- adapters

CONFIG = "adapter_config.json"


class LoadRequest(ModelRequest):
    """A request to load an adapter from a folder that PEFT has saved, or to replace the one of this name."""

    lora_name: str
    lora_path: str


class UnloadRequest(ModelRequest):
    lora_name: str


class VllmAdapters(TrainerRoutes):
    """The routes that load and unload LoRA adapters, as prime-rl and SkyRL call them.

    An adapter is merged into the weights: it holds for all requests, whichever model they name, and there is one at a
    time.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._merged: dict[AsyncGenerator, tuple[str, int]] = {}  # name, and version of the weights with it

    def posts(self) -> dict[str, Post]:
        load, unload = self.post(LoadRequest, self._load), self.post(UnloadRequest, self._unload)
        return {
            "/load_lora_adapter": load,
            "/skyrl/v1/load_lora_adapter": load,
            "/unload_lora_adapter": unload,
        }

    async def _load(self, engine: AsyncGenerator, body: LoadRequest, _: QueryParams) -> Any:
        with self.updating(engine):
            merged = await self._name(engine)
            if merged not in (None, body.lora_name):
                raise RuntimeError(f"one adapter is merged at a time; POST /unload_lora_adapter {merged!r} first")
            if not (Path(body.lora_path).expanduser() / CONFIG).is_file():  # which prime-rl tries again
                raise ApiError(404, f"there is no {CONFIG} in the folder {body.lora_path}", "lora_path", "not_found")
            version = await engine.call("read_adapter", body.lora_path, {"in_flight": "keep"})
            self._merged[engine] = body.lora_name, version
        return {"status": "ok", "weight_version": version}

    async def _unload(self, engine: AsyncGenerator, body: UnloadRequest, _: QueryParams) -> Any:
        with self.updating(engine):
            if await self._name(engine) != body.lora_name:
                raise ApiError(404, f"no adapter {body.lora_name!r} is merged", "lora_name", "not_found")
            version = await engine.call("update_adapter", None, in_flight="keep")
            del self._merged[engine]
        return {"status": "ok", "weight_version": version}

    async def _name(self, engine: AsyncGenerator) -> str | None:
        """Return the name of the adapter in the weights. None: there is none, also after another update."""
        name, version = self._merged.get(engine, (None, None))
        return name if version == await _version(engine) else None


def routes(service: Service) -> Routes:
    routes = VllmControl(service).routes()
    return replace(routes, posts={**routes.posts, **VllmAdapters(service).posts()})
