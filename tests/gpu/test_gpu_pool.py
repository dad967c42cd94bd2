"""GeneratorPool on several GPUs: each process has its own, and outputs are those of one Generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastgen import Generator, GeneratorPool, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than 2 GPUs that torch can use")


FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are fewer than 4 GPUs")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=FOUR)])
def test_processes_have_their_own_gpus_and_the_outputs_of_one_generator(ranks: int) -> None:
    """With ranks of tensor parallelism in float32, where sums differ, only the form is compared."""
    options: dict[str, Any] = {"dtype": "float32", "seed": 3, "max_seqs": 16, "num_pages": 200}
    options |= {"tensor_parallel": ranks, "deterministic": ranks == 1}  # batches differ
    prompts = [[{"role": "user", "content": f"what is {number} + 7?"}] for number in range(64)]
    params = SamplingParams(max_tokens=24)
    before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2 * ranks)]
    with GeneratorPool(data_parallel=2, **options) as pool:
        used = [free - torch.cuda.mem_get_info(gpu)[0] for gpu, free in enumerate(before)]
        outputs = pool.generate(prompts, params)
    assert min(used) > 10**8, "each GPU holds the model"
    with Generator(**options) as gen:
        expected = gen.generate(prompts, params)
    if ranks == 1:
        assert [output.completions for output in outputs] == [output.completions for output in expected]
    assert len(outputs) == len(prompts)


def test_more_processes_than_gpus_are_refused() -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=rf"data_parallel is {count}, which takes {count} GPUs, and torch finds"):
        GeneratorPool(data_parallel=count)
