"""A Generator on several GPUs gives the same answers as on one GPU, and its ranks end together.

Most tests use one Generator of the bundled model, since a start takes a while.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hash_model import hopeful
from invariants import check_scheduler
from test_gpu import CHATS
from test_logits import forget, reference, token_logprobs, write_config
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.request import Completion, Prompt, RequestOutput

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than 2 GPUs that torch can use")

RANKS = 4 if torch.cuda.device_count() >= 4 else 2  # both divide the bundled model; with 4, KV heads are replicated
NEAR_TIE = 1e-4
FLOAT32: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": 16, "seed": 0}
FEW_PAGES: dict[str, Any] = {"max_seqs": 8, "max_step_tokens": 32, "num_pages": 20}
SMALL: dict[str, Any] = {**FLOAT32, "max_seqs": 2, "max_step_tokens": 64, "num_pages": 64}


def ragged_prompts() -> list[Prompt]:
    """Return chats, and random prompts of many lengths with common prefixes."""
    draw = np.random.default_rng(0)
    common = draw.integers(10, 4096, 40)
    lengths = zip(draw.integers(0, 41, 12), draw.integers(1, 60, 12), strict=True)
    return [*CHATS, *([*common[:shared].tolist(), *draw.integers(10, 4096, own).tolist()] for shared, own in lengths)]


PROMPTS = ragged_prompts()
GREEDY = [
    SamplingParams(n=1 + number % 3, temperature=0, max_tokens=64, logprobs=5, ignore_eos=True)
    for number in range(len(PROMPTS))
]
SEEDED = SamplingParams(n=2, seed=5, temperature=0.9, top_p=0.95, repetition_penalty=1.05, max_tokens=32)


@pytest.fixture(scope="module")
def one_gpu() -> dict[str, list[RequestOutput]]:
    """Return the answers of one GPU, with room for all requests at the same time."""
    with Generator(**FLOAT32, max_seqs=16, num_pages=1024) as gen:
        found = {"greedy": gen.generate(PROMPTS, GREEDY), "seeded": gen.generate(CHATS, SEEDED)}
    forget()
    return found


@pytest.fixture(scope="module")
def parallel(one_gpu: dict[str, list[RequestOutput]]) -> Iterator[Generator]:
    """Yield a Generator on several GPUs with few pages, which admits more sequences than fit in these."""
    with Generator(**FLOAT32, **FEW_PAGES, tensor_parallel=RANKS) as gen:
        gen._loop.scheduler = hopeful(gen.config)
        yield gen


def completions(outputs: list[RequestOutput]) -> list[Completion]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [completion for output in outputs for completion in output.completions]


def check_alike(one: Completion, other: Completion) -> None:
    """Check that the tokens are the same, or that the first two that differ are the most likely ones, nearly equally
    so.
    """
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), None)
    if first is None:
        assert one.token_ids == other.token_ids
        assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-3)
        return
    assert one.top_logprobs is not None
    best, second = sorted(one.top_logprobs[first].items(), key=lambda pair: -pair[1])[:2]
    assert {best[0], second[0]} == {one.token_ids[first], other.token_ids[first]}
    assert best[1] - second[1] < NEAR_TIE


def test_greedy_answers_are_those_of_one_gpu(parallel: Generator, one_gpu: dict[str, list[RequestOutput]]) -> None:
    """The run has ragged prompts, several samples of each, chunks of at most 32 tokens, cached pages and
    preemptions."""
    before = parallel.stats
    found = parallel.generate(PROMPTS, GREEDY)
    for one, other in zip(completions(one_gpu["greedy"]), completions(found), strict=True):
        check_alike(one, other)
    assert parallel.stats.preemptions - before.preemptions > 5
    assert parallel.stats.cached_tokens - before.cached_tokens > 100
    check_scheduler(parallel._loop.scheduler)


def test_seeds_give_the_draws_that_they_give_on_one_gpu(
    parallel: Generator, one_gpu: dict[str, list[RequestOutput]]
) -> None:
    """A draw differs only if rounding in float32 moves a bound across it, which may happen in 1 of 32 answers."""
    found = [completion.token_ids for completion in completions(parallel.generate(CHATS, SEEDED))]
    again = [completion.token_ids for completion in completions(parallel.generate(CHATS, SEEDED))]
    expected = [completion.token_ids for completion in completions(one_gpu["seeded"])]
    assert len({tuple(ids) for ids in expected}) > len(CHATS)
    for ids in (found, again):
        assert sum(one != other for one, other in zip(ids, expected, strict=True)) <= 1


def test_long_prefills_whose_tokens_are_shared_out() -> None:
    """Steps of up to 4096 tokens are computed in two halves of any size; prompts are also scored."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(10, 4096, length).tolist() for length in draw.integers(100, 500, 30)]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    found = []
    for ranks in (1, RANKS):
        with Generator(**FLOAT32, max_seqs=32, max_step_tokens=4096, num_pages=1024, tensor_parallel=ranks) as gen:
            found.append((completions(gen.generate(prompts, params)), gen.score(prompts, start=1)))
        forget()
    (answers, scores), (answers_of_ranks, scores_of_ranks) = found
    for one, other in zip(answers, answers_of_ranks, strict=True):
        check_alike(one, other)
    for score, score_of_ranks in zip(scores, scores_of_ranks, strict=True):
        assert score_of_ranks == pytest.approx(score, abs=1e-3)


