"""The options of a RemoteGenerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from fastgen.option import Options, option

MAX_SECONDS = 1e9  # of a timeout; torch.distributed cannot represent very long ones


@dataclass(frozen=True)
class RemoteGeneratorOptions(Options):
    """The arguments of a RemoteGenerator."""

    url: str | Sequence[str] = field(
        metadata={"help": "address of `fgserve --rollout`, such as http://localhost:5678, or a list of addresses"}
    )
    _: KW_ONLY
    api_key: str | None = option(None, "API key of the server", unset="no key")
    model: str | None = option(None, "name of the model, if the server has several", unset="the server's only model")
    backend: Literal["nccl", "gloo"] | None = option(
        None, "transport of weights: a process group of NCCL or gloo",
        unset="memory of the GPU (CUDA IPC) if the tensors are on the server's GPU, NCCL between two GPUs, else gloo",
    )  # fmt: skip
    timeout: float = option(
        60.0, "seconds without progress after which an update fails, on both sides", low=0, high=MAX_SECONDS
    )
    bucket_bytes: int = option(
        128 << 20, "bytes of tensors that are sent together, which both sides hold in device memory", low=1
    )
    replace_group: bool = option(False, "take over the weight group of a trainer that has ended without `close`")
    max_requests: int = option(256, "maximum number of requests of this object that are on a server at a time", low=1)
    ready_timeout: float = option(600.0, "seconds to wait at the first call until the server's model is loaded", low=0)
    keep_copy: bool = option(
        False, "with a list of addresses: keep a copy of the last weights in host memory, which an engine that comes "
        "back gets at once; without a copy it stays out of service until the next update from tensors"
    )  # fmt: skip
