"""From logits to tokens: penalties, bias, masks, truncation, seeded draws and logprobs, all on the device.

What a row gets does not depend on its batch, to the last bit: a row is never summed in an order that the other rows
could change, and a `SamplePlan` only leaves out steps that would change no row. Two devices make this cheap:

- Tickets. A draw is a lottery in which a token holds int(2**44 * probability / largest probability) tickets. Sums of
  integers are exact in any order, so the winner is the same however a kernel splits the row. A token less likely
  than the likeliest by more than 2**44 (log: 30.5) holds none.
- Rank keys. A logit and its token id make one integer, larger for a larger logit and, among equals, for the lower id.
  So "the k likeliest" is always exactly k tokens, and top_k=1 is what greedy says.

Shapes: R rows (the samples drawn in a step), V vocabulary, S lanes. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastgen.request import LaneStart, SamplingParams

TICKETS = 2**44  # what the likeliest token holds
MAX_VOCAB = 2**18  # so that a row's tickets sum to less than 2**63
NO_TOKEN = -1  # drawn where nothing may be: the mask or -inf forbids all, or a logit is NaN or +inf
WORD = 0xFFFFFFFF
LARGE = 1e30  # parameters are held to +-LARGE and the temperature to 1 / LARGE, so that float32 arithmetic stays finite


@dataclass(frozen=True)
class SamplePlan:
    """What the rows of a batch need, known on the host; a False leaves out a step that would change no row.

    greedy, draws: some row takes the likeliest token, some row draws one. top_k_or_p, min_p: some drawing row has
    them. widest: how many of the likeliest tokens top-k and top-p must order, 0 for all. top_logprobs: raw
    alternatives, the most that a row asks for. keep_mask: some row asks which tokens truncation kept.
    """

    greedy: bool = True
    draws: bool = True
    penalties: bool = True
    bias: bool = True
    min_tokens: bool = True
    top_k_or_p: bool = True
    widest: int = 0
    min_p: bool = True
    top_logprobs: int = 0
    keep_mask: bool = False

    @staticmethod
    def of(params: Iterable[SamplingParams]) -> SamplePlan:
        """The least plan for rows with these parameters."""
        rows = list(params)
        drawing = [p for p in rows if p.temperature > 0]
        ordered = [p for p in drawing if p.top_k or p.top_p < 1]
        every_k = all(p.top_k for p in ordered)
        return SamplePlan(
            greedy=len(drawing) < len(rows),
            draws=bool(drawing),
            penalties=any(p.penalized for p in rows),
            bias=any(p.logit_bias for p in rows),
            min_tokens=any(p.min_tokens for p in rows),
            top_k_or_p=bool(ordered),
            widest=max((p.top_k for p in ordered), default=0) if every_k else 0,
            min_p=any(p.min_p > 0 for p in drawing),
            top_logprobs=max((p.logprobs or 0 for p in rows), default=0),
            keep_mask=any(p.return_sampling_mask for p in rows),
        )


@dataclass(slots=True)
class SampleOutput:
    """What R rows drew; all on the device.

    tokens: [R] int64, NO_TOKEN where nothing could be drawn. logprobs: [R] float32, of the distribution drawn from,
    0 for a greedy row, NaN at NO_TOKEN. raw_logprobs: [R] float32, log-softmax of the untouched logits.
    top_ids, top_logprobs: [R, k] int64 and float32, the raw alternatives, best first, equals by id; None for k = 0.
    kept: [R, V] bool, the tokens that could be drawn (a greedy row's one); None unless a row asked for it.
    """

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    kept: Tensor | None = None


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
    top_k: Tensor  # V where there is none
    penalized: Tensor


class _TokenTable:
    """A few (token id, addend) pairs a lane, [S, width]; unused ones add 0.0. As wide as was ever needed."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self.ids = torch.zeros(max_seqs, 0, dtype=torch.int64, device=device)
        self.addends = torch.zeros(max_seqs, 0, dtype=torch.float32, device=device)

    def write(self, lanes: Tensor, pairs: Mapping[int, Sequence[tuple[int, float]]]) -> None:
        """Replace the pairs of these lanes, the keys of `pairs`."""
        width, longest = self.ids.shape[1], max(map(len, pairs.values()))
        if longest > width:
            more = max(longest, 2 * width) - width
            self.ids = torch.nn.functional.pad(self.ids, (0, more))
            self.addends = torch.nn.functional.pad(self.addends, (0, more))
        self.addends.index_fill_(0, lanes, 0.0)
        if longest:
            cells = [(lane, column, token) for lane, row in pairs.items() for column, (token, _) in enumerate(row)]
            lane, column, token = _upload(cells, torch.int64, self.ids.device).unbind(1)
            self.ids[lane, column] = token
            addends = [addend for row in pairs.values() for _, addend in row]
            self.addends[lane, column] = _upload(addends, torch.float32, self.ids.device)


class LaneState:
    """What the sampler keeps of S lanes on the device.

    `last_token` [S] int64 is what a lane drew last (0 for NO_TOKEN, so that it can always be embedded). Penalty counts
    take 5 bytes a lane and token of the vocabulary; they are allocated when the first penalized lane starts, and a
    lane's own are rebuilt from its tokens at each start.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"the vocabulary has {vocab_size} tokens; the sampler takes at most {MAX_VOCAB}")
        self.vocab_size = vocab_size
        self.last_token = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self.floats = torch.zeros(max_seqs, 6, dtype=torch.float64, device=device)
        self.integers = torch.zeros(max_seqs, 6, dtype=torch.int64, device=device)
        self.bias = _TokenTable(max_seqs, device)
        self.stops = _TokenTable(max_seqs, device)
        self.in_prompt: Tensor | None = None  # [S, V] bool
        self.counts: Tensor | None = None  # [S, V] int32, occurrences in the answer

    @torch.inference_mode(False)
    def start(self, starts: Sequence[LaneStart]) -> None:
        """Rewrite the rows of these lanes, each named once."""
        if not starts:
            return
        device = self.last_token.device
        integers = _upload([[s.lane, *self._integers(s)] for s in starts], torch.int64, device)
        lanes = integers[:, 0]
        self.integers[lanes] = integers[:, 1:]
        self.floats[lanes] = _upload([_floats(s.params) for s in starts], torch.float64, device)
        self.bias.write(lanes, {s.lane: _bias(s.params) for s in starts})
        self.stops.write(lanes, {s.lane: _stops(s) for s in starts})
        penalized = [s for s in starts if s.params.penalized]
        if penalized:
            self._count(penalized)

    def _integers(self, start: LaneStart) -> list[int]:
        params = start.params
        top_k = min(params.top_k or self.vocab_size, self.vocab_size)
        seed = (start.seed + 2**63) % 2**64 - 2**63  # the low 64 bits, as int64: seeds -1 and 2**64 - 1 are one
        return [seed, start.index, start.prompt_len, params.min_tokens, top_k, int(params.penalized)]

    def _count(self, starts: Sequence[LaneStart]) -> None:
        """Count the tokens of these lanes from nothing."""
        device = self.last_token.device
        if self.counts is None or self.in_prompt is None:
            shape = (len(self.last_token), self.vocab_size)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        lanes = _upload([s.lane for s in starts], torch.int64, device)
        self.counts.index_fill_(0, lanes, 0)
        self.in_prompt.index_fill_(0, lanes, False)
        prompt = [s.lane * self.vocab_size + t for s in starts for t in s.token_ids[: s.prompt_len]]
        answer = [s.lane * self.vocab_size + t for s in starts for t in s.token_ids[s.prompt_len :]]
        self.in_prompt.view(-1).index_fill_(0, _upload(prompt, torch.int64, device), True)
        cells = _upload(answer, torch.int64, device)
        self.counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))

    def rows(self, lanes: Tensor) -> _Rows:
        """The parameters of lanes [R]."""
        floats = self.floats[lanes]
        float32s, integers = floats[:, :5].float(), self.integers[lanes]
        return _Rows._make([*float32s[..., None].unbind(1), floats[:, 5:], *integers[..., None].unbind(1)])

    def drew(self, lanes: Tensor, tokens: Tensor, penalized: Tensor | None) -> None:
        """Note tokens [R] as what lanes [R] drew last; count those of penalized rows [R] (1 or 0)."""
        tokens = tokens.clamp(min=0)
        self.last_token[lanes] = tokens
        if penalized is not None and self.counts is not None:
            self.counts.view(-1).index_add_(0, lanes * self.vocab_size + tokens, penalized.int())


def sample(
    state: LaneState, lanes: Tensor, positions: Tensor, logits: Tensor, plan: SamplePlan, mask: Tensor | None = None
) -> SampleOutput:
    """Draw the next token of each row, and note it in `state`.

    lanes: [R] int64, no lane twice. positions: [R] int64, where in prompt and answer (from 0) the drawn token will
    stand. logits: [R, V], left as they are. mask: [R, ceil(V / 32)] int32, bit i of word w is token 32 w + i, a set
    bit allows it. The order is that of SamplingParams: penalties, bias, min_tokens, mask, temperature, top-k, top-p,
    min-p.
    """
    logits = logits.float().contiguous()
    rows = state.rows(lanes)
    edited = _edit(state, rows, lanes, positions, logits, plan, mask)
    if not plan.draws:
        tokens = edited.argmax(1, keepdim=True)
        best = edited.gather(1, tokens)
        logprobs = torch.zeros_like(best)
        kept = None
    else:
        best = edited.amax(1, keepdim=True)
        tokens, logprobs, kept = _draw(edited, best, rows, positions[:, None], plan)
        if plan.greedy:
            greedy = rows.temperature == 0
            tokens = torch.where(greedy, edited.argmax(1, keepdim=True), tokens)
            logprobs = logprobs.masked_fill(greedy, 0.0)
    raw = logits.log_softmax(1)
    raw_logprobs = raw.gather(1, tokens)
    if plan.keep_mask:
        kept = _kept(edited, kept, rows, tokens)
    possible = best.isfinite()
    tokens = tokens.masked_fill(~possible, NO_TOKEN).squeeze(1)
    logprobs = logprobs.masked_fill(~possible, float("nan")).squeeze(1)
    state.drew(lanes, tokens, rows.penalized.squeeze(1) if plan.penalties else None)
    output = SampleOutput(tokens, logprobs, raw_logprobs.squeeze(1), kept=kept)
    if plan.top_logprobs:
        output.top_ids, output.top_logprobs = _alternatives(logits, raw, plan.top_logprobs)
    return output


def score(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None = None, top: int = 0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Logprobs [R] float32 of targets [R] int64 under logits [R, V] / temperatures [R] (all above 0; None: 1), and
    `top` raw alternatives (not divided) as ids and logprobs [R, top], or None for 0."""
    logits = logits.float().contiguous()
    scaled = logits if temperatures is None else logits / temperatures[:, None].float()
    logprobs = scaled.log_softmax(1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    if not top:
        return chosen, None, None
    raw = logprobs if temperatures is None else logits.log_softmax(1)
    return chosen, *_alternatives(logits, raw, top)


def _edit(
    state: LaneState,
    rows: _Rows,
    lanes: Tensor,
    positions: Tensor,
    logits: Tensor,
    plan: SamplePlan,
    mask: Tensor | None,
) -> Tensor:
    """Logits [R, V] after penalties, bias, min_tokens and mask; the argument itself where there are none."""
    if plan.penalties and state.counts is not None and state.in_prompt is not None:
        counts, in_prompt = state.counts[lanes], state.in_prompt[lanes]
        answered = counts > 0
        repeated = torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)
        logits = torch.where(answered | in_prompt, repeated, logits)
        logits = logits - counts * rows.frequency - answered * rows.presence
    if plan.bias:
        logits = logits.scatter_add(1, state.bias.ids[lanes], state.bias.addends[lanes])
    if plan.min_tokens:
        early = positions[:, None] - rows.prompt_len < rows.min_tokens
        logits = logits.scatter_add(1, state.stops.ids[lanes], state.stops.addends[lanes].masked_fill(~early, 0.0))
    if mask is not None:
        bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)
        allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits = logits.masked_fill(~allowed, float("-inf"))
    return logits


