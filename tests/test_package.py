"""The package as a user's process sees it: what importing it costs, its types, and that it changes nothing global."""

from __future__ import annotations

import inspect
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastgen
from fastgen import AsyncGenerator, SamplingParams
from fastgen.rl.remote import RemoteGenerator

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    """Return what a Python process of its own prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------ importing


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in fastgen.__all__:
        assert getattr(fastgen, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'fastgen' has no attribute 'Generater'"):
        fastgen.Generater  # noqa: B018
    with pytest.raises(ImportError, match="LLM"):
        from fastgen import LLM  # noqa: F401


def test_names_come_lazily_with_few_modules_after_torch_and_need_nothing_optional() -> None:
    """The number of modules stands for the time of an import, which other programs change."""
    code = """
import sys, fastgen
assert set(fastgen.__all__) < set(dir(fastgen)), dir(fastgen)
from fastgen import AsyncGenerator, Request, SamplingParams
from fastgen.rl.remote import RemoteGenerator
RemoteGenerator("http://localhost:1")
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
import torch
before = set(sys.modules)
from fastgen import Generator
others = {name for name in set(sys.modules) - before if not name.startswith("fastgen.")}
assert len(others) < 60, sorted(others)
assert Generator.__module__ == "fastgen.generator"
needless = {"transformers", "prompt_toolkit", "flash_attn", "ray"} & set(sys.modules)
assert torch.version.cuda or "triton" not in sys.modules
assert not needless, needless
gen = Generator(device="cpu")
assert "torch._dynamo" not in sys.modules, "a tokenizer needs none of torch's compiler"
gen.add("a")
gen.step()  # the program ends in the middle of a request, without a close
"""
    python(code)


def test_fgserve_without_its_extra_is_one_line() -> None:
    code = """
import contextlib, io, sys
sys.modules["uvicorn"] = None
from fastgen.cli.serve import command
with contextlib.redirect_stderr(io.StringIO()) as said:
    print(command())
print(said.getvalue())
"""
    missing = f"the package uvicorn is not installed; run: pip install -e '{ROOT}[serve]'"
    assert python(code) == f"2\nfgserve: error: fgserve cannot be used: {missing}\n\n"


@pytest.mark.parametrize(
    ("module", "prog"),
    [(f"fastgen {name}", f"fg{name}") for name in ("chat", "gen", "serve")]
    + [("fastgen.cli.gen", "fggen"), ("fastgen.cli.serve", "fgserve")],
)
def test_the_commands_are_modules_too(module: str, prog: str) -> None:
    done = subprocess.run([sys.executable, "-m", *module.split(), "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{prog} {fastgen.__version__}\n"), done.stderr


def test_the_package_as_a_module_says_what_it_takes() -> None:
    done = subprocess.run([sys.executable, "-m", "fastgen", "speak"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m fastgen takes chat, gen, serve, and then the options of that command\n"


def test_an_unknown_option_is_an_error_that_says_which_one_is_meant() -> None:
    with pytest.raises(TypeError, match=r"^AsyncGenerator has no option 'dtyp'; the nearest one is 'dtype'$"):
        AsyncGenerator(dtyp="bfloat16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^RemoteGenerator has no option 'tmeout'; the nearest one is 'timeout'$"):
        RemoteGenerator("http://localhost:1", tmeout=5)  # type: ignore[call-arg]
    for kind in (AsyncGenerator, RemoteGenerator):
        lines = str(kind.__init__.__doc__).splitlines()
        assert [line.partition(":")[0] for line in lines] == list(inspect.signature(kind).parameters)


TYPED = """
from fastgen import AsyncGenerator, Generator, SamplingParams
from fastgen.rl.remote import RemoteGenerator

with Generator("folder", max_seqs=4, dtype="bfloat16") as gen:
    reveal_type(gen.generate("a", SamplingParams(max_tokens=1, seed=2))[0].completions[0].token_ids)
    gen.generate("a", use_tqdm=False)  # Unexpected keyword argument "use_tqdm" for "generate" of "Generator"
    next(gen.stream("a")).outputs  # "RequestOutput" has no attribute "outputs"
    gen.get_tokenizer  # "Generator" has no attribute "get_tokenizer"
