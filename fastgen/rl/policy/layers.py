"""transformers' layers of a model, which are computed again, one at a time, to differentiate them.

The layers get the rows of a pack as one sequence, with the positions that the tokens have in theirs. Only attention
must know the sequences, so the model is made with an attention implementation that reads them from the pack.

Shape letters: T rows of a pack, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgen.model.config import ModelConfig
from fastgen.model.weights import EMBEDDING, HEAD
from fastgen.rl.policy.packs import Pack

ATTENTION = "fastgen_policy"  # the name of `attend_pack` among transformers' attention implementations
HALF = torch.bfloat16, torch.float16  # dtypes of torch's attention for ragged sequences, on a GPU


@dataclass
class PackTensors:
    """The rows of a pack on the device, for transformers' layers.

    ids, positions: int64 [1, T]. query_lens, kv_lens: of each segment. key_rows: see Pack. windows: of each layer.
    """

    ids: Tensor
    positions: Tensor
    query_lens: list[int]
    kv_lens: list[int]
    key_rows: Tensor | None
    windows: tuple[int, ...]
    query_ends: Tensor = field(init=False)
    key_ends: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.query_ends, self.key_ends = (
            torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=self.ids.device)
            for lens in (self.query_lens, self.kv_lens)
        )

    @classmethod
    def of(cls, pack: Pack, windows: tuple[int, ...], device: torch.device) -> PackTensors:
        ids, positions = (torch.from_numpy(array).to(device)[None] for array in (pack.ids, pack.positions))
        key_rows = None if (rows := pack.key_rows) is None else torch.from_numpy(rows).to(device)
        return cls(ids, positions, pack.query_lens.tolist(), pack.kv_lens.tolist(), key_rows, windows)


class SharedRows(torch.autograd.Function):
    """Rows of keys or values [T, K, D] by their indices; the gradients of a row that is used several times are summed
    in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,), (gradient,) = ctx.saved_tensors, gradients
        total = gradient.new_zeros(ctx.count, *gradient.shape[1:], dtype=torch.float32)
        return total.index_add_(0, rows, gradient.float()).to(gradient.dtype), None


def attend_pack(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float | None = None,
    pack: PackTensors,
    **others: object,
) -> tuple[Tensor, None]:
    """Return the causal attention of a pack's segments, [1, T, H, D], as an implementation for transformers.

    query: [1, H, T, D]; key, value: [1, K, T, D]. A query sees the keys of its own sequence up to itself, and of those
    only the last ones in a layer with a window. Other arguments of transformers say the same.
    """
    window = pack.windows[int(module.layer_idx)]  # type: ignore[arg-type]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if pack.key_rows is not None:
        k, v = (SharedRows.apply(t, pack.key_rows) for t in (k, v))  # type: ignore[no-untyped-call]
    if q.is_cuda and q.dtype in HALF:
        from torch.nn.attention.varlen import varlen_attn

        attend: Any = varlen_attn
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(attend).parameters else {}
        out: Tensor = attend(
            q.contiguous(), k.contiguous(), v.contiguous(), pack.query_ends, pack.key_ends, max(pack.query_lens),
            max(pack.kv_lens), scale=scaling, window_size=(window - 1 if window else -1, 0), **grouped,
        )  # fmt: skip
        return out[None], None
    queries, keys, values = torch.split(q, pack.query_lens), torch.split(k, pack.kv_lens), torch.split(v, pack.kv_lens)
    segments = zip(queries, keys, values, strict=True)
    return torch.cat([_attend(*each, window, scaling) for each in segments])[None], None


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, scaling: float | None) -> Tensor:
    """Return the attention of the last queries [t, H, D] of one sequence to its keys and values [n, K, D]."""
    mask = None
    if window or len(q) < len(k):
        queries = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        ahead = queries - torch.arange(len(k), device=q.device)
        mask = (ahead >= 0) & (ahead < (window or len(k)))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    heads_per_kv = q.shape[1] // k.shape[1]
    if heads_per_kv > 1 and q.is_cuda:  # torch's only float32 kernel for fewer KV heads holds all scores in memory
        k, v = (t.repeat_interleave(heads_per_kv, 1) for t in (k, v))
    grouped = k.shape[1] < q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)
    return out[0].transpose(0, 1)


