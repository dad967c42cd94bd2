"""Embeddings of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastgen.kernels.launch import Kernel


def _twin(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Return the embeddings [T, N] of ids, int64 [T].

    weight: [rows, N], the embeddings of the ids from `first` on; None: of all ids, and ids outside of the
    vocabulary are an error here, zeros in the kernel. The result is zeros for other ids.
    """
    if first is None:
        return F.embedding(ids, weight)
    own = ids - first
    here = (own >= 0) & (own < len(weight))
    return F.embedding(own.masked_fill_(~here, 0), weight).masked_fill_(~here[:, None], 0)


embed = Kernel(_twin, "fastgen.kernels.triton.embedding:embed")
