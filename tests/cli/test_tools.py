"""fgchat, fggen and fgserve: a model that cannot be loaded is one line, and the exit status 1."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest

from fastgen import Generator
from fastgen.cli import chat
from fastgen.cli.command import run_tool
from fastgen.cli.gen import main as gen
from fastgen.cli.gen.options import make_parser as gen_parser
from fastgen.cli.options import Parser
from fastgen.cli.serve import main as serve
from fastgen.cli.serve.options import make_parser as serve_parser
from fastgen.model.loader import BUNDLED

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another format, `model`, and an input, `rows.jsonl`, in the current folder."""
    (tmp_path / "model").mkdir()
    shutil.copy(BUNDLED / "config.json", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello"}\n')
    monkeypatch.chdir(tmp_path)


PICKLED = "error: model/model.safetensors is missing, and there is pytorch_model.bin"


def test_a_checkpoint_of_another_format_is_one_line(pickled: None, capsys: pytest.CaptureFixture[str]) -> None:
    for tool, main, more in (("fgchat", chat.main, ()), ("fggen", gen.main, ("rows.jsonl", "-o", "out.jsonl"))):
        status, told = main(["model", *more, "--language-model-only"]), capsys.readouterr()
        assert (status, told.out, told.err.count("\n")) == (1, "", 1)
        assert told.err.startswith(f"{tool}: {PICKLED}")


@pytest.mark.long
def test_a_server_of_such_a_checkpoint_ends(pickled: None) -> None:
    command = [sys.executable, "-m", "fastgen.cli.serve.main", "model", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    told = [line for line in ended.stderr.splitlines() if not re.match("fgserve: (listening at|chat page:)", line)]
    assert (ended.returncode, ended.stdout, len(told)) == (1, "", 1), ended.stderr
    assert told[0].startswith(f"fgserve: {PICKLED}")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--tensor-parallel-size=2", "there is no --tensor-parallel-size; use --tensor-parallel"),
        ("--no-enable-prefix-caching", "there is no --no-enable-prefix-caching; use --no-prefix-cache"),
        ("--max-new-tokens=3", "there is no --max-new-tokens; use --max-tokens"),
        ("--max-seq", "there is no --max-seq; use --max-seqs"),
        ("--zzz", "there is no --zzz"),
        ("--bogus", "there is no --bogus"),
        ("--verbos", "there is no --verbos; use --verbose"),
        ("--enforce-eager", "there is no --enforce-eager; leave it out"),
        (
            "--stop-token-ids=3",
            "there is no --stop-token-ids; stop_token_ids is a parameter of each request (SamplingParams in Python)",
        ),
    ],
)
def test_an_unknown_flag_is_one_line_that_says_what_takes_its_place(
    given: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for parser, others in ((serve_parser(), ["model"]), (gen_parser(), ["model", "rows.jsonl", "-o", "out.jsonl"])):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([*others, given])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"{parser.prog}: error: {hint}; {parser.prog} --help lists the options\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("fggen in.jsonl -o o.jsonl", "MODEL is missing: the first argument, in.jsonl, is an INPUT"),
        ("fggen a.csv.gz b/c.parquet -o o.jsonl", "MODEL is missing: the first argument, a.csv.gz, is an INPUT"),
        ("fggen - -o o.jsonl", "MODEL is missing: the first argument, -, is an INPUT"),
        ("fggen some/model -o o.jsonl", "INPUT is missing: the only argument, some/model, is the MODEL"),
        ("fggen --model some/model in.jsonl -o o.jsonl", "there is no --model; give MODEL without it"),
        ("fggen m in.jsonl -o o.jsonl --max-tokens 0", "--max-tokens is 0, so nothing would be computed; ask for at"),
        ("fggen m in.jsonl -o o.jsonl --regex a --choice b", "--regex and --choice are given together; give one"),
        ("fggen generate m in.jsonl -o o.jsonl", "fggen has no subcommands; leave 'generate' out"),
        ("fggen gen m in.jsonl -o o.jsonl", "fggen has no subcommands; leave 'gen' out"),
        ("fgserve serve some/model", "fgserve has no subcommands; leave 'serve' out"),
        ("fgserve --model some/model", "there is no --model; give MODEL without it"),
        (
            "fgserve --rollout --replicas 2 --max-replicas 3",
            "--rollout needs a fixed number of replicas, which it",
        ),
        ("fggen m in.jsonl -o o.jsonl --max-model-len 0", "--max-model-len is 0; it must be at least 1"),
        ("fgchat --kv-cache-gb x", "--kv-cache-gb is 'x'; it must be a number"),
        ("fgserve --chat-template none/a", "--chat-template: No such file or directory: 'none/a'"),
        ("fgserve --config none/a.yaml", "--config: No such file or directory: 'none/a.yaml'"),
        ("fgserve a a", "two models are called 'a'; give one of them another name in a file of --config"),
        ("fgchat chat some/model", "fgchat has no subcommands; leave 'chat' out"),
    ],
)
def test_a_wrong_command_line_is_told_in_its_own_words(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, *arguments = command.split()
    with pytest.raises(SystemExit, match="2"):
        {"fggen": gen.main, "fgserve": serve.main, "fgchat": chat.main}[tool](arguments)
    assert capsys.readouterr().err.startswith(f"{tool}: error: {told}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("max_seqs=8 and n=1: raise memory_fraction", "--max-seqs 8 and --n 1: raise --memory-fraction"),
        ("speculate='int4' needs tensor_parallel=1", "--speculate int4 needs --tensor-parallel 1"),
        ("leave prefix_cache=False out", "leave --no-prefix-cache out"),
        ("deterministic=True needs Triton; install it, or leave deterministic out",
         "--deterministic needs Triton; install it, or leave --deterministic out"),
        ("device is 'x'; use device='cpu'", "--device is 'x'; use --device cpu"),
        ("adapters load; the tokenizer is old", "adapters load; the tokenizer is old"),
        ("/a/max_seqs/dtype: no file 'max_seqs'", "/a/max_seqs/dtype: no file 'max_seqs'"),
        ("serve.yaml: max_seqs is 0", "serve.yaml: max_seqs is 0"),
        ("serve.yaml: there is no option 'a'; the options are max_seqs, max_tokens",
         "serve.yaml: there is no option 'a'; the options are max_seqs, max_tokens"),
        ('from_pretrained(folder, dtype="auto")', 'from_pretrained(folder, dtype="auto")'),
        ("regex: it has no end", "--regex: it has no end"),
        ("row 3: max_tokens is 0", "row 3: max_tokens is 0"),
    ],
)  # fmt: skip
def test_options_in_errors_are_flags(said: str, told: str) -> None:
    assert gen_parser().in_flags(said) == told


