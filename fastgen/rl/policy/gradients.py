"""Autograd functions with the engine's values, and the gradients of transformers' layers at the engine's residual
streams.

It is the work of gradient checkpointing: the engine's forward pass replaces the first one, and the backward pass
computes each layer again before it differentiates it.

Shape letters: T rows of a pack, N tokens whose logprobs are wanted, K tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastgen.rl.policy.layers import RecomputedModel

HEAD_ROWS = 1024  # number of rows whose logits are in memory at a time in the backward pass


class Weights(Protocol):
    """The weights of one stage of the model, and the trainer's parameters that they are made of."""

    @property
    def computed(self) -> Sequence[nn.Parameter]:
        """The weights that the stage computes with and that have gradients."""

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """The trainer's parameters."""

    def pull_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of `trained`. gradients: of `computed`."""


@dataclass
class SameWeights:
    """Weights that are the trainer's parameters, or these rounded to another dtype."""

    computed: Sequence[nn.Parameter]
    trained: Sequence[nn.Parameter]

    def pull_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = zip(gradients, self.trained, strict=True)
        return [None if gradient is None else gradient.to(parameter.dtype) for gradient, parameter in pairs]


@dataclass
class AdaptedWeights:
    """Weights base + scaling * B A. trained: A [rank, in] and B [out, rank] of each of `computed`, in float32."""

    computed: Sequence[nn.Parameter]
    trained: Sequence[nn.Parameter]
    scalings: Sequence[float]

    def pull_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        pulled: list[Tensor | None] = []
        pairs = zip(self.trained[::2], self.trained[1::2], strict=True)
        for gradient, scaling, (a, b) in zip(gradients, self.scalings, pairs, strict=True):
            if gradient is None:
                pulled += [None, None]
                continue
            factor_a, factor_b = (t.detach().to(gradient.dtype) for t in (a, b))
            of_a, of_b = factor_b.t() @ gradient, gradient @ factor_a.t()
            pulled += [(scaling * of_a).to(a.dtype), (scaling * of_b).to(b.dtype)]
        return pulled


Backward = Callable[..., tuple[Tensor | None, ...]]


def _without_autocast(backward: Backward) -> Backward:
    """Return a backward function that computes in the dtypes of its tensors, also in a block with autocast."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradients[0].device.type, enabled=False):
            return backward(ctx, *gradients)

    return run


def recomputed(x: Tensor | None, stream: Tensor, run: Callable[..., Tensor], weights: Weights) -> Tensor:
    """Return `stream`, the engine's residual stream [T, hidden] after a stage of the model, as a function of x, the one
    before it (None for the embedding), and of the stage's parameters. run: computes the stage from x."""
    y: Tensor = _Recomputed.apply(x, [stream], run, weights, *weights.trained)  # type: ignore[no-untyped-call]
    return y


class _Recomputed(torch.autograd.Function):
    """See `recomputed`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, stream: list[Tensor], run: Callable[..., Tensor], weights: Weights, *trained: Tensor
    ) -> Tensor:
        """stream: a list with the value, which is taken out of it; the value of a tensor argument would be copied."""
        ctx.save_for_backward(x)
        ctx.run, ctx.weights = run, weights
        return stream.pop()

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        wants_x = ctx.needs_input_grad[0]
        with torch.enable_grad():
            inputs = [] if x is None else [x.detach().requires_grad_(wants_x)]
            y = ctx.run(*inputs)
        wanted = [weight for weight in weights.computed if weight.requires_grad]
        leaves = inputs if wants_x else []
        found = torch.autograd.grad(y, [*leaves, *wanted], gradients, allow_unused=True)
        of_weights = _of_all(weights, wanted, found[len(leaves) :])
        return (found[0] if leaves else None, None, None, None, *weights.pull_back(of_weights))


def _of_all(weights: Weights, wanted: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of all weights that a stage computes with: None for those that are not in `wanted`."""
    found = dict(zip(map(id, wanted), gradients, strict=True))
    return [found.get(id(weight)) for weight in weights.computed]


