"""Adapters that PEFT has made, merged and saved. Needs the extra `rl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL
from conftest import random_ids
from test_adapters import equal, held
from test_updating import OPTIONS
from torch import Tensor

from fastgen import Generator

peft = pytest.importorskip("peft", reason="needs the extra rl")
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": list(ALL)},
    "all linear": {"target_modules": "all-linear", "use_rslora": True, "exclude_modules": ["k_proj"]},
    "patterns": {
        "target_modules": r".*\.(q|up)_proj", "rank_pattern": {"layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    },
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [0, 2], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["o_proj"], "init_lora_weights": "orthogonal"},
}  # fmt: skip


def trained(folder: Path, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    """Return PEFT's model of a folder, with an adapter that is not zero."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **fields))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn_like(parameter) * 0.1
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_that_peft_merges(name: str, dtype: torch.dtype, llama: Path, tmp_path: Path) -> None:
    model = trained(llama, dtype, CONFIGS[name])
    model.save_pretrained(tmp_path)
    sequence = random_ids(30)
    with torch.no_grad():
        unmerged = model(torch.tensor([sequence])).logits[0].float().log_softmax(-1)
    options: dict[str, Any] = OPTIONS | {"dtype": str(dtype)[6:]}
    with Generator(llama, **options) as gen:
        gen.update_adapter(peft.get_peft_model_state_dict(model), model.peft_config["default"])
        found = held(gen)
        gen.update_adapter(
            {n: p for n, p in model.named_parameters() if "lora_" in n}, model.peft_config["default"].to_dict()
        )
        assert equal(held(gen), found)
        (scores,) = gen.score([sequence])
    expected = [unmerged[at, token].item() for at, token in enumerate(sequence[1:])]
    if dtype == torch.float32:
        assert scores[1:] == pytest.approx(expected, abs=1e-4)  # of sums over three layers
    with Generator(llama, adapter=tmp_path, **options) as gen:
        assert equal(held(gen), found)
    weights: dict[str, Tensor] = model.merge_and_unload().state_dict()
    for key, weight in found.items():
        tolerance = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
        assert torch.allclose(weight.float(), weights[key].float(), **tolerance), key
