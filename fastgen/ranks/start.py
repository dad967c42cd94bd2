"""The start of a Generator's ranks: a single one in this process, several spawned by it, or the ranks of a program.

`python -m fastgen.ranks.start RANK FD` runs a follower; FD is the file descriptor of its end of a socket pair.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastgen.device.chip import current
from fastgen.device.find import find_device
from fastgen.engine.features import read_options
from fastgen.engine.interface import StepRunner
from fastgen.engine.options import EngineConfig, GeneratorOptions
from fastgen.engine.startup import build_rank
from fastgen.model.config import ModelConfig
from fastgen.parallel.group import Group, gather_objects
from fastgen.processes.channel import Failed, Peers, Start
from fastgen.processes.spawning import end_with_parent, spawn
from fastgen.ranks.protocol import Follower, Leader, Signal, Spawned, error_of
from fastgen.ranks.weights import SharedMemory

log = logging.getLogger(__name__)

FOLLOWER = ("-m", "fastgen.ranks.start")  # Python's arguments
KEY_BYTES = 32
KEY_SECONDS = 5.0  # time limit for a connecting rank to send its key
CONNECT_SECONDS = 60.0  # how long the leader waits for the followers of a program to connect

BuildArguments = tuple[ModelConfig, GeneratorOptions, Path]
"""The first arguments of `build_rank`."""


def resolve_options(model_config: ModelConfig, options: GeneratorOptions) -> GeneratorOptions:
    """Check the options against the model and this machine. Return options that can be sent to other ranks: with this
    process's device and the number of ranks, and without tp_group. Raises ValueError or TypeError."""
    tp_group = options.tp_group
    if tp_group is not None and options.tensor_parallel != 1:
        raise ValueError(f"tp_group has its ranks already; leave tensor_parallel={options.tensor_parallel!r} out")
    size = options.tensor_parallel if tp_group is None else process_group_of(tp_group).size()
    sharded = model_config.split(size)
    device = find_device(options.device, ranks=options.tensor_parallel)
    options = replace(options, device=device, tensor_parallel=size, tp_group=None)
    options = read_options(options, model_config, size)
    EngineConfig.make(sharded, options)
    return options


def start_runner(arguments: BuildArguments, tp_group: Any, status: Callable[[], Any]) -> StepRunner | Follower:
    """Load the weights on all ranks. Return the Runner, Leader or Follower of this rank.

    arguments: contain the options that `resolve_options` returned. tp_group: the program's process group or DeviceMesh,
    or None. status: see Leader.
    """
    device, ranks = str(arguments[1].device), arguments[1].tensor_parallel
    if tp_group is not None:
        return _join(process_group_of(tp_group), arguments, device, status)
    if ranks > 1:
        return start_followers(ranks, arguments, device)
    return build_rank(*arguments, device, Group())


def _join(
    given: dist.ProcessGroup, arguments: BuildArguments, device: str, status: Callable[[], Any]
) -> Leader | Follower:
    """Start a rank of a program. All ranks use rank 0's arguments, except that each has its own folder."""
    with current(torch.device(device)):
        model_config, options, _ = gather_objects(arguments, given)[0]
        group = Group.beside(given, torch.device(device))
        try:
            peers = connect(given, group.one_host)
            peers.on_failure = group.interrupt
            build = partial(build_rank, model_config, options, arguments[2], device, group)
            if group.rank == 0:
                return Leader(build, peers, group, status=status)
            return Follower(build, peers, group)
        except BaseException:
            group.leave()
            raise


def log_start(name: str, seconds: float, config: EngineConfig, model_config: ModelConfig) -> None:
    """Log the duration of a start and the configuration. Warn if the KV pool is smaller than the model's context."""
    log.info("%s in %.1f s: %s", name, seconds, config)
    if not config.context_given and config.max_model_len < model_config.max_position:
        log.warning(
            "the KV pool holds a context of %d tokens, and the model's is %d; raise kv_cache_gb or memory_fraction",
            config.max_model_len,
            model_config.max_position,
        )


def agreeing(tp_group: Any) -> AbstractContextManager[None]:
    """Return a context manager: an error within its block, on any rank of a tp_group, is raised on all ranks."""
    known = isinstance(tp_group, DeviceMesh | dist.ProcessGroup)  # anything else raises an error within the block
    return Group(process_group_of(tp_group) if known else None).agreeing()


def process_group_of(tp_group: Any) -> dist.ProcessGroup:
    """Return the process group that tp_group is, or that it has as a DeviceMesh of one dimension."""
    if isinstance(tp_group, DeviceMesh):
        if tp_group.ndim != 1:
            raise ValueError(f"tp_group is a mesh of {tp_group.ndim} dimensions; give one of them, as mesh['tp']")
        return tp_group.get_group()
    if not isinstance(tp_group, dist.ProcessGroup):
        raise TypeError(f"tp_group must be a process group or a DeviceMesh, not {type(tp_group).__name__}")
    return tp_group


# ------------------------------------------------------------------------------------------- spawned followers


