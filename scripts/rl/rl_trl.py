"""GRPO by TRL: its GRPOTrainer as it is, with a Generator where a vLLM server would be, on the problems of rl_grpo.py.

    pip install -c constraints.txt -e '.[rl]'
    python scripts/rl/rl_trl.py                  # on two CPU cores in minutes
    python scripts/rl/rl_trl.py --device cuda    # on a GPU
    python scripts/rl/rl_trl.py --url http://host:5678    # a server of `fgserve --rollout --dtype float32`

`sample_by` is for other programs, too. With use_vllm=True and vllm_mode="server" TRL asks its VLLMClient, which imports
vLLM for the transfer of weights; `sample_by` replaces it by a GeneratorClient. TRL goes on to gather the weights of
FSDP and ZeRO and to merge LoRA adapters, and applies its vllm_importance_sampling_* settings. trl is pinned, since this
is no interface of it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from rl_grpo import MAX_TOKENS, Settings, accuracy, chat, problems, reward
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from fastgen import Generator, SamplingParams
from fastgen.model.loader import resolve
from fastgen.rl.remote import RemoteGenerator

LEARNING_RATE = 2e-4  # above rl_grpo.py's, as there is one optimizer step per rollout
RATIO = "sampling/importance_sampling_ratio/mean"  # the trainer's probability over the sampler's, in the trainer's log


def sample_by(gen: Generator | RemoteGenerator) -> None:
    """Let trainers that are made from now on, with use_vllm=True and vllm_mode="server", sample by `gen`. Each process
    of a program calls it; only the first uses `gen`."""
    vllm_generation.VLLMClient = lambda **_: GeneratorClient(gen)
    vllm_generation.is_vllm_available = lambda: True


class GeneratorClient:
    """A client of a Generator, with the methods of TRL's VLLMClient that a GRPOTrainer calls."""

    def __init__(self, gen: Generator | RemoteGenerator) -> None:
        self.gen = gen

    def init_communicator(self, device: torch.device) -> None:
        self._device = device  # a RemoteGenerator connects at the first update

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(
        self, prompts: Sequence[Sequence[int]], features: None = None, logprobs: int = 0,
        structured_outputs_regex: str | None = None, generation_kwargs: dict[str, Any] | None = None, **params: Any,
    ) -> dict[str, list[Any]]:  # fmt: skip
        """Return n completions of each prompt, with the logprob of each token: lists [prompts x n][tokens][1]."""
        if features is not None or logprobs:
            raise ValueError("images and logprobs of other tokens are not supported")
        own = SamplingParams(**{**params, "regex": structured_outputs_regex, **(generation_kwargs or {})})
        outputs = self.gen.generate([list(prompt) for prompt in prompts], own)
        if errors := [output.error for output in outputs if output.error]:
            raise ValueError(f"a prompt cannot be answered: {errors[0]}")
        samples = [sample for output in outputs for sample in output.completions]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [[[logprob] for logprob in sample.logprobs] for sample in samples],
        }

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Push the weights. named_params: gathers, and merges adapters as long as it is read."""
        given: Any = named_params
        if isinstance(self.gen, RemoteGenerator):
            given = [(name, _Later(dtype, shape, self._device, named_params)) for name, dtype, shape in metadata]
        self.gen.update_weights(given)
        for _ in named_params:  # it does what comes after the last tensor
            pass

    def reset_prefix_cache(self) -> None:
        """Do nothing: KV of old weights is never found."""


class _Later:
    """A tensor that is taken from an iterator when it is sent, as a DTensor is gathered then."""

    def __init__(
        self, dtype: str, shape: list[int], device: torch.device, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        self.dtype, self.shape, self.device, self._tensors = getattr(torch, dtype), shape, device, tensors

    def full_tensor(self) -> Tensor:
        return next(self._tensors)[1]


def product(completions: list[Any], a: list[int], b: list[int], **_: Any) -> list[float]:
    """Return the reward of rl_grpo.py. a, b: columns of the data set."""
    return [reward((x, y), said[0]["content"]) for x, y, said in zip(a, b, completions, strict=True)]


def train(settings: Settings, device: str, folder: str, url: str | None = None) -> dict[str, Any]:
    """Train; return the held-out accuracy before and after, and the trainer's log, a dictionary for each step. folder:
    for TRL's files."""
    to_train, held_out = problems(settings)
    config = GRPOConfig(
        output_dir=folder, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True, seed=settings.seed,
        use_cpu=device == "cpu", bf16=False, gradient_checkpointing=False,
        max_steps=settings.steps, num_generations=settings.samples, per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=settings.prompts * settings.samples // settings.batch,  # one rollout per step
        temperature=1.0, max_completion_length=MAX_TOKENS,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0,
        use_vllm=True, vllm_mode="server",
        epsilon=settings.clip_low, epsilon_high=settings.clip_high, vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    gen: Generator | RemoteGenerator
    if url is not None:
        gen = RemoteGenerator(url)
    else:  # half of a GPU's memory is the trainer's
        gen = Generator(device=device, dtype="float32", memory_fraction=0.5, seed=settings.seed)
    with gen:
        sample_by(gen)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(resolve(None), dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(resolve(None)),
            reward_funcs=product,
            train_dataset=Dataset.from_list([{"prompt": chat((a, b)), "a": a, "b": b} for a, b in to_train]),
            args=config,
        )
        before = accuracy(gen, held_out)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        log = [entry for entry in trainer.state.log_history if RATIO in entry]
        return {"before": before, "after": accuracy(gen, held_out), "log": log}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--url", help="URL of a server of the bundled model (default: a Generator in this process)")
    parser.add_argument("--smoke", action="store_true", help="five small steps, to see that it runs")
    arguments = parser.parse_args(argv)
    smoke = {"steps": 5, "prompts": 2, "samples": 4, "batch": 4, "held_out": 4}
    with tempfile.TemporaryDirectory() as folder:
        report = train(Settings(**(smoke if arguments.smoke else {})), arguments.device, folder, arguments.url)
    print(f"held-out accuracy {100 * report['before']:.1f} % before, {100 * report['after']:.1f} % after")
    return report


if __name__ == "__main__":
    main()
