"""The engine on a GPU gives the same answers as on the CPU. Run these tests with: pytest tests/gpu"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen import Generator, SamplingParams
from fastgen.model.loader import load
from fastgen.model.weights import Shard
from fastgen.request import Completion

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

ASKED = [
    "hello", "what is 12 + 30?", "spell banana", "sort 5, 2, 9, 1", "what day comes after friday?", "who are you?",
    "what is the capital of france?", "what is 9 * 7?", "count to 10", "say goodbye", "reverse the word cat",
    "what is fastgen?", "name a colour", "is 7 larger than 3?", "what is 81 - 19?", "tell me something",
]  # fmt: skip
CHATS = [[{"role": "user", "content": text}] for text in ASKED]
GREEDY = SamplingParams(temperature=0, max_tokens=64)


def tight(page_size: int) -> dict[str, Any]:
    """Return options for three lanes, chunks of at most 7 tokens, and pages for little more than one answer."""
    return {"max_seqs": 3, "max_step_tokens": 7, "page_size": page_size, "num_pages": 128 // page_size + 2}


def completions(params: SamplingParams = GREEDY, **options: Any) -> list[Completion]:
    with Generator(**options) as gen:
        return [output.completions[0] for output in gen.generate(CHATS, params)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [completion.token_ids for completion in completions(device="cpu")]


@pytest.mark.parametrize("options", [{}, tight(16), tight(64)], ids=["default", "tight-16", "tight-64"])
def test_float32_answers_are_those_of_the_cpu(options: dict[str, Any], expected: list[list[int]]) -> None:
    found = completions(device="cuda", dtype="float32", **options)
    assert [completion.token_ids for completion in found] == expected


def test_aborts_change_nothing_in_float32(expected: list[list[int]]) -> None:
    """Of the first half of the requests every second one is aborted, and then the second half is added."""
    found: dict[str | int, list[int]] = {id: [] for id in range(len(CHATS))}
    half = len(CHATS) // 2

    def step(gen: Generator) -> None:
        for event in gen.step():
            found[event.id] += event.token_ids

    with Generator(device="cuda", dtype="float32", max_seqs=4, max_step_tokens=24) as gen:
        for id in range(half):
            gen.add(CHATS[id], GREEDY, id=id)
        for odd in range(1, half, 2):
            for _ in range(6):
                step(gen)
            for output in gen.abort(odd):  # its tokens are the first ones of its full answer
                ids = output.completions[0].token_ids
                assert ids == expected[odd][: len(ids)]
        for id in range(half, len(CHATS)):
            gen.add(CHATS[id], GREEDY, id=id)
        while gen.unfinished:
            step(gen)
        step(gen)
        assert gen.stats.aborted > 0
    kept = [id for id in range(len(CHATS)) if id >= half or id % 2 == 0]
    assert [found[id] for id in kept] == [expected[id] for id in kept]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_answers_make_sense(dtype: str) -> None:
    texts = [completion.text for completion in completions(device="cuda", dtype=dtype)]
    assert texts[1] == "12 + 30 = 42."
    assert texts[2] == "b-a-n-a-n-a"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoint_comes_onto_the_gpu_as_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensors are loaded through several pinned buffers, into rows of fused parameters, and to another dtype."""
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(0)
    sizes = {"a": (3000, 4096), "b": (5000, 4096), "c": (77,), "d": (4096, 3)}
    tensors = {name: torch.randn(size, generator=draw).bfloat16() for name, size in sizes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    fused = torch.zeros(8000, 4096, dtype=dtype, device="cuda")
    wide = torch.zeros(4096, 9, dtype=dtype, device="cuda")
    targets = {
        "a": fused[:3000],
        "b": fused[3000:],
        "c": torch.zeros(77, dtype=dtype, device="cuda"),
        "d": wide[:, 3:6],
    }
    load({name: Shard.whole(view) for name, view in targets.items()}, tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].cpu(), tensor.to(dtype)), name
    assert not wide[:, :3].any()
    assert not wide[:, 6:].any()


FILL = """
import sys, torch
kept, size = [], 1 << 30
while size >= 1 << 20:
    try:
        kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("full", flush=True)
sys.stdin.read()
"""


@pytest.mark.alone
def test_a_gpu_that_another_program_fills_is_a_clear_error() -> None:
    """A new process has no room for a CUDA context; this process has a context, but no room for the weights."""
    torch.empty(0, device="cuda")
    torch.cuda.empty_cache()
    with subprocess.Popen([sys.executable, "-c", FILL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as filling:
        try:
            assert filling.stdout is not None
            assert filling.stdout.readline() == b"full\n"
            with pytest.raises(ValueError, match=r"end (the|other) programs that hold .* device='cpu'"):
                Generator()
            code = "from fastgen import Generator; Generator()"
            ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert re.search(r"\nValueError: .*end (the|other) programs that hold .* device='cpu'", ended.stderr)
        finally:
            filling.kill()
