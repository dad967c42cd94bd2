"""Chrome traces of the engine's steps, and names for the parts of a step.

Each part of a step runs in a `span`, which appears in any trace of torch.profiler, including traces that the user
makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from torch._C._autograd import _profiler_enabled
from torch.profiler import profile, record_function

from fastgen.option import Option

_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """Return a context manager that names a range in this thread's trace. Without a trace it costs 0.1 us."""
    return record_function(name) if _profiler_enabled() else _NOTHING


class Tracer:
    """A recorder of a Generator's steps."""

    def __init__(self) -> None:
        self._profiler: profile | None = None  # None outside of `block`
        self._left = 0  # number of steps still to be recorded

    @contextmanager
    def block(self, path: str | Path, steps: int) -> Iterator[None]:
        """Record the work of a block until `steps` steps have ended, and write the trace to `path` at the end of the
        block.

        Raises ValueError for steps below 1, for a path that is not a file in an existing folder, and if a trace is
        being recorded already.
        """
        Option("steps", int, 1, low=1).check(steps)
        path = Path(path)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"path is {str(path)!r}; give the name of a file in a folder that exists")
        if self._profiler is not None or _profiler_enabled():
            raise ValueError("a trace is being recorded, and torch records one at a time; begin when it has ended")
        self._profiler, self._left = profile(), steps
        self._profiler.start()
        try:
            yield
        finally:
            profiler, self._profiler = self._profiler, None
            if self._left:
                profiler.stop()
            profiler.export_chrome_trace(str(path))

    def end_step(self) -> None:
        """Count a step, and stop the recording after the last one."""
        if self._profiler is not None and self._left:
            self._left -= 1
            if not self._left:
                self._profiler.stop()  # waits for the GPU
