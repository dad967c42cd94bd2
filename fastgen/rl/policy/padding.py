"""Samples as padded tensors, for losses that want rows of one length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.request import RequestOutput


class Padded(NamedTuple):
    """Samples in rows, padded on the right to the longest. Shapes: B samples, L positions.

    ids: int64 [B, L], prompt and answer. mask: bool [B, L], True for the tokens of the answer. logprobs,
    raw_logprobs: float32 [B, L], those of the draws, and 0 elsewhere. versions: int64 [B, L], the version of the
    weights that each token of the answer was drawn with, and -1 elsewhere.
    """

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor
    versions: Tensor


def pad(outputs: Iterable[RequestOutput], pad_id: int = 0, length: int | None = None) -> Padded:
    """Return the samples of outputs as padded tensors on the CPU, in order, those of one request after each other.

    pad_id: the id after the end of a sample. length: L, if it is to be longer than the longest sample needs. Raises
    ValueError if it is shorter, and for an output that is an error.
    """
    outputs = list(outputs)
    if failed := next((output for output in outputs if output.error is not None), None):
        raise ValueError(f"request {failed.id!r} failed, so it has no samples to pad: {failed.error}")
    pairs = [(output.prompt_token_ids, completion) for output in outputs for completion in output.completions]
    longest = max((len(prompt) + len(completion.token_ids) for prompt, completion in pairs), default=0)
    if length is not None and length < longest:
        raise ValueError(f"length is {length}, and the longest sample has {longest} tokens; give at least {longest}")
    shape = len(pairs), longest if length is None else length
    on_cpu = torch.device("cpu")  # the program's default device may be another one
    ids, versions = torch.full(shape, pad_id, device=on_cpu), torch.full(shape, -1, device=on_cpu)
    mask = torch.zeros(shape, dtype=torch.bool, device=on_cpu)
    logprobs, raw_logprobs = torch.zeros((2, *shape), dtype=torch.float32, device=on_cpu)
    for row, (prompt, completion) in enumerate(pairs):
        first, end = len(prompt), len(prompt) + len(completion.token_ids)
        ids[row, :end] = torch.tensor(prompt + completion.token_ids, device=on_cpu)
        mask[row, first:end] = True
        logprobs[row, first:end] = torch.tensor(completion.logprobs, device=on_cpu)
        raw_logprobs[row, first:end] = torch.tensor(completion.raw_logprobs, device=on_cpu)
        for version, begin, stop in completion.weight_versions:
            versions[row, first + begin : first + stop] = version
    return Padded(ids, mask, logprobs, raw_logprobs, versions)