@dataclass
class Head:
    """The last norm and the head, and what is wanted of them.

    divisor, cap: of the logits; see ModelConfig. rows: int64 [N], the row of x that predicts each of `targets`, int64
    [N]. kept: int64 [K], ascending indices of targets whose logits are wanted.
    """

    model: RecomputedModel
    divisor: float
    cap: float
    temperature: float
    rows: Tensor
    targets: Tensor
    kept: Tensor

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits of normed rows: float32 [R, V]."""
        if normed.is_cuda and normed.dtype != torch.float32:
            logits = torch.mm(normed, self.model.head.t(), out_dtype=torch.float32)
        else:
            logits = F.linear(normed, self.model.head).float()
        if self.divisor != 1:
            logits.div_(self.divisor)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits

    def gradient_of_logits(
        self, logits: Tensor, part: slice, of_logprobs: Tensor, of_entropies: Tensor | None, of_kept: Tensor | None
    ) -> Tensor:
        """Return the gradient of the logits, float32 [R, V], which are overwritten, of the targets in `part`. The other
        arguments: gradients of the results for all targets; see `head_results`."""
        slope = 1 - (logits / self.cap).square_() if self.cap else None
        logits = logits.div_(self.temperature) if self.temperature != 1 else logits
        gradient, factor = logits.log_softmax(1), of_logprobs[part, None]
        if of_entropies is not None and len(of_entropies):
            logprobs, probs = gradient, gradient.exp()
            entropy = -(probs * logprobs).sum(1, keepdim=True)
            gradient = probs * (logprobs + entropy).mul_(-of_entropies[part, None]).sub_(factor)
        else:  # most losses want no entropy, and these are the largest tensors of a step
            gradient = gradient.exp_().mul_(-factor)
        gradient.scatter_add_(1, self.targets[part, None], factor)
        if self.temperature != 1:
            gradient.div_(self.temperature)
        if of_kept is not None and len(of_kept):
            chosen = (self.kept >= part.start) & (self.kept < part.stop)
            gradient[self.kept[chosen] - part.start] += of_kept[chosen]
        if slope is not None:
            gradient.mul_(slope)
        return gradient if self.divisor == 1 else gradient.div_(self.divisor)


def head_results(x: Tensor, values: Sequence[Tensor], head: Head, weights: Weights) -> tuple[Tensor, ...]:
    """Return `values`, the engine's logprobs [N], entropies [N] or [0], and logits [K, V], as functions of x, the
    residual stream [T, hidden] after the last layer, and of the parameters of the last norm and the head."""
    results: tuple[Tensor, ...] = _HeadResults.apply(  # type: ignore[no-untyped-call]
        x, list(values), head, weights, *weights.trained
    )
    return results


class _HeadResults(torch.autograd.Function):
    """See `head_results`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Sequence[Tensor], head: Head, weights: Weights, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.head, ctx.weights = head, weights
        return tuple(values)

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), head, weights = ctx.saved_tensors, ctx.head, ctx.weights
        rows, where = head.rows.unique(return_inverse=True)  # a row may predict tokens of several sequences
        with torch.enable_grad():
            selected = x.detach()[rows].requires_grad_()
            normed = head.model.norm(selected)
        plain, weight = normed.detach(), head.model.head
        of_normed = torch.zeros_like(plain, dtype=torch.float32)
        of_head = torch.zeros_like(weight) if weight.requires_grad else None
        for at in range(0, len(head.rows), HEAD_ROWS):
            part = slice(at, min(at + HEAD_ROWS, len(head.rows)))
            inputs = plain[where[part]]
            of_logits = head.gradient_of_logits(head.logits(inputs), part, *gradients).to(plain.dtype)
            of_normed.index_add_(0, where[part], (of_logits @ weight.detach()).float())
            if of_head is not None:
                of_head.addmm_(of_logits.t(), inputs)
        others = [other for other in weights.computed if other.requires_grad and other is not weight]
        of_selected, *of_others = torch.autograd.grad(normed, [selected, *others], of_normed.to(plain.dtype))
        of_x = torch.zeros_like(x).index_copy_(0, rows, of_selected)
        of_weights = _of_all(weights, [*others, weight], [*of_others, of_head])
        return (of_x, None, None, None, *weights.pull_back(of_weights))


def check_in_backward(results: Sequence[Tensor], check: Callable[[], None]) -> tuple[Tensor, ...]:
    """Return the results of a forward pass, whose backward pass begins with a call of `check`: once, for all packs."""
    same: tuple[Tensor, ...] = _CheckInBackward.apply(check, *results)  # type: ignore[no-untyped-call]
    return same


class _CheckInBackward(torch.autograd.Function):
    """See `check_in_backward`."""

    @staticmethod
    def forward(ctx: Any, check: Callable[[], None], *results: Tensor) -> tuple[Tensor, ...]:
        ctx.check = check
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the gradients of a Policy cannot be differentiated again; leave create_graph out")
        ctx.check()
        return None, *gradients
