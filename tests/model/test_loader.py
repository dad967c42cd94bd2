"""loader.py: hub ids and folders, what is read of safetensors, and one clear error for each way a checkpoint is wrong.

The hub is a small HTTP server of this file, or a cache laid out by hand; huggingface_hub itself is the real one.
"""

import hashlib
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as some
from properties import EXAMPLES, holds_for
from safetensors.torch import save_file
from torch import Tensor

from fastgen.model import loader
from fastgen.model.loader import fill_random, load, resolve
from fastgen.model.weights import Shard, TensorMatcher, Update, write

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def small_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (8, 4), "model.layers.0.self_attn.q_proj.weight": (4, 4),
              "model.layers.0.self_attn.k_proj.weight": (2, 4), "model.norm.weight": (4,)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def empty_targets(dtype: torch.dtype = torch.float32) -> dict[str, Shard]:
    """Shards for `small_tensors`, q and k being rows of one fused parameter as they are in the model."""
    qk = torch.nn.Parameter(torch.zeros(6, 4, dtype=dtype))
    views = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in small_tensors().items()}
    views["model.layers.0.self_attn.q_proj.weight"] = qk[:4]
    views["model.layers.0.self_attn.k_proj.weight"] = qk[4:]
    return {name: Shard.whole(view) for name, view in views.items()}


def write_sharded(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Two shards and their index; returns the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    weight_map = {name: SHARDS[0 if place < len(names) // 2 else 1] for place, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# Folders


@pytest.mark.parametrize("sharded", [False, True])
def test_load_reads_a_folder(sharded: bool, tmp_path: Path) -> None:
    tensors, targets = small_tensors(), empty_targets()
    if sharded:
        write_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"another format of the same weights")
    (tmp_path / "model-extra.safetensors").write_bytes(b"not named by the index")
    load(targets, tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].view, tensor)


def test_index_wins_over_a_single_file_and_over_other_tensors_of_its_shards(tmp_path: Path) -> None:
    tensors = small_tensors()
    weight_map = write_sharded(tmp_path, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"stale")
    del weight_map["model.norm.weight"]
    write_index(tmp_path, weight_map)
    targets = empty_targets()
    del targets["model.norm.weight"]  # which would be unexpected if it were read
    load(targets, tmp_path)
    assert all(torch.equal(part.view, tensors[name]) for name, part in targets.items())


def test_what_models_have_no_place_for_is_skipped(tmp_path: Path) -> None:
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(8, 4)}
    save_file({**extras, **small_tensors()}, tmp_path / "model.safetensors")
    targets = empty_targets()  # a tied model: it has no lm_head.weight
    load(targets, tmp_path)
    untied = {**targets, "lm_head.weight": Shard.whole(torch.zeros(8, 4))}
    load(untied, tmp_path)
    assert untied["lm_head.weight"].view.eq(1).all()
    save_file(small_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing 1 of 5 tensors: lm_head\.weight"):
        load(untied, tmp_path)


def test_missing_tensors_are_listed_up_to_a_number() -> None:
    many = {f"model.layers.{layer}.w": Shard.whole(torch.zeros(1)) for layer in range(9)}
    with pytest.raises(ValueError, match=r"missing 9 of 9 tensors: model\.layers\.0\.w, .* and 4 more"):
        TensorMatcher(many).check_complete()


def test_progress_is_in_bytes_and_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "model.safetensors")
    targets = {"w": Shard.whole(torch.zeros(1 << 20))}
    load(targets, tmp_path)
    assert capsys.readouterr().err == ""
    load(targets, tmp_path, progress=True)
    shown = capsys.readouterr().err
    assert "100%" in shown
    assert "4.19M/4.19M" in shown


def break_nothing_there(folder: Path) -> None:
    for shard in [*SHARDS, "model.safetensors.index.json"]:
        (folder / shard).unlink()


def break_pickled(folder: Path) -> None:
    break_nothing_there(folder)
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"):
        (folder / name).write_bytes(b"a pickle")


