"""fgchat in a pseudo-terminal and through a pipe: commands, answers, Ctrl-C and errors."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from chat_program import FakeGenerator
from serving import alive, children, until
from terminal import BANNER, ROOT, STATS, ask, at_prompt, leave, said, spawn

import fastgen
from fastgen.cli import chat
from fastgen.cli.chat_backends import LocalBackend, Reply
from fastgen.cli.chat_commands import COMMANDS, listed
from fastgen.cli.chat_console import Console
from fastgen.cli.chat_files import Conversation
from fastgen.cli.chat_session import Chat
from fastgen.cli.tab_completion import completed
from fastgen.request import SamplingParams

PROGRAM = str(ROOT / "tests" / "chat_program.py")

# A terminal


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., pexpect.spawn]]:
    """start(*command) runs a Python command in a pseudo-terminal; without one, fgchat over FakeGenerator."""
    children = []

    def run(*command: str, **environment: str) -> pexpect.spawn:
        children.append(spawn(tmp_path / "state", *(command or [PROGRAM]), **environment))
        return children[-1]

    yield run
    for child in children:
        child.close(force=True)


def test_banner_rounds_and_quit(start):
    child = start()
    assert at_prompt(child, 1) == BANNER
    child.sendline("hello")
    child.expect(STATS)
    assert said(child).endswith("\nuser:hello;\n")
    assert child.match[1] == "2"  # the end-of-answer token counts
    at_prompt(child, 2)
    assert "\nuser:hello;assistant:user:hello;;user:more;\n" in ask(child, "more", 3)
    assert "\na\u241b[2Jb\ufffdc\td\n" in ask(child, "escape", 4), "control characters are made visible"
    assert leave(child, "/q") == 0


def test_ctrl_c_while_loading(start):
    child = start(PROGRAM, "slow")
    child.expect("loading")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 130


def test_reset_and_wrong_commands(start):
    child = start()
    at_prompt(child, 1)
    ask(child, "one", 2)
    ask(child, "two", 3)
    for wrong in ("0", "4", "x"):
        assert f"\n/r {wrong}: no such round; N goes from 1 to 3, " in ask(child, f"/r {wrong}", 3)
    assert "\n/r needs <N>; /help lists the commands (" in ask(child, "/r", 3), "it drops nothing"
    assert "\n/q takes nothing after it; " in ask(child, "/q now", 3)
    assert "\nno command /x; /help lists the commands (" in ask(child, "/x", 3)
    ask(child, " /x", 4)  # a message
    ask(child, "/r 2", 2)
    assert "\nuser:one;assistant:user:one;;user:other;\n" in ask(child, "other", 3)
    ask(child, "/r 1", 1)
    assert "\nuser:fresh;\n" in ask(child, "fresh", 2)
    assert re.search(
        r"\n  Available commands:\n    /r <N> +-- reset (?s:.*)\n    /q +-- quit\n", ask(child, "/help", 2)
    )
    assert max(map(len, listed(COMMANDS).splitlines())) < 80, "a line of help fits a terminal"
    assert "user:quit;" in ask(child, " quit", 3)
    assert leave(child, "quit") == 0


def type_block(child: pexpect.spawn, *lines: str) -> None:
    """Type /m and lines, and Ctrl-D."""
    for line in ("/m", *lines):
        child.sendline(line)
        child.expect(r"\.\.\. ")
    child.sendeof()


def test_multiline_message(start):
    child = start()
    at_prompt(child, 1)
    for line in ("/m", "first", "  . second"):
        child.sendline(line)
    assert "\nuser:first\n  . second;\n" in ask(child, ".", 2)
    ask(child, "/r 1", 1)
    pasted = ask(child, "\x1b[200~pasted\n/q\x1b[201~", 2)  # a bracketed paste is one message
    assert "\nuser:pasted\n/q;\n" in pasted
    type_block(child, "by", "Ctrl-D")
    assert "user:by\nCtrl-D;\n" in at_prompt(child, 3)
    type_block(child)  # nothing to say
    at_prompt(child, 3)


def test_text_typed_ahead_is_the_next_message_and_not_in_the_answer(start):
    child = start(PROGRAM, "--max-tokens", "300")
    at_prompt(child, 1)
    child.sendline("count")
    child.expect(" 5 6 7 ")
    child.send("dropped by Ctrl-C")
    child.sendintr()
    child.expect(STATS)
    assert not re.search("[a-z]", said(child))
    at_prompt(child, 2)
    assert re.search(r"user:count;assistant:1 2 3 4 5 6 7 [\d ]*;user:go on;", ask(child, "go on", 3))
    child.sendline("count")
    child.expect(" 5 6 7 ")
    child.send("/r 1\nahead\n/m\nlines\n.\n\x04")
    child.expect(r"\(cut at max_tokens 300\)")
    assert re.fullmatch(rf"[\d \n]+\n{STATS}\n", said(child))
    child.expect(pexpect.EOF)
    child.wait()
    assert re.search(r"\nuser:ahead;\n(?s:.*);user:lines;\n", said(child))
    assert child.exitstatus == 0


def test_ctrl_c_at_the_prompt_clears_the_line(start):
    child = start()
    at_prompt(child, 1)
    child.send("never mind")
    child.sendintr()
    assert "(/q or Ctrl-D quits)" in at_prompt(child, 1)
    assert "\nuser:hello;\n" in ask(child, "hello", 2)
    child.sendline("/m")
    child.send("dropped")
    child.sendintr()
    at_prompt(child, 2)
    assert "assistant:user:hello;;user:kept;" in ask(child, "kept", 3)


def test_tab_completes_commands_settings_and_paths(start, tmp_path):
    (tmp_path / "some folder").mkdir()
    child = start()
    at_prompt(child, 1)
    assert "(system prompt: be short)" in ask(child, "/sy\tbe short", 1)
    assert "(temperature = 0.5)" in ask(child, "/set temp\t0.5", 1)
    assert "(saved; " in ask(child, f"/save {tmp_path}/so\tchat", 1)
    assert (tmp_path / "some folder" / "chat").is_file()
    assert "user:a/s" in ask(child, "a/s\t", 2), "no message is changed"
    assert completed("/re") == ["/regen"]
    assert completed("/set ignore_eos o") == ["/set ignore_eos off", "/set ignore_eos on"]
    assert completed("/set temperature ") == ["/set temperature default"]
    (tmp_path / ".hidden").touch()
    assert completed(f"/save {tmp_path}/s") == [f"/save {tmp_path}/some folder/", f"/save {tmp_path}/state/"]
    assert f"/save {tmp_path}/.hidden" not in completed(f"/save {tmp_path}/")
    assert completed("/save /no/such/folder/") == completed("/nothing ") == completed("hello") == []


def test_no_path_of_a_folder_that_only_lists_its_files_is_completed(monkeypatch, tmp_path):
    def refuses(path: Path) -> bool:
        raise PermissionError(path)

    (tmp_path / "file").touch()
    assert completed(f"/save {tmp_path}/") == [f"/save {tmp_path}/file"]
    monkeypatch.setattr(Path, "is_dir", refuses)
    assert completed(f"/save {tmp_path}/") == []


def test_history_survives_and_does_without_its_file(start, tmp_path):
    child = start()
    at_prompt(child, 1)
    ask(child, "remember", 2)
    assert leave(child, "/q") == 0
    child = start()
    at_prompt(child, 1)
    assert "\nuser:remember;\n" in ask(child, "\x1b[A\x1b[A", 2)  # up, past /q
    (tmp_path / "file").touch()
    child = start(XDG_STATE_HOME=str(tmp_path / "file"))
    at_prompt(child, 1)
    ask(child, "hello", 2)


def test_commands_that_change_the_conversation_and_a_saved_one_goes_on(start, tmp_path):
    child = start(PROGRAM, "a/model", "--top-p", "0.9", "--system", "short")
    at_prompt(child, 1)
    assert "system:short;user:one;\n" in ask(child, "one", 2)
    assert "\n(system prompt: be  long)\n" in ask(child, "/system be  long", 2)
    assert "\nsystem:be  long;user:one;\n" in ask(child, "/regen", 2), "the same round again"
    assert "\n(temperature = 0.3)\n" in ask(child, "/set temperature 0.3", 2)
    ask(child, "/set ignore-eos=on", 2)
    ask(child, "/set ignore_eos default", 2)
    listed = ask(child, "/set", 2)
    limit = r"max_tokens +to the [a-z ]+ \(default\)"
    for line in ("temperature +0.3", "top_p +0.9", r"min_p +0.0 \(default\)", limit):
        assert re.search(rf"\n  {line}\n", listed)
    wrong = {
        "warmth 1": "there is no setting warmth; there are ",
        "top_p 2": "top_p is 2.0; it must be",
        "n 2": "there is",
    }
    for typed, why in {**wrong, "top_k x": "top_k is 'x'; it must be a whole number"}.items():
        assert f"\n/set: {why}" in ask(child, f"/set {typed}", 2)
    assert "has no switch for thinking" in ask(child, "/set thinking off", 2)
    path = tmp_path / "a chat.json"
    assert f"\n(saved; fgchat --resume '{path}' goes on from here)\n" in ask(child, f"/save {path}", 2)
    ask(child, "/set max_tokens 3", 2)
    assert "user:two;\n(cut" not in ask(child, "two", 3)
    ask(child, f"/save {path}", 3)
    (tmp_path / "other").write_text("mine")
    assert "is not a conversation that /save has written" in ask(child, f"/save {tmp_path}/other", 3)
    assert f"\n/save: there is no folder {tmp_path}/no" in ask(child, f"/save {tmp_path}/no/file", 3)
    saved = json.loads(path.read_text())
    assert saved["model"] == {"model": "a/model"}
    assert saved["settings"] == {"top_p": 0.9, "temperature": 0.3, "max_tokens": 3}
    assert saved["messages"][0] == {"role": "system", "content": "be  long"}
    assert (tmp_path / "other").read_text() == "mine"

    child = start(PROGRAM, "--resume", str(path), "--temperature", "0.5")
    assert at_prompt(child, 3).endswith("(a conversation of 2 rounds goes on)\n")
    shown = ask(child, "/set", 3)
    assert re.search(r"\n  temperature +0.5\n  top_p +0.9\n", shown)
    ask(child, "/set max_tokens default", 3)
    assert "\n(no system prompt)\n" in ask(child, "/system", 3)
    assert "\nuser:one;assistant:system:be  long;user:one;;user:two;assistant:" in ask(child, "three", 4)
    assert leave(child, "/q") == 0


def test_lines_are_wrapped_at_words_but_for_code(start):
    child = start()
    child.setwinsize(50, 40)
    at_prompt(child, 1)
    words, code = "some words " * 12, "x = 'some code with a very long line of text'"
    child.sendline(f"\x1b[200~{words}\n```\n{code}\n```\x1b[201~")
    child.expect(STATS)
    answer = said(child)[said(child).index("user:") :]
    assert answer.splitlines()[:2] == ["user:some words some words some words", "some words some words some words some"]
    assert f"\n```\n{code}\n```;" in answer
    assert max(len(line) for line in answer.splitlines() if line != code) <= 40


def test_thinking_is_dimmed_and_can_be_turned_off(start, tmp_path):
    child = start(PROGRAM, "thinking")
    at_prompt(child, 1)
    child.sendline("think")
    child.expect(STATS)
    assert "let me see\n\nthe answer\n" in said(child)
    dimmed = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", child.before, re.DOTALL))
    assert dimmed.replace("\r", "") == "let me see\n\n"
    at_prompt(child, 2)
    assert "\nuser:think;assistant:the answer;user:and?;\n" in ask(child, "and?", 3), "the content without the thinking"
    ask(child, f"/save {tmp_path}/saved", 3)
    first = {"role": "assistant", "content": "the answer", "reasoning_content": "let me see"}
    assert json.loads((tmp_path / "saved").read_text())["messages"][1] == first
    assert "\n(thinking = off)\n" in ask(child, "/set thinking off", 3)
    assert re.search(rf"think\nthe answer\n{STATS}", ask(child, "think", 4))
    child = start(PROGRAM, "--resume", f"{tmp_path}/saved", "--no-thinking", "--max-tokens", "2")
    at_prompt(child, 3)
    assert "the answer" in ask(child, "think", 4)
    ask(child, "/set thinking on", 4)
    assert "(ended while the model was thinking; without an answer, this round is dropped)" in ask(child, "think", 4)


def test_a_dumb_terminal_gets_plain_lines(start):
    child = start(TERM="dumb")
    child.expect("1> ")
    assert child.before.replace("\r", "") == BANNER
    child.sendline("/m\na\nb\n.")
    child.expect("2> ")
    assert "user:a\nb;\n" in said(child)
    type_block(child, "c")
    child.expect("3> ")
    assert "user:c;\n" in said(child)
    assert leave(child) == 0


def test_stdout_in_a_file_gets_only_the_answers(start, tmp_path):
    command = f"{sys.executable} {PROGRAM} > {tmp_path}/out"
    child = start("-c", f"import os; os.execl('/bin/sh', 'sh', '-c', {command!r})")
    assert at_prompt(child, 1) == BANNER
    assert re.search(STATS, ask(child, "hello", 2))
    assert leave(child, "/q") == 0
    assert (tmp_path / "out").read_text() == "user:hello;\n"


# A pipe, in this process


@pytest.fixture
def pipe(monkeypatch, capsys):
    """pipe(lines) -> (exit status, stdout, stderr, the generator)."""

    def run(lines: str, system: str | None = None, **params: int) -> tuple[int, str, str, FakeGenerator]:
        gen = FakeGenerator()
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = chat.run(LocalBackend(gen, params), Conversation(system=system))
        return status, *capsys.readouterr(), gen

    return run


def test_a_pipe_prints_only_answers(pipe):
    status, out, err, gen = pipe("hello\n\n/m\nx\ny\n.\nquit", system="be short")
    assert status == 0
    assert out.splitlines()[0] == "system:be short;user:hello;"
    assert "Ready" not in out + err
    assert [line for line in err.splitlines() if line and not re.fullmatch(STATS, line)] == []
    assert gen.prompts[1][-1] == {"role": "user", "content": "x\ny"}
    assert [message["role"] for message in gen.prompts[1]] == ["system", "user", "assistant", "user"]
    assert gen.prompts[2][-1]["content"] == "quit", "a command in a terminal only"
    _, _, _, gen = pipe("caf\udce9\n")
    assert gen.prompts[0][0]["content"] == "caf?", "which a tokenizer takes"


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_kept(pipe):
    long = "x" * 201
    status, _, err, gen = pipe(f"{long}\nhello\n{long}\nagain\n")
    assert status == 1  # a script should know
    first, _, _, second, _, _ = err.splitlines()
    assert first == "the prompt has 201 tokens, above the context of 200"
    assert second.endswith("above the context of 200; /r N goes back before round N")
    assert [message["content"] for message in gen.prompts[1]] == ["hello", "user:hello;", "again"]


def test_a_cut_answer_says_what_cut_it(pipe, capsys):
    _, out, err, _ = pipe("count", max_tokens=3)
    assert out == "1 2 3 \n"
    assert err.endswith("\n(cut at max_tokens 3)\n")
    reply = Reply("text", num_tokens=3, finish_reason="length")
    Chat(LocalBackend(FakeGenerator(), {}), Console()).report(reply, 1.0)
    assert capsys.readouterr().err.endswith("\n(cut: the context of 200 tokens is full; /r N goes back)\n")


def test_ctrl_c_in_a_pipe_ends_it_after_the_step(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    gen = FakeGenerator()
    gen.on_step = lambda: signal.raise_signal(signal.SIGINT) if len(gen.said) == 3 else None
    monkeypatch.setattr(sys, "stdin", io.StringIO("count\nnever\n"))
    with pytest.raises(KeyboardInterrupt):
        chat.run(LocalBackend(gen, {}))
    assert capsys.readouterr().out == "1 2 3 \n"
    assert len(gen.prompts) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_pipe_and_an_engine_error_are_quiet_ends():
    command = f"{sys.executable} {PROGRAM}"
    shell = {"shell": True, "capture_output": True, "text": True, "timeout": 30, "executable": "/bin/bash"}
    shell["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
    head = subprocess.run(f"echo count | {command} 2>errors | head -c 4; cat errors; rm errors", **shell)
    assert head.stdout == "1 2 "
    broken = subprocess.run(f"echo break | {command}", **shell)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert broken.stderr == "fgchat: error: the engine broke\n"


# The command line, and the bundled model


@pytest.mark.parametrize(
    "options",
    ["--top-p 0", "--temperature nan", "--max-tokens 0", "--dtype int8", "--seed x", "--temp 1", "--tensor-parallel 0"]
    + [
        "--resume /no/file",
        "--resume pyproject.toml",
        "--api-key x",
        "--model x",
        *(f"--url http://x {local}" for local in ("a/model", "--device cpu")),
    ],
)
def test_bad_options_exit_2(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        chat.main(options.split())
    assert capsys.readouterr().err.splitlines()[-1].startswith("fgchat: error: ")


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (["--model", "folder"], 2, "--model needs a server; give its --url; a local model needs no flag;"),
        (["folder", "--url", "http://localhost"], 2, "MODEL needs a local model; leave it or --url out;"),
        (["--resume", "nowhere"], 2, "there is no file nowhere;"),
        (["--chat-template", "nowhere"], 2, "--chat-template: No such file or directory: 'nowhere';"),
        (
            ["--chat-template", "x", "--url", "http://x"],
            2,
            "--chat-template needs a local model; leave it or --url out;",
        ),
        (["--help"], 0, ""),
    ],
)
def test_wrong_options_and_help(options: list[str], status: int, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chat.main(options)
    out, err = capsys.readouterr()
    assert (ended.value.code, err.startswith(f"fgchat: error: {why}")) == (status, status == 2), err
    assert "in Python" not in out, "values that a command line cannot give"


def test_options_go_over_the_models_defaults(monkeypatch, capsys):
    made = []

    def make(model: str | None, **options: object) -> FakeGenerator:
        made.append(FakeGenerator(model, **options))
        made[0].default_params = SamplingParams(temperature=0.3, top_k=7, top_p=0.5)
        return made[0]

    monkeypatch.setattr(fastgen, "Generator", make)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    options = ["--top-p", "0.9", "--max-tokens", "5", "--seed", "3", "--system", "short", "--tensor-parallel", "4"]
    options += ["--max-model-len", "99", "--memory-fraction", "0.5"]
    assert chat.main(["a/model", *options, "-v"]) == 0
    (gen,) = made
    assert gen.params == SamplingParams(temperature=0.3, top_k=7, top_p=0.9, max_tokens=5)
    assert gen.prompts[0][0] == {"role": "system", "content": "short"}
    expected = {"seed": 3, "max_seqs": 1, "tensor_parallel": 4, "max_model_len": 99, "memory_fraction": 0.5}
    assert (gen.model, gen.options) == ("a/model", expected)
    assert gen.closed
    assert capsys.readouterr().err.endswith("some statistics\n")


def test_a_file_replaces_the_chat_template(monkeypatch, tmp_path):
    gen = FakeGenerator("thinking")
    monkeypatch.setattr(fastgen, "Generator", lambda **options: gen)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    (tmp_path / "template").write_text("<think>{{ messages[-1].content }}")
    assert chat.main(["--chat-template", str(tmp_path / "template")]) == 0
    assert gen.tokenizer is not None
    assert gen.tokenizer.hf.chat_template == "<think>{{ messages[-1].content }}"


# Several ranks

OPTIONS = ("--tensor-parallel", "2", "--device", "cpu", "--temperature", "0")


@pytest.mark.long
def test_two_ranks_in_a_terminal(start):
    """The terminal shows the same as with one process, a stopped answer leaves the conversation whole, and
    the death of a rank ends the chat with one line."""
    child = start("-m", "fastgen.cli.chat", *OPTIONS)
    shown = at_prompt(child, 1)
    assert re.fullmatch(rf"(loading weights: [^\n]*\n*)+{re.escape(BANNER)}", shown)
    ranks = children(child.pid)
    assert len(ranks) == 1, "this one is the other"
    assert re.search(rf"\n[^\n]*\b42\b[^\n]*\n{STATS}\n$", ask(child, "what is 12 + 30?", 2))
    child.sendline("please count from 1 to 100")
    child.expect("4, 5, 6")
    child.sendintr()
    child.sendintr()  # a second one does nothing more
    child.expect(STATS)
    assert "98, 99" not in said(child)
    at_prompt(child, 3)
    assert re.search(rf"\n[^\n]*\b4\b[^\n]*\n{STATS}\n$", ask(child, "what is 2 + 2?", 4))
    assert children(child.pid) == ranks
    assert "astgen" not in said(child), "neither a warning nor a trace"
    os.kill(ranks[0], signal.SIGKILL)
    child.sendline("hello")
    child.expect(pexpect.EOF)
    child.wait()
    assert re.search(r"\nfgchat: error: rank 1 was killed by SIGKILL [^\n]*\n$", said(child))
    assert child.exitstatus == 1
    until(lambda: not any(map(alive, ranks)))
