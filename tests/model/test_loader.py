"""loader.py: hub ids and folders, what is read from safetensors files, and one clear error for each damaged checkpoint.

The hub is a small HTTP server in this file, or a cache folder that a test writes; huggingface_hub is the real package.
"""

import hashlib
import json
import resource
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from known_models import LLAMA, LLAMA_8B
from safetensors.torch import save_file
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model import loader
from fastgen.model.config import parse_config
from fastgen.model.loader import fill_random, follow_head, load, read_tensors, resolve
from fastgen.model.weights import Shard

INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def small_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (8, 4), "model.layers.0.self_attn.q_proj.weight": (4, 4),
              "model.layers.0.self_attn.k_proj.weight": (2, 4), "model.norm.weight": (4,)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def empty_targets(dtype: torch.dtype = torch.float32) -> dict[str, Shard]:
    """Return shards for `small_tensors`; q and k are rows of one fused parameter, as in the model."""
    qk = torch.nn.Parameter(torch.zeros(6, 4, dtype=dtype))
    views = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in small_tensors().items()}
    views["model.layers.0.self_attn.q_proj.weight"] = qk[:4]
    views["model.layers.0.self_attn.k_proj.weight"] = qk[4:]
    return {name: Shard.whole(view) for name, view in views.items()}


