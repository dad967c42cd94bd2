"""Fetches models from Hugging Face's hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fastgen.disk import naming_full_disk
from fastgen.names import nearest

WeightFiles = Callable[[Path], Iterable[Path]]
_MEDUSA = "medusa_lm_head.safetensors"  # of a repository of heads that draft, which may have nothing else
# All files except weights. They are fetched first, because the index names the files of weights.
_SMALL_FILES = [
    "config.json", "hf_quant_config.json", "quant_config.json", "quantize_config.json", "generation_config.json",
    "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template*", "additional_chat_templates/*", "modules.json",
    "*_Pooling/config.json", "model.safetensors.index.json",
]  # fmt: skip


def fetch_model(model: str, revision: str | None, weight_files: WeightFiles | None) -> Path:
    """Fetch the needed files of a hub repository into huggingface_hub's cache, and return its folder there.

    weight_files: function that returns the weight files of a folder, by what its index says; None: fetch no weights.
    Raises ValueError.
    """
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    remedy = "make room, or set HF_HOME to a folder on another disk"
    try:
        with naming_full_disk(constants.HF_HUB_CACHE, remedy):
            folder = _fetch(model, revision, _SMALL_FILES, bars=False)
            files = [str(path.relative_to(folder)) for path in weight_files(folder)] if weight_files else []
            if lacking := [name for name in files if not (folder / name).is_file()]:
                # At the commit of the small files, even if the repository has changed since.
                _fetch(model, folder.name, [*lacking, _MEDUSA], bars=True)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its licence at https://huggingface.co/{model}, then {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision!r} on the hub") from error
    except errors.HFValidationError as error:
        path = Path(model).expanduser()
        near = nearest(path.name, [each.name for each in path.parent.glob("*/")])
        hint = f"; there is {path.parent / near}" if near else ""
        raise ValueError(f"there is no folder {model}, and a hub id is not written like that{hint}") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{model} is neither a folder nor a model on the hub; for a private one {login}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(
            f"{model} is not a folder, is not in the local hub cache, and the hub cannot be reached ({error})"
        ) from error
    return folder


class _SilentBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]  # with stubs and without
    """A progress bar that is never shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _fetch(model: str, revision: str | None, patterns: list[str], bars: bool) -> Path:
    """Fetch the files of a hub repository that match `patterns`. Return the folder of the snapshot in the cache."""
    from huggingface_hub import errors, snapshot_download

    tqdm_class: Any = None if bars else _SilentBar  # otherwise every start would show bars for files in the cache
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, tqdm_class=tqdm_class))
    except errors.LocalEntryNotFoundError as error:
        # Newer versions refuse a cached snapshot that lacks any file matching a pattern. Some of these files are not
        # needed, so return the snapshot; a missing file that is needed raises an error later.
        snapshot = getattr(error, "snapshot_path", None)
        if snapshot is None:
            raise
        return Path(snapshot)