AsyncGenerator("folder", max_seqs=4, grammar_timeout=5, name="a")
RemoteGenerator("http://localhost:1", api_key="b", timeout=5)
Generator(dtyp="bfloat16")  # Unexpected keyword argument "dtyp" for "Generator"
Generator(max_seqs="4")  # Argument "max_seqs" to "Generator" has incompatible type "str"
Generator("folder", "main")  # Too many positional arguments for "Generator"
AsyncGenerator(dtyp="bfloat16")  # Unexpected keyword argument "dtyp" for "AsyncGenerator"
AsyncGenerator(grammar_timeout="5")  # Argument "grammar_timeout" to "AsyncGenerator" has incompatible type "str"
RemoteGenerator()  # Missing positional argument "url" in call to "RemoteGenerator"
RemoteGenerator("http://localhost:1", tmeout=5)  # Unexpected keyword argument "tmeout" for "RemoteGenerator"
SamplingParams(temprature=1)  # Unexpected keyword argument "temprature" for "SamplingParams"
SamplingParams(n="1")  # Argument "n" to "SamplingParams" has incompatible type "str"
"""


def test_mypy_sees_the_types_of_an_installed_fastgen(tmp_path: Path) -> None:
    """Check TYPED in an environment that has only this checkout: without torch, mypy takes less time."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site_packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site_packages / "fastgen.pth").write_text(f"{ROOT}\n")
    (tmp_path / "program.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", "env/bin/python", "program.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    checked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = re.findall(r"program.py:(\d+): error: ([^;[]*[^;[ ])", checked.stdout)
    lines = enumerate(TYPED.splitlines(), 1)
    assert found == [(str(at), line.partition("  # ")[2]) for at, line in lines if "  # " in line], checked.stdout
    assert 'Revealed type is "list[int]"' in checked.stdout, checked.stdout


# --------------------------------------------------------------------------------------------- global state


def global_state() -> Iterator[tuple[str, Any]]:
    yield "default dtype", torch.get_default_dtype()
    yield "default device", torch.get_default_device()
    yield "threads", (torch.get_num_threads(), torch.get_num_interop_threads())
    yield "grad", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    yield "deterministic", torch.are_deterministic_algorithms_enabled()
    yield "matmul precision", torch.get_float32_matmul_precision()
    yield "torch's random numbers", torch.random.get_rng_state().tolist()
    yield "python's random numbers", random.getstate()
    yield "numpy's random numbers", [np.asarray(part).tolist() for part in np.random.get_state()]


def test_kernels_are_not_needed() -> None:
    """Without Triton, as on systems other than Linux, the modules of kernels can be imported and their twins run."""
    code = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import fastgen.model.attention.paged, fastgen.kernels
for found in pkgutil.walk_packages(fastgen.kernels.__path__, "fastgen.kernels."):
    importlib.import_module(found.name)
assert fastgen.kernels.launch.triton is None
print("imported")
"""
    assert python(code).split() == ["imported"]


def test_making_and_using_generators_changes_nothing_global(llama: Path) -> None:
    before = dict(global_state())
    for options in ({"dtype": "bfloat16"}, {"load": "dummy"}, {}):
        with fastgen.Generator(llama, device="cpu", **options) as gen:  # type: ignore[arg-type]
            gen.generate([[1, 2, 3], [4]], SamplingParams(n=2, max_tokens=6))
            gen.generate([[]])
            gen.score([[5, 6, 7]])
    after = dict(global_state())
    assert [name for name in before if before[name] != after[name]] == []


def test_the_callers_random_numbers_and_default_dtype_do_not_reach_the_answers(llama: Path) -> None:
    answers = []
    for seed, dtype in ((1, torch.float32), (2, torch.float64)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            torch.set_default_dtype(dtype)
            try:
                gen = fastgen.Generator(llama, device="cpu", seed=5)
                answers.append(gen.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].completions)
                assert torch.get_default_dtype() is dtype
            finally:
                torch.set_default_dtype(torch.float32)
    assert answers[0] == answers[1]


def test_two_generators_live_in_one_process(llama: Path) -> None:
    """Their steps alternate, and each gives the answers that it gives without the other."""
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
    alone = [fastgen.Generator(llama, device="cpu").generate([prompt], params)[0].completions for prompt in prompts]
    gens = [fastgen.Generator(llama, device="cpu", page_size=page_size) for page_size in (1, 16)]
    for gen, prompt in zip(gens, prompts, strict=True):
        gen.add(prompt, params)
    said: list[list[int]] = [[], []]
    while any(gen.unfinished for gen in gens):
        for gen, tokens in zip(gens, said, strict=True):
            for event in gen.step():
                tokens += event.token_ids
    assert said == [completions[0].token_ids for completions in alone]
    gens[0].close()
    assert gens[1].generate([prompts[1]], params)[0].completions == alone[1]
