"""The draw on a GPU, by the kernels of fastgen.kernels.triton.sampling. Only the first draw on a GPU loads this."""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.kernels import scoring
from fastgen.kernels.triton import sampling
from fastgen.model.sampler import LaneState, SampleOutput, SamplePlan, kept_tokens


def draw(
    logits: Tensor, state: LaneState, lanes: Tensor, positions: Tensor, plan: SamplePlan, mask: Tensor | None,
    to_host: bool = False,
) -> SampleOutput:  # fmt: skip
    cut = plan.sorted_tokens > 0
    host = torch.empty(4, len(lanes), dtype=torch.int32, device="cpu", pin_memory=lanes.is_cuda) if to_host else None
    out, kept = sampling.draw(
        logits, state, lanes, positions, state.workspace(len(lanes)),
        edited=plan.edits, truncated=cut or plan.min_p, cut=cut, mask=mask, keep=plan.keep_mask, host=host,
    )  # fmt: skip
    output = SampleOutput(out[:4], host=host)
    if kept is not None:
        output.kept = kept_tokens(kept, state.rows(lanes), output.tokens)
    totals = out[4:].view(torch.float32)
    if plan.chosen:
        output.chosen = state.chosen.logprobs(logits, lanes, plan.chosen, totals)
    if plan.top_logprobs:
        output.top_ids, output.top_logprobs = scoring.alternatives.launch(logits, plan.top_logprobs, totals)
    return output