# At true sizes


MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
WORSE = 1.25


def measure(folder: Path, lengths: list[int], answer: int, **options: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Return random prompts with their sampled answers, and raw logprobs: of each prompt's tokens but the first, from
    prefills, and of its answer's, from decodes."""
    draw = np.random.default_rng(0)
    small: dict[str, Any] = {"max_seqs": 16, "max_step_tokens": 1024, "max_model_len": 1024, "kv_cache_gb": 1.0}
    with Generator(folder, device="cuda", dtype="bfloat16", seed=0, **small, **options) as gen:
        prompts = [draw.integers(0, gen.model_config.vocab_size, length).tolist() for length in lengths]
        outputs = gen.generate(prompts, SamplingParams(max_tokens=answer, ignore_eos=True, prompt_logprobs=0))
    forget()
    answers = completions(outputs)
    found = []
    for output, completion in zip(outputs, answers, strict=True):
        assert output.prompt_logprobs is not None
        found.append(output.prompt_logprobs[1:] + completion.raw_logprobs)
    return [prompt + completion.token_ids for prompt, completion in zip(prompts, answers, strict=True)], found


def error(model: Any, lengths: list[int], measured: tuple[list[list[int]], list[list[float]]]) -> dict[str, float]:
    """Return root mean squares of the measured logprobs, less those of transformers in the model's dtype."""
    parts: dict[str, list[Tensor]] = {"prefill": [], "decode": []}
    for length, sequence, logprobs in zip(lengths, *measured, strict=True):
        off = torch.tensor(logprobs, dtype=torch.float64) - token_logprobs(model, [sequence], "cuda")[0]
        parts["prefill"].append(off[: length - 1])
        parts["decode"].append(off[length - 1 :])
    return {part: float(torch.cat(each).square().mean().sqrt()) for part, each in parts.items()}


def test_bfloat16_at_true_size_is_as_near_to_float32_as_on_one_gpu(tmp_path: Path) -> None:
    """Four layers of Mistral 7B. On one GPU a layer rounds its contribution to the residual stream about nine times.
    With ranks, the partial sums of `o` and `down`, which each rank rounds, add two such roundings (of N parts with
    errors of 1 / sqrt(N) each). They are independent, so errors grow by sqrt(11 / 9) = 1.11; the limit of 1.25 leaves
    room for chance."""
    from safetensors.torch import save_file

    write_config(MISTRAL, 4, tmp_path)
    lengths = [2, 15, 16, 17, 64, 100, 255, 640, 333, 128, 500, 31]
    with reference(tmp_path, "cuda") as model:
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
        forget()
        one = measure(tmp_path, lengths, 64)
        several = measure(tmp_path, lengths, 64, tensor_parallel=RANKS)
        exact = model.float()
        errors = {"1": error(exact, lengths, one), str(RANKS): error(exact, lengths, several)}
    print({gpus: {part: f"{value:.5f}" for part, value in each.items()} for gpus, each in errors.items()})
    for part in ("prefill", "decode"):
        assert 0 < errors[str(RANKS)][part] <= WORSE * errors["1"][part], errors


# In a program that already has ranks


INSIDE = """
import json, os, sys
import torch
import torch.distributed as dist
from fastgen import Generator, SamplingParams
from fastgen.engine.cuda_graphs import Graphs

ran, replay = [], Graphs.run
def counted(self, key):
    ran.append(key)
    replay(self, key)
Graphs.run = counted

asked = json.loads(sys.argv[1])
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
with Generator(tp_group=dist.group.WORLD, **asked["options"]) as gen:
    ran.clear()  # what its start replayed
    outputs = gen.generate(asked["prompts"], SamplingParams(**asked["params"]))
    decodes = [key for key in ran if isinstance(key, int)]  # the pieces of prefills have (tokens, layer)
    answers = [[completion.token_ids for completion in output.completions] for output in outputs]
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, {"answers": answers, "replayed": len(decodes)})
if rank == 0:
    print(json.dumps(ranks))
dist.destroy_process_group()
"""


def test_decodes_are_graphs_on_every_rank(one_gpu: dict[str, list[RequestOutput]], tmp_path: Path) -> None:
    """torchrun lets the test look into the ranks. The answers are the same on each rank, and the same as on one GPU."""
    (tmp_path / "inside.py").write_text(INSIDE)
    params = {"n": 2, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    options = {**SMALL, "max_seqs": 8, "max_step_tokens": 256}  # so that all prompts are prefilled in one step
    asked = json.dumps({"options": options, "prompts": CHATS[:4], "params": params})
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    command = [sys.executable, *torchrun, str(tmp_path / "inside.py"), asked]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    ranks = json.loads(ran.stdout.splitlines()[-1])
    assert len(ranks) == RANKS
    for rank in ranks:
        assert rank["answers"] == ranks[0]["answers"]
        assert rank["replayed"] in (23, 24)  # each token but the first, and perhaps a step too many
    expected = [output.completions[0].token_ids[:24] for output in one_gpu["greedy"][:4]]
    alike = [answers == [ids, ids] for answers, ids in zip(ranks[0]["answers"], expected, strict=True)]
    assert sum(alike) >= 3  # but for near-ties


# How ranks end


def ranks_of(parent: int) -> set[int]:
    """Return the processes of ranks that a process has spawned: all but rank 0, which is that process."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if b"fastgen.ranks.start" in command and int(status.rpartition(")")[2].split()[1]) == parent:
            found.add(int(folder.name))
    return found


def free_memory() -> list[int]:
    """Return the free bytes of each GPU."""
    forget()
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(RANKS)]


def shared_segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def within(seconds: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


LONG = SamplingParams(max_tokens=256, ignore_eos=True)


def generate_until(gen: Generator, until: float) -> None:
    while time.monotonic() < until:
        gen.generate(CHATS[:2], LONG)


def lose_a_rank() -> None:
    """Kill a rank of a Generator that generates, and check that this ends all ranks."""
    known = ranks_of(os.getpid())
    with Generator(**SMALL, tensor_parallel=RANKS) as gen:
        ranks = ranks_of(os.getpid()) - known
        assert len(ranks) == RANKS - 1
        gen.add(CHATS[0], LONG)
        for _ in range(5):
            gen.step()
        os.kill(max(ranks), signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RuntimeError, match="SIGKILL"):
            generate_until(gen, killed + 20)
        assert within(killed + 10 - time.monotonic(), lambda: not ranks & ranks_of(os.getpid()))
        with pytest.raises(RuntimeError, match="no longer agree"):
            gen.generate(CHATS[0], LONG)


def check_freed(before: list[int], kept: list[float]) -> None:
    """Check that each GPU's free memory is what it was before, but for at most `kept` bytes."""
    freed = within(
        2, lambda: all(now > then - most for now, then, most in zip(free_memory(), before, kept, strict=True))
    )
    reserved = [torch.cuda.memory_reserved(gpu) for gpu in range(RANKS)]
    assert freed, f"free bytes of each GPU were {before} and are {free_memory()}; torch has reserved {reserved}"


def test_a_killed_rank_ends_the_others() -> None:
    segments = shared_segments()
    lose_a_rank()
    assert shared_segments() <= segments


@pytest.mark.alone
def test_a_killed_rank_leaves_no_memory() -> None:
    """The free memory of whole GPUs is compared, since the memory of a killed process can be found nowhere else: nobody
    else may use them.

    This process, rank 0, keeps its context with the kernels that it has loaded, including NCCL's: 681 MB the first
    time, of which torch had reserved 69 (two workspaces of cuBLAS). A second Generator uses them again, so any more
    would be a leak."""
    free_memory()  # makes a context on each GPU, which takes memory too
    before = free_memory()
    lose_a_rank()
    check_freed(before, [768e6, *[64e6] * (RANKS - 1)])
    before = free_memory()
    lose_a_rank()
    check_freed(before, [64e6] * RANKS)


INTERRUPTED = """
import json, sys
from fastgen import Generator, SamplingParams

gen = Generator(**json.loads(sys.argv[1]))
print("ready", flush=True)
while True:
    gen.generate("hello", SamplingParams(max_tokens=64, ignore_eos=True))
"""


def test_ctrl_c_leaves_nothing_of_a_script() -> None:
    """SIGINT is sent to the whole process group, as a terminal does."""
    segments = shared_segments()
    command = [sys.executable, "-c", INTERRUPTED, json.dumps({**SMALL, "tensor_parallel": RANKS})]
    pipe = subprocess.PIPE
    script = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    ranks: set[int] = set()
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        ranks = ranks_of(script.pid)
        assert len(ranks) == RANKS - 1
        time.sleep(0.3)  # into the midst of it
        os.killpg(script.pid, signal.SIGINT)
        _, errors = script.communicate(timeout=10)  # ends when all that hold its output have ended
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        assert shared_segments() <= segments
    finally:
        for process in ranks | {script.pid}:
            if Path(f"/proc/{process}").exists():
                os.kill(process, signal.SIGKILL)
        script.wait()
