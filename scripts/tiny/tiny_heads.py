"""Heads that draft for the bundled model, for training: DFlash and Medusa in plain torch, and their folders.

Parameters have the names that they have in published checkpoints, so that a state_dict is a checkpoint. Both heads
draft after an anchor, a token whose own KV is not computed yet: the states of earlier positions are known, and the
anchor itself. Shape letters: B rows, L length, R rows of all blocks, H hidden size, A anchors of a row, D drafts of an
anchor.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_data import PAD
from tiny_model import CONTEXT, HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, LAYERS, NORM_EPS, ROPE_THETA, VOCAB, save_weights
from torch import Tensor, nn

MASK = PAD  # the token that stands for one to draft; it is in no text


@dataclass(frozen=True)
class Anchors:
    """The places where drafts begin. at: positions, int64 [B, A]. wanted: bool [B, A, D], whether a draft is for a
    token of the anchor's reply."""

    at: Tensor
    wanted: Tensor

    @classmethod
    def drawn(cls, learned: Tensor, count: int, drafts: int, draw: torch.Generator) -> "Anchors":
        """Draw `count` anchors for each row at random. learned: bool [B, L], whether a token belongs to a reply."""
        length = learned.shape[1]
        scores = torch.rand(learned.shape, generator=draw, device=learned.device)
        scores[:, :-1] *= learned[:, :-1] & learned[:, 1:]
        scores[:, -1] = 0
        best = scores.topk(count, 1)
        follow = best.indices[..., None] + torch.arange(1, drafts + 1, device=learned.device)
        rows = torch.arange(len(learned), device=learned.device)[:, None, None]
        wanted = learned[rows, follow.clamp(max=length - 1)] & (follow < length)
        return cls(best.indices, wanted.cumprod(-1).bool() & (best.values > 0)[..., None])

    def pick(self, states: Tensor, offset: int) -> Tensor:
        """Return states [B, L, H] at the position `offset` after each anchor, [B, A, H]; at the nearest one if there is
        none, as for anchors whose drafts are not wanted."""
        at = (self.at + offset).clamp(0, states.shape[1] - 1)
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [B, heads, R, D] turned by RoPE for positions [B, R]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * ROPE_THETA ** -(torch.arange(half, device=x.device) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.7 / inputs**0.5)
    return layer


class Attention(nn.Module):
    """The attention of a block's rows to the context and to their own block, with a norm for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HEADS * HEAD_SIZE), linear(HEADS * HEAD_SIZE, HIDDEN)
        self.k_proj, self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_SIZE), linear(HIDDEN, KV_HEADS * HEAD_SIZE)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_SIZE, NORM_EPS), nn.RMSNorm(HEAD_SIZE, NORM_EPS)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, rows: Tensor, context: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Return [B, R, H] of rows [B, R, H] at `positions` [B, R]. context: [B, L, H]. sees: bool [B, 1, R, L + R]."""
        both, batch = torch.cat((context, rows), 1), len(rows)
        of_context = torch.arange(context.shape[1], device=rows.device).expand(batch, -1)
        q, k, v = (
            project(x).view(batch, x.shape[1], -1, HEAD_SIZE).transpose(1, 2).float()
            for project, x in ((self.q_proj, rows), (self.k_proj, both), (self.v_proj, both))
        )
        q = turn(self.q_norm(q), positions)
        k = turn(self.k_norm(k), torch.cat((of_context, positions), 1))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        attended: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return attended


