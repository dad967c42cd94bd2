"""The rollout `fastgen` under verl itself: a replica in Ray, and GRPO by verl's own program. Needs verl (see .ci/run).

verl trains on accelerators only, so `verl_cpu.py` adds a platform for the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fastgen
from fastgen import Generator, SamplingParams

HERE, ROOT = Path(__file__).parent, Path(fastgen.__file__).parents[1]
TINY = ROOT / "fastgen" / "tiny"
CPU = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "PYTHONPATH": f"{ROOT}:{HERE}"}
CPU |= {"RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}

pytest.importorskip("verl", reason="needs verl 0.9.1 and what docs/rl.md installs with it")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(sum(map(ord, solution_str)) % 7)
"""
PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import test_verl
asyncio.run(test_verl.use_replica())
"""


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **CPU}, **options
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


# ------------------------------------------------------------------------------------------------ a replica


async def use_replica() -> None:
    """Launch a replica for one worker, and use it as verl does. This runs in a process of its own."""
    import ray
    from omegaconf import OmegaConf
    from verl.workers.config import RolloutConfig
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False)
    model = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": str(TINY)})
    model.override_config = {"attn_implementation": "sdpa"}
    engine = {"fastgen": {"num_pages": 100, "page_size": 16}}
    config = RolloutConfig(
        name="fastgen", tensor_model_parallel_size=1, dtype="float32", prompt_length=64, response_length=32,
        engine_kwargs=engine,
    )  # fmt: skip

    @ray.remote
    class Worker:
        def start(self) -> None:
            os.environ["RANK"] = "0"
            self.rollout = get_rollout_class("fastgen")(config, model, None)

        async def update(self, seed: int, step: int) -> None:
            await self.rollout.resume(["weights"])
            await self.rollout.update_weights(iter(changed(seed).items()), global_steps=step)
            await self.rollout.resume(["kv_cache"])

        async def refusals(self) -> list[str]:
            found = []
            for options in ({"wire_format": "delta_flush"}, {"peft_config": {}}):
                try:
                    await self.rollout.update_weights(iter(()), **options)
                except ValueError as error:
                    found.append(str(error))
            return found

    worker = Worker.options(num_gpus=0.5).remote()
    await worker.start.remote()
    replica = get_rollout_replica_class("fastgen")(0, config, model, gpus_per_node=1)
    await replica.init_hybrid(type("Group", (), {"workers": [worker]}))
    await check(replica, worker)
    print("done")


def changed(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        name: tensor.float() + 0.02 * seed * torch.randn(tensor.shape)
        for name, tensor in load_file(TINY / "model.safetensors").items()
    }


async def check(replica: Any, worker: Any) -> None:
    server, prompt = replica.server_handle, [5, 6, 7, 8]
    asked = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True, "seed": 3}

    async def ask(**more: Any) -> Any:
        return await server.generate.remote(prompt, {**asked, "ignore_eos": True, **more}, "id")

    with Generator(dtype="float32", page_size=16, num_pages=100) as here:
        for step, seed in enumerate((0, 1, 2)):
            if step:  # as in each step of verl's synchronous trainer
                await replica.sleep()
                await worker.update.remote(seed, step)
                here.update_weights(changed(seed))
            found = await ask()
            params = SamplingParams(max_tokens=32, seed=3, ignore_eos=True)
            (expected,) = here.generate([prompt], params)[0].completions
            assert found.token_ids == expected.token_ids
            assert found.log_probs == expected.logprobs
            assert (found.stop_reason, found.extra_fields["global_steps"]) == ("completed", step or None)

    running = [asyncio.ensure_future(ask(max_tokens=1500, seed=number)) for number in range(3)]
    await asyncio.sleep(1)
    await replica.abort_all_requests()
    partial = await asyncio.gather(*running)
    assert [output.stop_reason for output in partial] == ["aborted"] * 3
    assert all(len(output.log_probs) == len(output.token_ids) for output in partial)
    waiting = asyncio.ensure_future(ask())
    await replica.clear_kv_cache()
    await replica.release_kv_cache()
    await replica.resume_kv_cache()
    assert not waiting.done()
    await replica.resume_generation()
    assert (await waiting).token_ids == found.token_ids
    await replica.abort_all_requests(reject_request=True)
    refused = await ask()
    assert (refused.token_ids, refused.stop_reason) == ([], "aborted")
    await replica.resume_generation()
    first, second = await worker.refusals.remote()
    assert "takes no weights as 'delta_flush'" in first
    assert "lora.merge=True" in second


def test_a_replica_generates_and_gets_weights() -> None:
    assert run("-c", PROGRAM, str(HERE)).endswith("done\n")


# ------------------------------------------------------------------------------------------------ verl's program


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """The options of a run of three steps."""
    import pandas

    rows = [
        {
            "data_source": "products",
            "prompt": [{"role": "user", "content": f"what is {number} * 17?"}],
            "reward_model": {"style": "rule", "ground_truth": str(17 * number)},
            "extra_info": {"index": number},
        }
        for number in range(24)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    return (HERE / "verl_options.txt").read_text().format(folder=tmp_path, model=TINY).split()


def test_three_steps_of_grpo(options: list[str]) -> None:
    """The engine has the trainer's weights in each step: their logprobs of the samples are equal."""
    said = run("-m", "verl.trainer.main_ppo", *options)
    steps = re.findall(r"step:(\d+) - (.*)", said)
    assert [int(number) for number, _ in steps] == [1, 2, 3], said[-3000:]
    for _, line in steps:
        metrics = dict(re.findall(r"(\S+?):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)", line))
        assert float(metrics["training/rollout_probs_diff_max"]) < 1e-3, json.dumps(metrics)
        assert float(metrics["actor/grad_norm"]) > 0
