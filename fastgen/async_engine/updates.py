"""Updates of the weights of an AsyncGenerator by another program, through a process group or from a folder."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fastgen.async_engine.trainer_group import TrainerGroup, decode_id, find_id
from fastgen.async_engine.wire import Header, Wire, placeholders
from fastgen.device.memory import gpu_id
from fastgen.generator import Generator
from fastgen.model.adapter import AdapterUpdate, read_adapter
from fastgen.model.deltas import DELTA
from fastgen.model.parameters import checkpoint_shards
from fastgen.model.quantization import Int4
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Shard, Tensors
from fastgen.speculation.options import Speculation


class WeightUpdates:
    """Updates of a Generator's weights by other programs.

    check: function that raises if the client of the running call has gone.
    """

    def __init__(self, gen: Generator, check: Callable[[], None]) -> None:
        self._gen, self._check = gen, check
        self._wire: Wire | None = None
        self._trainer: TrainerGroup | None = None

    def weight_state(self) -> dict[str, Any]:
        return {"weight_version": self._gen.weight_version, "torn": self._gen.needs_weights}

    def reset_weights(self) -> int:
        """Set all weights to 0, so that a check after an update finds what it has left out. Return their version."""
        shards = checkpoint_shards(self._gen.model_config)
        zeros = [(name, torch.zeros(()).expand(shard.shape)) for name, shard in shards.items()]
        rounds = isinstance(self._gen.model_config.quantization, Int4)
        return self._gen.update_weights(zeros, in_flight="keep", requantize=rounds)

    def init_weight_group(
        self, host: str, backend: str | None, gpu: str | None, seconds: float, bucket_bytes: int, replace: bool
    ) -> dict[str, Any]:
        """Open a store at a free port of `host`, through which a sender meets this process. Return its port, and the
        key and backend of the new group.

        backend: "gloo" or "nccl"; None: "ipc" if both ends are on one GPU, "nccl" between two GPUs, else "gloo".
        gpu: the sender's GPU (see `gpu_id`); None: the sender's tensors are on the CPU.
        seconds, bucket_bytes: see Wire.
        replace: end the group that there may be.

        Raises ValueError if the backend cannot be used, and RuntimeError if there is a group and `replace` is False.
        """
        device = torch.device(self._gen.config.device)
        if backend is None:
            backend = "gloo" if gpu is None or device.type != "cuda" else "ipc" if gpu == gpu_id(device) else "nccl"
        if backend == "nccl" and device.type != "cuda":
            raise ValueError("backend is 'nccl', and this server's weights are on the CPU; give 'gloo'")
        if self._wire is not None and not replace:
            raise RuntimeError("another program has a weight group; let it close, or give replace_group=True")
        self.close_weight_group()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port, limit = listener.getsockname()[1], timedelta(seconds=seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=limit
        )
        self._wire = Wire(store, secrets.token_hex(16), 1, backend, device, seconds, bucket_bytes)
        return {"port": port, "group": self._wire.key, "backend": backend}

    def close_weight_group(self, group: str | None = None) -> None:
        """Close the group if it has this key; None: whatever its key is."""
        if self._wire is not None and group in (None, self._wire.key):
            self._wire.close()
            self._wire = None

    def receive_weights(self, group: str, header: Header, options: dict[str, Any]) -> int:
        """Update the weights with the tensors that the sender sends. Return the version of the weights.

        group: key of the group. header: names, dtypes and shapes of the tensors, checked before anything is written.
        options: keyword arguments of `Generator.update_weights`, whose errors are raised here too.
        """
        wire, shards = self._find(group), checkpoint_shards(self._gen.model_config)
        WeightUpdate(placeholders(_without_deltas(header, shards)), shards, options["partial"]).check()
        try:
            received = wire.receive(header, self._check)
            tensors: Tensors = received
            if any(name.endswith(DELTA) for name, _, _ in header):  # indices are checked before anything is written
                tensors = [(name, tensor.clone()) for name, tensor in received]
            return self._gen.update_weights(tensors, **options)
        finally:
            if wire.broken:
                self.close_weight_group()

    def receive_adapter(
        self, group: str, header: Header, config: dict[str, Any] | None, options: dict[str, Any]
    ) -> int:
        """Merge an adapter whose tensors the sender sends. Return the version of the weights.

        config: fields of PEFT's LoraConfig; it is checked with the header before anything is sent. options: keyword
        arguments of `Generator.update_adapter`. All tensors are received before the weights change.
        """
        wire = self._find(group)
        AdapterUpdate(placeholders(header), config, checkpoint_shards(self._gen.model_config)).check()
        try:
            named = [(name, tensor.clone()) for name, tensor in wire.receive(header, self._check)]
        finally:
            if wire.broken:
                self.close_weight_group()
        return self._gen.update_adapter(named, config, **options)

    def _find(self, group: str) -> Wire:
        """Return the weight group with this key. Raises ValueError if there is none."""
        wire = self._wire
        if wire is None or not secrets.compare_digest(wire.key.encode(), group.encode()):
            raise ValueError("there is no weight group with this key; POST /init_weight_group returns one")
        self._check()
        return wire

    def join_trainer(
        self,
        ranks: tuple[int, int],
        address: tuple[str, int] | None,
        unique_id: str | None,
        buffer_bytes: int | None,
        seconds: float,
    ) -> None:
        """Join the group of one of vLLM's trainers, instead of an earlier one.

        ranks: index of this process and number of ranks. address: of the trainer's store; None: unique_id is given,
        NCCL's id in base64. buffer_bytes: see `TrainerGroup.receive`, for updates that do not say it. seconds: see
        TrainerGroup. Raises ValueError if the weights are not on a GPU, or if the id cannot be read.
        """
        given = None if unique_id is None else decode_id(unique_id)
        if not self.has_nccl:
            raise ValueError("weights come over NCCL, and this server's are on the CPU; update them from a folder")
        self._leave_trainer()
        group_id = given or find_id(address, seconds, self._check)
        device = torch.device(self._gen.config.device)
        self._trainer = TrainerGroup(group_id, ranks, device, buffer_bytes, seconds, self._check)

    def receive_packed(self, header: Header, buffer_bytes: int | None, drafter: bool = False) -> int:
        """Update the weights with what a trainer's group broadcasts; tensors that are not named stay, and running
        requests keep their KV. Return the version of the weights. See TrainerGroup.receive.

        drafter: if True, the header names all tensors of the head that drafts, and no others.
        """
        likes, shards = placeholders(header), checkpoint_shards(self._gen.model_config)
        partial = not shards.keys() <= {name for name, _, _ in header}
        if not drafter:
            WeightUpdate(likes, shards, partial).check()
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError("there is no group with a trainer; POST /init_weight_transfer_engine first")
        try:
            tensors = trainer.receive(header, buffer_bytes, self._check)
            if not drafter:
                return self._gen.update_weights(tensors, partial=partial, in_flight="keep")
            self._gen.update_drafter([(name, tensor.clone()) for name, tensor in tensors])
            return self._gen.weight_version
        finally:
            if trainer.broken:
                self._leave_trainer()

    def _leave_trainer(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    @property
    def has_nccl(self) -> bool:
        return torch.device(self._gen.config.device).type == "cuda"

    def transfer_state(self) -> dict[str, Any]:
        """Return what a trainer asks for: whether weights can come over NCCL, their version and dtype, and which memory
        is asleep."""
        gen = self._gen
        state = {"nccl": self.has_nccl, "weight_version": gen.weight_version, "dtype": gen.config.dtype}
        return {**state, "asleep": sorted(gen.asleep)}

    def check_drafter(self) -> None:
        """Raise ValueError if there is no head that drafts, whose weights a trainer would send in vain."""
        options = self._gen.config.speculate
        if not isinstance(options, Speculation) or options.head is None:
            raise ValueError("there is no head that drafts; start the server with one as --speculate")

    def read_adapter(self, folder: str, options: dict[str, Any]) -> int:
        """Merge the adapter that PEFT has saved in a folder. Return the version of the weights. options: keyword
        arguments of `Generator.update_adapter`."""
        return self._gen.update_adapter(*read_adapter(folder), **options)


def _without_deltas(header: Header, shards: Mapping[str, Shard]) -> Header:
    """Return a header in which the weights of the model that have deltas are whole."""
    weights = {name + DELTA: (name, "float32", list(shard.shape)) for name, shard in shards.items()}
    return [weights.get(name, (name, kind, shape)) for name, kind, shape in header]