def write_sharded(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write two files of tensors and their index; return the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    weight_map = {name: SHARDS[0 if place < len(names) // 2 else 1] for place, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# Folders


def test_load_reads_a_single_file_or_else_what_the_index_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does after a save in several files and another one in a single file, in the same folder."""
    tensors = small_tensors()
    (tmp_path / "consolidated.safetensors").write_bytes(b"another format of the same weights")
    weight_map = write_sharded(tmp_path, tensors)
    del weight_map["model.norm.weight"]
    write_index(tmp_path, weight_map)
    targets = empty_targets()
    del targets["model.norm.weight"]  # it would be unexpected if it were read
    load(targets, tmp_path)
    assert all(torch.equal(part.view, tensors[name]) for name, part in targets.items())
    newer = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(newer, tmp_path / "model.safetensors")
    (tmp_path / SHARDS[1]).unlink()  # save_pretrained deletes the older files, and not their index
    targets = empty_targets()
    load(targets, tmp_path)
    assert all(torch.equal(part.view, newer[name]) for name, part in targets.items())
    assert read_tensors(tmp_path).keys() == tensors.keys()
    assert not caplog.messages
    assert resolve(tmp_path) == tmp_path
    assert caplog.messages == [
        f"{tmp_path} has model.safetensors and {INDEX}; the first is read, as in transformers; delete the other"
    ]


def test_tensors_that_models_do_not_need_are_skipped(tmp_path: Path) -> None:
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(8, 4)}
    extras |= {"vision_tower.conv.weight": torch.ones(2), "model.mtp_layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    save_file({**extras, **small_tensors()}, tmp_path / "model.safetensors")
    targets = empty_targets()  # a tied model: it has no lm_head.weight
    load(targets, tmp_path)
    untied = {**targets, "lm_head.weight": Shard.whole(torch.zeros(8, 4))}
    load(untied, tmp_path)
    assert untied["lm_head.weight"].view.eq(1).all()
    save_file(small_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing 1 of 5 tensors: lm_head\.weight"):
        load(untied, tmp_path)


def test_the_head_of_a_tied_model(tmp_path: Path) -> None:
    """It is followed if it differs from the embedding, in whichever files and under whichever names they are."""
    config = parse_config({**LLAMA, **LLAMA_8B, "tie_word_embeddings": True})
    tensors = small_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    changed = embedding.clone()
    changed[7, 3] += 1
    for head, own in ((embedding.double(), False), (changed, True), (embedding.flip(1), True), (embedding[1:], True)):
        for prefix in ("model.", "", "language_model.model."):
            named = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
            write_sharded(tmp_path, {**named, "lm_head.weight": head})
            assert follow_head(config, tmp_path) == replace(config, own_head=own)
    write_sharded(tmp_path, tensors)
    assert follow_head(config, tmp_path) == config
    targets = empty_targets()
    write_sharded(tmp_path, {"lm_head.weight": tensors.pop("model.embed_tokens.weight"), **tensors})
    assert follow_head(config, tmp_path) == config
    load(targets, tmp_path)
    assert torch.equal(targets["model.embed_tokens.weight"].view, embedding)


def test_names_that_begin_at_the_layers(tmp_path: Path) -> None:
    """The embedding stands for a head that is not there."""
    named = {name.removeprefix("model."): tensor for name, tensor in small_tensors().items()}
    targets = {**empty_targets(), "lm_head.weight": Shard.whole(torch.zeros(8, 4))}
    for more, head in (({}, named["embed_tokens.weight"]), ({"lm_head.weight": torch.ones(8, 4)}, torch.ones(8, 4))):
        save_file({**named, **more}, tmp_path / "model.safetensors")
        load(targets, tmp_path)
        assert torch.equal(targets["model.embed_tokens.weight"].view, named["embed_tokens.weight"])
        assert torch.equal(targets["lm_head.weight"].view, head)


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the entry of the embedding in the header of its file."""
    path = folder / SHARDS[0]
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    change(header["model.embed_tokens.weight"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[start:])


def leave_pickles(folder: Path) -> None:
    for name in (*SHARDS, INDEX):
        (folder / name).unlink()
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"):
        (folder / name).write_bytes(b"a pickle")


TRUNCATED = "is truncated or not a safetensors file .*; delete it and fetch it again"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (
        lambda folder: [(folder / name).unlink() for name in (*SHARDS, INDEX)],
        rf"model\.safetensors is missing, and there is no {INDEX}",
    ),
    "pickles": (leave_pickles, r"and there is pytorch_model-00001-of-00002\.bin instead; .*transformers: AutoModel"),
    "a lost file": (lambda folder: (folder / SHARDS[1]).unlink(), f"{SHARDS[1]} is missing, though {INDEX} names it"),
    "a truncated file": (
        lambda folder: (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-5]),
        f"{SHARDS[1]} {TRUNCATED}",
    ),
    "a pointer of Git LFS": (
        lambda folder: (folder / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
        f"{SHARDS[0]} {TRUNCATED}",
    ),
    "another dtype": (
        lambda folder: change_header(folder, lambda entry: entry.update(dtype="I32")),  # of the same size
        rf"{SHARDS[0]}: tensor 'model\.embed_tokens\.weight' is I32; bfloat16, .* are supported",
    ),
    "another shape": (
        lambda folder: change_header(folder, lambda entry: entry["shape"].reverse()),
        rf"{SHARDS[0]}: tensor 'model\.embed_tokens\.weight' has shape \[4, 8\]; the model needs \[8, 4\]",
    ),
    "a missing tensor": (
        lambda folder: write_index(folder, dict(list(write_sharded(folder, small_tensors()).items())[:-1])),
        r"^/.*: missing 1 of 4 tensors: model\.norm\.weight",
    ),
    "a tensor in another file": (
        lambda folder: write_index(folder, dict.fromkeys(small_tensors(), SHARDS[0])),
        rf"{SHARDS[0]} lacks the tensor 'model\.layers\.0\.self_attn\.k_proj\.weight'",
    ),
    "an index of another folder": (
        lambda folder: write_index(folder, dict.fromkeys(small_tensors(), f"../{folder.name}/{SHARDS[0]}")),
        f"{INDEX} is not an index .* is not the name of a file in this folder",
    ),
    "an index without a map": (
        lambda folder: (folder / INDEX).write_text('{"metadata": {}}'),
        f"{INDEX} is not an index",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    write_sharded(tmp_path, small_tensors())
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(empty_targets(), tmp_path)


def test_resolve_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="revision='main' goes with a hub id"):
        resolve(tmp_path, revision="main")
    monkeypatch.setattr(loader, "BUNDLED", tmp_path)
    assert resolve(None) == resolve("fastgen-tiny") == tmp_path
    with pytest.raises(ValueError, match="revision='main' goes with a hub id"):
        resolve("fastgen-tiny", revision="main")
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "gone", "./gone", "a/b/c"):
        with pytest.raises(ValueError, match=rf"^there is no folder {name}, and a hub id is not written like that$"):
            resolve(name)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"^there is no folder ./modle, .* not written like that; there is model$"):
        resolve("./modle")
    for file, remedy in (
        ("model.gguf", 'convert it with transformers.*dtype="auto"'),
        ("x.safetensors", "give the folder of config"),
    ):
        (tmp_path / file).write_bytes(b"")
        with pytest.raises(ValueError, match=rf"^{tmp_path / file} is a file, and fastgen reads folders .*; {remedy}"):
            resolve(tmp_path / file)


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


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_OFFLINE", True)


SMALL_FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "chat_template.jinja"}  # fmt: skip


def repository(folder: Path, sharded: bool) -> dict[str, bytes]:
    """Return the files of a repository, with some that are not needed."""
    write_sharded(folder, small_tensors())
    if not sharded:
        save_file(small_tensors(), folder / "model.safetensors")
        (folder / INDEX).unlink()
    for name in SMALL_FILES:
        (folder / name).write_text("{}")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "model-extra.safetensors"):
        (folder / name).write_text("not needed")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("sharded", [False, True])
