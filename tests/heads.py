"""Random heads that draft, in the forms in which programs write them, and what they should draft, in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from called_graphs import Called, capturable
from conftest import random_ids
from drafting import adversary
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.engine.warm_up import capture
from fastgen.kernels.drafts import StepDraws
from fastgen.kernels.noise import gumbel
from fastgen.speculation.drafting import Drafting
from fastgen.speculation.head import Head
from fastgen.speculation.planning import DraftPlan

HEADS, INNER, EPS, THETA, MASK = 6, 80, 1e-5, 3000.0, 7
LENGTHS = (1, 70, 33, 5, 64, 96)
PROMPTS = [random_ids(length) for length in LENGTHS[:-1]]
PROMPTS.append(PROMPTS[1][:64] + random_ids(32, 5))
PARAMS = [
    SamplingParams(max_tokens=40, seed=number, ignore_eos=True, temperature=(0.0, 0.8)[number % 2], n=1 + number % 2)
    for number in range(len(PROMPTS))
]
SCHEDULES: list[dict[str, Any]] = [
    {"page_size": 64, "max_seqs": 8},
    {"page_size": 16, "max_seqs": 2, "max_step_tokens": 16},
    {"page_size": 1, "max_seqs": 5, "max_step_tokens": 40},
    {"page_size": 16, "num_pages": 12, "max_seqs": 6, "max_step_tokens": 40, "host_cache_gb": 0.001},
]


def save_head(
    folder: Path, target: Path, dialect: str = "z-lab", block: int = 6, features: tuple[int, ...] = (0, 1),
    layers: int = 2, reduced: int = 0, seed: int = 0, markov: int = 0, **changes: Any,
) -> Path:  # fmt: skip
    """Write a random DFlash head for a target, and return its folder. markov: rank of a Markov head, and there is a
    confidence head too; 0: none. changes: of fields of its config.json."""
    config = json.loads((target / "config.json").read_text())
    hidden, kv_heads = config["hidden_size"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    own = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden, "head_dim": size,
        "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "intermediate_size": INNER,
        "num_hidden_layers": layers, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": config["vocab_size"],
        "max_position_embeddings": 512, "layer_types": ["full_attention"] * layers,
    }  # fmt: skip
    special: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(features)}
    if dialect == "z-lab":
        own |= {"block_size": block, "dflash_config": special}
    elif dialect == "DeepSpec":
        own |= {**special, "architectures": ["Qwen3DSparkModel"], "block_size": block, "markov_rank": markov,
                "markov_head_type": "vanilla", "enable_confidence_head": markov > 0}  # fmt: skip
    else:
        numbers = [layer + 1 for layer in features]
        own = {
            "speculators_model_type": "dflash", "transformer_layer_config": own, "block_size": block,
            "mask_token_id": MASK, "aux_hidden_state_layer_ids": numbers,
            "draft_vocab_size": reduced or config["vocab_size"],
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**own, **changes}))
    tensors = random_tensors(hidden, size, kv_heads, config["vocab_size"], len(features), layers, reduced, seed)
    if markov:
        draw, shape = torch.Generator().manual_seed(seed), (config["vocab_size"], markov)
        tensors |= {f"markov_head.markov_w{n}.weight": torch.randn(shape, generator=draw) for n in (1, 2)}
        tensors |= {"confidence_head.proj.weight": torch.ones(1, hidden + markov)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_tensors(
    hidden: int, size: int, kv_heads: int, vocab: int, features: int, layers: int, reduced: int, seed: int
) -> dict[str, Tensor]:
    """Return the tensors of a random DFlash head."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)
    }  # fmt: skip
    for number in range(layers):
        layer = f"layers.{number}."
        linears = {"q": (HEADS * size, hidden), "k": (kv_heads * size, hidden), "v": (kv_heads * size, hidden),
                   "o": (hidden, HEADS * size)}  # fmt: skip
        shapes |= {f"{layer}self_attn.{name}_proj.weight": shape for name, shape in linears.items()}
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (size,) for name in "qk"}
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (INNER, hidden) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = hidden, INNER
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=draw) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()
    }  # fmt: skip
    if reduced:
        ids = torch.randperm(vocab, generator=draw)[:reduced].sort().values
        tensors |= {"lm_head.weight": torch.randn(reduced, hidden, generator=draw), "d2t": ids - torch.arange(reduced)}
    return tensors


