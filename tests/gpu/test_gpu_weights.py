"""New weights on a GPU: in place, under graphs that were captured with the old ones, and with little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from adapters import CONFIG, adapter, merged
from safetensors.torch import load_file
from test_gpu import CHATS
from torch import Tensor

from fastgen import Generator, SamplingParams
from fastgen.model.loader import BUNDLED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_seqs": 4, "num_pages": 64, "seed": 0,
    "speculate": False,  # in float32 the bits of a row depend on the other rows of a step
}  # fmt: skip
PARAMS = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=24)


@pytest.fixture(scope="module")
def old() -> dict[str, Tensor]:
    return load_file(BUNDLED / "model.safetensors", device="cuda")


def answers(gen: Generator) -> list[tuple[list[int], list[float]]]:
    outputs = gen.generate(CHATS, PARAMS)
    return [(c.token_ids, c.raw_logprobs) for output in outputs for c in output.completions]


@pytest.mark.parametrize(("where", "dtype"), [("cuda", torch.float32), ("cpu", torch.float64)])
def test_graphs_go_on_with_the_new_weights(where: str, dtype: torch.dtype, old: dict[str, Tensor]) -> None:
    with Generator(load="dummy", **OPTIONS) as gen, Generator(**OPTIONS) as other:
        assert gen._runner.graphs
        views = {name: part.view.data_ptr() for name, part in gen._runner.model.parameters.targets().items()}
        before, expected = answers(gen), answers(other)
        gen.update_weights({name: tensor.to(where, dtype) for name, tensor in old.items()})
        assert {name: part.view.data_ptr() for name, part in gen._runner.model.parameters.targets().items()} == views
        assert answers(gen) == expected != before


@pytest.mark.parametrize(
    ("where", "dtype", "base"),
    [("cuda", torch.float32, "device"), ("cpu", torch.bfloat16, "host"), ("cuda", torch.bfloat16, "host")],
)
def test_graphs_go_on_with_an_adapter_and_with_the_base(where: str, dtype: torch.dtype, base: str) -> None:
    """The weights are rounded once. If the base and the product were rounded separately, 30 % would differ."""
    state, rounding = adapter(BUNDLED), 0 if dtype == torch.float32 else 2**-7
    with Generator(adapter_base=base, **OPTIONS | {"dtype": str(dtype)[6:]}) as gen:
        views = {name: part.view for name, part in gen._runner.model.parameters.targets().items()}
        weights, before = {name: view.clone() for name, view in views.items()}, answers(gen)
        gen.update_adapter({name: tensor.to(where) for name, tensor in state.items()}, CONFIG)
        for name, weight in merged(BUNDLED, state, dtype=dtype).items():
            found, expected = views[name].cpu(), weight.to(dtype)
            assert torch.allclose(found, expected, rtol=rounding, atol=1e-5)
            assert dtype == torch.float32 or (found != expected).float().mean() < 1e-3
        adapted = answers(gen)
        assert adapted != before
        gen.sleep()
        gen.wake()
        assert answers(gen) == adapted
        gen.update_adapter(None)
        assert all(torch.equal(view, weights[name]) for name, view in views.items())
        assert answers(gen) == before


def test_one_tensor_of_extra_memory(old: dict[str, Tensor]) -> None:
    def made() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in old.items():
            yield name, tensor.double()

    with Generator(**OPTIONS) as gen:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gen.update_weights(made())
        largest = max(tensor.nbytes for tensor in old.values())
        assert torch.cuda.max_memory_allocated() - before < 5.5 * largest  # four times that, and a copy


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than 2 GPUs that torch can use")
@pytest.mark.parametrize(("ranks", "where"), [(1, "cuda:1"), (2, "cuda"), (2, "cpu")])
def test_tensors_of_another_gpu_and_ranks(ranks: int, where: str, old: dict[str, Tensor]) -> None:
    options = OPTIONS | {"tensor_parallel": ranks}
    with Generator(load="dummy", **options) as gen, Generator(**options) as other:
        gen.update_weights((name, tensor.to(where)) for name, tensor in old.items())
        assert answers(gen) == answers(other)
