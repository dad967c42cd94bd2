"""The workloads of `bench.py gpu`, and the limit that a GPU's memory and its matrix products set to each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reports import MODELS

from fastgen.model.config import ModelConfig

DTYPE_BYTES = 2


@dataclass(frozen=True)
class Workload:
    """Sequences of prompt -> generated tokens.

    samples: number of sequences per prompt, which share all of it. common: number of tokens that all prompts share.
    """

    sequences: int
    prompt: int
    generated: int
    samples: int = 1
    common: int = 0

    @property
    def prompts(self) -> int:
        """The number of different prompts."""
        return self.sequences // self.samples

    @property
    def tokens(self) -> int:
        """The tokens that all sequences together generate."""
        return self.sequences * self.generated

    def small(self) -> Workload:
        sequences, samples = min(self.sequences, 4), min(self.samples, 2)
        return Workload(sequences, min(self.prompt, 24), min(self.generated, 12), samples, min(self.common, 16))


SHARED = {
    "group": Workload(64 * 16, 1024, 512, samples=16),
    "tree": Workload(32 * 16, 2048 + 512, 256, samples=16, common=2048),
}
"""Workloads whose sequences share prefixes: 64 prompts; 32 few-shot prompts of 512 tokens after one system prompt."""

PLAIN = {
    "headline": Workload(512, 1024, 128),
    "decode": Workload(512, 1024, 1024),
    "short": Workload(2048, 128, 512),
    "chat1": Workload(1, 128, 256),
    "chat8": Workload(8, 128, 256),
    "chat32": Workload(32, 128, 256),
}
"""The default run."""

MORE = {
    "chat64": Workload(64, 128, 256),
    "batch128": Workload(128, 256, 256),
    "long": Workload(64, 8000, 256),
    "longchat": Workload(1, 16000, 256),
}
WORKLOADS = PLAIN | MORE | SHARED
SMOKE_SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
               "max_position_embeddings": 512, "full_attention_interval": 2}  # fmt: skip


def settings(model: str, smoke: bool, int4: bool = False) -> dict[str, Any]:
    """Return a model's config.json. int4: its linear layers are in int4, its others in float16, as AWQ stores them."""
    form = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32 if smoke else 128, "zero_point": True}
    found = MODELS[model] | (SMOKE_SHAPE if smoke else {})
    return found | ({"torch_dtype": "float16", "quantization_config": form} if int4 else {})


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU: bytes/s of memory traffic, and FLOP/s of bfloat16 matrix products."""

    memory: float
    products: float

    def times(self, gpus: int) -> Rates:
        """Return the rates of so many GPUs together, without any communication."""
        return Rates(gpus * self.memory, gpus * self.products)


CARDS = {"h200": Rates(4.30e12, 665e12), "h100": Rates(3.02e12, 677e12)}
"""Rates measured once on an H200 and on an H100 SXM; reports also have the limit by the rates of their own machine."""


def card_of(gpu: str) -> str:
    """Return the key in CARDS for a GPU by its name, such as NVIDIA H100 80GB HBM3; an H200 for one without rates."""
    return "h100" if "H100" in gpu else "h200"


ATTENTION_RATE = 600 / 665
"""The rate of the FLOPs of a prefill's attention, as a share of the rate of the matrix products."""

FP8_RATE = 1300 / 665
"""The rate of matrix products in fp8 with one scale per row (`torch._scaled_mm`, once on an H200), as such a share."""


@dataclass(frozen=True)
class Costs:
    """Costs of a model.

    layers, head: number of parameters of its linear layers and of lm_head. attention: FLOPs per (query, key) pair.
    kv: bytes of KV per token. layer_bytes: bytes per weight of the linear layers, without the head. fp8: whether they
    are in fp8.
    """

    layers: int
    head: int
    attention: int
    kv: int
    layer_bytes: float = DTYPE_BYTES
    fp8: bool = False

    @property
    def weight_bytes(self) -> float:
        return self.layers * self.layer_bytes + self.head * DTYPE_BYTES

    @property
    def layer_flops(self) -> float:
        """FLOPs of the linear layers per token, weighted by the rate of fp8 where they are in fp8."""
        return 2 * self.layers / (FP8_RATE if self.fp8 else 1)

    @classmethod
    def of(cls, model: ModelConfig, kv_dtype: str = "bfloat16") -> Costs:
        embedding = model.vocab_size * model.hidden_size
        return cls(
            layers=model.num_parameters - embedding * (1 if model.shares_head else 2),
            head=embedding,
            attention=4 * model.kv_layers * model.num_heads * model.head_size,
            kv=2 * model.kv_layers * model.num_kv_heads * model.head_size * (1 if kv_dtype == "fp8" else DTYPE_BYTES),
            layer_bytes=model.quantization.weight_bytes if model.quantization else DTYPE_BYTES,
            fp8=model.quantization is not None and model.quantization.name == "fp8",
        )


def product_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (out, in) of a layer's four matrix products: qkv, o, gate and up, down."""
    q_size, kv_size = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    hidden, inner = model.hidden_size, model.intermediate_size
    return [(q_size + 2 * kv_size, hidden), (hidden, q_size), (model.gate_up_size, hidden), (hidden, inner)]


def limit(costs: Costs, workload: Workload, rates: Rates, lanes: int) -> float:
    """Return the generated tokens per second that GPUs of these rates allow, where `lanes` sequences decode at a time.

    The limit counts the FLOPs of the prompts (lm_head only for their last tokens). For each decode step it counts the
    longer of two times, reading all weights once and multiplying by them, and adds the time to read the lanes' KV once.
    Nothing else is counted, and nothing of the states of recurrent layers.

    Shared tokens count once: in the prefill, and in each step, where all samples of a prompt are assumed to decode at
    the same time.
    """
    prompt, common, generated = workload.prompt, workload.common, workload.generated
    steps = workload.tokens / lanes

    def prefill(start: int, end: int) -> float:
        """Return the FLOPs of positions start to end of a prompt, where the FLOPs of attention count by their rate."""
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        return costs.layer_flops * (end - start) + costs.attention * pairs / ATTENTION_RATE

    prompts = prefill(0, common) + workload.prompts * (prefill(common, prompt) + 2 * costs.head)
    step = max(costs.weight_bytes / rates.memory, (costs.layer_flops + 2 * costs.head) * lanes / rates.products)
    read = common * steps + ((prompt - common) * workload.prompts + generated / 2 * workload.sequences) * generated
    return workload.tokens / (prompts / rates.products + steps * step + costs.kv * read / rates.memory)
