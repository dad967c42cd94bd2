"""Adapters: a Generator with one answers as a Generator of the merged weights, and without it as the base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import ALL, CONFIG, adapter, base_of, merged, save_adapter
from conftest import check_idle, families_in_turn, new_weights, random_ids
from test_updating import OPTIONS, SHORT, SYSTEM, answers, drain
from torch import Tensor

from fastgen import Generator

pytestmark = pytest.mark.timeout(60)


def held(gen: Generator) -> dict[str, Tensor]:
    parameters = gen._runner.model.parameters
    parameters.unpack()
    weights = {name: shard.view.clone() for name, shard in parameters.targets().items()}
    parameters.pack()
    return weights


def equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    return all(
        torch.allclose(weight.float(), expected[name].to(weight.dtype).float(), rtol=0, atol=tolerance)
        for name, weight in found.items()
    )


@pytest.mark.parametrize(("family", "base"), families_in_turn(["host", "device"]), indirect=["family"])
def test_adapters_follow_one_another_and_the_base_comes_back_to_the_bit(family: Path, base: str) -> None:
    with Generator(family, adapter_base=base, **OPTIONS) as gen:
        old, weights = answers(gen), held(gen)
        for layers in (ALL, ("q_proj", "v_proj", "qkv_proj")):
            state = adapter(family, layers)
            parameters = {name: torch.nn.Parameter(value.clone()) for name, value in state.items()}
            version = gen.update_adapter(parameters, CONFIG | {"target_modules": list(layers)})
            assert version == gen.weight_version
            assert equal(held(gen), merged(family, state), 1e-6)
            assert all(torch.equal(parameters[name], state[name]) for name in state), "a trainer's stay as they are"
            with Generator(family, **OPTIONS) as other:
                other.update_weights(held(gen), version=version)
                assert answers(gen) == answers(other) != old
        assert gen.update_adapter(None) == 3
        assert equal(held(gen), weights)
        assert answers(gen) == old
        assert gen.update_adapter(None, version=9) == 9
        check_idle(gen)


@pytest.mark.parametrize(
    ("name", "dtype"), [("", torch.float32), (".default", torch.bfloat16), (".default", torch.float16)]
)
def test_weights_are_rounded_once(name: str, dtype: torch.dtype, llama: Path) -> None:
    """Each layer has its own rank, alpha and scaling. Names are PEFT's names on disk and in memory."""
    ranks = {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 6}
    alphas = {"o_proj": 32, "model.layers.2.mlp.down_proj": 1}

    def rank(layer: str) -> int:
        return 2 if layer.endswith("k_proj") else 6 if "layers.1.mlp.up_proj" in layer else 4

    def scaling(layer: str) -> float:
        alpha = 32 if layer.endswith("o_proj") else 1 if "layers.2.mlp.down_proj" in layer else 6
        return float(alpha / rank(layer) ** 0.5)

    config = CONFIG | {"use_rslora": True, "rank_pattern": ranks, "alpha_pattern": alphas}
    state = adapter(llama, rank=rank, name=name)
    plain = {key.replace(name + ".weight", ".weight"): value for key, value in state.items()}
    with Generator(llama, dtype=str(dtype)[6:], **OPTIONS) as gen:
        gen.update_adapter(iter(state.items()), SimpleNamespace(to_dict=lambda: config))
        found, expected = held(gen), merged(llama, plain, scaling, dtype)
        if dtype == torch.float32:
            assert equal(found, expected, 1e-5)
        else:  # the float32 sums may differ in their last bits
            differ = [(found[key] != value.to(dtype)).float().mean() for key, value in expected.items()]
            assert max(differ) < 1e-3
            assert all(torch.allclose(found[key], value.to(dtype), rtol=2**-7) for key, value in expected.items())


