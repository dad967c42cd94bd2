"""What the engine's tests share: tiny checkpoints that transformers wrote, a tokenizer, and masks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

# Read when torch is first imported, here and in processes that tests start. pytest-xdist has one worker per
# core, and threads that wait for each other's core are many times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # where a test has several threads
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under `nohup pytest &`: tests of Ctrl-C would wait for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported: kernels then run on CPU tensors

from families import FAMILIES, HYBRIDS, SIZES, VOCAB, load_reference, save_random
from invariants import check_scheduler

from fastgen import Generator
from fastgen.kernels.triton import batch_invariant
from fastgen.model.weights import UNUSED, text_name

sys.dont_write_bytecode = False  # pytest keeps the tests that it has compiled, which takes each worker 7 seconds

if os.environ.get("TRITON_INTERPRET"):
    with suppress(ImportError):
        from interpreter import hasten

        hasten()


GPU_TESTS = Path(__file__).parent / "gpu"  # they fill GPUs and measure their memory, so they run in one process


def names_gpu_tests(config: pytest.Config) -> bool:
    """Return whether an argument of the command line is tests/gpu, or a test in it."""
    paths = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return any(path.resolve().is_relative_to(GPU_TESTS) for path in paths)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run tests/gpu in this process. Limit the workers that share a GPU: each has kernels and models on it, and starts
    processes of its own. On few cores, have one worker more, since tests also wait for servers and time limits."""
    if names_gpu_tests(config):
        return 0
    if torch.cuda.is_available():
        return 6
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1 if cores <= 4 else None


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Refuse workers for tests/gpu."""
    if config.getoption("numprocesses", None) and names_gpu_tests(config):
        raise pytest.UsageError("tests/gpu runs in one process, so leave -n out: pytest tests/gpu")


FIRST = tuple(f"tests/{room}/" for room in ("cli/serve", "rl", "ranks", "engine", "text", "model", "kernels"))
"""Tests that begin first, since their files take longest: one worker would be left with them in the end."""

# Files that share servers, which then start once and not once per worker: {part of a path: name of the group}.
GROUPS = {
    "cli/serve/test_serve_messages": "caller",
    "cli/serve/test_serve_responses": "caller",
    "cli/test_chat_backends": "caller",
    "rl/test_remote": "rollout",
    "cli/serve/test_serve_trainers": "rollout",
    "cli/serve/test_serve_beams": "rollout",
    "cli/serve/test_serve_app": "bundled",
    "cli/serve/test_serve_vllm_serving": "bundled",
    "tests/test_examples": "bundled",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((at for at, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one worker, which makes its fixtures once, and files that share a server to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((name for part, name in GROUPS.items() if part in file), file)

    return Groups(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests/gpu where a run of all tests has several workers."""
    if "PYTEST_XDIST_WORKER" in os.environ and item.path.is_relative_to(GPU_TESTS) and torch.cuda.is_available():
        pytest.skip("tests/gpu runs in one process by itself: pytest tests/gpu")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the CPU seconds of all tests, and keep them in pytest's cache for .ci/run. Workers have ended by now."""
    ours, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = round(ours.ru_utime + ours.ru_stime + ended.ru_utime + ended.ru_stime)
    terminalreporter.write_line(f"CPU seconds of all processes: {seconds}")
    if cache := getattr(config, "cache", None):  # pytest has none with -p no:cacheprovider
        cache.set("fastgen/cpu_seconds", seconds)


FEW = ("ministral3", "mistral", "olmo3", "granite")
"""Families for tests of what does not depend on the family: with windows in no layer, in all, and in some; with scales
by position, norms of queries and keys, biases, multipliers, and tied embeddings."""

# Halves of them, each with windows and without.
FIRST_HALF, SECOND_HALF = FEW[::2], FEW[1::2]


