"""The options of fgserve: flags, the file and the variable of the key, and their precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen.cli import serve
from fastgen.cli.options import flag
from fastgen.cli.options import read as read_text
from fastgen.cli.serve.options import TABLE, ServeOptions, ServerOptions, read_options


def read(*argv: str, file: str | None = None, folder: Path | None = None, **environment: str) -> ServeOptions:
    if file is not None:
        assert folder is not None
        (folder / "serve.yaml").write_text(file)
        argv = (*argv, "--config", str(folder / "serve.yaml"))
    return read_options(argv, environment)


def test_the_defaults() -> None:
    options = read()
    assert options.server == ServerOptions()
    assert [(model.name, model.model, model.generator) for model in options.models] == [("fastgen-tiny", None, {})]


@pytest.mark.parametrize("name", TABLE)
def test_flags_go_before_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in "abc":
        Path(text).write_text(text)  # chat_template is the text of a file
    option = TABLE[name]
    texts: dict[Any, tuple[str, ...]] = {int: ("3", "4"), float: ("0.25", "0.5")}
    texts |= {bool: ("true", "false")}
    words = ("http://a", "http://b") if name == "allow_origin" else ("a", "b")
    first, second = [*option.choices * 2][:2] or texts.get(option.kind, words)

    def value(options: ServeOptions) -> Any:
        (model,) = options.models
        given = {**vars(options.server), **model.generator, "chat_template": model.chat_template}
        return model.name if name == "served_model_name" else given[name]

    def parsed(text: str) -> Any:
        return text == "true" if option.kind is bool else read_text(option, text)

    file = f"{name}: {first}"
    flags = (flag(name), second) if option.kind is not bool else (flag(name).replace("--", "--no-"),)
    assert value(read(file=file, folder=tmp_path)) == parsed(first)
    assert value(read(*flags, file=file, folder=tmp_path)) == parsed(second)


def test_the_variable_of_the_key_is_between_the_flag_and_the_file(tmp_path: Path) -> None:
    variable = {"file": "api_key: a", "folder": tmp_path, "FASTGEN_API_KEY": "b"}
    assert read(**variable).server.api_key == "b"  # type: ignore[arg-type]
    assert read("--api-key=c", **variable).server.api_key == "c"  # type: ignore[arg-type]


def test_models_of_the_file_have_their_own_settings(tmp_path: Path) -> None:
    file = "dtype: float16\nmodels: [a/b, {model: c, name: d, dtype: bfloat16, device: 'cuda:1'}]"
    first, second = read(file=file, folder=tmp_path).models
    assert (first.name, first.model, dict(first.generator)) == ("a/b", "a/b", {"dtype": "float16"})
    assert (second.name, second.model) == ("d", "c")
    assert dict(second.generator) == {"dtype": "bfloat16", "device": "cuda:1"}
    assert read("e", "--served-model-name", "x").models[0].name == "x"
    flagged = read("--dtype", "float32", file=file, folder=tmp_path).models
    assert [model.generator["dtype"] for model in flagged] == ["float32"] * 2
    assert [model.name for model in read("e", file=file, folder=tmp_path).models] == ["e"]
    (tmp_path / "own").write_text("{{ x }}")
    models = read(file=f"models: [a, {{model: b, chat_template: {tmp_path}/own}}]", folder=tmp_path).models
    assert [model.chat_template for model in models] == [None, "{{ x }}"]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_models_on_one_gpu_get_equal_parts_of_it(count: int) -> None:
    free, parts = 1.0, []
    models = read(*map(str, range(count))).models
    for model in models:
        parts.append(free * model.generator.get("memory_fraction", 0.9))
        free -= parts[-1]
    assert parts == pytest.approx([0.9 / count] * count)
    for model in models:  # it gets as much when it is started again
        share = {**model.generator, **model.again}.get("memory_fraction", 0.9)
        assert (free + parts[0]) * share == pytest.approx(parts[0])


def test_models_on_other_gpus_or_with_a_share_of_their_own_are_left_alone(tmp_path: Path) -> None:
    file = "models: [{name: a, device: 'cuda:0'}, {name: b, device: 'cuda:1'}, {name: c, device: cpu}]"
    models = read(file=file, folder=tmp_path).models
    assert not any("memory_fraction" in {**model.generator, **model.again} for model in models)
    file = "models: [{name: a, memory_fraction: 0.2}, {name: b, num_pages: 9}]"
    first, second = read(file=file, folder=tmp_path).models
    assert first.generator == {"memory_fraction": 0.2}
    assert second.generator == {"num_pages": 9}


@pytest.mark.parametrize(
    ("argv", "file", "environment", "said"),
    [
        (["--port", "70000"], None, {}, "--port is 70000; it must be at least 0 and at most 65535"),
        (["--api-key", ""], None, {}, "--api-key is empty; give it a value, or leave it out"),
        *((["--api-key", key], None, {}, "--api-key is empty, or has white") for key in (" ", "a ", "\ta", "a\nb")),
        ([], None, {"FASTGEN_API_KEY": "a\n"}, "--api-key is empty, or has white space"),
        (["--grammar-timeout=1e308"], None, {}, "--grammar-timeout is 1e+308; it must be above 0 and at most"),
        (["--max-body-mb=nan"], None, {}, "--max-body-mb is nan; it must be above 0"),
        (["--max-body-mb=1e308"], None, {}, "--max-body-mb is 1e+308; it must be above 0 and at most 1e+06"),
        ([], "restart: maybe", {}, "serve.yaml: restart is 'maybe'; it must be true or false"),
        (["--dtype", "int8"], None, {}, "--dtype is 'int8'; it must be one of 'auto', 'float32'"),
        ([], "prot: 3", {}, "serve.yaml: there is no option 'prot'"),
        ([], "api_key: 123", {}, "serve.yaml: api_key is 123; it must be a string, so put it in quotes"),
        ([], "port: [1]", {}, "serve.yaml: port is [1]; it must be a single value"),
        ([], "models: x", {}, "serve.yaml: models must be a list"),
        ([], "models: [{model: a, port: 3}]", {}, "serve.yaml: models[0]: there is no option 'port'"),
        ([], "port: 1\na: [b\n  c: d", {}, "serve.yaml is not YAML: line 3: expected ',' or ']', but got ':'"),
        ([], "port: 2026-13-45", {}, "serve.yaml is not YAML: month must be in 1..12"),
        ([], "[" * 5000, {}, "serve.yaml is not YAML: "),
        ([], "api_key:", {}, "serve.yaml: api_key is empty; give it a value, or leave it out"),
        ([], None, {"FASTGEN_API_KEY": ""}, "FASTGEN_API_KEY is empty; give it a value, or leave it out"),
        (["--replicas=2", "--max-replicas=1"], None, {}, "--max-replicas is 1, and --replicas is 2, which is more"),
        (["--replicas=2", "--ssl-certfile=a"], None, {}, "--ssl-certfile has no effect on replicas"),
        (["--allow-origin", "https://a.example b.example"], None, {}, "--allow-origin has 'b.example'; an origin is"),
        (["a", "a"], None, {}, "two models are called 'a'"),
        (["--config", "/nowhere"], None, {}, "No such file"),
        (["--served-model-name", "x", "a", "b"], None, {}, "two models are called 'x'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    argv: list[str],
    file: str | None,
    environment: dict[str, str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(*argv, file=file, folder=tmp_path, **environment)
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_file_in_another_encoding_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_bytes("port: 3".encode("utf-8-sig"))
    assert read("--config", str(file)).server.port == 3, "with a byte order mark"
    file.write_bytes("api_key: clé".encode("latin-1"))
    with pytest.raises(SystemExit):
        read("--config", str(file))
    assert f"{file} is not UTF-8; save it in that encoding" in capsys.readouterr().err


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "needed", interrupt)
    assert serve.command() == 130
    assert capsys.readouterr().err == "\n"