class WithoutMemory(TorchFunctionMode):
    """Makes `torch.empty` allocate nothing, so that the weights of linear layers and embeddings take no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | {"device": "meta"} if func is torch.empty else kwargs)


class WithHead(nn.Module):
    """A text model of transformers that has no causal model there, with a head."""

    def __init__(self, settings: Any, attn_implementation: str) -> None:
        from transformers import AutoModel

        super().__init__()
        make: Any = AutoModel.from_config
        self.model = make(settings, attn_implementation=attn_implementation)
        self.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)


class RecomputedModel:
    """transformers' model of a checkpoint's folder, whose parameters are the tensors that it is given.

    weights: the model's tensors by Hugging Face name, which it uses without a copy. `parameters` holds them by the same
    names as leaves that can be differentiated; a tied head is the embedding.
    """

    def __init__(self, folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_pack)
        self.config = config
        device = weights[EMBEDDING].device
        read: Any = AutoConfig.from_pretrained
        settings = read(folder, trust_remote_code=False).get_text_config()  # nosec B615: a folder, not a hub id
        causal = type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING
        with torch.device(device), WithoutMemory():
            make: Any = AutoModelForCausalLM.from_config if causal else WithHead
            model: Any = make(settings, attn_implementation=ATTENTION)
        model.load_state_dict({HEAD: weights[EMBEDDING], **weights}, assign=True)
        model.eval()  # dropout would change the values
        if HEAD not in weights:
            model.lm_head.weight = model.model.embed_tokens.weight
        self._model, self._core, self.layers = model, model.model, list(model.model.layers)
        self._lock = threading.Lock()  # held while layers run, or only note their arguments
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())

    def embed(self, pack: PackTensors) -> Tensor:
        """Return the embeddings of a pack's tokens: [T, hidden]."""
        x: Tensor = self._core.embed_tokens(pack.ids)[0]
        scale = 1 if self.config.scaled_embedding else self.config.embedding_scale  # if scaled, x already is
        return x if scale == 1 else x * scale

    def norm(self, x: Tensor) -> Tensor:
        """Return the last norm of rows [R, hidden]."""
        normed: Tensor = self._core.norm(x)
        return normed

    @property
    def head(self) -> nn.Parameter:
        weight: nn.Parameter = self._model.lm_head.weight
        return weight

    def layer_calls(self, pack: PackTensors, x: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """Return a function for each layer, which computes its output [T, hidden] from its input [T, hidden].

        transformers' model is run with layers that only note their arguments, such as the rotation of queries and keys
        at these positions. x: [T, hidden], of the model's dtype.
        """
        calls: list[Callable[[Tensor], Tensor]] = []
        with self._lock, torch.no_grad(), _noting(self.layers) as noted:
            self._core(inputs_embeds=x[None], position_ids=pack.positions, use_cache=False)
        for layer, arguments in zip(self.layers, noted, strict=True):
            calls.append(_LayerCall(layer, arguments | {"pack": pack}, self._lock))
        return calls


@dataclass
class _LayerCall:
    """A layer with all arguments but its input."""

    layer: nn.Module
    arguments: dict[str, Any]
    lock: threading.Lock

    def __call__(self, x: Tensor) -> Tensor:
        with self.lock:
            y = self.layer(x[None], **self.arguments)
        result: Tensor = y[0] if isinstance(y, tuple) else y  # of some layers of transformers 4
        return result.view(x.shape)


@contextmanager
def _noting(layers: list[nn.Module]) -> Iterator[list[dict[str, Any]]]:
    """Let layers return their input, and note the other arguments of each."""
    noted: list[dict[str, Any]] = []

    def note(x: Tensor, **arguments: Any) -> Tensor:
        noted.append(arguments)
        return x

    for layer in layers:
        layer.forward = note
    try:
        yield noted
    finally:
        for layer in layers:
            del layer.forward
