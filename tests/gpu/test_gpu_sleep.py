"""A Generator that sleeps gives its memory back to the driver, and after `wake` its graphs compute the same tokens.

The tests marked `alone` compare the free memory of the whole GPU, as `sleep` itself does: the memory that a Generator
maps is not torch's, and a container does not see which process uses how much. They need a GPU that nobody else uses.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from known_models import KNOWN
from safetensors.torch import load_file
from test_gpu import CHATS

from fastgen import Generator, SamplingParams
from fastgen.model.loader import BUNDLED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_seqs": 4, "kv_cache_gb": 2.0, "seed": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
MB = 1 << 20


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def answers(gen: Generator) -> list[list[int]]:
    return [output.completions[0].token_ids for output in gen.generate(CHATS, GREEDY)]


@pytest.mark.alone
@pytest.mark.parametrize("host_cache_gb", [0, 0.05])
def test_memory_goes_and_graphs_replay_the_same_tokens(host_cache_gb: float) -> None:
    with Generator(host_cache_gb=host_cache_gb, **OPTIONS) as gen:
        runner = gen._runner
        graphs, where = runner.graphs, runner.pool.whole.data_ptr()
        assert graphs
        before, awake = answers(gen), free()
        weights = sum(part.view.nbytes for part in runner.model.parameters.targets().values())
        for tags, least in (
            (("weights", "kv_cache"), runner.pool.whole.nbytes + weights),
            ("kv_cache", runner.pool.whole.nbytes),
            ("weights", weights),
            (("weights", "kv_cache"), runner.pool.whole.nbytes + weights),
        ):
            for keep in (True, False):
                start = free()
                freed = gen.sleep(tags, keep_weights=keep)
                assert freed == pytest.approx(free() - start, abs=4 * MB)
                assert freed > least - 4 * MB
                assert gen.sleep(tags) == 0
                gen.wake("weights")
                if not keep and "weights" in tags:
                    gen.update_weights(load_file(BUNDLED / "model.safetensors"))
                gen.wake()
                assert answers(gen) == before
        assert runner.graphs is graphs
        assert runner.pool.whole.data_ptr() == where
        assert free() > awake - 64 * MB


@pytest.mark.alone
def test_others_may_use_the_memory_meanwhile() -> None:
    with Generator(**OPTIONS) as gen:
        before = answers(gen)
        gen.sleep()
        torch.cuda.empty_cache()
        other = torch.full((free() - 1024 * MB,), 0xFF, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"GB of cuda:0 are needed, and .* are free"):
            gen.wake()
        assert bool((other[-MB:] == 0xFF).all())
        del other
        gen.wake()  # torch still keeps what `other` was
        assert answers(gen) == before
    torch.cuda.empty_cache()


@pytest.mark.alone
def test_all_is_given_back_at_the_end() -> None:
    with Generator(**OPTIONS) as gen:  # so that CUDA has loaded everything that stays loaded
        answers(gen)
    start = free()
    for sleeps in (False, True):
        with Generator(**OPTIONS) as gen:
            answers(gen)
            assert free() < start - 1e9
            if sleeps:
                gen.sleep()
        assert free() > start - 64 * MB


@pytest.mark.alone
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 60e9, reason="Mistral 7B and its KV do not fit"
)
def test_mistral_wakes_within_a_second(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["mistralai/Mistral-7B-Instruct-v0.3"][0]))
    options: dict[str, Any] = {"load": "dummy", "dtype": "bfloat16", "kv_cache_gb": 20.0, "max_seqs": 16, "seed": 0}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with Generator(tmp_path, device="cuda", **options) as gen:
        before = gen.generate([[5, 6, 7]] * 3, params)
        for turn in ("first", "second"):
            start = time.perf_counter()
            freed = gen.sleep()
            slept = time.perf_counter()
            gen.wake()
            woke = time.perf_counter()
            print(f"{turn}: {freed / 1e9:.1f} GB; sleep {slept - start:.3f} s, wake {woke - slept:.3f} s")
            assert freed > 34e9
            assert woke - slept < 1.0
            after = gen.generate([[5, 6, 7]] * 3, params)
            assert [o.completions[0].token_ids for o in after] == [o.completions[0].token_ids for o in before]


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than 2 GPUs that torch can use")
def test_ranks_sleep() -> None:
    with Generator(tensor_parallel=2, **OPTIONS | {"kv_cache_gb": 4.0}) as gen:
        before = answers(gen)
        for keep in (True, False):
            assert gen.sleep(keep_weights=keep) > 3.9e9
            gen.wake("weights")
            if not keep:
                gen.update_weights(load_file(BUNDLED / "model.safetensors", device="cuda"))
            gen.wake()
            assert answers(gen) == before
