"""The sampler: penalties, bias, masks, truncation, seeded draws and logprobs, all on the device.

A token is drawn by the Gumbel-max trick: among the tokens that truncation keeps, it is the token with the largest
logit / temperature + noise. The noise is a function of (seed, sample index, position, token id), see
fastgen.kernels.noise. So a draw is a function of these and of the row's logits. The other rows of the batch
do not change a bit of it, since a maximum is the same in any order, and sums over a row have their own order. A
`SamplePlan` does not either, since it leaves out only operations that would change no row.

A logit and its token id make one integer, the rank key, larger for a larger logit and, among equals, for the lower id.
So "the k most likely tokens" are always exactly k, and top_k=1 draws the greedy token.

On a GPU the kernels of fastgen.kernels.triton.sampling do this (see gpu_sampler.py); the torch code below is their
twin.

Shapes: R rows (the samples drawn in a step), V vocabulary, S lanes. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgen.device.pinned import upload
from fastgen.kernels import scoring
from fastgen.kernels.launch import Kernel
from fastgen.kernels.noise import gumbel
from fastgen.kernels.scoring import ids_of_keys, rank_keys_of
from fastgen.model.chosen import ChosenTokens
from fastgen.request import MAX_BIASES, LaneStart, SamplingParams

if TYPE_CHECKING:
    from fastgen.kernels.triton.sampling import Scratch

REACH = 30.5  # top-k and top-p cut tokens that are more than exp(REACH) times less likely than the most likely one
MAX_VOCAB = 2**19 - 1  # masses of up to 2**44 each (kernels/triton/sampler_rows.py) are summed in int64
NO_TOKEN = -1  # result if no token can be drawn: the mask or -inf forbids all, or a logit is NaN or +inf
LARGE = 1e30  # bound of parameters (1 / LARGE for the temperature) that keeps float32 arithmetic finite


class SamplePlan(NamedTuple):
    """The operations that the rows of a batch need, known on the host. False leaves an operation out.

    greedy: some row takes the most likely token; random: some row draws one. addends: some row has logit_bias or
    min_tokens. sorted_tokens: the number of most likely tokens that top-k and top-p must sort, 0 if no drawing row
    has them. keep_mask: some row asks for the tokens that truncation kept. top_logprobs: the largest number of raw
    alternatives that a row asks for. chosen: the largest number of ids whose logprobs a row has chosen.
    """

    greedy: bool
    random: bool
    penalties: bool
    addends: bool
    min_p: bool
    keep_mask: bool
    sorted_tokens: int
    top_logprobs: int
    chosen: int = 0

    @staticmethod
    def of(params: SamplingParams) -> SamplePlan:
        """Return the plan of one row."""
        drawing = params.temperature > 0
        cut = drawing and (params.top_k > 0 or params.top_p < 1)
        return SamplePlan(
            greedy=not drawing,
            random=drawing,
            penalties=params.penalized,
            addends=bool(params.logit_bias or params.min_tokens),
            min_p=drawing and params.min_p > 0,
            keep_mask=params.return_sampling_mask,
            sorted_tokens=min(params.top_k or MAX_VOCAB, MAX_VOCAB) if cut else 0,
            top_logprobs=params.logprobs or 0,
            chosen=len(params.logprob_token_ids),
        )

    @staticmethod
    def together(plans: np.ndarray) -> SamplePlan:
        """Return the smallest plan for rows with these plans, int64 [9, R]; R is 1 or more."""
        largest = plans.max(1).tolist()
        return SamplePlan(*map(bool, largest[:6]), *largest[6:])

    @property
    def edits(self) -> bool:
        """Logits are edited before the draw (not counting masks)."""
        return self.penalties or self.addends


@dataclass(slots=True)
class SampleOutput:
    """The draws of R rows; tensors on the device, and in the Runner's `Launched` on the host.

    packed: int32 [4, R], one tensor, which the kernel also writes to the host, or one copy brings there. Its rows are
    the tokens, NO_TOKEN if none could be drawn; then, as the bits of float32, the logprobs under the distribution
    drawn from (0 for a greedy row, NaN at NO_TOKEN); the untruncated logprobs, which leave out top-k, top-p and min-p;
    and the raw logprobs, the log-softmax of the untouched logits (undefined at NO_TOKEN). top_ids, top_logprobs: int64
    and float32 [R, k], the raw alternatives, best first, equal ones by id; None for k = 0. kept: bool [R, V], the
    tokens that could be drawn (one for a greedy row); None unless a row asked for it. chosen: float32 [R, c], raw
    logprobs of the ids that each row has chosen; see ChosenTokens. host: `packed` in pinned memory, to be kept until
    the launch has run, or None."""

    packed: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    kept: Tensor | None = None
    chosen: Tensor | None = None
    host: Tensor | None = None

    def rows(self, chosen: np.ndarray) -> SampleOutput:
        """Return the draws of some rows, int64 [n], on the host."""
        each = (None if x is None else x[chosen] for x in (self.top_ids, self.top_logprobs, self.kept, self.chosen))
        return SampleOutput(self.packed[:, chosen].contiguous(), *each)

    @property
    def tokens(self) -> Tensor:
        """[R] int64."""
        return self.packed[0].long()

    @property
    def logprobs(self) -> Tensor:
        """[3, R] float32: the logprobs, the untruncated ones and the raw ones."""
        return self.packed[1:].view(torch.float32)


class _Rows(NamedTuple):
    """The parameters of R rows as columns [R, 1]: float32, then float64 (top_p), then int64."""

    temperature: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_p: Tensor
    seed: Tensor
    sample_index: Tensor
    prompt_len: Tensor
    min_tokens: Tensor
    top_k: Tensor  # V if there is none
    penalized: Tensor
    biases: Tensor  # number of pairs in the token table; the stop ids come after them
    stops: Tensor


class LaneState:
    """The sampling state of S lanes on the device.

    last_token: int64 [S], each lane's last token (0 for NO_TOKEN, so that it can always be embedded). table: int64 [S,
    14], the parameters: the integers of _Rows from seed on, then the bits of its floats as float64. token_ids, addends:
    int64 and float32 [S, MAX_BIASES], (token, addend) pairs, a lane's biases and then its stop ids. most_pairs: the
    largest number of pairs that a lane has had. counts: int32 [S, V], the occurrences of tokens in a penalized lane's
    output, and
    in_prompt: bool [S, V]; both are rebuilt from the lane's tokens when it starts. samples: this rank samples; other
    ranks receive the tokens, and keep only `last_token` up to date."""

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device, samples: bool = True) -> None:
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"the vocabulary has {vocab_size} tokens; the sampler takes at most {MAX_VOCAB}")
        self.vocab_size = vocab_size
        self.last_token = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.table = torch.zeros(max_seqs, len(_Rows._fields), dtype=torch.int64, device=device)
        width = min(MAX_BIASES, 2 * vocab_size)
        self.token_ids = torch.zeros(max_seqs, width, dtype=torch.int64, device=device)
        self.addends = torch.zeros(max_seqs, width, dtype=torch.float32, device=device)
        self.most_pairs = 0
        cells = max_seqs if samples else 0, vocab_size
        self.counts = torch.zeros(cells, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(cells, dtype=torch.bool, device=device)
        self.chosen = ChosenTokens(max_seqs if samples else 0, device)
        self._workspace: Scratch | None = None

    @torch.inference_mode(False)  # as above
    def workspace(self, rows: int) -> Scratch:
        """Return scratch memory of the kernels for at least `rows` rows; the same memory until more rows need it."""
        if self._workspace is None or self._workspace.rows < rows:
            from fastgen.kernels.triton.sampling import Scratch  # only kernels need it

            self._workspace = Scratch.make(rows, self.vocab_size, self.last_token.device)
        return self._workspace

    @torch.inference_mode(False)
    def start(self, starts: Sequence[LaneStart]) -> None:
        """Write the parameters of lanes that start; each lane is named once."""
        if not starts:
            return
        device = self.last_token.device
        shared: dict[int, tuple[list[int], list[int]]] = {}  # by parameters, which many lanes have in common
        rows = []
        for s in starts:
            if id(s.params) not in shared:
                shared[id(s.params)] = _numbers(s.params, self.vocab_size)
            integers, floats = shared[id(s.params)]
            seed = (s.seed + 2**63) % 2**64 - 2**63  # the low 64 bits, as int64: seeds -1 and 2**64 - 1 are one
            stops = len(s.stop_ids) if s.params.min_tokens else 0
            rows.append([s.lane, seed, s.index, s.prompt_len, *integers, stops, *floats])
        uploaded = upload(np.array(rows, dtype=np.int64), device)
        self.table.index_copy_(0, uploaded[:, 0], uploaded[:, 1:])
        if any(s.params.logit_bias or s.params.min_tokens for s in starts):
            self._write_pairs(starts)
        self.chosen.start(starts)
        penalized = [s for s in starts if s.params.penalized]
        if penalized:
            self._count(penalized)

    def _write_pairs(self, starts: Sequence[LaneStart]) -> None:
        """Write the biases and stop ids of these lanes into the token table. Older pairs after them stay, unused."""
        alike: dict[tuple[int, frozenset[int]], list[LaneStart]] = {}  # lanes with one list are written at once
        for s in starts:
            alike.setdefault((id(s.params), s.stop_ids), []).append(s)
        for together in alike.values():
            pairs = _pairs(together[0])
            if pairs:
                count = len(pairs)
                tokens, addends = np.array(pairs, dtype=np.float64).T
                lanes = [s.lane for s in together]
                packed = np.concatenate((tokens.astype(np.int64), addends.copy().view(np.int64), lanes))
                ids, bits, rows = torch.split(upload(packed, self.table.device), [count, count, len(lanes)])
                self.token_ids[:, :count].index_copy_(0, rows, ids.expand(len(lanes), -1))
                self.addends[:, :count].index_copy_(0, rows, bits.view(torch.float64).float().expand(len(lanes), -1))
                self.most_pairs = max(self.most_pairs, count)

    def _count(self, starts: Sequence[LaneStart]) -> None:
        """Rebuild the penalty counts of these lanes from their tokens."""
        device = self.last_token.device
        token_ids = [np.array(s.token_ids, dtype=np.int64) + s.lane * self.vocab_size for s in starts]
        prompts = np.concatenate([tokens[: s.prompt_len] for tokens, s in zip(token_ids, starts, strict=True)])
        outputs = np.concatenate([tokens[s.prompt_len :] for tokens, s in zip(token_ids, starts, strict=True)])
        uploaded = upload(np.concatenate((np.array([s.lane for s in starts]), prompts, outputs)), device)
        lanes, cells = uploaded[: len(starts)], uploaded[len(starts) :]
        prompt, output = cells[: len(prompts)], cells[len(prompts) :]
        self.counts.index_fill_(0, lanes, 0)
        self.in_prompt.index_fill_(0, lanes, False)
        self.in_prompt.view(-1).index_fill_(0, prompt, True)
        self.counts.view(-1).index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def rows(self, lanes: Tensor) -> _Rows:
        """Return the parameters of lanes [R]."""
        entries = self.table[lanes]
        floats = _Rows._fields.index("seed")  # the number of columns that hold floats, the last ones of the table
        integers, float32s = entries[:, :-floats], entries[:, -floats:-1].view(torch.float64).float()
        top_p = entries[:, -1:].view(torch.float64)
        return _Rows._make([*float32s[..., None].unbind(1), top_p, *integers[..., None].unbind(1)])

    def drew(self, lanes: Tensor, tokens: Tensor, penalized: Tensor | None) -> None:
        """Store tokens [R] as the last tokens of lanes [R], and count the tokens of penalized rows (int [R], 1 or
        0)."""
        tokens = tokens.clamp(min=0)
        self.last_token[lanes] = tokens
        if penalized is not None:
            self.counts.view(-1).index_add_(0, lanes * self.vocab_size + tokens, penalized.int())


def _draw_twin(
    logits: Tensor, state: LaneState, lanes: Tensor, positions: Tensor, plan: SamplePlan, mask: Tensor | None,
    to_host: bool = False,
) -> SampleOutput:  # fmt: skip
    """Draw the next token of each row, and store it in `state`.

    logits: [R, V], contiguous, not changed. lanes: int64 [R]; a lane is named twice only if it is padding, or for the
    rows of a speculative decode, whose last token `kernels.drafts.follow` stores. positions:
    int32 or int64 [R], the position (from 0) of the drawn token in prompt and output. mask: int32 [R, ceil(V / 32)];
    bit i of word w is token 32 w + i, and a set bit allows it. The order is as in SamplingParams: penalties, bias,
    min_tokens, mask, temperature, top-k, top-p, min-p. to_host: kernels also write `SampleOutput.host`.
    """
    logits = logits.float()
    rows = state.rows(lanes)
    edited = _edit(state, rows, lanes, positions, logits, plan, mask)
    best = edited.amax(1, keepdim=True)
    possible = best.isfinite()
    if plan.random:
        tokens, logprobs, kept = _draw(edited, best, rows, positions[:, None], plan)
    else:
        tokens, logprobs, kept = edited.argmax(1, keepdim=True), torch.zeros_like(best).repeat(1, 2), None
    logprobs = logprobs.masked_fill(~possible, float("nan"))
    raw_logprobs = logits.log_softmax(1).gather(1, tokens)
    tokens = tokens.masked_fill(~possible, NO_TOKEN)
    state.drew(lanes, tokens.squeeze(1), rows.penalized.squeeze(1) if plan.penalties else None)
    packed = torch.cat((tokens.int(), logprobs.view(torch.int32), raw_logprobs.view(torch.int32)), dim=1)
    output = SampleOutput(packed.T.contiguous())
    if plan.keep_mask:
        output.kept = kept_tokens(edited > float("-inf") if kept is None else kept, rows, output.tokens)
    if plan.chosen:
        output.chosen = state.chosen.logprobs(logits, lanes, plan.chosen)
    if plan.top_logprobs:
        output.top_ids, output.top_logprobs = scoring.alternatives.twin(logits, plan.top_logprobs)
    return output


draw = Kernel(_draw_twin, "fastgen.model.gpu_sampler:draw")


def _edit(
    state: LaneState,
    rows: _Rows,
    lanes: Tensor,
    positions: Tensor,
    logits: Tensor,
    plan: SamplePlan,
    mask: Tensor | None,
) -> Tensor:
    """Return logits [R, V] after penalties, bias, min_tokens and mask; the argument itself if there are none."""
    if plan.penalties:
        counts, in_prompt = state.counts[lanes], state.in_prompt[lanes]
        in_output = counts > 0
        repeated = torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)
        logits = torch.where(in_output | in_prompt, repeated, logits)
        logits = logits - counts * rows.frequency - in_output * rows.presence
    if plan.addends:
        early = positions[:, None] - rows.prompt_len < rows.min_tokens
        used = rows.biases + torch.where(early, rows.stops, 0)
        unused = torch.arange(state.most_pairs, device=logits.device) >= used
        token_ids, addends = state.token_ids[lanes, : state.most_pairs], state.addends[lanes, : state.most_pairs]
        logits = logits.scatter_add(1, token_ids, addends.masked_fill(unused, 0.0))
    if mask is not None:
        bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
        allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits


def _draw(
    edited: Tensor, best: Tensor, rows: _Rows, positions: Tensor, plan: SamplePlan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw from edited logits [R, V] with maxima best [R, 1]; a greedy row gets its most likely token.

    Returns tokens [R, 1], logprobs and untruncated logprobs [R, 2], and the tokens that truncation kept, bool [R, V]
    (None: all).
    """
    greedy = rows.temperature == 0
    scores = (edited - best).div_(rows.temperature.masked_fill(greedy, 1.0))
    untruncated = logprobs = scores.log_softmax(1)
    kept = _truncate(edited, best, rows, plan)
    if kept is not None:
        scores.masked_fill_(~kept, float("-inf"))
        logprobs = scores.log_softmax(1)
    noise = gumbel(rows.seed, rows.sample_index, positions, edited.shape[1])
    scores += noise.masked_fill_(greedy, 0.0) if plan.greedy else noise
    tokens = scores.argmax(1, keepdim=True)
    values = torch.cat((logprobs.gather(1, tokens), untruncated.gather(1, tokens)), dim=1)
    return tokens, values.masked_fill(greedy, 0.0), kept