def test_the_adapter_of_a_folder_is_there_from_the_start(llama: Path, tmp_path: Path) -> None:
    state, other = adapter(llama, ("q_proj", "down_proj")), adapter(llama, ("v_proj",), seed=1)
    path = save_adapter(tmp_path / "adapter", state, CONFIG | {"target_modules": ["q_proj", "down_proj"]})
    with Generator(llama, adapter=path, **OPTIONS) as gen:
        assert gen.weight_version == 0
        assert equal(held(gen), merged(llama, state), 1e-6)
        with pytest.raises(ValueError, match=r"partial=True with an adapter .* update_adapter\(None\) first"):
            gen.update_weights({"model.norm.weight": torch.ones(64)}, partial=True)
        gen.update_adapter(other, CONFIG | {"target_modules": ["v_proj"]})
        assert equal(held(gen), merged(llama, other), 1e-6)
        gen.update_adapter(None)
        assert equal(held(gen), base_of(llama))
    for options, text in (
        (
            {"adapter": tmp_path},
            "adapter is .*, in which adapter_config.json is missing; give a folder that PEFT has saved",
        ),
        ({"adapter": path, "load": "dummy"}, "adapter needs the weights of the checkpoint"),
        ({"adapter": save_adapter(tmp_path / "bad", state)}, "(?s)adapter .*missing 30 of 42"),
    ):
        with pytest.raises(ValueError, match=text):
            Generator(llama, **OPTIONS, **options)


def test_a_whole_update_replaces_the_base_and_drops_the_adapter(llama: Path) -> None:
    state, weights = adapter(llama), new_weights(llama)
    with Generator(llama, **OPTIONS) as gen:
        gen.update_adapter(state, CONFIG)
        gen.update_weights(weights)
        assert equal(held(gen), weights)
        gen.update_adapter(None)
        assert equal(held(gen), weights)
        part = {"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 64)}
        gen.update_weights(part, partial=True)
        gen.update_adapter(state, CONFIG)
        gen.update_adapter(None)
        assert equal(held(gen), weights | part)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dora": ({"use_dora": True}, ValueError, "the adapter's use_dora is True, which is not supported: only plain LoRA"),
    "bias": ({"bias": "lora_only"}, ValueError, "the adapter's bias is 'lora_only'"),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, ValueError, "init_lora_weights is 'pissa_niter_16'"),
    "layers": ({"layer_replication": [[0, 2], [1, 3]]}, ValueError, "layer_replication is"),
    "kind": ({"peft_type": "IA3"}, ValueError, "peft_type is 'IA3'"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, ValueError, "target_modules has lm_head"),
    "embedding": ({"target_modules": [*ALL, "embed_tokens"]}, ValueError, "target_modules has model.embed_tokens"),
    "rank": ({"r": None}, ValueError, "the adapter's r is None for model.layers.0.mlp.down_proj; it must be a number"),
    "shapes": ({"r": 8}, ValueError, r"(?s)has shape \[4, 96\]; the model needs \[8, 96\].* and 22 more"),
    "excluded": ({"exclude_modules": ["v_proj"]}, ValueError, "unexpected tensor .*v_proj.*; the model has no such"),
}  # fmt: skip


