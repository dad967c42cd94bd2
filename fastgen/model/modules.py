"""A module of a Hugging Face model, as the tables in parameters.py list it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

ROWS, COLUMNS = 0, 1  # dimensions of a weight [outputs, inputs]


@dataclass(frozen=True)
class Module:
    """A module of Hugging Face's model, with a weight and possibly a bias.

    name: name of the module; its tensors are `name`.weight and `name`.bias. place: attribute of Layer or of Parameters
    that holds the weight, either a tensor or a linear layer. Modules with the same place are stacked row by row into
    one fused layer, in the order of the table. shape: shape of the whole weight, [outputs, inputs], or [size] for a
    norm. split: dimension of the weight that is split into equal parts over the ranks, ROWS or COLUMNS; None if each
    rank holds the whole weight. bias: the module has a bias [outputs]. parts: number of KV heads, into which k and v
    can be split; with more ranks, neighbouring ranks hold the same part. 0: there is one part per rank. first, total:
    modules of one name are one tensor of `total` rows, in which this module's rows begin at `first`; total 0: the
    tensor has no other rows. bare: the tensor is `name` itself. exact: it stays in float32, whatever the model's dtype.
    """

    name: str
    place: str
    shape: tuple[int, ...]
    split: int | None = None
    bias: bool = False
    parts: int = 0
    first: int = 0
    total: int = 0
    bare: bool = False
    exact: bool = False

    def part(self, rank: int, ranks: int) -> tuple[int, tuple[int, ...]]:
        """Return (start in dimension `split`, shape) of the part of the weight that a rank holds."""
        if self.split is None:
            return 0, self.shape
        shape, parts = list(self.shape), min(ranks, self.parts or ranks)
        shape[self.split] //= parts
        return rank * parts // ranks * shape[self.split], tuple(shape)


def together(name: str, modules: list[Module]) -> list[Module]:
    """Return modules whose weights are one tensor of this name."""
    ends = [*accumulate(module.shape[0] for module in modules)]
    return [
        replace(module, name=name, first=end - module.shape[0], total=ends[-1])
        for module, end in zip(modules, ends, strict=True)
    ]