def _draw(
    edited: Tensor, best: Tensor, rows: _Rows, positions: Tensor, plan: SamplePlan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw from edited logits [R, V] with maxima best [R, 1]: tokens and logprobs [R, 1], and what truncation kept
    [R, V] (None: all). A greedy row gets a draw at temperature 1, for the caller to replace."""
    temperature = rows.temperature.masked_fill(rows.temperature == 0, 1.0)
    weights = edited.sub(best).div_(temperature).exp_()
    kept = weights >= rows.min_p if plan.min_p else None
    tickets = weights.mul_(TICKETS).long()
    if plan.top_k_or_p:
        likeliest = _likeliest(edited, tickets, rows, plan.widest)
        kept = likeliest if kept is None else likeliest.logical_and_(kept)
    if kept is not None:
        tickets.mul_(kept)
    ends = tickets.cumsum_(1)  # token i holds the tickets from ends[i - 1] up to ends[i]
    total = ends[:, -1:]
    winner = (_uniform(rows.seed, rows.sample_index, positions) * total).long()  # below total, however it rounds
    tokens = torch.searchsorted(ends, winner, right=True).clamp_(max=edited.shape[1] - 1)  # a row of NaN may find V
    logprobs = (edited.gather(1, tokens) - best).div_(temperature) - (total.double() / TICKETS).log()
    return tokens, logprobs.float(), kept


def _likeliest(edited: Tensor, tickets: Tensor, rows: _Rows, widest: int) -> Tensor:
    """What top-k and then top-p keep of logits [R, V] with these tickets [R, V]: bool [R, V]."""
    vocab = edited.shape[1]
    width = min(widest or vocab, vocab)
    keys = _rank_keys(edited)
    ranked = keys.topk(width).values if width < vocab else keys.sort(dim=1, descending=True).values
    count = rows.top_k.clamp(max=width)
    within = torch.arange(width, device=keys.device) < count
    held = tickets.gather(1, _key_ids(ranked, vocab)).mul_(within).cumsum_(1)
    short = (held < held[:, -1:] * rows.top_p).sum(1, keepdim=True)  # so many hold less than top_p together
    count = torch.where(rows.top_p < 1, torch.minimum(short + 1, count), count)
    everything = (rows.top_k >= vocab) & (rows.top_p >= 1)  # its count is wrong where width < vocab
    return (keys >= ranked.gather(1, count - 1)).logical_or_(everything)


def _kept(edited: Tensor, kept: Tensor | None, rows: _Rows, tokens: Tensor) -> Tensor:
    """Which tokens each row could draw, [R, V] bool."""
    possible = edited > float("-inf")
    if kept is not None:
        possible &= kept
    chosen = torch.zeros_like(possible).scatter_(1, tokens, True)
    return torch.where(rows.temperature == 0, chosen, possible)


def _alternatives(logits: Tensor, raw: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The ids of the `top` largest logits and their raw logprobs, [R, top]."""
    ids = _key_ids(_rank_keys(logits).topk(top).values, logits.shape[1])
    return ids, raw.gather(1, ids)


def _rank_keys(logits: Tensor) -> Tensor:
    """Logits [R, V] float32 as distinct int64: the larger logit is the larger key; among equals, the lower id."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 the equal of 0.0
    ordered = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))  # as integers, negative floats run backwards
    return ordered.long().mul_(2**32).add_(torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device))


def _key_ids(keys: Tensor, vocab: int) -> Tensor:
    """The token ids within rank keys."""
    return vocab - 1 - (keys & WORD)


def _uniform(seed: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (seed bits, sample index, position), all int64 of one shape: 53 random bits."""
    counter = torch.stack((index & WORD, position & WORD, position >> 32, torch.zeros_like(position)))
    words = philox(counter, torch.stack((seed & WORD, (seed >> 32) & WORD)))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four random words [4, ...]
    for each counter [4, ...] and key [2, ...]; words are int64 from 0 to 2**32 - 1."""
    even, odd = counter[0::2], counter[1::2]
    factors = torch.stack((torch.full_like(key[0], 0xD2511F53), torch.full_like(key[0], 0xCD9E8D57)))
    steps = torch.stack((torch.full_like(key[0], 0x9E3779B9), torch.full_like(key[0], 0xBB67AE85)))
    for _ in range(10):
        product = even * factors  # wraps around as int64; its 64 bits are those of the unsigned product
        even = ((product >> 32) & WORD).flip(0) ^ odd ^ key
        odd = (product & WORD).flip(0)
        key = (key + steps) & WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _floats(params: SamplingParams) -> list[float]:
    """A lane's parameters in the order of _Rows."""
    temperature = max(params.temperature, 1 / LARGE) if params.temperature else 0.0
    repetition = max(params.repetition_penalty, 1 / LARGE)
    bounded = map(_bounded, (temperature, params.min_p, repetition, params.presence_penalty, params.frequency_penalty))
    return [*bounded, params.top_p]


def _bias(params: SamplingParams) -> list[tuple[int, float]]:
    return [(token, _bounded(bias)) for token, bias in (params.logit_bias or {}).items()]


def _stops(start: LaneStart) -> list[tuple[int, float]]:
    return [(token, float("-inf")) for token in sorted(start.stop_ids)] if start.params.min_tokens else []


def _bounded(value: float) -> float:
    return min(max(value, -LARGE), LARGE)


def _upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values as a device tensor, without waiting for the copy."""
    pinned = device.type == "cuda"  # a copy from pageable memory would wait
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)
