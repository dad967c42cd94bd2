"""Linear layers in int4 (`fastgen.kernels.int4`). The tensors of checkpoints are described in int4_layouts.py.

On the CPU, weights are dequantized once, when all of them are loaded: layers are then plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastgen.kernels import int4
from fastgen.kernels.batch_invariant import Fused
from fastgen.model.config import ModelConfig
from fastgen.model.int4_layouts import LAYOUTS, NIBBLES, RoundedShard, StoredShard, dequantize
from fastgen.model.linear import Linear
from fastgen.model.quantization import Int4, SizeError
from fastgen.model.weights import Part, Shard


@dataclass(eq=False)
class Int4Linear(Linear):
    """A linear layer with a weight in int4.

    weight, scales, zeros: as int4_layouts.py describes them. form: form of the model. ready: they are in the order that
    kernels read (`int4.prepare`).
    """

    scales: Tensor = field(kw_only=True)
    zeros: Tensor | None = field(kw_only=True)
    form: Int4 = field(kw_only=True)
    ready: bool = False

    @classmethod
    def zeros_of(
        cls,
        form: Int4,
        rows: Sequence[tuple[str, int]],
        size_in: int,
        bias: Tensor | None,
        new: Callable[..., Tensor],
        batch_invariant: bool,
    ) -> Int4Linear:
        """Make a layer of zeros. rows: (name of a Hugging Face module that is fused into it, its outputs on this rank).
        new: makes a tensor of zeros from a shape and a dtype.

        Raises SizeError if sizes are not multiples of the number of weights per word or per scale.
        """
        names, sizes = ", ".join(dict(rows)), [size for _, size in rows]
        group = form.group_size or size_in
        if size_in % group or any(size % NIBBLES for size in (size_in, *sizes)):
            raise SizeError(
                f"{names} of {size_in} inputs and {', '.join(map(str, sizes))} outputs are not whole groups of {group} "
                f"inputs and {NIBBLES} outputs"
            )
        size_out, groups = sum(sizes), size_in // group
        return cls(
            new(size_out, size_in // NIBBLES, dtype=torch.int32),
            bias,
            batch_invariant,
            scales=new(size_out, groups, dtype=getattr(torch, form.scale_dtype)),
            zeros=new(size_out, groups, dtype=torch.uint8) if form.zeros else None,
            form=form,
        )

    def product(self, x: Tensor, fused: Fused) -> Tensor:
        product = int4.int4_product.launch if self.batch_invariant else int4.int4_product
        y: Tensor = product(x, self.weight, self.scales, self.zeros, self.bias, fused)
        return y

    def prepare(self) -> None:
        """Reorder the tensors for kernels, in place, since CUDA graphs have their addresses."""
        if not self.ready:
            self._replace(int4.prepare(self.weight, self.scales, self.zeros))
            self.ready = True

    def restore(self) -> None:
        """Undo `prepare`, so that shards can be written."""
        if self.ready:
            self.ready = False
            self._replace(int4.restore(self.weight, self.scales, self.zeros))

    @torch.no_grad()
    def _replace(self, tensors: tuple[Tensor, Tensor, Tensor | None]) -> None:
        for old, new in zip((self.weight, self.scales, self.zeros), tensors, strict=True):
            if old is not None and new is not None:
                old.copy_(new.clone() if new.data_ptr() == old.data_ptr() else new)  # it may be a view of the old one

    def launch_all(self, fused: Fused, dtype: torch.dtype, sizes: Iterable[int]) -> None:
        """Launch the kernels of products of these numbers of tokens, with one row. fused: see `apply`. dtype: dtype of
        the input."""
        from fastgen.kernels.triton.int4 import launch_for, sizes_of  # only on a GPU

        x = self.weight.new_zeros(1, self.weight.shape[1] * NIBBLES, dtype=dtype)
        arguments = x, self.weight, self.scales, self.zeros, self.bias, fused
        for size in (*sizes_of(x, self.weight, self.scales, fused), *sizes):
            launch_for(size, *arguments)

    def shards(self, name: str, part: Part, rows: slice, stored: str) -> dict[str, Shard]:
        """Return the shards of a module's tensors. rows: the rows of this layer that are `part` of its weight.

        stored: layout of the checkpoint's tensors; "": the shard quantizes the weights that are written.
        """
        assert not self.ready
        zeros = None if self.zeros is None else self.zeros[rows]
        if not stored:
            shard = rounded_shard(self.form, self.weight[rows], part, self.scales[rows], zeros)
            return {f"{name}.weight": shard}
        layout, group = LAYOUTS[stored], self.form.group_size or part.shape[1]
        views = (self.weight[rows], layout.words), (self.scales[rows], layout.scales), (zeros, layout.zeros)
        return {
            f"{name}.{tensor.suffix}": StoredShard.of(view, tensor, part, group)
            for view, tensor in views
            if view is not None
        }


def rounded_shard(
    form: Int4, view: Tensor, part: Part, scales: Tensor | None = None, zeros: Tensor | None = None
) -> RoundedShard:
    """Return the shard of a weight that is rounded to int4 as it is written; see RoundedShard."""
    columns = part.size if part.dim == 1 else part.shape[1]
    return RoundedShard(
        view, *part[:3], scales, zeros=zeros, group=form.group_size or columns, asymmetric=form.zeros,
        scale_dtype=getattr(torch, form.scale_dtype),
    )  # fmt: skip


def prepared(linear: Linear, new: Callable[..., Tensor]) -> Linear:
    """Return a linear layer that steps can use: an Int4Linear in the order of kernels, or on the CPU a layer with the
    dequantized weight. new: makes a tensor of zeros from a shape, in the dtype that the model computes in."""
    if not isinstance(linear, Int4Linear):
        return linear
    if linear.weight.device.type != "cpu":
        linear.prepare()
        return linear
    weight = new(len(linear.weight), linear.weight.shape[1] * NIBBLES)
    weight.copy_(dequantize(linear.weight, linear.scales, linear.zeros))
    return Linear(weight, linear.bias)


def restored(linear: Linear) -> Linear:
    """Return a linear layer whose shards can be written, after `prepared`."""
    if isinstance(linear, Int4Linear):
        linear.restore()
    return linear


def check_int4(model: ModelConfig, form: Int4) -> None:
    """Raise SizeError if the kernels of a GPU cannot run a model in int4. model: config of one rank."""
    heads, kv_heads = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    shapes = (heads + 2 * kv_heads, model.hidden_size), (model.hidden_size, heads)
    mlp = (model.gate_up_size, model.hidden_size), (model.hidden_size, model.intermediate_size)
    gate = [(heads, model.hidden_size)] if model.output_gate else []
    try:
        for outputs, inputs in (*shapes, *mlp, *gate):
            int4.check(outputs, inputs, form.group_size or inputs)
    except ValueError as error:
        raise SizeError(str(error)) from None
