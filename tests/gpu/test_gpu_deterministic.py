"""Equal bits under any schedule on a GPU: products, attention and whole answers, however the work is divided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitwise import Answer, Requests, alone, answers, preempting, random_options, random_requests
from torch import Tensor

from fastgen import Generator
from fastgen.device.chip import Chip
from fastgen.kernels import batch_invariant, launch
from fastgen.kernels.batch_invariant import Fused, RopeWrite
from fastgen.kernels.hopper import decode as hopper_decode
from fastgen.kernels.rope import SlotMapping
from fastgen.kernels.triton import batch_invariant as product_kernels
from fastgen.kernels.triton.compile_ahead import compile_ahead
from fastgen.model.attention.interface import StepLayout
from fastgen.model.attention.paged import PagedAttention
from fastgen.model.kv_pool import KVPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")

GPU = torch.device("cuda", 0)
MOST = 8192
TOKENS = (1, 8, 9, 16, 17, 33, 64, 65, 96, 128, 129, 160, 192, 200, 256, 257, 512, 1000)
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (32768, 4096),
    "gate_up of Qwen3 8B": (24576, 4096),
}


class Product:
    """A product of SHAPES with its epilogue, of up to MOST tokens."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        outputs, inputs = SHAPES[name]
        torch.manual_seed(0)
        self.name = name
        self.x = torch.randn(MOST, inputs, device="cuda", dtype=dtype)
        self.weight = torch.randn(outputs, inputs, device="cuda", dtype=dtype) * inputs**-0.5
        self.bias = torch.randn(outputs, device="cuda", dtype=dtype)
        self.residual = torch.randn(MOST, outputs, device="cuda", dtype=dtype)
        angles = torch.randn(MOST, 64, device="cuda")
        self.turns = angles.cos(), angles.sin()
        self.slots = torch.randperm(MOST, device="cuda")
        self.pool = torch.zeros(2, MOST // 64, 8, 64, 128, device="cuda", dtype=dtype)

    def rows(self, tokens: int, chosen: product_kernels.ProductConfig | None = None) -> list[Tensor]:
        """Return all results of the product for the first tokens, with one row per token."""
        fused = Fused(
            add=self.residual[:tokens].clone() if self.name in ("o", "down") else None,
            swiglu=self.name.startswith("gate_up"),
            rope=RopeWrite(self.mapping(tokens), *self.pool) if self.name == "qkv" else None,
            out_dtype=torch.float32 if self.name == "head" else None,
        )
        given = self.x[:tokens], self.weight, None if fused.out_dtype else self.bias, fused
        self.pool.zero_()
        out = product_kernels.launch_as(chosen, *given) if chosen else batch_invariant.product.launch(*given)
        if self.name != "qkv":
            return [out]
        slots = self.slots[:tokens]
        kept = self.pool.transpose(2, 3).flatten(1, 2)[:, slots]  # [keys and values, tokens, K, D]
        return [out, *kept]

    def mapping(self, tokens: int) -> SlotMapping:
        positions = torch.arange(tokens, device="cuda")
        return SlotMapping(positions, self.slots[:tokens], *self.turns, tokens, 8, 64)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in SHAPES), ("o", torch.float16)])
def test_a_row_of_a_product_does_not_depend_on_their_number(name: str, dtype: torch.dtype) -> None:
    product = Product(name, dtype)
    compile_ahead(lambda: [product.rows(tokens) for tokens in TOKENS], GPU)  # on all cores
    expected = product.rows(MOST)
    for tokens in TOKENS:
        for found, want in zip(product.rows(tokens), expected, strict=True):
            assert torch.equal(found, want[:tokens]), f"{tokens} tokens"


