"""GRPO by TRL: its GRPOTrainer with a Generator where vLLM would be, on the problems of rl_grpo.py.

    pip install -c constraints.txt -e '.[rl]'
    python scripts/rl/rl_trl.py                  # on two CPU cores in minutes
    python scripts/rl/rl_trl.py --device cuda    # on a GPU
    python scripts/rl/rl_trl.py --url http://host:5678    # with a server of `fgserve --rollout`

TRL's rollout_func is experimental, so trl is pinned. What this one has to know of it:

- Prompts arrive already repeated, num_generations times: equal neighbours are one request with so many samples.
- logprobs are a flat list a completion, under the temperature that it was sampled with.
- A completion without a token breaks the trainer, and one without its final EOS counts as cut off. The Generator keeps
  the EOS, so that no completion is empty.
- Weights are given to the sampler, and its logprobs are used, only where the trainer believes that it has vLLM.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from rl_grpo import MAX_TOKENS, Settings, accuracy, chat, problems, reward
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from fastgen import Generator, SamplingParams
from fastgen.model.loader import resolve
from fastgen.remote import RemoteGenerator
from fastgen.request import Prompt

LEARNING_RATE = 2e-4  # above rl_grpo.py's, as there is one optimizer step a rollout
RATIO = "sampling/importance_sampling_ratio/mean"  # trainer's over sampler's probability, in the trainer's log


class GeneratorTrainer(GRPOTrainer):
    """A GRPOTrainer that samples by a Generator, in one process with at most one GPU.

    Before the rollouts of a step it calls `sync_weights`, as it would for vLLM, and applies its
    vllm_importance_sampling_* settings to the Generator's logprobs. use_vllm is set after the constructor, which would
    start vLLM.
    """

    def __init__(self, gen: Generator | RemoteGenerator, **arguments: Any) -> None:
        super().__init__(rollout_func=roll_out, **arguments)
        self.gen = gen
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, self, -1

    def sync_weights(self) -> None:
        self.gen.update_weights(self.accelerator.unwrap_model(self.model).state_dict())


def roll_out(prompts: Sequence[Prompt], trainer: GeneratorTrainer) -> dict[str, list[Any]]:
    """Return one completion for each prompt, in their order. weight_version: of the weights that it was drawn with."""
    groups = [(prompt, len(list(equal))) for prompt, equal in itertools.groupby(prompts)]
    tokens, heat = trainer.max_completion_length, trainer.temperature
    params = [SamplingParams(n=count, temperature=heat, max_tokens=tokens) for _, count in groups]
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "weight_version": []}
    for output in trainer.gen.generate([prompt for prompt, _ in groups], params):
        for sample in output.completions:
            if sample.error:
                raise ValueError(f"a prompt can not be answered: {sample.error}")
            found["prompt_ids"].append(output.prompt_token_ids)
            found["completion_ids"].append(sample.token_ids)
            found["logprobs"].append(sample.logprobs)
            found["weight_version"].append(sample.weight_versions[-1][0])
    return found


def product(
    completions: list[Any], a: list[int], b: list[int], weight_version: list[int],
    log_metric: Callable[[str, float], None], **_: Any,
) -> list[float]:  # fmt: skip
    """Return the reward of rl_grpo.py. a, b: columns of the data set."""
    log_metric("weight_version", sum(weight_version) / len(weight_version))
    return [reward((x, y), said[0]["content"]) for x, y, said in zip(a, b, completions, strict=True)]


def generator(settings: Settings, device: str, url: str | None) -> Generator | RemoteGenerator:
    """Return the sampler: in this process, or at a url."""
    if url is not None:
        return RemoteGenerator(url)
    # Half of a GPU's memory is the trainer's
    return Generator(device=device, dtype="float32", memory_fraction=0.5, seed=settings.seed)


def train(settings: Settings, device: str, folder: str, url: str | None = None) -> dict[str, Any]:
    """Train; return the held-out accuracy before and after, and the trainer's log, a dictionary for each step. folder:
    for TRL's files."""
    to_train, held_out = problems(settings)
    config = GRPOConfig(
        output_dir=folder, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True, seed=settings.seed,
        use_cpu=device == "cpu", bf16=False, gradient_checkpointing=False,
        max_steps=settings.steps, num_generations=settings.samples, per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=settings.prompts * settings.samples // settings.batch,  # a rollout a step
        temperature=1.0, max_completion_length=MAX_TOKENS,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0,
        epsilon=settings.clip_low, epsilon_high=settings.clip_high, vllm_importance_sampling_mode="token_truncate",
    )  # fmt: skip
    with generator(settings, device, url) as gen:
        trainer = GeneratorTrainer(
            gen,
            model=AutoModelForCausalLM.from_pretrained(resolve(None), dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(resolve(None)),
            reward_funcs=product,
            train_dataset=Dataset.from_list([{"prompt": chat((a, b)), "a": a, "b": b} for a, b in to_train]),
            args=config,
        )
        before = accuracy(gen, held_out)
        trainer.train()
        trainer.sync_weights()
        log = [entry for entry in trainer.state.log_history if RATIO in entry]
        return {"before": before, "after": accuracy(gen, held_out), "log": log}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--url", help="of a server of the bundled model (default: a Generator in this process)")
    parser.add_argument("--smoke", action="store_true", help="five small steps, to see that it runs")
    arguments = parser.parse_args(argv)
    smoke = {"steps": 5, "prompts": 2, "samples": 4, "batch": 4, "held_out": 4}
    with tempfile.TemporaryDirectory() as folder:
        report = train(Settings(**(smoke if arguments.smoke else {})), arguments.device, folder, arguments.url)
    print(f"held-out accuracy {100 * report['before']:.1f} % before, {100 * report['after']:.1f} % after")
    return report


if __name__ == "__main__":
    main()