class Reference:
    """A target of transformers, and a DFlash head in plain torch that computes everything anew for each draft.

    first: the first row of a block that drafts.
    """

    def __init__(self, target: Path, head: Path, first: int, features: tuple[int, ...] = (0, 1)) -> None:
        import transformers

        self._target = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._tensors = load_file(head / "model.safetensors")
        self._first, self._features = first, features
        self._known: dict[tuple[int, ...], Tensor] = {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Replace the target's weights."""
        self._target.load_state_dict(tensors, strict=False)
        self._known.clear()

    @torch.no_grad()
    def logits(self, ids: list[int], start: int, length: int) -> Tensor:
        """Return the logits [length - first, V] of the drafts after the token at position `start`.

        ids: the tokens of the sequence, of which those up to `start` are used. length: number of rows of the block.
        """
        key = tuple(ids)
        if key not in self._known:
            states = self._target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            self._known[key] = torch.cat([states[layer + 1][0] for layer in self._features], 1)
        w, embedding = self._tensors, self._target.get_input_embeddings().weight
        context = norm(self._known[key][:start] @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = embedding[torch.tensor([ids[start]] + [MASK] * (length - 1))]
        for number in range(sum(name.endswith("q_proj.weight") for name in w)):
            prefix = f"layers.{number}."
            layer = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
            x = x + self._attention(layer, norm(x, layer["input_layernorm.weight"]), context)
            y = norm(x, layer["post_attention_layernorm.weight"])
            gate, up = (y @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        rows = norm(x, w["norm.weight"])[self._first :]
        vocab = len(embedding)
        if "d2t" not in w:
            return rows @ self._target.get_output_embeddings().weight.T
        logits = torch.full((len(rows), vocab), -torch.inf)
        logits[:, torch.arange(len(w["d2t"])) + w["d2t"]] = rows @ w["lm_head.weight"].T
        return logits

    def added(self, tokens: list[int]) -> Tensor:
        """Return the logits [n, V] that n tokens add to those of the next ones."""
        if "markov_head.markov_w1.weight" not in self._tensors:
            return torch.zeros(1)
        rows, matrix = (self._tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
        return rows[tokens] @ matrix.T

    def _attention(self, layer: dict[str, Tensor], y: Tensor, context: Tensor) -> Tensor:
        both = torch.cat((context, y))
        size = len(layer["self_attn.q_norm.weight"])
        q, k, v = (x @ layer[f"self_attn.{name}_proj.weight"].T for name, x in (("q", y), ("k", both), ("v", both)))
        q, k, v = (x.view(len(x), -1, size) for x in (q, k, v))
        positions = torch.arange(len(both))
        q = turned(norm(q, layer["self_attn.q_norm.weight"]), positions[len(context) :])
        k = turned(norm(k, layer["self_attn.k_norm.weight"]), positions)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q, k).div(size**0.5).softmax(-1)  # each row sees all of the block
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ layer["self_attn.o_proj.weight"].T


def save_medusa(folder: Path, target: Path, heads: int = 3, blocks: int = 1, own: bool = True) -> Path:
    """Write random Medusa heads for a target, and return their folder. own: with matrices to the vocabulary."""
    config = json.loads((target / "config.json").read_text())
    hidden, draw = config["hidden_size"], torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"], shapes[f"{head}.{block}.linear.bias"] = (hidden, hidden), (hidden,)
        if own:
            shapes[f"{head}.{blocks}.weight"] = config["vocab_size"], hidden
    tensors = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": str(target)}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


class MedusaReference:
    """A target of transformers, and Medusa heads in plain torch."""

    def __init__(self, target: Path, tensors: dict[str, Tensor]) -> None:
        import transformers

        self._target = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._tensors = tensors
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def logits(self, ids: list[int], start: int, length: int) -> Tensor:
        """Return the logits [length, V] of the drafts after the token at position `start`."""
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = self._target(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        state = self._known[key][start - 1]
        found, w = [], self._tensors
        for head in range(length):
            x, block = state, 0
            while f"{head}.{block}.linear.weight" in w:
                x = x + F.silu(w[f"{head}.{block}.linear.weight"] @ x + w[f"{head}.{block}.linear.bias"])
                block += 1
            found.append(w.get(f"{head}.{block}.weight", self._target.get_output_embeddings().weight) @ x)
        return torch.stack(found)


def save_eagle(
    folder: Path, target: Path, features: tuple[int, ...] = (0, 1), reduced: int = 0, dialect: str = "yuhuili",
    qk_norm: bool = False, own: bool = True, **changes: Any,
) -> Path:  # fmt: skip
    """Write a random EAGLE-3 head for a target, and return its folder. own: with a matrix to the vocabulary. changes:
    of fields of its config.json."""
    config = json.loads((target / "config.json").read_text())
    hidden, kv_heads, count = config["hidden_size"], config["num_key_value_heads"], len(features)
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "head_dim": size,
        "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "intermediate_size": INNER,
        "num_hidden_layers": 1, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": config["vocab_size"],
        "max_position_embeddings": 64, "draft_vocab_size": reduced or config["vocab_size"],
    }  # fmt: skip
    inputs = [layer + 1 for layer in features]
    if dialect == "yuhuili":
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(features)}
    elif dialect == "DeepSpec":
        fields |= {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": list(features)}
    else:
        methods = {"proposal_methods": [{"speculative_tokens": 3}]}
        fields = {
            "speculators_model_type": "eagle3", "transformer_layer_config": fields, "speculators_config": methods,
            "draft_vocab_size": fields["draft_vocab_size"], "eagle_aux_hidden_state_layer_ids": inputs,
        }  # fmt: skip
    fields |= changes
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, count * hidden), "norm": (hidden,)}
    layer = "layers.0." if dialect == "speculators" else "midlayer."
    heads = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    shapes |= {f"{layer}self_attn.{name}_proj": (count * size, 2 * hidden) for name, count in heads.items()}
    shapes |= {f"{layer}self_attn.o_proj": (hidden, HEADS * size), f"{layer}mlp.down_proj": (hidden, INNER)}
    shapes |= {f"{layer}mlp.{name}_proj": (INNER, hidden) for name in ("gate", "up")}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"{layer}{name}": (hidden,) for name in norms}
    shapes |= {f"{layer}self_attn.{name}_norm": (size,) for name in "qk" if qk_norm}
    shapes |= {f"fc_norm.{number}": (hidden,) for number in range(count) if fields.get("fc_norm")}
    shapes |= {"input_norm": (count * hidden,)} if fields.get("norm_before_fc") else {}
    shapes |= {"lm_head": (reduced or config["vocab_size"], hidden)} if own else {}
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=draw) * 0.2 + (len(shape) == 1) for name, shape in shapes.items()
    }
    if reduced:
        ids = torch.randperm(config["vocab_size"], generator=draw)[:reduced].sort().values
        tensors["d2t"] = ids - torch.arange(reduced)
        tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), ids)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