@pytest.mark.parametrize("gluon", sorted({launch.GLUON, False}))
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up"])
@pytest.mark.usefixtures("fresh_configs")
def test_all_configurations_give_the_same_bits(name: str, gluon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product(name, torch.bfloat16)
    expected = product.rows(1000)
    monkeypatch.setattr(launch, "GLUON", gluon)
    shapes = [(tokens, outputs) for tokens in TOKENS for outputs in (4096, 6144, 28672)]
    several = {product_kernels.config(*shape, 4096, torch.bfloat16, Chip.of(GPU)) for shape in shapes}
    counts = {
        chosen: min(chosen.tokens * chosen.token_tiles, 77) if gluon and chosen.swap else 77 for chosen in several
    }
    compile_ahead(lambda: [product.rows(tokens, chosen) for chosen, tokens in counts.items()], GPU)
    for chosen, tokens in counts.items():
        for found, want in zip(product.rows(tokens, chosen), expected, strict=True):
            assert torch.equal(found, want[:tokens]), chosen


@pytest.mark.skipif(
    torch.cuda.is_available() and not launch.gluon_runs_on(Chip.of(torch.device("cuda", 0)), torch.bfloat16),
    reason="needs Hopper, and Gluon",
)
@pytest.mark.parametrize(
    ("group", "num_kv", "head_size", "page_size", "window", "dtype"),
    [
        (4, 8, 128, 64, 0, torch.bfloat16), (4, 8, 64, 128, 100, torch.bfloat16), (1, 12, 96, 64, 0, torch.bfloat16),
        (5, 8, 128, 192, 0, torch.float16), (20, 1, 128, 64, 70, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("count", "longest"), [(1, 1), (1, 65), (2, 9000), (40, 500), (300, 900)])
def test_decodes_in_gluon_are_those_in_triton(
    group: int, num_kv: int, head_size: int, page_size: int, window: int, dtype: torch.dtype, count: int, longest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Decodes are split or not. Unwritten values are NaN, and rows of a graph without a sequence have no result."""
    torch.manual_seed(count + longest)
    lens = torch.randint(1, longest + 1, (count,), device="cuda", dtype=torch.int32)
    lens[0] = longest
    lens[1::7] = 0
    slots = -(-longest // page_size)
    pool = KVPool(2, count * slots, num_kv, page_size, head_size, dtype, torch.device("cuda"))
    table = torch.randperm(count * slots, device="cuda").int().view(count, slots)
    written = (
        torch.arange(slots * page_size, device="cuda").view(slots, page_size) < lens[:, None, None]
    )  # [count, slots, page]
    for numbers in (pool.keys, pool.values):
        numbers.normal_()
        numbers[:, table.flatten()] *= torch.where(written, 1.0, torch.nan).to(dtype).view(1, -1, 1, page_size, 1)
    q = torch.randn(count, group * num_kv, head_size, dtype=dtype, device="cuda")

    def attended(in_gluon: bool, split: bool, decodes_alone: bool) -> Tensor:
        with monkeypatch.context() as patch:
            if not in_gluon:
                patch.setattr(hopper_decode, "streams", lambda *_: False)
            paged = PagedAttention(pool, group * num_kv, (window,), count, longest)
            paged.chip = replace(paged.chip, processors=10**9 if split else 0)
            plan = paged.plan_decode(torch.arange(count, device="cuda"), lens, table, reads_early=decodes_alone)
            q.add_(0)  # a kernel launched in the ordinary way
            return torch.stack([paged.attend(plan, layer, q, window) for layer in range(2)])[:, lens > 0]

    expected = attended(False, False, False)
    assert expected.isfinite().all()
    assert torch.equal(attended(False, True, False), expected)
    for split in (False, True):
        for decodes_alone in (False, True):
            assert torch.equal(attended(True, split, decodes_alone), expected), (split, decodes_alone)


def test_a_product_is_right() -> None:
    product = Product("down", torch.bfloat16)
    exact = product.x[:99].double() @ product.weight.double().t() + product.bias + product.residual[:99]
    [found] = product.rows(99)
    assert float((found.double() - exact).norm() / exact.norm()) < 0.003


@pytest.mark.parametrize(
    ("heads", "num_kv", "head_size", "window", "page_size"),
    [
        (32, 8, 128, 0, 64), (40, 8, 128, 700, 64), (8, 4, 96, 700, 64), (8, 2, 32, 0, 64), (32, 8, 128, 700, 16),
    ],
)  # fmt: skip
def test_a_query_has_one_answer(heads: int, num_kv: int, head_size: int, window: int, page_size: int) -> None:
    """The bits are the same in a prefill, in a chunk of it, and as a decode with all keys in one work tile or in
    several.

    Pages of 16 tokens use only the kernel in Triton.
    """
    torch.manual_seed(0)
    length, tokens = 2900, 200
    slots = -(-length // page_size)
    pool = KVPool(1, slots, num_kv, page_size, head_size, torch.bfloat16, torch.device("cuda"))
    pool.keys.normal_()
    pool.values.normal_()
    table = torch.randperm(slots, device="cuda").int().expand(300, -1).contiguous()
    q = torch.randn(tokens, heads, head_size, device="cuda", dtype=torch.bfloat16)
    paged = PagedAttention(pool, heads, (window,), 300, 4096)

    def attend(rows: Tensor, query_lens: Tensor, kv_lens: Tensor) -> Tensor:
        decodes = len(rows) if bool((query_lens == 1).all()) else 0
        layout = StepLayout(query_lens.numpy(), kv_lens.numpy(), decodes, np.arange(len(query_lens)), table)
        return paged.attend(paged.plan(layout), 0, rows, window)

    whole = attend(q, torch.tensor([tokens]), torch.tensor([length]))
    assert whole.isfinite().all()
    for first, last in ((0, 7), (100, 200), (131, 164), (195, 200)):
        chunk = attend(q[first:last], torch.tensor([last - first]), torch.tensor([length - tokens + last]))
        assert torch.equal(chunk, whole[first:last])
    lens = torch.arange(length - tokens + 1, length + 1)
    ones = torch.ones_like(lens)
    for several in (slice(0, tokens), slice(50, 52), slice(199, 200)):
        assert torch.equal(attend(q[several], ones[several], lens[several]), whole[several])
    paged.partials = 400  # too few for splits, so all keys of a decode are in one work tile
    assert torch.equal(attend(q, ones, lens), whole)
    assert torch.equal(attend(q, torch.tensor([tokens]), torch.tensor([length])), whole)


MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
    "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
CONTEXT = 700


class Model:
    """The options of a model's Generators, requests, and the answer to each request by itself."""

    def __init__(self, **how: Any) -> None:
        self.how: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "seed": 0, "deterministic": True} | how
        with self.generator(max_seqs=4, prefix_cache=False) as gen:
            self.requests: Requests = random_requests(gen.model_config.vocab_size, 24, 640, 40)
            self.expected: list[Answer] = alone(gen, self.requests)

    def generator(self, **options: Any) -> Generator:
        options = {"max_model_len": CONTEXT, "num_pages": 400} | options
        return Generator(**self.how, **options)


@pytest.fixture(scope="module", params=["bundled", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "bundled":
        return Model()
    folder: Path = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(MISTRAL))
    return Model(model=folder, load="dummy")


def check(model: Model, found: list[Answer]) -> None:
    wrong = [number for number, each in enumerate(found) if each != model.expected[number]]
    assert not wrong


def test_in_a_batch_as_alone(model: Model) -> None:
    """The cache is cold or warm, a decode step has up to 64 rows, and one request has many samples."""
    ids, params = model.requests[0]
    with model.generator(max_seqs=64) as gen:
        check(model, answers(gen, model.requests))
        check(model, answers(gen, model.requests))
        assert gen.stats.cached_tokens > 1000
        again = answers(gen, model.requests * 3)
        assert again == model.expected * 3
        one, many = (answers(gen, [(ids, replace(params, n=n, temperature=1.0, top_p=1.0))])[0][0] for n in (1, 50))
    assert one[0] == many[0]
    assert len({tuple(completion.token_ids) for completion in many}) > 10


def test_a_score_is_what_was_drawn(model: Model) -> None:
    """Raw logprobs, and untruncated logprobs at the temperature of the draw, have the same bits."""
    with model.generator(max_seqs=32) as gen:
        for (prompt, params), (completions, _) in zip(model.requests, model.expected, strict=True):
            sequences = [prompt + completion.token_ids for completion in completions]
            assert gen.score(sequences, start=len(prompt)) == [each.raw_logprobs for each in completions]
            if params.temperature:
                scores = gen.score(sequences, start=len(prompt), temperature=params.temperature)
                assert scores == [each.untruncated_logprobs for each in completions]


def test_hidden_states_in_a_batch_and_in_chunks_as_alone(model: Model) -> None:
    """Steps that keep them are launched kernel by kernel, and others by graphs."""
    sequences = [prompt for prompt, _ in model.requests[:10]]
    with model.generator(max_seqs=2, prefix_cache=False) as gen:
        layers = [0, 1, gen.model_config.num_layers // 2, -1]
        expected = [gen.features([ids], layers)[0] for ids in sequences]
        assert [tuple(states.shape) for states in expected] == [
            (4, len(ids), gen.model_config.hidden_size) for ids in sequences
        ]
    with model.generator(max_seqs=32, max_prefill_tokens=48) as gen:
        check(model, answers(gen, model.requests))
        found = gen.features(sequences, layers)
        assert all(map(torch.equal, found, expected))
        last = gen.features(sequences, layers, "last")
        assert all(torch.equal(mine, states[:, -1:]) for mine, states in zip(last, expected, strict=True))
        assert gen.features(sequences, -1)[0].dtype == expected[0].dtype == getattr(torch, gen.config.dtype)
        check(model, answers(gen, model.requests))


def test_under_a_random_schedule_as_alone(model: Model) -> None:
    with model.generator(**random_options(1, CONTEXT)) as gen:
        preempting(gen, steps=29)
        check(model, answers(gen, model.requests))
        check(model, answers(gen, model.requests))
        assert gen.stats.preemptions > 3


def test_short_chunks_while_others_decode_as_alone(model: Model) -> None:
    with model.generator(max_seqs=8, max_prefill_tokens=48) as gen:
        check(model, answers(gen, model.requests))


def test_it_is_the_default_on_hopper() -> None:
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    for dtype in ("bfloat16", "float16", "float32"):
        with Generator(device="cuda", dtype=dtype, kv_cache_gb=0.1, max_seqs=2) as gen:
            assert gen.config.deterministic == (on_hopper and dtype != "float32")
    with Generator(device="cuda", dtype="bfloat16", max_prefill_tokens=0) as gen:
        assert 256 <= gen.config.max_prefill_tokens <= gen.config.max_step_tokens, "measured at the start"
    if on_hopper:
        with pytest.raises(ValueError, match="leave deterministic out"):
            Generator(device="cuda", dtype="bfloat16", deterministic=False)


def test_float32_too() -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "deterministic": True, "max_model_len": CONTEXT}
    with Generator(**options, max_seqs=2, prefix_cache=False) as gen:
        requests = random_requests(gen.model_config.vocab_size, 8, 300, 20)
        expected = alone(gen, requests)
    with Generator(**options, max_seqs=32, max_step_tokens=100) as gen:
        assert answers(gen, requests) == expected
