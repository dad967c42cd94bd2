"""Reads the sampling parameters of Hugging Face's `generation_config.json`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fastgen.model.config import read_json
from fastgen.model.config_fields import number_of
from fastgen.names import advice
from fastgen.request import SAMPLING_OPTIONS

log = logging.getLogger(__name__)

GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Other fields of generation_config.json that change what transformers generates: the values that change nothing, and
# null.
_NOT_USED: dict[str, tuple[Any, ...]] = {
    "max_length": (20,), "max_new_tokens": (), "min_length": (0,), "min_new_tokens": (0,), "stop_strings": ([],),
    "bad_words_ids": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ([], {}),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "no_repeat_ngram_size": (0,), "typical_p": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (), "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (), "guidance_scale": (1,), "num_beams": (1,), "num_return_sequences": (1,),
    "penalty_alpha": (0,), "dola_layers": (), "watermarking_config": (), "token_healing": (False,),
}  # fmt: skip


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters that `generation_config.json` sets: a subset of GENERATION_CONFIG, without nulls.

    If `do_sample` is false, the result is a temperature of 0 and the penalty. If the file has neither `do_sample` nor a
    temperature, it is the penalty. A WARNING names other fields that transformers follows. Raises ValueError for values
    that no request could have.
    """
    path = folder / "generation_config.json"
    generation = read_json(path) or {}
    if unused := [name for name, plain in _NOT_USED.items() if generation.get(name) not in (None, *plain)]:
        ours = advice("argument")
        listed = (f"{name} ({ours[name]})" if name in ours else name for name in unused)
        log.warning("%s has fields that are not used: %s", path, ", ".join(listed))
    samples = generation.get("do_sample", generation.get("temperature") is not None)
    fields = GENERATION_CONFIG if samples else ("repetition_penalty",)
    try:
        defaults = {field: number_of(generation, field) for field in fields if generation.get(field) is not None}
        for field, value in defaults.items():
            SAMPLING_OPTIONS[field].check(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}; correct it, or ignore the file with generation_config=False") from None
    return {"temperature": 0, **defaults} if generation.get("do_sample") is False else defaults