def _truncate(edited: Tensor, best: Tensor, rows: _Rows, plan: SamplePlan) -> Tensor | None:
    """Return the tokens that truncation keeps of edited logits [R, V] with maxima best [R, 1]: bool [R, V]; None: all.

    It always keeps the most likely token.
    """
    kept = None
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0)
    if plan.sorted_tokens:
        kept = _likeliest(edited, best, rows, temperature, plan.sorted_tokens)
    if plan.min_p:
        likely = edited >= best + rows.min_p.log() * temperature
        kept = likely if kept is None else kept.logical_and_(likely)
    return None if kept is None else kept.logical_and_(edited > float("-inf"))


def _likeliest(edited: Tensor, best: Tensor, rows: _Rows, temperature: Tensor, most: int) -> Tensor:
    """Return the tokens that top-k and then top-p keep of logits [R, V] with maxima best [R, 1]: bool [R, V].

    most: the number of most likely tokens to sort.
    """
    vocab = edited.shape[1]
    width = min(most, vocab)
    keys = rank_keys_of(edited)
    ranked = keys.topk(width).values if width < vocab else keys.sort(dim=1, descending=True).values
    likeliest = edited.gather(1, ids_of_keys(ranked, vocab))
    count = rows.top_k.clamp(max=width)
    within = torch.arange(width, device=keys.device) < count
    mass = ((likeliest - best) / temperature).exp().double().mul_(within).cumsum_(1)
    short = (mass < mass[:, -1:] * rows.top_p).sum(1, keepdim=True)  # this many tokens hold less than top_p together
    count = torch.where(rows.top_p < 1, torch.minimum(short + 1, count), count)
    everything = (rows.top_k >= vocab) & (rows.top_p >= 1)  # its count is wrong where width < vocab
    cut = (keys >= ranked.gather(1, count - 1)).logical_and_(edited >= best - REACH * temperature)
    return cut.logical_or_(everything)