def start_followers(size: int, arguments: BuildArguments, device: str) -> Leader:
    """Spawn ranks 1 to size - 1, and return their leader.

    All followers import torch and say READY before the group is made: its rendezvous would not notice that one fails.
    """
    spawned, peers = Spawned([], SharedMemory()), Peers()
    try:
        for rank in range(1, size):
            peers.add(rank, spawn((*FOLLOWER, str(rank)), spawned.processes, spawned.memory.file))
        listener = socket.create_server(("127.0.0.1", 0))
        port, name = listener.getsockname()[1], f"fastgen-{secrets.token_hex(8)}"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        followers = {
            "arguments": arguments, "kind": torch.device(device).type, "name": name, "port": port, "size": size,
            "memory": spawned.memory.file,
        }  # fmt: skip
        peers.send(Start(followers, logging.getLogger("fastgen").getEffectiveLevel()))
        for _ in range(1, size):
            rank, message = peers.receive()
            if isinstance(message, Failed):
                raise error_of(rank, message, spawned)
            assert message is Signal.READY
        with current(torch.device(device)):
            group = Group.join(store, name, 0, size, torch.device(device))
            peers.on_failure = group.interrupt
            return Leader(partial(build_rank, *arguments, device, group), peers, group, spawned)
    except BaseException:
        spawned.end(peers.close)
        raise


def follow(
    rank: int, peers: Peers, arguments: BuildArguments, kind: str, name: str, port: int, size: int, memory: int
) -> None:
    """Run a follower until the leader ends, which raises an error here.

    kind: type of the device. name, port: name of the group, and port of the store in which its ranks meet. size: number
    of ranks. memory: file descriptor of the shared memory for weights.
    """
    try:
        device = torch.device(find_device(f"cuda:{rank}" if kind == "cuda" else kind))
        if kind == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(max(torch.get_num_threads() // size, 1) if kind == "cpu" else 1)
        peers.send(Signal.READY)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        group = Group.join(store, name, rank, size, device)
    except BaseException as error:
        peers.send(Failed.of(error))
        raise
    follower = Follower(partial(build_rank, *arguments, str(device), group), peers, group)
    gc.freeze()  # otherwise a garbage collection over all of torch's objects would delay some step by 80 ms
    follower.run(memory)


def main() -> None:
    faulthandler.enable()
    end_with_parent()
    rank, file = map(int, sys.argv[-2:])
    peers = Peers()
    peers.on_failure = lambda: os._exit(1)  # at once, as there is nothing to clean up
    peers.add(0, socket.socket(fileno=file))
    try:
        _, start = peers.receive()
        assert isinstance(start, Start)
        logging.basicConfig(format=f"rank {rank}: %(message)s")
        logging.getLogger("fastgen").setLevel(max(start.log_level, logging.WARNING))  # the leader logs the rest
        follow(rank, peers, **start.arguments)
    finally:
        os._exit(1)


# ------------------------------------------------------------------------------------------- the ranks of a program


def connect(group: dist.ProcessGroup, one_host: bool) -> Peers:
    """Connect rank 0 of a process group with every other rank.

    All ranks call this. Rank 0 listens on a free port, which only this host can reach if all ranks are on it. A
    connecting rank must send its key, which it receives through the group. Raises RuntimeError if a rank does not
    connect.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        keys = [os.urandom(KEY_BYTES) for _ in range(size)]
        with socket.create_server(("127.0.0.1" if one_host else "", 0)) as server:
            address = "127.0.0.1" if one_host else _public_address(), server.getsockname()[1]
            gather_objects((keys, address), group)
            return _accept(server, {keys[other]: other for other in range(1, size)})
    keys, address = gather_objects(None, group)[0]
    try:
        connection = socket.create_connection(address, CONNECT_SECONDS / 4)
    except OSError as error:
        raise RuntimeError(f"rank 0 cannot be reached at {address}: {error}") from error
    connection.sendall(keys[rank])
    peers = Peers()
    peers.add(0, connection)
    return peers


def _public_address() -> str:
    """Return the address from which this host reaches other hosts, or its name if it has no route to them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing, and only chooses a route
        address: str = probe.getsockname()[0]
        return address
    return socket.gethostname()


def _accept(server: socket.socket, missing: dict[bytes, int]) -> Peers:
    """Wait for ranks to connect. missing: {key: rank}; emptied here. A connection that does not send one of the keys is
    closed."""
    peers, deadline = Peers(), time.monotonic() + CONNECT_SECONDS
    try:
        while missing:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            other, key = server.accept()[0], b""
            other.settimeout(KEY_SECONDS)
            with suppress(OSError):
                key = other.recv(KEY_BYTES)
            if key in missing:
                peers.add(missing.pop(key), other)
            else:
                other.close()
    except BaseException as error:
        peers.close()
        if isinstance(error, TimeoutError):
            late = sorted(missing.values())
            raise RuntimeError(f"ranks {late} have not connected in {CONNECT_SECONDS:g} s") from error
        raise
    return peers


if __name__ == "__main__":
    main()