class MLP(nn.Module):
    """A gated MLP. inner: its width."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, inner), linear(HIDDEN, inner)
        self.down_proj = linear(inner, HIDDEN)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """A layer of a DFlash head. inner: the width of its MLP."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP(inner)
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPS)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, positions, sees)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class DFlash(nn.Module):
    """A DFlash head (arXiv 2602.06036). features: the target's layers whose outputs it reads. layers: number of its own
    layers. inner: the width of their MLPs. drafts: number of tokens that it drafts."""

    def __init__(self, features: tuple[int, ...], layers: int, inner: int, drafts: int = 7) -> None:
        super().__init__()
        assert max(features) < LAYERS - 1
        self.features, self.inner, self.drafts = features, inner, drafts
        self.fc = linear(len(features) * HIDDEN, HIDDEN)
        self.hidden_norm, self.norm = nn.RMSNorm(HIDDEN, NORM_EPS), nn.RMSNorm(HIDDEN, NORM_EPS)
        self.layers = nn.ModuleList(Layer(inner) for _ in range(layers))

    def forward(self, states: tuple[Tensor, ...], anchors: Anchors, ids: Tensor, embedding: Tensor) -> Tensor:
        """Return the states of the drafts [B, A, D, H], of which the target's head makes logits.

        states: the target's: its embedding, then the output of each layer, [B, L, H] each, the last one normed. ids:
        int64 [B, L]. embedding: the target's, [V, H].
        """
        context = self.hidden_norm(self.fc(torch.cat([states[layer + 1] for layer in self.features], 2)).float())
        (batch, length), count, block = ids.shape, anchors.at.shape[1], self.drafts + 1
        tokens = ids.new_full((batch, count, block), MASK)
        tokens[..., 0] = ids.gather(1, anchors.at)
        positions = (anchors.at[..., None] + torch.arange(block, device=ids.device)).flatten(1)
        earlier = torch.arange(length, device=ids.device) < anchors.at[..., None]
        own = torch.eye(count, dtype=torch.bool, device=ids.device).repeat_interleave(block, 1)
        sees = torch.cat((earlier, own.expand(batch, -1, -1)), 2).repeat_interleave(block, 1)[:, None]
        x = F.embedding(tokens.flatten(1), embedding)
        for layer in self.layers:
            x = layer(x, context, positions, sees)
        found: Tensor = self.norm(x).view(batch, count, block, HIDDEN)[:, :, 1:]
        return found

    def save(self, folder: Path) -> None:
        """Write the head in bfloat16, as z-lab's program does."""
        config = {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": self.drafts + 1,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(self.features)}, "dtype": "bfloat16",
            "head_dim": HEAD_SIZE, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": self.inner,
            "max_position_embeddings": CONTEXT, "num_attention_heads": HEADS, "num_hidden_layers": len(self.layers),
            "num_key_value_heads": KV_HEADS, "rms_norm_eps": NORM_EPS, "rope_theta": ROPE_THETA,
            "tie_word_embeddings": True, "vocab_size": VOCAB,
        }  # fmt: skip
        write_head(self, folder, "model.safetensors", config)


class Block(nn.Module):
    """A residual block of a Medusa head, which begins as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(nn.ModuleList):
    """Medusa heads (arXiv 2401.10774) of one residual block each, which share the target's head. drafts: number of
    heads."""

    def __init__(self, drafts: int = 4) -> None:
        super().__init__(nn.ModuleList([Block()]) for _ in range(drafts))
        self.drafts = drafts

    def forward(self, states: tuple[Tensor, ...], anchors: Anchors, ids: Tensor, embedding: Tensor) -> Tensor:
        """Return the states of the drafts, as DFlash.forward does."""
        last = anchors.pick(states[-1].float(), -1)  # the anchor was drawn from it
        return torch.stack([head[0](last) for head in self], 2)

    def save(self, folder: Path) -> None:
        """Write the heads in bfloat16, as FasterDecoding's program does, without matrices to the vocabulary."""
        config = {"medusa_num_heads": self.drafts, "medusa_num_layers": 1, "base_model_name_or_path": "fastgen-tiny"}
        write_head(self, folder, "medusa_lm_head.safetensors", config)


def write_head(head: nn.Module, folder: Path, name: str, config: dict[str, object]) -> None:
    """Write the weights and the config.json of a head."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(head, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
