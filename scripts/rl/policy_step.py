"""Measures a trainer's step with a Policy beside today's loop, and writes JSON to scripts/results/.

    python scripts/rl/policy_step.py --smoke                       # in seconds on a CPU, to see that it runs
    python scripts/rl/policy_step.py --name h200-policy            # on an H200
    python scripts/rl/policy_step.py --models llama-135m --dtype float32 --sizes 8,256,4 --name cpu-policy

A step is the forward and the backward pass over samples that the Generator has drawn, a few at a time, and once more
over groups of 16 samples with one prompt ("policy_groups"). Today's loop is transformers' model with a copy of the
weights, gradient checkpointing, the same attention (torch's flash attention), and logits of 2048 rows at a time.
Weights are random, in the true shapes. Written for each model: whether all logprobs equal the draws' to the bit, and
the largest difference, with a histogram of the importance ratios; seconds of a step (the better of two); the peak of
the device's memory in a step; and how far gradients are from a float32 reference, as the mean over the parameters of
|gradient - reference| / |reference|.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.rl.policy import Policy

sys.path.append(str(Path(__file__).parent.parent / "bench"))

from reports import MODELS, RESULTS, write_json

LogprobsOf = Callable[[list[list[int]], list[int]], Tensor]  # of ids and the starts of the answers

HEAD_ROWS = 2048
RATIOS, BINS = (0.795, 1.205), 41  # range and number of bins of the histogram
SMOKE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip


class Samples:
    """Samples with their prompts: `ids` of each, `starts` of the answers, and `drawn`, the raw logprobs of each."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        pairs = [(output.prompt_token_ids, each) for output in outputs for each in output.completions]
        self.ids = [prompt + each.token_ids for prompt, each in pairs]
        self.starts = [len(prompt) for prompt, _ in pairs]
        self.drawn = [torch.tensor(each.raw_logprobs) for _, each in pairs]

    def first(self, count: int) -> Samples:
        """Return the first samples."""
        few = Samples([])
        few.ids, few.starts, few.drawn = self.ids[:count], self.starts[:count], self.drawn[:count]
        return few

    def parts(self, size: int) -> Iterator[tuple[list[list[int]], list[int], Tensor]]:
        """Yield ids, starts and drawn logprobs of `size` samples at a time."""
        for at in range(0, len(self.ids), size):
            part = slice(at, at + size)
            yield self.ids[part], self.starts[part], torch.cat(self.drawn[part])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def peak_memory(device: str, found: dict[str, float]) -> Iterator[None]:
    """Note the largest number of GB of the device that are in use during the block, by any program."""
    if device == "cpu":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    done, least = threading.Event(), [torch.cuda.mem_get_info()[0]]

    def watch() -> None:
        while not done.wait(0.002):
            least.append(min(least.pop(), torch.cuda.mem_get_info()[0]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found["peak_gb"] = (torch.cuda.mem_get_info()[1] - least[0]) / 1e9


def logprobs_by_transformers(model: Any, ids: list[list[int]], starts: list[int]) -> Tensor:
    """Return the logprobs of the answers' tokens as today's loops compute them, from rows padded on the right."""
    length, device = max(map(len, ids)), model.device
    padded = torch.tensor([each + [0] * (length - len(each)) for each in ids], device=device)
    hidden = model.model(padded, use_cache=False).last_hidden_state
    pairs = list(zip(ids, starts, strict=True))
    rows = torch.cat([hidden[row, start - 1 : len(each) - 1] for row, (each, start) in enumerate(pairs)])
    targets = torch.tensor([token for each, start in pairs for token in each[start:]], device=device)

    def of_rows(x: Tensor, wanted: Tensor) -> Tensor:
        return model.lm_head(x).float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]

    parts = zip(rows.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
    return torch.cat([checkpoint(of_rows, *part, use_reentrant=False) for part in parts])


def run_step(logprobs_of: LogprobsOf, samples: Samples, size: int) -> list[Tensor]:
    """Compute logprobs and gradients; return the differences from the logprobs of the draws. The loss is a policy
    gradient with advantages that differ by token."""
    distances = []
    for ids, starts, drawn in samples.parts(size):
        logprobs = logprobs_of(ids, starts)
        drawn = drawn.to(logprobs.device)
        advantages = torch.linspace(-1, 1, len(drawn), device=drawn.device)
        (((logprobs - drawn).exp() * advantages).sum() / 1e3).backward()
        distances.append(logprobs.detach() - drawn)
    return distances


def measured(step: Callable[[], list[Tensor]], module: nn.Module, device: str) -> dict[str, Any]:
    """Return the figures of a step, which is run once before it is measured. module: has the parameters."""
    found: dict[str, Any] = {}
    distances = torch.cat(step())
    found["equal"], found["max_logprob_difference"] = not bool(distances.any()), distances.abs().max().item()
    ratios = distances.exp().clamp(*RATIOS).cpu()  # what is outside is counted in the last bin on its side
    found["ratios"] = torch.histc(ratios, BINS, *RATIOS).int().tolist()
    module.zero_grad()
    with peak_memory(device, found):
        step()
    seconds = []
    for _ in range(2):
        module.zero_grad()
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    found["seconds"] = min(seconds)
    return found


def baseline(folder: Path, device: str, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return transformers' model with a copy of weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.load_state_dict(state, strict=False)  # a tied head is not in it
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def gradients_of(module: nn.Module, logprobs_of: LogprobsOf, samples: Samples) -> dict[str, Tensor]:
    """Return the gradients of a step over all samples at a time, by the parameters' names."""
    module.zero_grad()
    run_step(logprobs_of, samples, len(samples.ids))
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def error_of_gradients(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the mean relative error over all parameters."""
    return statistics.mean(((gradients[name].float() - g).norm() / g.norm()).item() for name, g in reference.items())


def draw(gen: Generator, count: int, length: int, answer: int, vocab: int, n: int = 1) -> list[RequestOutput]:
    """Return `count` samples, n of each prompt, of `length` tokens with an answer of at most `answer`."""
    random = torch.Generator().manual_seed(count + length)
    prompts = torch.randint(3, vocab, (count // n, length - answer), generator=random).tolist()
    params = SamplingParams(n=n, temperature=1.0, max_tokens=answer, ignore_eos=True)
    return gen.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def measure(name: str, device: str, dtype: str, sizes: tuple[int, int, int], gradients: bool) -> dict[str, Any]:
    """Return the figures of one model. sizes: number of samples, their length, and how many go through it at a time."""
    count, length, size = sizes
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(SMOKE if name == "smoke" else MODELS[name]))
        options: dict[str, Any] = {"kv_cache_gb": 12.0 if device == "cuda" else 0.2, "speculate": False}
        with Generator(folder, load="dummy", device=device, dtype=dtype, seed=0, **options) as gen:
            return _measure(gen, folder, (count, length, size), gradients) | {"model": name, "dtype": dtype}


def _measure(gen: Generator, folder: Path, sizes: tuple[int, int, int], gradients: bool) -> dict[str, Any]:
    count, length, size = sizes
    device, vocab = gen.config.device.partition(":")[0], gen.model_config.vocab_size
    samples = Samples(draw(gen, count, length, length // 2, vocab))
    groups = Samples(draw(gen, count, length, length // 2, vocab, n=min(16, count)))
    gen.sleep("kv_cache")  # as loops do while they train
    policy = Policy(gen)
    weights = gen._runner.weights.tensors()
    shared = all(p.data_ptr() == weights[name].data_ptr() for name, p in policy.named_parameters())
    report: dict[str, Any] = {"samples": count, "length": length, "at_a_time": size, "one_copy": shared}
    report["policy"] = measured(partial(run_step, policy.logprobs, samples, size), policy, device)
    report["policy_groups"] = measured(partial(run_step, policy.logprobs, groups, max(size, 16)), policy, device)
    policy.zero_grad()
    state = policy.state_dict()
    model = baseline(folder, device, state, getattr(torch, gen.config.dtype))
    by_transformers = partial(logprobs_by_transformers, model)
    report["transformers"] = measured(partial(run_step, by_transformers, samples, size), model, device)
    if gradients:
        few = samples.first(4)
        kinds = {
            "policy": gradients_of(policy, policy.logprobs, few),
            "transformers": gradients_of(model, by_transformers, few),
        }
        exact = baseline(folder, device, state, torch.float32)
        reference = gradients_of(exact, partial(logprobs_by_transformers, exact), few)
        report["gradient_errors"] = {kind: error_of_gradients(of_kind, reference) for kind, of_kind in kinds.items()}
    return report


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen0.6,qwen1.7,qwen4,qwen8", help="names in bench/models.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="64,1024,8", help="samples, tokens of each, and how many at a time")
    parser.add_argument("--name", help="writes scripts/results/NAME.json (default: none is written)")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    models, sizes, dtype = arguments.models.split(","), arguments.sizes, arguments.dtype
    if arguments.smoke:
        models, sizes, dtype = ["smoke"], "4,32,2", "float32"
    reports = []
    for name in models:
        count, length, size = map(int, sizes.split(","))
        gradients = name in ("qwen0.6", "smoke")
        report = measure(name, arguments.device, dtype, (count, length, size), gradients)
        gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        reports.append(report | {"device": gpu, "torch": torch.__version__})
        print(json.dumps(reports[-1]), flush=True)
        gc.collect()
    if arguments.name:
        write_json(RESULTS / f"{arguments.name}.json", reports)
    return reports


if __name__ == "__main__":
    main()
