"""kernels/triton/compile_ahead.py with a fake Triton that counts compilations and launches.
scripts/tune/compile_kernels.py uses the real one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastgen.kernels.triton import compile_ahead as ahead
from fastgen.kernels.triton import jit
from fastgen.kernels.triton.compile_ahead import compile_ahead

CPU = torch.device("cpu")


def _doubled(x, count):
    """A kernel that is never compiled."""


class Triton:
    """A fake of Triton's JITFunction for `kernel`, which counts by key, the dtype of the first argument."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.jit import JITFunction

        self.compiled: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()
        self.threads: set[threading.Thread] = set()
        self.refused: set[str] = set()
        cache: dict[str, Any] = {}
        triton = self

        class Compiled:
            function = packed_metadata = None

            def __init__(self, key: str) -> None:
                self.key = key

            @property
            def run(self) -> Callable[..., None]:
                triton.loaded[self.key] += 1
                return lambda *args: triton.launched.update([self.key])

        def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
            key = str(args[0].dtype)
            kernel = cache.get(key) or self._do_compile(key)
            if kernel is not None and not warmup:
                kernel.run()
            return kernel

        def do_compile(self: Any, key: str) -> Any:
            triton.threads.add(threading.current_thread())
            triton.compiled[key] += 1
            if key in triton.refused:
                raise ValueError(f"{key} is too much")
            return cache.setdefault(key, Compiled(key))

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(JITFunction, "_do_compile", do_compile)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        self.kernel = jit.quick(JITFunction)(_doubled, do_not_specialize=("count",))

    def steps(self) -> None:
        for count in range(3):
            for dtype in (torch.float32, torch.float16):
                self.kernel[(1,)](torch.zeros(16, dtype=dtype), count)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    return Triton(monkeypatch)


def test_each_kernel_is_compiled_once_and_loaded_by_threads_and_none_is_launched(triton: Triton) -> None:
    compile_ahead(triton.steps, CPU)
    each = {"torch.float32": 1, "torch.float16": 1}
    assert triton.compiled == triton.loaded == each
    assert threading.current_thread() not in triton.threads
    assert not triton.launched
    triton.steps()
    assert triton.compiled == each
    assert triton.launched == {"torch.float32": 3, "torch.float16": 3}
    compile_ahead(triton.steps, CPU)
    assert triton.compiled == each, "those that were launched before are not compiled again"
    assert triton.launched.total() == 6, "nor are they launched"


def test_a_kernel_that_does_not_compile_raises_where_it_is_launched(triton: Triton) -> None:
    triton.refused.add("torch.float16")
    with pytest.raises(ValueError, match="float16 is too much"):
        compile_ahead(triton.steps, CPU)
    assert triton.compiled == {"torch.float32": 1, "torch.float16": 2}
    assert triton.launched == {"torch.float32": 1}
    triton.refused.clear()
    triton.steps()
    assert triton.launched == {"torch.float32": 4, "torch.float16": 3}


def test_after_an_exception_kernels_are_launched_again(triton: Triton) -> None:
    def interrupted() -> None:
        triton.steps()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_ahead(interrupted, CPU)
    assert not triton.compiled
    triton.steps()
    assert triton.launched.total() == 6


def test_another_thread_or_an_unknown_triton_launches(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    other = threading.Thread(target=triton.steps)
    compile_ahead(lambda: (other.start(), other.join()), CPU)
    assert triton.launched.total() == 6
    monkeypatch.setattr(ahead, "KNOWN", False)
    compile_ahead(triton.steps, CPU)
    assert triton.launched.total() == 12


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_bar_or_the_log_shows_what_takes_long(
    patience: float, show: bool, triton: Triton, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    load, looked = ahead._load, threading.Event()
    wait = ahead.wait
    monkeypatch.setattr(ahead, "PATIENCE", patience)
    monkeypatch.setattr(ahead, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(ahead, "wait", lambda *args: (wait(*args), looked.set())[0])
    # Kernels load only after the first look at what is ready, unless patience is long.
    monkeypatch.setattr(ahead, "_load", lambda *args: (patience or looked.wait(60)) and load(*args))
    with caplog.at_level("INFO", logger=ahead.log.name):
        compile_ahead(triton.steps, CPU, show)
    error = capsys.readouterr().err
    assert ("compiling kernels 2/2, once for this machine" in error) == (show and not patience)
    said = [f"compiling kernels {count}/2, once for this machine" for count in range(3)]
    assert caplog.messages == (said if not (show or patience) else [])
    assert error.endswith("\n") if show and not patience else not error
