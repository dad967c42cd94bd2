"""Installation: all extras resolve on PyPI, and the wheel works in an empty environment like the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PIP = "pip==26.3"  # pip 23.3 is the first that resolves without downloading the wheels
ADDITION = "what is 12 + 30?"


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)


def canonical(name: str) -> str:
    """Return the name of a project as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def copy_checkout(folder: Path) -> None:
    """Copy what an installation needs, without files of earlier builds."""
    shutil.copytree(ROOT / "fastgen", folder / "fastgen", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copy_checkout(source)
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, source)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


# ---------------------------------------------------------------------------------------------------- resolving


@pytest.fixture(scope="module")
def plain_pip(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """The command of a new pip and its environment, without this machine's configuration except for network access.
    Skips if, and only if, the index that pip comes from cannot be reached."""
    ours = {"PIP_CERT", "PIP_PROXY"}
    environment = {name: value for name, value in os.environ.items() if name in ours or not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    target = tmp_path_factory.mktemp("pip")
    quick = ("--no-cache-dir", "--retries", "1", "--timeout", "15", "--target", str(target))
    fetched = run(sys.executable, "-m", "pip", "install", "--no-deps", *quick, PIP, env=environment)
    if fetched.returncode != 0:
        assert "(from versions: none)" in fetched.stderr, fetched.stderr
        pytest.skip(f"nothing was resolved, because PyPI cannot be reached: {fetched.stderr.splitlines()[0]}")
    return [sys.executable, str(target / "pip")], environment


@pytest.mark.parametrize("python", PYTHONS)
def test_all_extras_resolve_with_nothing_but_the_index(
    python: str, wheel: Path, plain_pip: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    """Resolve all extras together, which implies that each of them resolves. pip fetches only metadata. It takes wheels
    for the version `python`, but evaluates dependencies' markers for the Python that runs it."""
    command, environment = plain_pip
    everything = f"fastgen[{','.join(EXTRAS)}] @ {wheel.as_uri()}"
    constraints, report = ROOT / "constraints.txt", tmp_path / "report.json"
    nothing = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--report", report)
    other_python = ("--python-version", python, "--only-binary=:all:", "--target", tmp_path / "unused")
    resolved = run(*command, "install", *nothing, *other_python, "-c", constraints, everything, env=environment)
    assert resolved.returncode == 0, resolved.stdout[-3000:] + resolved.stderr

    installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {canonical(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in installed}
    pins = re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    assert {canonical(name): version for name, version in pins}.items() <= found.items(), "a pin that nothing needs"


# ---------------------------------------------------------------------------------------------------- the wheel


def test_an_editable_installation_works_beside_a_checkout_named_fastgen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Import fastgen where the current folder has the checkout, a folder named fastgen without __init__.py."""
    checkout, site = tmp_path / "fastgen", tmp_path / "site"
    site.mkdir()
    copy_checkout(checkout)
    builder = f"from setuptools.build_meta import build_editable; build_editable({str(site)!r})"
    built = run(sys.executable, "-c", builder, cwd=checkout)
    assert built.returncode == 0, built.stderr
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = f"import site; site.addsitedir({str(site)!r}); import fastgen; print(fastgen.__file__)"
    # -S: without the packages of these tests, which include another fastgen.
    assert run(sys.executable, "-S", "-c", program).stdout.strip() == str(checkout / "fastgen" / "__init__.py")


def test_the_wheel_has_all_files_of_the_package(wheel: Path) -> None:
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastgen").rglob("*") if path.is_file()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fastgen/")}
    assert packed == {name for name in there if "__pycache__" not in name}


@contextmanager
def environment(package: str | Path, constraints: Path) -> Iterator[Path]:
    """Make an environment with one package and its dependencies, which may take gigabytes. Yield the folder of its
    commands."""
    with tempfile.TemporaryDirectory() as folder:
        assert run(sys.executable, "-m", "venv", folder).returncode == 0
        commands = Path(folder) / ("Scripts" if os.name == "nt" else "bin")
        installed = run(commands / "pip", "install", "--no-compile", "-c", constraints, package)
        assert installed.returncode == 0, installed.stderr
        checked = run(commands / "pip", "check")
        assert checked.returncode == 0, checked.stdout
        yield commands


@pytest.fixture(scope="module")
def scripts(wheel: Path) -> Iterator[Path]:
    """The folder of the commands of an environment that has the wheel and no extra."""
    with environment(wheel, ROOT / "constraints.txt") as commands:
        yield commands


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder in which no process finds the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_the_wheel_answers_as_the_checkout_does(
    scripts: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--device", "cpu", "--temperature", "0")
    there = run(scripts / "fgchat", *options, input=ADDITION)
    assert there.returncode == 0, there.stderr
    assert "42" in there.stdout

    prompts, answers = elsewhere / "in.jsonl", elsewhere / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": ADDITION}) + "\n", encoding="utf-8")
    done = run(scripts / "fggen", "fastgen-tiny", prompts, "-o", answers, "--chat", *options)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(answers.read_text(encoding="utf-8"))["completions"]
    assert answer in there.stdout

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    here = run(sys.executable, "-m", "fastgen.cli.chat", *options, input=ADDITION)
    assert here.stdout == there.stdout


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="some of the oldest versions have no wheel for this Python")
def test_the_oldest_versions_that_the_metadata_admits_do(wheel: Path, elsewhere: Path) -> None:
    """All packages have their oldest version except torch, whose oldest version is gigabytes on some indexes."""
    wanted = [*PROJECT["dependencies"], *EXTRAS["serve"], *EXTRAS["parquet"]]
    oldest = [each.replace(">=", "==") for each in wanted if not each.startswith("torch")]
    oldest += re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    (elsewhere / "oldest.txt").write_text("\n".join(oldest), encoding="utf-8")
    (elsewhere / "in.jsonl").write_text(json.dumps({"prompt": ADDITION}) + "\n", encoding="utf-8")
    model = shutil.copytree(ROOT / "fastgen" / "tiny", elsewhere / "model")
    # A Mistral whose tokenizer has a class that transformers 5 writes and transformers 4 does not know.
    for name, old, new in (
        ("config.json", "llama", "mistral"), ("tokenizer_config.json", "PreTrainedTokenizerFast", "TokenizersBackend"),
    ):  # fmt: skip
        text = (model / name).read_text(encoding="utf-8")
        (model / name).write_text(text.replace(old, new), encoding="utf-8")
    options = ("--device", "cpu", "--temperature", "0")
    with environment(f"fastgen[serve,parquet] @ {wheel.as_uri()}", elsewhere / "oldest.txt") as commands:
        said = run(commands / "fgchat", *options, input=ADDITION)
        assert "42" in said.stdout, said.stderr
        done = run(commands / "fggen", model, "in.jsonl", "-o", "out.parquet", "--chat", *options)
        assert done.returncode == 0, done.stderr
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with subprocess.Popen([commands / "fgserve", "fastgen-tiny", "--port", str(port), *options[:2]]) as server:
            try:
                while server.poll() is None and not listens(port):
                    time.sleep(0.2)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=60) as reply:
                    assert b"ChatRequest" in reply.read()
            finally:
                server.terminate()


def listens(port: int) -> bool:
    """Return whether there is a server at a port of this machine."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("command", "status", "extra"),
    [
        ("fgserve --help", 2, "serve"),
        ("fggen fastgen-tiny in.jsonl -o out.parquet", 1, "parquet"),
        ("fggen fastgen-tiny in.jsonl -o out.jsonl --ray", 1, "ray"),
        ("fggen fastgen-tiny in.jsonl -o out.jsonl --url http://localhost:1", 1, "openai"),
    ],
)
def test_an_extra_that_is_not_installed_is_a_line_with_the_command_that_installs_it(
    command: str, status: int, extra: str, scripts: Path, elsewhere: Path
) -> None:
    (elsewhere / "in.jsonl").write_text(json.dumps({"prompt": ADDITION}) + "\n", encoding="utf-8")
    name, *arguments = command.split()
    said = run(scripts / name, *arguments)
    assert (said.returncode, said.stdout) == (status, "")
    assert extra in EXTRAS
    line = (
        rf"{name}: error: .* cannot be used: the package \w+ is not installed; run: pip install 'fastgen\[{extra}\]'\n"
    )
    assert re.fullmatch(line, said.stderr), said.stderr


def test_fgchat_needs_no_extra_for_a_server(scripts: Path) -> None:
    said = run(scripts / "fgchat", "--url", "http://localhost:1")
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr.startswith("fgchat: error: no connection to http://localhost:1/v1"), said.stderr