def test_only_needed_files_are_fetched_and_only_once(
    sharded: bool, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = serve(repository(tmp_path / "there", sharded))
    weights = {INDEX, *SHARDS} if sharded else {"model.safetensors"}
    folder = resolve("org/model", weights=False)
    assert hub.asked == SMALL_FILES | ({INDEX} if sharded else set())
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
    hub.close()
    assert resolve("org/model") == folder
    go_offline(monkeypatch)
    (folder / "tokenizer.json").unlink()
    assert resolve("org/model") == folder


def test_heads_of_medusa_are_fetched(serve: Any, tmp_path: Path) -> None:
    save_file(small_tensors(), tmp_path / "heads")
    hub = serve({"config.json": b"{}", "medusa_lm_head.safetensors": (tmp_path / "heads").read_bytes()})
    assert resolve("org/model", weights=False).is_dir()
    assert hub.asked == {"config.json"}
    assert (resolve("org/model") / "medusa_lm_head.safetensors").is_file()


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


def test_a_cache_suffices_offline(cache: Path, talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout that huggingface_hub documents: refs/main holds the commit, snapshots/<commit> the files."""
    repo = cache / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    shutil.copytree(talker, folder)
    go_offline(monkeypatch)
    assert resolve("org/model") == resolve("org/model", revision=COMMIT) == folder
    texts = []
    for model in ("org/model", talker):
        with Generator(model, device="cpu") as gen:
            texts.append(gen.generate("hello", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].text)
    assert texts[0] == texts[1] != ""
    write_sharded(folder, small_tensors())
    (folder / SHARDS[0]).unlink()
    (folder / "model.safetensors").unlink()
    assert resolve("org/model") == folder
    with pytest.raises(ValueError, match=rf"{SHARDS[0]} is missing, though .* names it; fetch it again"):
        load(empty_targets(), folder)
    with pytest.raises(ValueError, match="org/absent is not a folder, is not in the local hub cache"):
        resolve("org/absent")


# Random weights


def test_random_weights_follow_from_names_and_starts() -> None:
    """They do not depend on the other tensors of a rank, and leave the global generator alone."""
    state = torch.get_rng_state()
    names = ("big.weight", "other.weight", "model.norm.weight", "self_attn.q_proj.bias")
    first, second = ({name: Shard.whole(torch.zeros(300, 300)) for name in names} for _ in range(2))
    del second["other.weight"]
    second["cut.weight"] = Shard(torch.zeros(300, 300), (600, 300), 0, 300)
    first["cut.weight"] = Shard(torch.zeros(300, 300), (600, 300), 0, 0)
    for targets in (first, second):
        fill_random(targets)
    assert torch.equal(torch.get_rng_state(), state)
    equal = {name: torch.equal(part.view, first[name].view) for name, part in second.items()}
    assert equal == {name: name != "cut.weight" for name in second}
    assert not torch.equal(first["big.weight"].view, first["other.weight"].view)
    assert first["model.norm.weight"].view.eq(1).all()
    assert first["big.weight"].view.std().item() == pytest.approx(0.02, rel=0.02)