def test_what_is_wrong_leaves_the_weights(llama: Path) -> None:
    state = adapter(llama)
    a, b = list(state)[:2]
    given: list[tuple[Any, Any, type[Exception], str]] = [
        *((state, CONFIG | change, kind, text) for change, kind, text in WRONG.values()),
        (state, None, TypeError, "config must be PEFT's LoraConfig, or a dict"),
        ({}, {"r": 4, "lora_alpha": 6}, ValueError, "the adapter has no linear layer of this model"),
        (state, CONFIG | {"target_modules": ["c_attn"]}, ValueError, "the adapter has no linear layer"),
        (5, CONFIG, TypeError, "must be a mapping, or an iterable of"),
        ({a: state[a]}, CONFIG, ValueError, r"missing 41 of 42 tensors: model\.layers\.0\.mlp\.down_proj\.lora_A"),
        ([*state.items(), (a.replace(".weight", ".second.weight"), state[a])], CONFIG, ValueError, "is given twice"),
        (state | {"x.lora_A.weight": state[a]}, CONFIG, ValueError, "unexpected tensor 'x.lora_A.weight'; the model"),
        (state | {b: state[b].int()}, CONFIG, ValueError, "is torch.int32; bfloat16"),
        (state | {b: state[b][:, :3]}, CONFIG, ValueError, r"has shape \[64, 3\]; the model needs \[64, 4\]"),
    ]
    with Generator(llama, **OPTIONS) as gen:
        gen.update_adapter(state, CONFIG)
        before = held(gen)
        for named, config, kind, text in given:
            with pytest.raises(kind, match=text):
                gen.update_adapter(named, config)
            assert gen.weight_version == 1
        with pytest.raises(ValueError, match="version is 1, which is the current one"):
            gen.update_adapter(None, version=1)
        assert equal(held(gen), before)
        gen.generate([5, 6], SHORT)
    with pytest.raises(RuntimeError, match="closed"):
        gen.update_adapter(None)


def test_some_layers_and_regular_expressions(llama: Path) -> None:
    state = adapter(llama, ("layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"))
    configs: list[dict[str, Any]] = [
        {"target_modules": r"model\.layers\.1\.(self_attn\.q|mlp\.up)_proj"},
        {"target_modules": {"q_proj", "up_proj"}, "layers_to_transform": 1},
        {"target_modules": "all-linear", "exclude_modules": r".*layers\.[02].*|.*(k|v|o|gate|down)_proj"},
    ]
    with Generator(llama, **OPTIONS) as gen:
        for config in configs:
            gen.update_adapter(state, CONFIG | config)
            assert equal(held(gen), merged(llama, state), 1e-6)
            gen.update_adapter(None)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_an_update_in_flight_is_as_one_of_the_merged_weights(mode: str, llama: Path) -> None:
    states = [adapter(llama, seed=1), None, adapter(llama, ("q_proj", "up_proj"), seed=2)]
    configs = [CONFIG, None, CONFIG | {"target_modules": ["q_proj", "up_proj"]}]
    weights = []
    with Generator(llama, **OPTIONS) as gen:
        for adapted in zip(states, configs, strict=True):
            gen.update_adapter(*adapted)
            weights.append(held(gen))
    prompts = [SYSTEM[: 10 * i] + random_ids(9 + i, seed=i) for i in range(4)]
    params = replace(SHORT, max_tokens=24, temperature=0.9, n=2)
    found = []
    for merges in (False, True):
        with Generator(llama, **OPTIONS | {"max_step_tokens": 20, "num_pages": 18}) as gen:
            events = [event for prompt in prompts if gen.add(prompt, params) for event in gen.step()]
            for number, steps in enumerate((1, 9, 5)):
                events += [event for _ in range(steps) for event in gen.step()]
                if merges:
                    gen.update_adapter(states[number], configs[number], in_flight=mode)
                else:
                    gen.update_weights(weights[number], in_flight=mode)
            found.append([replace(event, started=0) for event in events + drain(gen)])
    assert found[0] == found[1]


def test_base_and_adapter_sleep(llama: Path) -> None:
    with Generator(llama, adapter_base="device", **OPTIONS) as gen:
        gen.update_adapter(adapter(llama), CONFIG)
        before = held(gen)
        gen.sleep()
        with pytest.raises(RuntimeError, match="the weights are asleep"):
            gen.update_adapter(None)
        gen.wake()
        assert equal(held(gen), before)
        gen.update_adapter(None)
        assert equal(held(gen), base_of(llama))
        gen.sleep(keep_weights=False)
        gen.wake()
        with pytest.raises(RuntimeError, match="were dropped by sleep; call update_weights with all of them"):
            gen.update_adapter(None)
