"""The bundled model for training: a Llama in plain PyTorch, its optimizer, and its Hugging Face folder.

Parameters carry Hugging Face names, so that a state dict is a checkpoint. Shapes: B rows, L positions, H query heads,
K KV heads, D head size.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 4096, 256, 8, 4, 2, 64, 704
CONTEXT, ROPE_THETA, NORM_EPS = 2048, 10000.0, 1e-5


def rope_tables(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, float32 [L, D]; both halves of a head rotate by the same angles."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_SIZE, 2, device=device, dtype=torch.float32) / HEAD_SIZE)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, L, D]."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped KV heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, L, hidden] -> the same."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD_SIZE).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, KV_HEADS, HEAD_SIZE).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_SIZE).transpose(1, 2)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, HEADS * HEAD_SIZE))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, L, hidden] -> the same."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, L, hidden] -> the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPS)


class TinyLlama(nn.Module):
    """The whole model; the output projection is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for name, weight in self.matrices():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # every layer starts as the identity
            else:
                nn.init.normal_(weight, std=0.7 / math.sqrt(weight.shape[1]))

    def matrices(self) -> list[tuple[str, nn.Parameter]]:
        """The weights of the linear layers, which Muon trains."""
        return [(name, p) for name, p in self.model.layers.named_parameters() if p.dim() == 2]

    def compile_layers(self) -> None:
        """Compile one layer at a time: all share their code, so that compilation takes seconds."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, L] -> logits [B, L, vocab]."""
        cos, sin = rope_tables(ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def orthogonalize(updates: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each of updates [N, rows, columns], by five Newton-Schulz steps.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    out: Tensor = (x.mT if tall else x).to(updates.dtype)
    return out


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal; matrices of one shape are handled together.

    The embedding and the norms are left to AdamW.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr})
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all matrices."""
        assert closure is None
        for group in self.param_groups:
            matrices: list[Tensor] = group["params"]
            gradients = torch.stack([m.grad for m in matrices if m.grad is not None]).float()
            state = self.state[matrices[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp_(state["momentum"], self.momentum))
            rows, columns = matrices[0].shape
            step_size = -group["lr"] * math.sqrt(max(1.0, rows / columns))
            torch._foreach_mul_(matrices, 1 - group["lr"] * self.decay)
            torch._foreach_add_(matrices, list(update.unbind()), alpha=step_size)


def save_folder(model: TinyLlama, folder: Path, eos_ids: list[int], bos_id: int, pad_id: int) -> None:
    """Write weights in bfloat16, config.json and generation_config.json, as transformers reads them."""
    from transformers import GenerationConfig, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=0.2, bos_token_id=bos_id, eos_token_id=eos_ids, pad_token_id=pad_id
    )
    generation.save_pretrained(folder)
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