def families_in_turn(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Each of FEW with one value, or each value with one of FEW if there are more of these."""
    most = max(len(FEW), len(values))
    return [(FEW[at % len(FEW)], values[at % len(values)]) for at in range(most)]


Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoint(name, **config): the folder of a random model of transformers' `name`ForCausalLM, in float32."""
    made: dict[str, Path] = {}

    def make(name: str, **config: Any) -> Path:
        key = repr((name, sorted(config.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            save_random(name, {**SIZES, **config}, made[key])
        return made[key]

    return make


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    """A checkpoint without a tokenizer, of each family in turn."""
    name, config = (FAMILIES | HYBRIDS)[request.param]
    return checkpoint(name, **config)


@pytest.fixture(scope="session")
def llama(checkpoint: Checkpoint) -> Path:
    """A checkpoint without a tokenizer."""
    return checkpoint("Llama", **FAMILIES["llama"][1])


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    save_random("Llama", SIZES, folder)
    save_tokenizer(folder)
    return folder


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[answer] {% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """A byte-fallback BPE like Llama 2's: 3 special tokens, 256 bytes, and 61 letters and merges of some English."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE())
    trained.normalizer = spaces
    english = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?", "hello the other"]
    size = VOCAB - len(special) - 256
    trained.train_from_iterator(english, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    found = json.loads(trained.to_str())["model"]
    entries = special + [f"<0x{byte:02X}>" for byte in range(256)] + sorted(found["vocab"], key=found["vocab"].get)
    assert len(entries) == VOCAB
    tokenizer = Tokenizer(
        models.BPE(
            vocab={entry: number for number, entry in enumerate(entries)},
            merges=[tuple(merge) for merge in found["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(folder)


MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def save_embedder(model: Path, folder: Path) -> Path:
    """Copy a model as sentence-transformers has it: without a head, with names that begin at its layers."""
    shutil.copytree(model, folder)
    tensors = {name.removeprefix("model."): t for name, t in load_file(model / "model.safetensors").items()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    listed = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(MODULES.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == "lasttoken" for name in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**modes, "include_prompt": True}))
    return folder


@pytest.fixture(scope="session")
def shared_generator(talker: Path) -> Iterator[Generator]:
    with Generator(talker, seed=0, max_seqs=8, max_step_tokens=64, page_size=16) as gen:
        yield gen


@pytest.fixture
def gen(shared_generator: Generator) -> Iterator[Generator]:
    """A Generator with a tokenizer, 8 lanes and steps of 64 tokens, which a test has to leave with nothing running."""
    assert shared_generator.unfinished == 0
    yield shared_generator
    assert shared_generator.unfinished == 0
    check_idle(shared_generator)


@pytest.fixture
def fggen(gen: Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """fggen(*arguments) runs the command with that Generator, in an empty folder; its status."""
    from fastgen.cli.gen import main

    monkeypatch.setattr(main, "_load", lambda args: gen)
    monkeypatch.setattr(Generator, "close", lambda self: None)  # it is used again
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main.main(["random", *map(str, arguments)])


def check_idle(gen: Generator) -> None:
    """Nothing is kept of what has run."""
    assert gen.step() == []  # reads a token too many, if one is on its way
    check_scheduler(gen._loop.scheduler)
    stats = gen.stats
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert not gen._loop.owners


def new_weights(folder: Path, seed: int = 1) -> dict[str, Tensor]:
    """Other weights of the shapes of a checkpoint's text model, by name: a state dict in float32."""
    draw = torch.Generator().manual_seed(seed)
    old = load_file(folder / "model.safetensors")
    text = {text_name(name): t for name, t in old.items() if not name.startswith(UNUSED)}
    return {name: t + 0.1 * torch.randn(t.shape, generator=draw) for name, t in text.items()}


def hf_logits(folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """What transformers makes of ids: float32 [T, V], which must not be changed."""
    return _hf_logits(folder, tuple(ids), dtype)


@lru_cache(50)
def _hf_logits(folder: Path, ids: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode():
        return hf_model(folder, dtype)(torch.tensor([ids])).logits[0].float()


_hf_models: dict[tuple[Path, torch.dtype], Any] = {}


def hf_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    if (folder, dtype) not in _hf_models:
        _hf_models[folder, dtype] = load_reference(folder, dtype)
    return _hf_models[folder, dtype]


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(3, VOCAB, length).tolist()


def allow(row: np.ndarray, tokens: Sequence[int] | np.ndarray) -> None:
    """Let a mask row allow just these tokens."""
    bits = np.zeros(32 * len(row), dtype=np.uint8)
    bits[tokens] = 1
    row[:] = np.packbits(bits, bitorder="little").view(np.int32)


class Script:
    """A mask that makes the model say exactly these ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.said: list[int] = []

    def fill(self, row: np.ndarray) -> None:
        allow(row, [self.ids[len(self.said)]])

    def accept(self, token: int) -> None:
        self.said.append(token)


class Turns:
    """A mask whose k-th token is k modulo 5."""

    def __init__(self) -> None:
        self.count = 0

    def fill(self, row: np.ndarray) -> None:
        allow(row, np.arange(self.count % 5, VOCAB, 5))

    def accept(self, token: int) -> None:
        assert token % 5 == self.count % 5
        self.count += 1


@pytest.fixture
def fresh_configs() -> Iterator[None]:
    """Forget how products are cut up, around a test that changes what decides it."""
    batch_invariant.config.cache_clear()
    yield
    batch_invariant.config.cache_clear()


@pytest.fixture(scope="session")
def rollout_server(talker: Path) -> Iterator[Any]:
    """A server of `talker` for trainers, with the key "secret", which all requests have."""
    from serving import FGSERVE, Server

    options = ("--rollout", "--api-key", "secret", "--logprobs-mode", "processed_logprobs")
    with Server(FGSERVE, str(talker), *options, key="secret") as server:
        yield server.await_ready()


@pytest.fixture(scope="session")
def here(talker: Path) -> Iterator[Generator]:
    """The Generator whose answers those of `rollout_server` are compared with; a test leaves it with its weights."""
    with Generator(talker, page_size=16, num_pages=300) as gen:
        yield gen


@pytest.fixture(scope="session")
def bundled_server() -> Iterator[Any]:
    """A server of the bundled model, which ends well after all its tests."""
    from serving import FGSERVE, Server, alive

    server = Server(FGSERVE, "--seed", "1", "--grammar-timeout", "1")
    assert server.get("/ready").status_code == 503, "the port opens before the model is there"
    server.await_ready()
    (engine,) = server.engines()
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert not alive(engine)
    assert "Traceback" not in server.said


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of the bundled model with the tool calls of Hermes, a short context, and the key "secret"."""
    from asking import save_caller  # they import the openai package, in a second
    from serving import FGSERVE, Server

    folder = save_caller("hermes", tmp_path_factory.mktemp("caller") / "hermes")
    with Server(FGSERVE, "--tokenizer", str(folder), "--api-key", "secret", "--max-model-len", "512") as server:
        yield server.await_ready()
