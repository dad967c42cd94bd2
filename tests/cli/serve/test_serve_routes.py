"""routes.py: modules of routes are imported when they are asked for, and installed packages add routes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from starlette.testclient import TestClient

from fastgen.cli.serve.app import make_app
from fastgen.cli.serve.options import read_options
from fastgen.cli.serve.routes import MODULES, TRAINER_MODULES, RouteModule
from fastgen.cli.serve.service import Service

ROOT = Path(__file__).parents[3]


def client(*flags: str) -> TestClient:
    return TestClient(make_app(Service(read_options(["one", *flags], {}))), "http://localhost")


@pytest.mark.parametrize("module", MODULES + TRAINER_MODULES, ids=lambda module: module.name)
def test_the_table_has_the_paths_of_each_module(module: RouteModule) -> None:
    routes = module.load().routes(Service(read_options(["one"], {})))
    for name in ("posts", "gets", "dialects"):
        assert set(getattr(module, name)) == getattr(routes, name).keys()


def test_a_module_is_imported_by_the_first_request_to_its_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = RouteModule.load

    def record(module: RouteModule) -> ModuleType:
        loaded.append(module.name)
        return load(module)

    monkeypatch.setattr(RouteModule, "load", record)
    server = client("--rollout")
    assert server.get("/health").status_code == 503
    assert server.post("/v1/chat/completions", json={}).status_code == 400
    assert server.get("/v1/messages").status_code == 405
    assert set(loaded) <= {"dialects.anthropic"}, "for the form of its error"
    assert server.post("/v1/embeddings", json={}).status_code == 400
    assert server.get("/loads").status_code == 503
    assert set(loaded) == {"dialects.anthropic", "embeddings", "dialects.sglang"}
    for body, field in (({"text": 5}, "text"), ({"prompt": "a", "id": 5}, "id")):  # SGLang's, and our own
        assert server.post("/generate", json=body).json()["error"]["param"] == field
    assert loaded.count("dialects.sglang") == 1, "and its state is there once"
    sources = (ROOT / "fastgen" / "cli" / "serve").glob("*.py")
    assert not [path for path in sources if re.search(r"import .*dialects|from \S*dialects", path.read_text("utf-8"))]


def install(folder: Path, code: str, value: str = "fgserve_words:routes") -> None:
    """Install a package with an entry point in a folder, as pip does."""
    info = folder / "fgserve_words-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fgserve-words\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastgen.routes]\nwords = {value}\n")
    (folder / "fgserve_words.py").write_text(code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules and packages can be imported. Its module is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fgserve_words", raising=False)
    return tmp_path


def test_the_guide_s_package_adds_routes(folder: Path) -> None:
    guide = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
    code = re.findall(r"```python no-test\n(# fgserve_words.py\n.*?)```", guide, re.DOTALL)[0]
    value = re.findall(r'entry-points."fastgen.routes"\]\nwords = "(.*?)"', guide)[0]
    install(folder, code, value)
    server = client("--api-key", "secret")
    assert server.post("/v1/words", json={"text": "a b"}).status_code == 401
    server.headers["Authorization"] = "Bearer secret"
    for prefix in ("/v1", ""):
        assert server.post(f"{prefix}/words", json={"text": "a b"}).json() == {"words": 2}
        assert server.get(f"{prefix}/words/models").json() == {"models": ["one"]}
    told = server.post("/words", json={"text": "a b", "colour": "red"})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "colour")
    assert server.get("/words").status_code == 405
    described = server.get("/openapi.json").json()
    assert {"/v1/words", "/v1/words/models"} <= described["paths"].keys()
    assert "WordsRequest" in described["components"]["schemas"]


IMPORT = "from fastgen.cli.serve.routes import Post, Routes\nfrom fastgen.cli.serve.validation import Strict\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: module 'fgserve_words' has no attribute 'routes'"),
        ("routes = 5", "TypeError: 'int' object is not callable"),
        ("def routes(service): return {}", "TypeError: it returns dict instead of"),
        (f"{IMPORT}def routes(service): return Routes(gets={{'/models': None}})", "its path '/models' exists already"),
        (f"{IMPORT}def routes(service): return Routes(gets={{'words': None}})", "its path 'words' does not begin with"),
        (
            f"{IMPORT}def routes(service): return Routes(dialects={{'/generate': {{'a': Post(Strict, None)}}}})",
            "its dialect is for a post to '/generate', which does not exist",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_named_at_the_start(folder: Path, code: str, reason: str) -> None:
    install(folder, code)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        client()
    place = "the entry point `words = fgserve_words:routes` of the package fgserve-words in the group fastgen.routes"
    assert str(error.value).startswith(place)
    assert str(error.value).endswith("; correct or uninstall it")