def kept_tokens(kept: Tensor, rows: _Rows, tokens: Tensor) -> Tensor:
    """Return the tokens that each row could draw, [R, V] bool, given those that truncation kept and tokens [R]."""
    chosen = torch.arange(kept.shape[1], device=kept.device) == tokens[:, None]
    return torch.where(rows.temperature == 0, chosen, kept)


def _numbers(params: SamplingParams, vocab: int) -> tuple[list[int], list[int]]:
    """Return a lane's integers in the order of _Rows, from min_tokens to biases, and its floats as bits of float64."""
    top_k = min(params.top_k or vocab, vocab)
    temperature = max(params.temperature, 1 / LARGE) if params.temperature else 0.0
    repetition = max(params.repetition_penalty, 1 / LARGE)
    bounded = map(_bounded, (temperature, params.min_p, repetition, params.presence_penalty, params.frequency_penalty))
    bits: list[int] = np.array([*bounded, params.top_p], dtype=np.float64).view(np.int64).tolist()
    return [params.min_tokens, top_k, int(params.penalized), len(params.logit_bias or ())], bits


def _pairs(start: LaneStart) -> list[tuple[int, float]]:
    """Return the biases of a lane, then its stop ids if it has min_tokens, as (token, addend)."""
    pairs = [(token, _bounded(bias)) for token, bias in (start.params.logit_bias or {}).items()]
    stops = sorted(start.stop_ids) if start.params.min_tokens else []
    return pairs + [(token, float("-inf")) for token in stops]


def _bounded(value: float) -> float:
    return min(max(value, -LARGE), LARGE)