def break_lost_shard(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()


def break_truncated(folder: Path) -> None:
    data = (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[1]).write_bytes(data[:-5])


def break_empty(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes(b"")


def break_pointer(folder: Path) -> None:
    (folder / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], size: int | None = None) -> None:
    """Change the header of a safetensors file, whose size is then told as `size` (None: as it is)."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    data = content[start:]
    changed = change(json.loads(content[8:start]))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)


def break_header_size(folder: Path) -> None:
    rewrite(folder / SHARDS[0], lambda header: header, size=10**6)


def break_header_json(folder: Path) -> None:
    rewrite(folder / SHARDS[0], lambda header: json.dumps(header).encode()[:-9])


def break_header_kind(folder: Path) -> None:
    rewrite(folder / SHARDS[0], list)


def break_offsets(folder: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
        last["data_offsets"][1] += 10**6
        return header

    rewrite(folder / SHARDS[0], change)


def break_dtype(folder: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        header["model.embed_tokens.weight"]["dtype"] = "I32"  # of the same size
        return header

    rewrite(folder / SHARDS[0], change)


def break_unknown_dtype(folder: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        header["model.embed_tokens.weight"]["dtype"] = "Q4"
        return header

    rewrite(folder / SHARDS[0], change)


def break_shape(folder: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        header["model.embed_tokens.weight"]["shape"].reverse()
        return header

    rewrite(folder / SHARDS[0], change)


def break_missing_tensor(folder: Path) -> None:
    weight_map = {name: shard for name, shard in write_sharded(folder, small_tensors()).items() if "norm" not in name}
    write_index(folder, weight_map)


def break_moved_tensor(folder: Path) -> None:
    write_index(folder, dict.fromkeys(small_tensors(), SHARDS[0]))


def break_index_elsewhere(folder: Path) -> None:
    write_index(folder, dict.fromkeys(small_tensors(), f"../{folder.name}/{SHARDS[0]}"))


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def break_index_by_depth(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing_there, r"model\.safetensors is missing, and there is no model\.safetensors\.index\.json"),
        (
            break_pickled,
            r"is missing, and there is pytorch_model-00001-of-00002\.bin instead; .*transformers: AutoModel",
        ),
        (break_lost_shard, rf"{SHARDS[1]} is missing, though model\.safetensors\.index\.json names it"),
        (break_truncated, rf"{SHARDS[1]} is truncated"),
        (break_empty, rf"{SHARDS[0]} is truncated"),
        (break_pointer, rf"{SHARDS[0]} is truncated or not a safetensors file"),
        (break_header_size, rf"{SHARDS[0]} is truncated or not a safetensors file .*; delete it and fetch it again"),
        (break_header_json, rf"{SHARDS[0]} is truncated or not a safetensors file .*JSON.*; delete it and fetch it"),
        (break_header_kind, rf"{SHARDS[0]} is truncated or not a safetensors file .*JSON.*; delete it and fetch it"),
        (
            break_offsets,
            rf"{SHARDS[0]} is truncated or not a safetensors file .*offset.*; delete it and fetch it again",
        ),
        (break_unknown_dtype, rf"{SHARDS[0]} is truncated or not a safetensors file .*`Q4`.*; delete it and fetch it"),
        (break_dtype, rf"{SHARDS[0]}: tensor 'model\.embed_tokens\.weight' is I32; bfloat16, .* are supported"),
        (
            break_shape,
            rf"{SHARDS[0]}: tensor 'model\.embed_tokens\.weight' has shape \[4, 8\]; the model needs \[8, 4\]",
        ),
        (break_missing_tensor, r"^/.*: missing 1 of 4 tensors: model\.norm\.weight"),
        (break_moved_tensor, rf"{SHARDS[0]} lacks the tensor 'model\.layers\.0\.self_attn\.k_proj\.weight'"),
        (break_index_elsewhere, r"model\.safetensors\.index\.json is not an index .* no name of a file in this folder"),
        (break_index, r"model\.safetensors\.index\.json is not an index"),
        (break_index_by_depth, r"model\.safetensors\.index\.json is not an index .* recursion"),
    ],
)
def test_a_damaged_folder_is_named(damage: Any, message: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, small_tensors())
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(empty_targets(), tmp_path)


@EXAMPLES
def test_a_file_that_was_cut_or_changed_is_an_error_or_has_the_right_shapes(examples: int, tmp_path: Path) -> None:
    """A changed byte of the values cannot be noticed, but it changes one value alone."""
    tensors = small_tensors()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    anywhere = some.one_of(*(some.integers(low, high) for low, high in ((0, 7), (8, start - 1), (start, len(content)))))

    @holds_for(2 * examples, anywhere, some.none() | some.integers(1, 255))
    def holds(at: int, change: int | None) -> None:
        """Cut the file at a byte, or change the byte by xor."""
        damaged = bytearray(content)
        if change is None:
            del damaged[at:]
        elif at < len(content):
            damaged[at] ^= change
        path.write_bytes(damaged)
        targets, message = empty_targets(), None
        try:
            load(targets, tmp_path)
        except ValueError as error:
            message = str(error)
        if message is not None:
            assert str(tmp_path) in message
            assert bytes(damaged) != content
            return
        differ = [name for name in tensors if not torch.equal(targets[name].view, tensors[name])]
        assert len(differ) == 0 if at < start or at == len(content) else len(differ) <= 1, differ


def test_resolve_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="revision='main' goes with a hub id"):
        resolve(tmp_path, revision="main")
    monkeypatch.setattr(loader, "BUNDLED", tmp_path)
    assert resolve(None) == resolve("fastgen-tiny") == tmp_path
    with pytest.raises(ValueError, match="revision='main' goes with a hub id"):
        resolve("fastgen-tiny", revision="main")
    for name in (tmp_path / "gone", "./gone", "a/b/c"):
        with pytest.raises(ValueError, match=r"(gone|a/b/c) is neither a folder nor a model on the hub"):
            resolve(name)


# The hub


class Hub:
    """A hub with one repository, org/model; `asked` collects the files that were requested."""

    def __init__(self, files: dict[str, bytes], error: tuple[int, str] | None = None) -> None:
        self.files, self.error, self.asked = files, error, set[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        headers, status, body = {"X-Repo-Commit": COMMIT}, 200, b"{}"
        if path.startswith("/api/models/org/model/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings, "private": False}).encode()
        elif path.startswith(f"/api/models/org/model/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.files.items()]  # fmt: skip
            body = json.dumps(tree).encode()
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            name = path.rsplit("/", 1)[1]
            self.asked.add(name)
            body = self.files[name]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            if self.error:
                status, headers["X-Error-Code"] = self.error
        elif "/org/model/" in path:
            status, headers["X-Error-Code"] = 404, "RevisionNotFound"
        else:
            status, headers["X-Error-Code"] = 404, "RepoNotFound"
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no token from this machine."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hub"


@pytest.fixture
def serve(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    hubs: list[Hub] = []

    def start(files: dict[str, bytes], error: tuple[int, str] | None = None) -> Hub:
        hubs.append(Hub(files, error))
        constants = pytest.importorskip("huggingface_hub").constants
        monkeypatch.setattr(constants, "ENDPOINT", hubs[-1].url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hubs[-1].url + template[template.index("/{") :])
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


def repository(folder: Path, sharded: bool) -> dict[str, bytes]:
    if sharded:
        write_sharded(folder, small_tensors())
    else:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file(small_tensors(), folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text("{}")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "model-extra.safetensors"):
        (folder / name).write_text("not needed")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_OFFLINE", True)


SMALL_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja"}  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True])
def test_hub_only_what_is_needed_and_once(
    sharded: bool, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = serve(repository(tmp_path / "there", sharded))
    weights = {"model.safetensors.index.json", *SHARDS} if sharded else {"model.safetensors"}
    folder = resolve("org/model", weights=False)
    assert hub.asked == SMALL_FILES | ({"model.safetensors.index.json"} if sharded else set())
    assert resolve("org/model") == folder
    assert hub.asked == SMALL_FILES | weights
    targets = empty_targets()
    load(targets, folder)
    assert torch.equal(targets["model.norm.weight"].view, small_tensors()["model.norm.weight"])

    hub.asked.clear()
    capsys.readouterr()
    assert resolve("org/model", revision="main") == folder
    assert not hub.asked
    assert capsys.readouterr().err == ""  # no bars when there is nothing to fetch
    go_offline(monkeypatch)
    assert resolve("org/model") == folder


def test_hub_down_falls_back_to_the_cache(serve: Any, tmp_path: Path) -> None:
    hub = serve(repository(tmp_path / "there", sharded=True))
    folder = resolve("org/model")
    hub.close()
    assert resolve("org/model") == folder


@pytest.mark.parametrize(
    ("error", "model", "revision", "message"),
    [
        ((403, "GatedRepo"), "org/model", None, r"gated: accept .*huggingface\.co/org/model.*hf auth login.*HF_TOKEN"),
        (None, "org/model", "v9", "org/model has no revision 'v9'"),
        (None, "org/other", None, "org/other is neither a folder nor a model on the hub"),
    ],
)
def test_hub_refusals(error: Any, model: str, revision: str | None, message: str, serve: Any, tmp_path: Path) -> None:
    serve(repository(tmp_path / "there", sharded=False), error)
    with pytest.raises(ValueError, match=message):
        resolve(model, revision)


def test_a_full_cache_is_named_and_the_next_start_goes_on(serve: Any, cache: Path, tmp_path: Path) -> None:
    files = repository(tmp_path / "model", sharded=False)
    files["model.safetensors"] += bytes(20_000)
    serve(files)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=rf"make room, or set HF_HOME to a folder on another disk: '.*{cache.name}'"):
            resolve("org/model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (resolve("org/model") / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_hub_without_safetensors(serve: Any) -> None:
    serve({"config.json": b"{}", "pytorch_model.bin": b"x", "consolidated.safetensors": b"x"})
    folder = resolve("org/model")
    assert folder.name == COMMIT
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing, .*fastgen reads safetensors only, so convert"
    ):
        load(empty_targets(), folder)


def hand_made_cache(cache: Path) -> Path:
    """The layout that huggingface_hub documents: refs/main holds the commit, snapshots/<commit> the files."""
    repo = cache / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    write_sharded(repo / "snapshots" / COMMIT, small_tensors())
    return repo / "snapshots" / COMMIT


def test_offline_cache_suffices(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hand_made_cache(cache)
    go_offline(monkeypatch)
    assert resolve("org/model") == folder
    assert resolve("org/model", revision=COMMIT) == folder
    (folder / SHARDS[0]).unlink()
    assert resolve("org/model") == folder
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} is missing, though .* names it; fetch it again"):
        load(empty_targets(), folder)
    with pytest.raises(ValueError, match="org/absent is not a folder, is not in the local hub cache"):
        resolve("org/absent")


def test_offline_cache_may_lack_files_that_nobody_needs(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(repository(tmp_path / "there", sharded=True))
    folder = resolve("org/model")
    (folder / "tokenizer.json").unlink()
    go_offline(monkeypatch)
    assert resolve("org/model") == folder


OFFLINE = """
import sys
from fastgen import Generator, SamplingParams

params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
prompt = "hello"
for model in sys.argv[1:]:
    with Generator(model, device="cpu") as gen:
        (output,) = gen.generate([prompt], params)
        assert output.error is None, output.error
        prompt = output.prompt_token_ids  # the last model has no tokenizer
        print(output.completions[0].token_ids, output.completions[0].text)
"""


def test_a_process_without_a_network_answers_by_hub_id_by_folder_and_by_ids_alone(talker: Path, tmp_path: Path) -> None:
    """The first two have a tokenizer, which only the first one's text needs."""
    repo = tmp_path / "home" / "hub" / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(talker, repo / "snapshots" / COMMIT)
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(talker / name, plain)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", OFFLINE, "org/model", str(talker), str(plain)]
    said = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    by_id, by_folder, by_ids = said.stdout.splitlines()
    assert by_id == by_folder
    ids, text = by_id.split("]")
    assert text.strip()
    assert by_ids == f"{ids}] "


# Random weights, and transformers' own files


def test_fill_random_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    filled = []
    for _ in range(2):
        targets = empty_targets(torch.bfloat16)
        targets["model.layers.0.self_attn.q_proj.bias"] = Shard.whole(torch.zeros(64))
        for name in ("big.weight", "other.weight"):
            targets[name] = Shard.whole(torch.zeros(300, 300))
        fill_random(targets)
        filled.append({name: part.view for name, part in targets.items()})
    assert torch.equal(torch.get_rng_state(), state)
    first, same = filled
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["big.weight"], first["other.weight"])
    assert first["model.norm.weight"].eq(1).all()
    assert first["model.layers.0.self_attn.q_proj.bias"].ne(0).all()
    assert first["big.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert first["big.weight"].mean().item() == pytest.approx(0.0, abs=3e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
                                          "Qwen3ForCausalLM"])  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_comes_back(architecture: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = model_class(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    expected = dict(model.named_parameters())
    targets = {name: Shard.whole(torch.full_like(parameter, torch.nan)) for name, parameter in expected.items()}
    assert ("lm_head.weight" in targets) == (not tied)
    load(targets, resolve(tmp_path))
    assert all(torch.equal(targets[name].view, expected[name]) for name in expected)
    write(targets, Update(model.state_dict(), targets).tensors())  # a trainer's names, lm_head.weight twice if tied
    assert all(torch.equal(targets[name].view, expected[name]) for name in expected)