def test_a_warning_names_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def warn() -> int:
        logging.getLogger("fastgen.start").warning("the pool is small; raise num_pages or memory_fraction")
        return 0

    assert run_tool("fggen", False, warn, gen_parser().in_flags) == 0
    line = "WARNING fastgen.start: the pool is small; raise --num-pages or --memory-fraction\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"tokenizer": "/none"}, "--tokenizer: there is no folder /none"),
        ({"adapter": "/none"}, "--adapter is '/none', in which adapter_config.json is missing"),
        ({"speculate": "fastgen-tiny/none"}, "--speculate: 'fastgen-tiny/none' is neither a folder nor a head"),
        ({"speculate": "none"}, "--speculate is 'none'; it must be 'auto', 'ngram', 'int4', 'off', or the folder"),
        ({"quantization": "awq"}, "--quantization awq does not fit the checkpoint, which is not quantized; leave --q"),
    ],
)
def test_an_error_of_a_model_names_the_flag_that_caused_it(option: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=next(iter(option))) as error:
        Generator(**option)  # type: ignore[arg-type]
    assert told in gen_parser().in_flags(str(error.value))
    assert "Speculation" not in gen_parser().in_flags(str(error.value))


@pytest.mark.parametrize("make_parser", [gen_parser, serve_parser, chat._parser])
def test_the_help_has_a_short_usage_line_one_form_of_defaults_and_two_examples(
    make_parser: Callable[[], Parser],
) -> None:
    parser = make_parser()
    text = parser.format_help()
    usage, examples = text.partition("\n")[0], text.partition("Examples:\n\n")[2].splitlines()
    assert usage.startswith(f"usage: {parser.prog} ")
    assert len(usage) < 70
    assert len(examples) == 2
    for example in examples:
        command = re.split(r"\s{2,}", example.strip())[0]
        parser.parse_intermixed_args(shlex.split(command)[1:])
    assert not re.search(r"default: (True|False|None|no)\)|\[\w+: ", text)


@pytest.mark.parametrize("make_parser", [gen_parser, serve_parser])
def test_a_shell_completes_options_and_files(
    make_parser: Callable[[], ArgumentParser], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        make_parser().parse_args(["--print-completion", "bash"])
    script = capsys.readouterr().out
    (name,) = re.findall(r"^complete .*-F (\w+)", script, re.M)
    (tmp_path / "some.yaml").touch()
    for words, completed in (("--max-step-t", "--max-step-tokens"), ("--adapter some", "some.yaml")):
        typed = f"COMP_WORDS=(tool {words}); COMP_CWORD={len(words.split())}; {name}; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", script + typed], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.split() == [completed], done.stderr
