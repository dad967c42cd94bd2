"""A Policy on a GPU: the bits of the draws, one copy of the weights, and gradients near those of float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu import CHATS
from torch import Tensor

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.rl.policy import Policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_seqs": 8,
    "num_pages": 96,
    "page_size": 16,
    "seed": 0,
    "deterministic": True,
}
DRAWN = SamplingParams(n=4, temperature=0.9, max_tokens=40, ignore_eos=True)


def samples_of(outputs: list[RequestOutput]) -> tuple[list[list[int]], list[int], Tensor]:
    pairs = [(output.prompt_token_ids, each) for output in outputs for each in output.completions]
    raw = torch.tensor([x for _, each in pairs for x in each.raw_logprobs], device="cuda")
    return [prompt + each.token_ids for prompt, each in pairs], [len(prompt) for prompt, _ in pairs], raw


def train(gen: Generator, policy: Policy, optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Take a step on new samples, whose logprobs must have the bits of the draws; return the samples."""
    sequences, starts, drawn = samples_of(gen.generate([*CHATS, *CHATS], DRAWN))
    logprobs = policy.logprobs(sequences, starts)
    assert torch.equal(logprobs.detach(), drawn)
    logprobs.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    policy.commit()
    return sequences


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("bfloat16", {}),
        ("bfloat16", {"speculate": "ngram", "max_step_tokens": 64, "num_pages": 40}),
        ("bfloat16", {"kv_cache_dtype": "fp8"}),
        ("float32", {}),
    ],
)
def test_the_bits_of_the_draws_in_each_step_of_training(dtype: str, more: dict[str, Any]) -> None:
    with Generator(dtype=dtype, **OPTIONS | more) as gen:
        policy = Policy(gen, pack_tokens=500)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
        for _ in range(3):
            train(gen, policy, optimizer)
        assert gen.weight_version == 3


def gradients(**options: Any) -> dict[str, Tensor]:
    """Return the gradients of three samples with one prompt and of one without, on the CPU in float32."""
    random = torch.Generator().manual_seed(0)
    prompt, *rest = (torch.randint(5, 260, (length,), generator=random).tolist() for length in (70, 31, 32, 33, 45))
    sequences = [prompt + answer for answer in rest[:3]] + rest[3:]
    with Generator(**OPTIONS | options) as gen:
        policy = Policy(gen)
        policy.logprobs(sequences, [70, 70, 70, 1]).mean().backward()
        return {name: parameter.grad.float().cpu() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_gradients_are_near_those_of_the_cpu(dtype: str, most: float) -> None:
    exact, ours = gradients(device="cpu", dtype="float32"), gradients(dtype=dtype)
    distances = [((ours[name] - gradient).norm() / gradient.norm()).item() for name, gradient in exact.items()]
    assert sum(distances) / len(distances) < most


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_drawn_between_an_optimizer_step_and_its_commit(fused: bool) -> None:
    with Generator(dtype="bfloat16", **OPTIONS) as gen:
        policy = Policy(gen)
        loss = policy.logprobs([list(range(5, 60))]).mean()
        loss.backward(retain_graph=True)
        torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=fused).step()
        with pytest.raises(RuntimeError, match="call backward before"):
            loss.backward()
        with pytest.raises(RuntimeError, match="call commit"):
            gen.generate(CHATS, DRAWN)
        policy.commit()
        assert len(gen.generate(CHATS, DRAWN)) == len(CHATS)


def test_parameters_are_the_memory_of_the_weights_or_masters_in_float32() -> None:
    with Generator(dtype="bfloat16", **OPTIONS) as gen:
        views = {name: part.view.data_ptr() for name, part in gen._runner.model.parameters.targets().items()}
        assert all(parameter.is_contiguous() for parameter in Policy(gen).parameters())  # NCCL broadcasts no others
        assert {name: p.data_ptr() for name, p in Policy(gen).named_parameters()} == views
        masters = Policy(gen, dtype=torch.float32)
        sequences = [list(range(5, 60)), list(range(9, 40))]
        masters.logprobs(sequences).sum().backward()
        with torch.no_grad():
            for parameter in masters.parameters():
                parameter -= 1e-4 * parameter.grad
        after = masters.logprobs(sequences)
        assert gen.score(sequences, 1) == [each.tolist() for each in after.split([54, 30])]
        for name, parameter in masters.named_parameters():
            assert torch.equal(gen._runner.weights.tensors()[name], parameter.bfloat16())


def test_an_adapter_is_trained_on_its_merged_weights() -> None:
    with Generator(dtype="bfloat16", **OPTIONS) as gen:
        before = gen.generate(CHATS, DRAWN)
        policy = Policy(gen, adapter={"r": 8, "lora_alpha": 16, "target_modules": "all-linear"})
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        for _ in range(3):
            sequences = train(gen, policy, optimizer)
        gen.update_adapter(None)
        assert [o.completions for o in gen.generate(CHATS, DRAWN)] != [o.completions for o in before]  # other seeds
        assert gen.score(sequences, 1) == [each.tolist() for each in torch.split(*_scores(gen, sequences))]


def _scores(gen: Generator, sequences: list[list[int]]) -> tuple[Tensor, list[int]]:
    return Policy(gen).logprobs(sequences).detach(), [len(ids) - 1 for ids in sequences]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of its two processes")
def test_ranks_take_one_step_together_over_nccl(tmp_path: Path) -> None:
    rest = [str(ROOT / "fastgen" / "tiny"), str(tmp_path / "state"), "cuda"]
    command = [sys.executable, str(ROOT / "tests" / "policy_ranks.py"), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank), "2", *rest]) for rank in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    states = [torch.load(f"{rest[1]}{rank}", map_location="cpu")[0] for rank in range(2)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
