"""The values that are returned with each sampled token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Drawn:
    """The logprobs of sampled tokens, and their sampling mask: lists with one entry for each token.

    logprobs: natural logarithms, float32, under the distribution that was sampled from (0.0 at temperature 0).
    untruncated_logprobs: the same without top_k, top_p and min_p, over all of the vocabulary that penalties, biases and
        masks leave; equal to logprobs if nothing is truncated.
    raw_logprobs: logprobs under the softmax of the untouched logits at temperature 1.
    top_logprobs: the most likely raw alternatives, and then the chosen ones, token id -> logprob; None unless
        `SamplingParams.logprobs` or `logprob_token_ids` asks.
    sampling_mask: the token ids that truncation kept; None unless `SamplingParams.return_sampling_mask` asks.
    """

    logprobs: list[float] = field(default_factory=list)
    untruncated_logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] | None = None
    sampling_mask: list[list[int]] | None = None

    def lists(self) -> dict[str, Any]:
        """Return the lists that are not None, by name."""
        return {name: values for name in _DRAWN if (values := getattr(self, name)) is not None}

    def per_token(self) -> Iterable[tuple[Any, ...]]:
        """Return the values of each token, as `append` takes them."""
        lists = self.logprobs, self.untruncated_logprobs, self.raw_logprobs
        if self.top_logprobs is None and self.sampling_mask is None:
            return zip(*lists, strict=True)
        asked = (values or itertools.repeat(None) for values in (self.top_logprobs, self.sampling_mask))
        return zip(*lists, *asked, strict=False)

    def append(self, row: tuple[Any, ...]) -> None:
        """Append one item of another's `per_token`, which must have the lists that this has."""
        self.logprobs.append(row[0])
        self.untruncated_logprobs.append(row[1])
        self.raw_logprobs.append(row[2])
        if self.top_logprobs is not None:
            self.top_logprobs.append(row[3])
        if self.sampling_mask is not None:
            self.sampling_mask.append(row[4])

    def extend(self, other: Drawn) -> None:
        """Append all values of another, which must have the lists that this has."""
        for name, values in self.lists().items():
            values += getattr(other, name)

    def cut(self, length: int) -> None:
        """Drop the values after the first `length` tokens."""
        for values in self.lists().values():
            del values[length:]


_DRAWN = tuple(Drawn.__dataclass_fields__)
