"""Check the arithmetic of reference.py on a CPU, against transformers and against itself under random schedules.

    python scripts/hybrid/check_reference.py [--schedules 40] [--output scripts/results/hybrid-reference.json]

The layers are random, with the head sizes of Qwen3.5; every second sequence repeats one token, so that its keys are
nearly parallel. The exit status is 1 if an output differs in a bit between schedules.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from pathlib import Path
from typing import Any

import torch
from reference import BLOCK, Lane, Layer
from torch import Tensor

HIDDEN = 256


def sizes(**changes: Any) -> Any:
    """Return a small configuration of Qwen3.5 text."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    shape = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512}
    return Qwen3_5TextConfig(**{**shape, **heads, **linear, **changes})


def random_layer(seed: int) -> torch.nn.Module:
    """Return a layer of transformers with weights in float32 that bfloat16 can hold, and decays from slow to fast."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(seed)
    module = Qwen3_5GatedDeltaNet(sizes(), 0).eval()
    randomize(module)
    return module.bfloat16().float()


def randomize(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif name.endswith("A_log"):
            parameter.copy_(torch.empty_like(parameter).uniform_(0.01, 16).log())
        elif name.endswith("dt_bias"):
            parameter.uniform_(-6, 1)


def random_tokens(seed: int, length: int) -> Tensor:
    """Return inputs (length, HIDDEN), values of bfloat16; of odd seeds, half are nearly the same."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, HIDDEN, generator=generator)
    if seed % 2:
        part = slice(length // 4, 3 * length // 4)
        x[part] = x[length // 4] + 0.01 * x[part]
    return x.bfloat16().float()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def compare_layers(seeds: range) -> dict[str, float]:
    """Return the largest relative errors of a layer's outputs: in float32 against transformers, and in bfloat16, of
    transformers and of the reference, against transformers in float32."""
    rows = []
    for seed in seeds:
        module, x = random_layer(seed), random_tokens(seed, 300)
        want = module(x[None])[0]
        theirs = copy.deepcopy(module).bfloat16()(x.bfloat16()[None])[0]
        ours = {dtype: run(Layer(module, dtype), x) for dtype in (torch.float32, torch.bfloat16)}
        rows.append([error(each, want) for each in (ours[torch.float32], ours[torch.bfloat16], theirs)])
    names = ("float32", "bfloat16", "bfloat16_transformers")
    return {name: max(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def run(layer: Layer, x: Tensor) -> Tensor:
    return layer.forward(x, layer.new_lane())


def compare_models(seeds: range) -> dict[str, float]:
    """Return the largest relative errors of the logits of random models with 3 recurrent layers and 1 of attention, as
    `compare_layers` does. In bfloat16, what surrounds the recurrent layers is transformers'."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    rows = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(sizes()).eval()
        randomize(model)
        model = model.bfloat16().float()
        ids = torch.randint(512, (1, 200))
        want = model(ids, use_cache=False).logits[0]
        half = copy.deepcopy(model).bfloat16()
        theirs = half(ids, use_cache=False).logits[0]
        found = []
        for dtype, changed in ((torch.float32, model), (torch.bfloat16, half)):
            for layer in changed.model.layers:
                if hasattr(layer, "linear_attn"):
                    layer.linear_attn = _Instead(Layer(layer.linear_attn.float(), dtype))
            found.append(changed(ids, use_cache=False).logits[0])
        rows.append([error(each, want) for each in (*found, theirs)])
    names = ("float32", "bfloat16", "bfloat16_transformers")
    return {name: max(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


class _Instead(torch.nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return run(self.layer, hidden_states[0].float()).to(hidden_states.dtype)[None]


def run_schedule(layer: Layer, x: Tensor, seed: int) -> tuple[Tensor, dict[str, int]]:
    """Return the outputs of x by random prefills, decodes, drafts, and preemptions, and how often each took place.

    A preempted sequence continues from a state kept at a block border, and computes the tokens after it again."""
    choice, lane = random.Random(seed), layer.new_lane()
    kept: list[tuple[int, Lane]] = [(0, layer.new_lane())]
    outputs: list[Tensor] = []
    counts = dict.fromkeys(("prefill", "decode", "draft", "rejected", "resume"), 0)
    while len(outputs) < len(x):
        at = len(outputs)
        left = min(BLOCK - lane.count, len(x) - at)
        action = choice.choices(("prefill", "decode", "draft", "resume"), (4, 8, 8, 1))[0]
        counts[action] += 1
        if action == "prefill":
            outputs += layer.forward(x[at : at + choice.choice((2, 17, 63, 64, 65, 130))], lane)
        elif action == "decode":
            outputs += layer.forward(x[at : at + 1], lane)
        elif action == "draft":
            right = choice.randint(1, min(8, left))
            wrong = choice.randint(0, min(8, left) - right)
            rows = torch.cat([x[at : at + right], torch.randn(wrong, x.shape[1])])
            outputs += layer.draft(rows, lane, lambda _, right=right: right)
            counts["rejected"] += wrong
        else:
            border, state = choice.choice(kept)
            lane, outputs = state.copy(), outputs[:border]
        if lane.count == 0:
            kept.append((len(outputs), lane.without_rows()))
    return torch.stack(outputs), counts


def check_schedules(number: int) -> dict[str, Any]:
    """Run `number` schedules per dtype, and count the actions and the schedules whose outputs differ."""
    total: dict[str, Any] = {"schedules": 0, "different": 0}
    for dtype in (torch.float32, torch.bfloat16):
        for seed in range(number):
            layer, x = Layer(random_layer(seed % 4), dtype), random_tokens(seed, 200)
            got, counts = run_schedule(layer, x, seed)
            total["schedules"] += 1
            total["different"] += not torch.equal(got, run(layer, x))
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=40, help="random schedules per dtype")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    results = {
        "layers": compare_layers(range(10)),
        "models": compare_models(range(4)),
        "schedules": check_schedules(options.schedules),
    }
    print(json.dumps(results, indent=1))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(results["schedules"]["different"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
