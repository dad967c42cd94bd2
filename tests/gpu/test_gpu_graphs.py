"""A step replayed as a CUDA graph has the bits of the same step launched kernel by kernel, with prefills and without;
and all kernels are compiled before the first step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from known_models import KNOWN
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.engine.cuda_graphs import smallest_size
from fastgen.engine.runner import Runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

# The bundled model, and two layers of other models at their true sizes.
MISTRAL, QWEN2, QWEN3 = "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B"
MODES = [
    (None, "bfloat16", 64), (None, "float32", 64), (MISTRAL, "bfloat16", 64), (QWEN2, "bfloat16", 64),
    (QWEN3, "bfloat16", 32),  # with pages of 32 tokens, decodes do not run in Gluon
]  # fmt: skip
LANES = 70
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 200, 700]


def model_options(name: str | None, folder: Path, context: int = 2048) -> dict[str, Any]:
    """Return the options for two layers of a model with random weights; None: the bundled model."""
    if name is None:
        return {}
    (folder / "config.json").write_text(json.dumps({**KNOWN[name][0], "num_hidden_layers": 2}))
    return {"model": str(folder), "load": "dummy", "max_model_len": context}


@contextmanager
def busy_generator(name: str | None, folder: Path, **options: Any) -> Iterator[Generator]:
    """Yield a Generator in which LANES sequences of different lengths are decoding."""
    options |= {"device": "cuda", "max_seqs": LANES, "kv_cache_gb": 1.0, "seed": 0, **model_options(name, folder)}
    draw = np.random.default_rng(0)
    with Generator(**options) as gen:
        vocab = gen.model_config.vocab_size
        for lane in range(LANES):
            prompt = draw.integers(0, vocab, LENGTHS[lane % len(LENGTHS)]).tolist()
            gen.add(prompt, SamplingParams(max_tokens=200, ignore_eos=True, seed=lane))
        said: set[str | int] = set()
        while len(said) < LANES:
            said |= {event.id for event in gen.step()}
        for _ in range(4):
            gen.step()
        gen._loop.drain()
        assert gen.stats.running == LANES
        yield gen
        gen.abort(list(said))


@torch.inference_mode()
def check_replay(runner: Runner, size: int, real: int, *others: Callable[[int], object], shared: bool = False) -> None:
    """Compare a step of `size` rows with `real` lanes, replayed and launched from the same state, to the bit; and with
    steps of `others`, whose logits need only be near."""
    held = [runner.lanes.kv_lens, runner.pool.keys, runner.pool.values]
    before = [tensor.clone() for tensor in held]
    results: list[list[Tensor]] = []
    for run in (runner.graphs[shared].run, lambda size: runner.decode_body(size, shared), *others):
        for tensor, saved in zip(held, before, strict=True):
            tensor.copy_(saved)
        runner.logits.fill_(torch.nan)
        run(size)
        # The spare page of padding is whatever its last writer left there.
        pages = [tensor[:, : runner.pool.spare].clone() for tensor in held[1:]]
        results.append([runner.logits[:real].clone(), runner.lanes.kv_lens.clone(), *pages])
    for tensor, saved in zip(held, before, strict=True):
        tensor.copy_(saved)
    replayed, launched, *near = results
    assert replayed[0].isfinite().all()
    assert not torch.equal(replayed[1], before[0]), "the step counted its tokens"
    for name, one, other in zip(("logits", "KV lengths", "keys", "values"), replayed, launched, strict=True):
        assert torch.equal(one, other), f"{name} of {real} lanes in a step of {size}"
    for logits, *_ in near:
        torch.testing.assert_close(replayed[0], logits, atol=0.3, rtol=0.05)


@pytest.mark.parametrize(("name", "dtype", "page_size"), MODES)
def test_a_replayed_step_is_the_launched_one(name: str | None, dtype: str, page_size: int, tmp_path: Path) -> None:
    with busy_generator(name, tmp_path, dtype=dtype, page_size=page_size) as gen:
        runner = gen._runner
        smaller = 0
        for size in runner.graphs[False].keys:
            for real in {size, smaller + 1}:  # full, and with as much padding as there can be
                lanes = torch.full((size,), runner.config.max_seqs, dtype=torch.int64)
                lanes[:real] = torch.randperm(LANES, generator=torch.Generator().manual_seed(size))[:real]
                runner.lanes.input.lanes[:size] = lanes.cuda()
                check_replay(runner, size, real)
            smaller = size


def test_decodes_are_replayed_and_prefills_are_not() -> None:
    with Generator(device="cuda", max_seqs=8, seed=0, speculate=False) as gen:
        graphs = gen._runner.graphs[False]
        ran: list[int] = []
        replay = graphs.run
        graphs.run = lambda size: (ran.append(size), replay(size))[1]  # type: ignore[method-assign, func-returns-value]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        outputs = gen.generate([[1, 2, 3]] * 5, params)
        assert len(ran) in (19, 20)  # and perhaps a step too many
        assert set(ran) == {smallest_size(graphs.keys, 5)}
        assert len({tuple(output.completions[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize(("name", "dtype", "page_size"), MODES)
def test_replayed_prefills_are_those_launched_kernel_by_kernel(
    name: str | None, dtype: str, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed steps with prefills have the same bits as launched ones. Without padding, logprobs may differ by
    rounding if the engine is not deterministic, because fewer rows may use another matrix product."""
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "max_seqs": 16, "kv_cache_gb": 1.0, "seed": 0}
    options |= {"page_size": page_size, "speculate": False, **model_options(name, tmp_path)}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)
    draw = np.random.default_rng(0)
    with Generator(**options, prefix_cache=False) as gen:
        runner, vocab = gen._runner, gen.model_config.vocab_size
        graphs = runner.prefill_graphs
        assert graphs is not None
        lengths = (1, 9, 16, 17, 32, 33, 64, 100, 160, 255, 256, *(size - 1 for size in graphs.sizes if size > 256))
        prompts = [draw.integers(0, vocab, min(length, gen.max_model_len - 2)).tolist() for length in lengths]
        replays, ran, found = (graphs.layers[False].run, graphs.ends.run), [], []

        def said() -> list[float]:
            """Return logprobs of scored prompts of several tokens, and those of the first tokens after all,
            while another request decodes."""
            scores = [logprob for prompt in prompts[1:] for logprob in gen.score([prompt], start=1)[0]]
            busy = gen.add(prompts[4], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
            for prompt in prompts:
                gen.add(prompt, params)
                while gen.unfinished > 1:
                    scores += [event.raw_logprobs[0] for event in gen.step() if event.finish_reason]
            gen.abort(busy)
            return scores

        launches = partial(graphs._run_layers, shared=False), graphs._finish
        for layers, ends in (replays, launches):
            monkeypatch.setattr(graphs.layers[False], "run", lambda key, run=layers: (ran.append(key), run(key)))
            monkeypatch.setattr(graphs.ends, "run", ends)
            found.append(said())
        runner.prefill_graphs = None
        found.append(said())
        deterministic = gen.config.deterministic
    most = smallest_size(graphs.sizes, max(map(len, prompts)) + 1)
    assert set(ran) == {size for size in graphs.sizes if size <= most}
    assert found[0] == found[1]
    if deterministic:
        assert found[0] == found[2]
    error = np.abs(np.subtract(found[0], found[2]))
    assert error.mean() < (0.02 if dtype == "bfloat16" else 1e-3)


LATE = """
import json, sys
import numpy as np
import triton
from fastgen import Generator, SamplingParams
from fastgen.model.attention import shared

shared.SHARING_PAYS = 1
options = json.loads(sys.argv[1])
gen = Generator(device="cuda", kv_cache_gb=0.25, seed=0, **options)
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append([step, what["repr"]])
step = "start"
vocab, context = gen.model_config.vocab_size, gen.max_model_len
draw = np.random.default_rng(0)


def prompt(length):
    return draw.integers(0, vocab, min(length, context - 40)).tolist()


class Even:
    def fill(self, row):
        row[:] = 0x55555555

    def accept(self, token):
        assert token % 2 == 0


lengths = [1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 100, 129, 200, 333]
kinds = {
    "greedy": {"temperature": 0},
    "plain": {},
    "min_p": {"min_p": 0.05},
    "truncated": {"top_k": 20, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "biases": {"logit_bias": {5: 2.0}, "min_tokens": 4},
    "mask": {"mask": Even()},
    "kept": {"top_k": 5, "return_sampling_mask": True},
    "logprobs": {"logprobs": 1},
    "more logprobs": {"logprobs": 20},
    "scored prompt": {"prompt_logprobs": 3},
    "samples": {"n": 3},
}
for name, fields in kinds.items():
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **fields})
    for length in lengths:  # one at a time, so that steps are small
        step = f"{name}, alone, {length}"
        gen.generate([prompt(length)], params)
    step = f"{name}, together"
    gen.generate([prompt(length) for length in lengths * 3], params)
step = "all kinds together"
gen.generate(
    [prompt(length) for length in lengths for _ in kinds],
    [SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **fields}) for _ in lengths for fields in kinds.values()],
)
for length in lengths:
    step = f"scores, {length}"
    gen.score([prompt(length)])
    gen.score([prompt(length) for _ in range(5)], start=length // 2, temperature=0.7)
step = "forks of odd lengths, from the cache"
for length in lengths:
    ids = prompt(length)
    for _ in range(2):
        gen.generate([ids], SamplingParams(n=5, max_tokens=9, ignore_eos=True))
for count in (1, 2, 3, 5, 12, 32):
    step = f"drafts of {count}"
    ids = prompt(9)
    for _ in range(3):
        gen.generate([ids] * count, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
print(json.dumps({"compiled": compiled, "steps": gen.stats.steps, "accepted": gen.stats.accepted}))
"""


@pytest.mark.parametrize(
    ("name", "max_seqs", "page_size", "speculate"),
    [
        (None, 4, 64, "off"), (None, 64, 64, "auto"), (MISTRAL, 64, 64, "off"), (QWEN2, 4, 64, "auto"),
        (QWEN3, 64, 32, "off"),
    ],
)  # fmt: skip
def test_nothing_compiles_after_the_start(
    name: str | None, max_seqs: int, page_size: int, speculate: str, tmp_path: Path
) -> None:
    """This runs in a new process, in which no other Generator has compiled anything."""
    options = {"max_seqs": max_seqs, "dtype": "bfloat16", "page_size": page_size, "speculate": speculate}
    options |= model_options(name, tmp_path, context=1024)
    command = [sys.executable, "-c", LATE, json.dumps(options)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["steps"] > 1000
    assert not found["compiled"]
    assert (found["accepted"] > 0) == (speculate == "auto")
