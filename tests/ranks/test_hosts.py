"""Ranks on two hosts, which are two network namespaces with host names of their own: they answer, take new weights, and
notice that the other host has vanished without a word."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import fastgen
from fastgen.processes.channel import SILENT_SECONDS

NAMES = [f"fastgen{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]

ETC = Path("/etc/netns")

PROGRAM = """
import os, sys
import torch.distributed as dist
from fastgen import Generator, SamplingParams

dist.init_process_group("gloo")
params = SamplingParams(n=2, seed=1, max_tokens=8, logprobs=1)

def answers(gen):
    return [output.completions for output in gen.generate(["Hello", "What is 12 + 30?"], params)]

with Generator(device="cpu", tp_group=dist.group.WORLD) as gen:
    from safetensors.torch import load_file
    weights = load_file(sys.argv[1])
    before = answers(gen)
    gen.update_weights({name: tensor * 1.01 for name, tensor in weights.items()})
    assert answers(gen) != before
    gen.update_weights(weights)
    assert [each.token_ids for each in answers(gen)[0]] == [each.token_ids for each in before[0]]
    print("ready", gen.config.deterministic, os.getpid(), flush=True)
    sys.stdin.readline()
    try:
        answers(gen)
    except RuntimeError as error:
        print(error, flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Yield the names of two network namespaces with a link between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    try:
        ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
        for name, address, other in zip(NAMES, ADDRESSES, reversed(ADDRESSES), strict=True):
            ip("netns", "add", name)
            ip("link", "set", name, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "via", other)
            settings = ETC / name  # replaces files of /etc within the namespace
            settings.mkdir(parents=True)
            (settings / "nsswitch.conf").write_text("hosts: files\n")  # a name server would be asked in vain, for long
            table = (f"{each} {of}\n" for each, of in zip(ADDRESSES, NAMES, strict=True))
            (settings / "hosts").write_text("127.0.0.1 localhost\n" + "".join(table))
        yield NAMES
    finally:
        for name in NAMES:
            shutil.rmtree(ETC / name, ignore_errors=True)
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def start(host: str, number: int, program: Path) -> subprocess.Popen[str]:
    """Start the rank of a host by torchrun."""
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1"
    meeting = f"--master-addr {ADDRESSES[0]} --master-port 29511"
    weights = Path(fastgen.__file__).parent / "tiny" / "model.safetensors"
    command = f"hostname {host}; exec {torchrun} {meeting} {program} {weights}"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": host}
    return subprocess.Popen(
        ("ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", command),
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def line_of(rank: subprocess.Popen[str], start: str) -> str:
    """Return the next line of a rank's output that begins so."""
    assert rank.stdout is not None
    lines = []
    for line in rank.stdout:
        lines.append(line)
        if line.startswith(start):
            return line
    raise AssertionError("".join(lines))


@pytest.mark.long
@pytest.mark.parametrize("vanishes", [False, True])
def test_two_hosts_answer_and_notice_that_one_is_gone(hosts: list[str], tmp_path: Path, vanishes: bool) -> None:
    """The other rank is killed, or its host's link goes down, while this one waits for its user."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks, programs = [start(host, number, program) for number, host in enumerate(hosts)], list[int]()
    try:
        for rank in ranks:
            _, deterministic, pid = line_of(rank, "ready").split()
            assert deterministic == "True"
            programs.append(int(pid))
        if vanishes:
            ip("-n", hosts[1], "link", "set", hosts[1], "down")
            time.sleep(SILENT_SECONDS + 5)
        else:
            os.kill(programs[1], signal.SIGKILL)
            time.sleep(1)
        assert ranks[0].stdin is not None
        ranks[0].stdin.write("go on\n")
        ranks[0].stdin.flush()
        assert "is gone" in line_of(ranks[0], "rank 1")
    finally:
        for pid in (*programs, *(rank.pid for rank in ranks)):  # torchrun's programs have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            rank.communicate()
