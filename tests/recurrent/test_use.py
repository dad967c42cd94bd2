"""What users do with a hybrid model beside generating."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from fastgen import Generator, SamplingParams
from fastgen.model.config import read_config
from fastgen.rl.policy import Policy

PROMPT = torch.randint(500, (90,), generator=torch.Generator().manual_seed(0)).tolist()
PARAMS = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")  # of recurrent layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small random model: three recurrent layers and one with attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        max_position_embeddings=512,
        rope_parameters=rope,
        eos_token_id=511,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    made = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(made)
    return made


@pytest.fixture
def gen(folder: Path) -> Iterator[Generator]:
    with Generator(folder, device="cpu", dtype="float32", max_seqs=4, max_step_tokens=48) as gen:
        yield gen


def draw(gen: Generator) -> tuple[list[int], list[float]]:
    """The ids and logprobs of one answer."""
    (completion,) = gen.generate([PROMPT], PARAMS)[0].completions
    return completion.token_ids, completion.logprobs


def logprobs_of(weights: dict[str, torch.Tensor], folder: Path, answer: list[int]) -> torch.Tensor:
    """The logprobs of an answer by transformers, with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("targets", [list(PROJECTIONS), "all-linear"])
def test_adapters_change_the_projections_of_recurrent_layers(
    gen: Generator, folder: Path, targets: list[str] | str
) -> None:
    """An adapter of PEFT has factors for all linear layers that it targets, which the model merges; without it, the
    bits are the old ones."""
    weights = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    ends = PROJECTIONS if isinstance(targets, list) else (*PROJECTIONS, "_proj")
    source, factors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for name, weight in list(weights.items()):
        layer = name.removesuffix(".weight")
        if layer.endswith(ends):
            a, b = (torch.randn(shape, generator=source) * 0.1 for shape in ((4, weight.shape[1]), (len(weight), 4)))
            factors |= {f"base_model.model.{layer}.lora_{which}.weight": each for which, each in (("A", a), ("B", b))}
            weights[name] = weight + 2 * b @ a
    before = draw(gen)
    gen.update_adapter(factors, {"r": 4, "lora_alpha": 8, "target_modules": targets})
    answer, logprobs = draw(gen)
    assert logprobs != before[1]
    torch.testing.assert_close(torch.tensor(logprobs), logprobs_of(weights, folder, answer), atol=2e-4, rtol=0)
    gen.update_adapter(None)
    assert draw(gen) == before


@pytest.mark.parametrize("name", ["A_log", "norm.weight"])
def test_what_qwen3_5_publishes_in_float32_is_not_rounded(folder: Path, name: str) -> None:
    """The decays and the norm of outputs, in a model in bfloat16: a change below its precision has an effect."""
    found = load_file(folder / "model.safetensors")
    given = {key: tensor.bfloat16().float() for key, tensor in found.items() if key.endswith(f"linear_attn.{name}")}
    assert len(given) == 3
    scores = []
    with Generator(folder, device="cpu", dtype="bfloat16", max_seqs=4) as gen:
        for factor in (1, 1 + 2**-10):
            changed = {key: tensor * factor for key, tensor in given.items()}
            assert all(torch.equal(changed[key].bfloat16().float(), given[key]) for key in given)
            gen.update_weights(changed, partial=True)
            scores.append(gen.score([PROMPT])[0])
        gen.update_weights(given, partial=True)
        assert gen.score([PROMPT])[0] == scores[0]
    assert scores[0] != scores[1]


@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("page_size", [64, 16])
def test_conversations_continue_from_their_last_states(page_size: int, users: int, folder: Path) -> None:
    """They begin alike. The engine is idle between the turns, and cached pages reach beyond the states."""
    prompts, computed = [[*PROMPT[:70], *[user] * 20] for user in range(users)], 0
    with Generator(folder, device="cpu", seed=0, page_size=page_size) as gen:
        for _ in range(4):
            outputs = gen.generate(prompts, PARAMS)
            if computed:
                assert [output.cached_tokens for output in outputs] == [computed // 64 * 64] * users
            computed = len(prompts[0]) + PARAMS.max_tokens - 1
            prompts = [[*old, *o.completions[0].token_ids, 7] for old, o in zip(prompts, outputs, strict=True)]


def test_a_policy_refuses_a_hybrid_model(gen: Generator) -> None:
    with pytest.raises(ValueError, match=r"cannot train models with recurrent layers; .* update_weights"):
        Policy(gen)


def test_a_quantized_checkpoint_is_refused_with_a_remedy_that_helps(folder: Path, tmp_path: Path) -> None:
    """The option quantization, which nobody gave, is not to blame."""
    shutil.copy(folder / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="take a checkpoint that is not quantized"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="leave quantization out"):
        read_config(folder, "fp8")
