"""KV that is freed outside of windows, as a feature of an engine; see window_pages.py and features.py. No torch here,
since the scheduler needs this module."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from fastgen.engine.admission import LaneTable
from fastgen.engine.features import Feature
from fastgen.engine.interface import PlanFeature
from fastgen.engine.options import EngineConfig
from fastgen.engine.pages import PageAllocator
from fastgen.engine.stats import Stats
from fastgen.engine.window_pages import FreeWindows, Places, WindowAllocator
from fastgen.model.config import ModelConfig
from fastgen.request import Batch, Sequence

if TYPE_CHECKING:  # it imports torch
    from fastgen.engine.runner import Runner


class WindowPages(PlanFeature):
    """The places that each batch needs. options: of the feature."""

    def __init__(self, options: FreeWindows) -> None:
        self._options = options

    def make_allocator(self, config: EngineConfig) -> PageAllocator:
        places, self._page_size = self._options.places(config), config.page_size
        self._pages = WindowAllocator(config.num_pages, config.page_size, places, self._options.first)
        return self._pages

    def reset(self, lanes: LaneTable) -> None:
        self._lanes = lanes
        self._held: dict[int, tuple[int, deque[int]]] = {}  # by lane: index of the first page held, and the pages
        self._chunks: dict[int, int] = {}  # the lanes with chunks in the last batch, and the ends of these

    def payload(self, batch: Batch) -> Places | None:
        """Hold the pages that the batch reads and writes, those of cached prefixes first: their places are not given
        away any more."""
        for lane, end in self._chunks.items():
            self._move(self._lanes[lane], end, end)
        forks = {lane for chunk in batch.prefills for lane in chunk.forks}
        begins = {chunk.lane: chunk.start for chunk in reversed(batch.prefills)}
        started = {start.lane for start in batch.starts}
        for lane in started - forks:
            if (sequence := self._lanes.sequences[lane]) is not None:
                at = begins.get(lane, sequence.computed)
                self._move(sequence, at, at)
        for lane, first, _ in batch.page_updates:  # outside of their prefills, pages grow when a decode reaches them
            sequence = self._lanes.sequences[lane]
            if sequence is not None and lane not in started:
                self._move(sequence, first * self._page_size, len(sequence.pages) * self._page_size)
        for chunk in batch.prefills:
            end = chunk.start + len(chunk.tokens)
            self._move(self._lanes[chunk.lane], chunk.start, end)
            for lane in chunk.forks:
                self._move(self._lanes[lane], end, end)
        self._chunks = {chunk.lane: chunk.start + len(chunk.tokens) for chunk in batch.prefills}
        return self._pages.take_places()

    def _move(self, sequence: Sequence, position: int, end: int) -> None:
        """Let a lane hold the pages that queries at positions `position` to `end` - 1 read and write."""
        low = self._options.first(position) // self._page_size
        first, held = self._held.get(sequence.lane) or (low, deque[int]())
        while held and first < low:
            self._pages.let_go(held.popleft())
            first += 1
        for page in sequence.pages[first + len(held) : self._pages.count(end)]:
            self._pages.hold(page)
            held.append(page)
        self._held[sequence.lane] = first, held

    def leave(self, sequence: Sequence) -> None:
        self._chunks.pop(sequence.lane, None)
        _, held = self._held.pop(sequence.lane, (0, deque[int]()))
        for page in reversed(held):
            self._pages.let_go(page)


class FreeWindowsFeature(Feature):
    """The second pool, which `EngineConfig.free_windows` asks for."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        for name, value in (("speculate", config.speculate), ("host_cache_gb", config.host_pages)):
            if value:
                raise ValueError(f"free_windows does not work together with {name}; leave one of them out")
        if config.attention == "flash":
            raise ValueError("free_windows does not work together with attention='flash'; use 'auto'")

    @classmethod
    def read(cls, given: Any, target: ModelConfig, ranks: int, load: str) -> FreeWindows:
        layers = tuple(layer for layer, window in enumerate(target.windows) if window)
        if not 0 < len(layers) < target.num_layers:
            raise ValueError(
                "free_windows needs a model with a sliding window in some layers and none in others; leave it out"
            )
        return FreeWindows(layers, max(target.windows))

    def plan(self, stats: Stats) -> WindowPages:
        assert isinstance(self.config.free_windows, FreeWindows)
        return WindowPages(self.config.free_windows)

    def attach(self, runner: Runner) -> None:
        """The import stands here because it loads torch."""
        from fastgen.engine.window_pool import attach

        assert isinstance(self.config.free_windows, FreeWindows)
        attach(runner, self.config.free_windows)
