"""display.py: objects in a line, and outputs in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from fastgen import AsyncGenerator, Event, Generator
from fastgen.engine.stats import Stats
from fastgen.request import Completion, RequestOutput, SamplingParams

TEXT = "Paris is the <b>capital</b> of France & it always will be.\n" * 100


def test_a_record_is_one_line_without_what_is_usual() -> None:
    completion = Completion(1, list(range(5, 500)), TEXT, "stop", stop_reason=2, logprobs=[-0.1] * 495)
    for record, shown in (
        (completion, "Completion(index=1, text='Paris is the <b>c... always will be.\\n', token_ids=[5, 6, 7, ...], "
         "finish_reason='stop', stop_reason=2)"),
        (RequestOutput("r0", [1] * 99, [completion] * 5, prompt="a" * 10**6), "RequestOutput(id='r0', "
         "prompt='aaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaa', completions=['Paris is the <b>c... always will be.\\n', "
         "4 more])"),
        (RequestOutput(3, [], [Completion(0, [], "", "error", error="no")]),
         "RequestOutput(id=3, completions=[''], error='no')"),
        (Event("r1", 0, [5], "five"), "Event(id='r1', index=0, text='five', token_ids=[5])"),
        (SamplingParams(), "SamplingParams()"),
        (SamplingParams(top_p=0.9, stop=["a"], json_schema={"type": "object", "properties": {"a": {"b": {}}}, "x": 1},
                        allowed_token_ids=np.arange(9)),
         "SamplingParams(top_p=0.9, stop=['a'], json_schema={'properties': {'a': {...}}, 'type': 'object', ...}, "
         "allowed_token_ids=array([0, 1, 2, 3, 4, 5, 6, 7, 8]))"),
        (Stats(requests=3, steps=7, step_seconds=1.5), "Stats(requests=3, steps=7)"),
    ):  # fmt: skip
        assert repr(record) == shown


def test_an_engine_says_what_it_runs(gen: Generator, talker: Path) -> None:
    start = f"Generator('{talker.name}', dtype='float32', device='cpu', max_model_len=512, max_seqs=8, num_pages="
    assert repr(gen) == f"{start}{gen.config.num_pages})"
    assert repr(AsyncGenerator("Qwen/Qwen3-8B")) == "AsyncGenerator('Qwen/Qwen3-8B', not ready)"
    unfinished = object.__new__(Generator)  # as in a debugger, after an exception in __init__
    unfinished.folder = Path("/hub/models--Qwen--Qwen3-8B/snapshots/0123abc")
    assert repr(unfinished) == "Generator('Qwen/Qwen3-8B')"


class _Cells(HTMLParser):
    """The tags of a page, and the texts of its cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_an_output_is_a_table_in_a_notebook_whose_texts_are_no_html() -> None:
    good, bad = Completion(0, [5, 6], TEXT, "length"), Completion(1, [], "<i>", "error", error="x < y")
    found = _Cells(RequestOutput("r0", [1, 2], [good, bad], prompt="<script>")._repr_html_())  # type: ignore[attr-defined]
    assert found.tags == {"table", "tr", "th", "td"}
    assert found.cells == ["prompt", "<script>", "0: length, 2 tokens", TEXT, "1: error, 0 tokens", "<i> [x < y]"]
    found = _Cells(RequestOutput("r0", [1, 2], [])._repr_html_())  # type: ignore[attr-defined]
    assert found.cells == ["prompt", "2 ids"]
    assert _Cells(good._repr_html_()).cells == ["0: length, 2 tokens", TEXT]  # type: ignore[attr-defined]