class EagleReference:
    """A target of transformers, and an EAGLE-3 head in plain torch that computes everything anew for each draft. The
    noise of draws is added to its logits, since each draft is the token of the next row."""

    def __init__(self, target: Path, head: Path, features: tuple[int, ...] = (0, 1)) -> None:
        import transformers

        self._target = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._config = json.loads((head / "config.json").read_text())
        self._w = {
            name.removeprefix("midlayer.").removeprefix("layers.0.").removesuffix(".weight"): tensor
            for name, tensor in load_file(head / "model.safetensors").items()
        }
        self._features = features
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    @torch.no_grad()
    def draft(self, ids: list[int], draft: Draft) -> list[int]:
        """Return as many drafts after the token at position draft.start as there are in `draft`."""
        embedding, start = self._target.get_input_embeddings().weight, draft.start
        key = tuple(ids)
        if key not in self._known:
            found = self._target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            self._known[key] = [found[layer + 1][0] for layer in self._features]
        states = self._states([x[:start] for x in self._known[key]])
        tokens, drafts = ids[1 : start + 1], list[int]()
        for _ in draft.tokens:
            x, following = self._layer(embedding[torch.tensor(tokens)], states)
            logits = self._logits(x)
            if draft.temperature:
                at = torch.tensor([[start + 1 + len(drafts)]], dtype=torch.int32)
                noise = gumbel(torch.tensor([[draft.seed]]), torch.tensor([[draft.index]]), at, len(logits))
                logits = logits / draft.temperature + noise[0]
            drafts.append(int(logits.argmax()))
            states, tokens = torch.cat((states, following[None])), [*tokens, drafts[-1]]
        return drafts

    def _states(self, features: list[Tensor]) -> Tensor:
        if self._config.get("fc_norm"):
            features = [norm(x, self._w[f"fc_norm.{at}"]) for at, x in enumerate(features)]
        together = torch.cat(features, 1)
        if self._config.get("norm_before_fc"):
            together = norm(together, self._w["input_norm"])
        return together @ self._w["fc"].T

    def _layer(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed result of the last row, and the state of the row that follows."""
        w = self._w
        normed = norm(states, w["hidden_norm"])
        both = torch.cat((norm(embedded, w["input_layernorm"]), normed), 1)
        kv_heads = self._target.config.num_key_value_heads
        size = len(w["self_attn.k_proj"]) // kv_heads
        q, k, v = ((both @ w[f"self_attn.{name}_proj"].T).view(len(both), -1, size) for name in "qkv")
        if "self_attn.q_norm" in w:
            q, k = norm(q, w["self_attn.q_norm"]), norm(k, w["self_attn.k_norm"])
        positions = torch.arange(len(both))
        q, k = turned(q, positions), turned(k, positions)
        k, v = (x.repeat_interleave(HEADS // kv_heads, 1) for x in (k, v))
        weights = torch.einsum("hd,khd->hk", q[-1], k).div(size**0.5).softmax(-1)
        x = (normed if self._config.get("norm_before_residual") else states)[-1]
        x = x + torch.einsum("hk,khd->hd", weights, v).flatten() @ w["self_attn.o_proj"].T
        y = norm(x, w["post_attention_layernorm"])
        gate, up = (w[f"mlp.{name}_proj"] @ y for name in ("gate", "up"))
        x = x + w["mlp.down_proj"] @ (F.silu(gate) * up)
        result = norm(x, w["norm"])
        return result, result if self._config.get("norm_output") else x

    def _logits(self, x: Tensor) -> Tensor:
        own = self._w.get("lm_head", self._target.get_output_embeddings().weight) @ x
        if "d2t" not in self._w:
            return own
        logits = torch.full((self._target.config.vocab_size,), -torch.inf)
        logits[torch.arange(len(own)) + self._w["d2t"]] = own
        return logits


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [T, heads, D] turned by rope."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * THETA ** -(torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


@dataclass
class Draft:
    """A draft of a head. start: position of the token that it follows. seed, index, temperature: of the lane."""

    seed: int
    index: int
    start: int
    last: int
    tokens: list[int]
    temperature: float


@dataclass
class Recorded:
    """The drafts that a Generator's head makes, in order."""

    drafts: list[Draft] = field(default_factory=list)

    def check(
        self, reference: Reference | MedusaReference, first: int, block: int, outputs: list[RequestOutput]
    ) -> int:
        """Compare all drafts with the reference, and return how many of their tokens there were. The seed of each
        request must be its number, and its temperature 0 or that of the drafts."""
        count = 0
        for draft in self.drafts:
            output = outputs[draft.seed]
            ids = output.prompt_token_ids + output.completions[draft.index].token_ids
            if draft.start >= len(ids) or not draft.tokens:  # a token too many, which is dropped
                continue
            assert draft.last == ids[draft.start]
            assert len(draft.tokens) <= block - first
            logits = reference.logits(ids, draft.start, len(draft.tokens) + first)
            if isinstance(reference, Reference):
                logits = logits + reference.added([draft.last, *draft.tokens[:-1]])
            if draft.temperature:
                positions = torch.arange(len(draft.tokens), dtype=torch.int32)[:, None] + draft.start + 1
                seed, index = (torch.full(positions.shape, each) for each in (draft.seed, draft.index))
                logits = logits / draft.temperature + gumbel(seed, index, positions, logits.shape[1])
            expected = logits.argmax(1).tolist()
            assert draft.tokens == expected, (draft, expected)
            count += len(expected)
        return count

    def check_eagle(self, reference: EagleReference, most: int, outputs: list[RequestOutput]) -> int:
        """Compare all drafts of an EAGLE-3 head with the reference, as `check` does."""
        count = 0
        for draft in self.drafts:
            output = outputs[draft.seed]
            ids = output.prompt_token_ids + output.completions[draft.index].token_ids
            if draft.start < len(ids) and draft.tokens:
                assert draft.last == ids[draft.start]
                assert len(draft.tokens) <= most
                assert draft.tokens == reference.draft(ids, draft), draft
                count += len(draft.tokens)
        return count


def head_of(gen: Generator) -> Head:
    drafting = gen._runner.features[DraftPlan]  # type: ignore[attr-defined]
    assert isinstance(drafting, Drafting)
    assert isinstance(drafting.head, Head)
    return drafting.head


def without_drafts(
    folder: Path, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[RequestOutput]:
    """Return the answers of a model that drafts nothing."""
    with Generator(folder, speculate=False, **options) as gen:
        return gen.generate(prompts, params)


def opposed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    """Return the answers of a model that drafts nothing. From now on, the text drafter is an adversary whose drafts are
    right, wrong, or right up to some token of these answers, so that any number of rows is rejected before the next
    draft of a head."""
    expected = without_drafts(folder, prompts, params)
    adversary(monkeypatch, expected, json.loads((folder / "config.json").read_text())["vocab_size"])
    return expected


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert [output.completions for output in found] == [output.completions for output in expected]


def call_graphs(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> Called:
    """Let graphs of few sizes run the steps and drafts of a Generator. Return those of drafts."""
    runner = gen._runner
    capturable(monkeypatch)
    capture(runner, None, [16, 64])  # type: ignore[arg-type]
    runner.graphs[False].keys = [4, 8]  # type: ignore[attr-defined]  # as in test_cuda_graphs
    graphs = head_of(gen).graphs
    assert isinstance(graphs, Called)
    graphs.keys = [2, 4, 8]
    return graphs


def record(gen: Generator, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Record what a Generator's head drafts from now on."""
    head, found, lanes = head_of(gen), Recorded(), gen._runner.lanes  # type: ignore[attr-defined]
    right = head.draft

    def draft(drawn: StepDraws, plan: DraftPlan, rows: Tensor, tokens: Tensor, counts: Tensor) -> bool:
        drafted = right(drawn, plan, rows, tokens, counts)
        for lane in drawn.lanes.tolist() if drafted else ():
            seed, index = lanes.state.table[lane, :2].tolist()
            own = tokens[lane, : counts[lane]].tolist()
            temperature, last = lanes.params[lane].temperature, int(lanes.state.last_token[lane])
            found.drafts.append(Draft(seed, index, int(lanes.kv_lens[lane]), last, own, temperature))
        return drafted

    monkeypatch.setattr(head, "draft", draft)
    return found
