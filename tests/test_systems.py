"""Systems other than Linux: what they lack is hidden from fastgen. It was never run on a real one."""

from __future__ import annotations

import subprocess
import sys

HIDE = """
import asyncio, ctypes, os, signal, socket, sys, sysconfig, time
import huggingface_hub, torch, transformers.utils.chat_template_utils  # only fastgen's own use is of interest
from transformers import PreTrainedTokenizerFast

sysconfig.get_config_vars()  # reads a file that depends on the platform

def hide(system, modules, names):
    sys.platform = system
    sys.modules.update(dict.fromkeys(modules))
    for module, name in names:
        delattr(module, name)

MACOS = [(os, "sched_getaffinity"), (os, "memfd_create"), (time, "pthread_getcpuclockid")]
"""

ON_MACOS = """
hide("darwin", [], MACOS)
import fastgen.async_engine.client, fastgen.cli.chat, fastgen.cli.gen.main, fastgen.cli.serve.main
from fastgen.device.threads import FreeCores
print(FreeCores().count == os.cpu_count())
"""

ON_WINDOWS = """
unix = [(os, "register_at_fork"), (os, "fork"), (os, "nice"), (socket, "AF_UNIX")]
unix += [(signal, name) for name in ("SIGKILL", "SIGPROF", "SIGHUP", "SIGUSR1")]
loop = asyncio.new_event_loop()  # Windows has another kind
hide("win32", ["fcntl", "resource", "termios", "tty", "pwd"], MACOS + unix)
open_library = ctypes.CDLL.__init__
def refusing(self, name, *rest, **options):
    if name is None:
        raise TypeError("Windows needs a name")
    open_library(self, name, *rest, **options)
ctypes.CDLL.__init__ = refusing

from fastgen import AsyncGenerator, Generator, SamplingParams
with Generator(device="cpu") as gen:
    messages = [{"role": "user", "content": "Hello"}]
    print(len(gen.chat(messages, SamplingParams(max_tokens=3, ignore_eos=True))[0].completions[0].token_ids))
try:
    loop.run_until_complete(AsyncGenerator(device="cpu").start())
except RuntimeError as error:
    print(error)
import fastgen.cli
"""


def program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True)


def test_modules_can_be_imported_without_what_macos_lacks() -> None:
    done = program(ON_MACOS)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_generator_runs_without_what_windows_lacks_and_the_rest_says_what_to_use() -> None:
    done = program(ON_WINDOWS)
    tokens, of_async = done.stdout.splitlines()
    assert tokens == "3"
    assert "use Generator there, or WSL for AsyncGenerator" in of_async
    *_, of_commands = done.stderr.splitlines()
    assert "need Python's fcntl, resource, termios, which Windows lacks; use WSL" in of_commands
