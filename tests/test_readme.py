"""The README's claims that a test can hold."""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fastgen.names import advice

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts" / "docs"))
import compare  # noqa: E402
import ratios  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_as_the_readme_has_it() -> None:
    command = next(line.strip() for line in README.splitlines() if line.strip().endswith("&& pytest"))
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_python_example_runs_and_the_model_is_mostly_right() -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    right = re.search(r"(\d+) of 400 samples are right", out.getvalue())
    assert right, out.getvalue()
    assert int(right[1]) > 340  # at temperature 0.8, and in the dtype that this CPU computes fastest


def test_the_table_and_the_picture_of_speed_are_those_of_the_measured_files() -> None:
    assert compare.table() in README
    assert compare.picture() == (ROOT / "docs" / "images" / "speed.svg").read_text(encoding="utf-8")
    assert ratios.picture() == (ROOT / "docs" / "images" / "ratios.svg").read_text(encoding="utf-8")


LONG = {"quickstart-train.md": pytest.mark.long}  # it trains
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", [pytest.param(page, marks=LONG.get(page, ())) for page in PAGES])
def test_the_code_of_a_guide_runs_and_its_links_lead_somewhere(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that begin with ```python run one after the other; those with ```python no-test are excerpts. Each block
    of ideas.md is a program that checks itself."""
    monkeypatch.chdir(tmp_path)  # some write files
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))  # as torchrun does
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        alone = page == "ideas.md"
        assert not alone or "\nassert " in code
        exec(compile(code, page, "exec"), {} if alone else names)
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_messages_of_the_troubleshooting_guide_exist() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "fastgen").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # parts of one literal
    messages = [part for cell in re.findall(r"^\| (.*?) \|", text, re.M) for part in re.findall("`([^`]+)`", cell)]
    assert len(messages) > 20
    assert [message for message in messages if message not in code and message != "max_tokens"] == []
    flags = set(re.findall(r"`--([a-z-]+)", text)) - {"device", "verbose"}
    assert [flag for flag in flags if not re.search(rf"\b{flag.replace('-', '_')}\b", code)] == []


def test_the_guide_for_users_of_vllm_has_all_names_that_errors_explain() -> None:
    guide = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8").replace("--", "").replace("-", "_")
    rows = [(set(re.findall(r"\w+", left)), right) for left, right in re.findall(r"^\| (.*) \| (.*) \|$", guide, re.M)]
    words = {name: re.findall(r"\w+", text) for name, text in (advice("argument") | advice("attribute")).items()}
    ours = {name: found[1] if found[0] == "use" else "no" for name, found in words.items()}
    assert [name for name in ours if not any(name in left and ours[name] in right for left, right in rows)] == []
    useless = {name for left, right in rows if right.startswith("nothing") for name in left}
    assert useless <= {name for name, our in ours.items() if our == "no"}
