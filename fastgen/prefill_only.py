"""The methods of a Generator that read prompts and generate nothing: scores, probabilities of choices, embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import overload

from fastgen.engine.interrupts import OneCaller
from fastgen.engine.loop import Loop
from fastgen.engine.outputs import OutputQueue
from fastgen.engine.prompts import Scores, TopScores, pair_scores, prompt_list
from fastgen.engine.team import on_all_ranks
from fastgen.model.config import ModelConfig
from fastgen.option import check_items
from fastgen.request import Prompt, PromptScore, Request, SamplingParams
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer, encode_prompt


class PrefillOnly:
    """The methods of Generator that compute something of prompts and generate nothing."""

    tokenizer: Tokenizer | None
    model_config: ModelConfig
    folder: Path
    _loop: Loop
    _interrupt: OneCaller

    @overload
    def score(
        self, sequences: Iterable[Prompt], start: int | SequenceOf[int] = 0, temperature: float = 1.0
    ) -> Scores: ...
    @overload
    def score(
        self, sequences: Iterable[Prompt], start: int | SequenceOf[int] = 0, temperature: float = 1.0, *, logprobs: int
    ) -> tuple[Scores, TopScores]: ...
    @on_all_ranks
    def score(
        self,
        sequences: Iterable[Prompt],
        start: int | SequenceOf[int] = 0,
        temperature: float = 1.0,
        *,
        logprobs: int | None = None,
    ) -> Scores | tuple[Scores, TopScores]:
        """Return the logprobs of given tokens: float32, of log_softmax(logits / temperature).

        sequences: prompts, mostly lists of ids. start: the first position to score, for all sequences or a list with
        one for each. The result has len - start floats for each sequence; position 0 has no logprob, and is NaN, as is
        a position whose logits are not finite. logprobs: number of alternatives (1 to 128); the result is then a pair,
        whose second list has a dict for each float: the most likely tokens there, with their raw logprobs (at
        temperature 1), as `RequestOutput.prompt_top_logprobs`.

        Raises ValueError for a sequence that cannot be scored, and if start leaves nothing to score in any.
        """
        arguments = [sequences], [start], [temperature], [logprobs]
        ((prompts, starts),) = self._interrupt.reading(map(pair_scores, *arguments))
        scores = self._read(prompts, starts, float(temperature), top=logprobs or 0)
        values = [score.logprobs[first:] for score, first in zip(scores, starts, strict=True)]
        if values and not any(values):
            raise ValueError(f"start is {start}, the end of each sequence, which leaves nothing to score; lower it")
        if logprobs is None:
            return values
        return values, [score.top_logprobs[first:] for score, first in zip(scores, starts, strict=True)]

    @on_all_ranks
    def classify(self, prompts: Prompt | Iterable[Prompt], choices: SequenceOf[str]) -> list[dict[str, float]]:
        """Return the probability of each choice as the whole answer to a prompt, for each prompt: {choice: p}. The
        values of a prompt sum to 1.

        prompts: see `generate`. choices: at least one text. The weight of a choice is the model's probability, at
        temperature 1 and without a mask, of its ids and then the end: the product over the ids of the choice as the
        tokenizer writes it, times the sum over the model's eos ids. p is that weight divided by the sum over all
        choices. Other ways to write the same text as tokens do not count. Nothing is drawn.

        Raises ValueError for a prompt that cannot be served, and for a choice that is empty, given twice, or that
        cannot be encoded on its own.
        """
        check_items("choice", choices, self.model_config.vocab_size)
        (many,) = self._interrupt.reading(map(prompt_list, [prompts]))
        answers = [_answer_ids(text, self.tokenizer) for text in choices]
        if len(set(choices)) < len(choices):
            raise ValueError("a choice is given twice; give each one once")
        ends = [[id] for id in sorted(self.model_config.eos_ids)] or [[]]
        sequences, starts = list[Prompt](), list[int]()
        for prompt in many:
            ids = encode_prompt(prompt, self.tokenizer)[0]
            if not ids:
                raise ValueError("a prompt is empty; give at least one token")
            for answer in answers:
                sequences += [[*ids, *answer, *end] for end in ends]
                starts += [len(ids)] + [len(ids) + len(answer)] * (len(ends) - 1)
        scores = self._read(sequences, starts)
        logprobs = [score.logprobs[first:] for score, first in zip(scores, starts, strict=True)]
        weights = [_weight(logprobs[at : at + len(ends)]) for at in range(0, len(logprobs), len(ends))]
        rows = (weights[at : at + len(choices)] for at in range(0, len(weights), len(choices)))
        return [dict(zip(choices, _softmax(row), strict=True)) for row in rows]

    @on_all_ranks
    def embed(self, prompts: Prompt | Iterable[Prompt]) -> list[list[float]]:
        """Return the embedding of each prompt: a list of hidden-size floats, the hidden state of the last token after
        the last norm, divided by its length if the model's files say so.

        prompts: see `generate`; a text gets the special tokens of the tokenizer, and no instruction. Raises ValueError
        if the model's folder does not say that it embeds in this way (modules.json and 1_Pooling/config.json of
        sentence-transformers), and for a prompt that cannot be served.
        """
        normalized = _reads_last_token(self.folder)
        (many,) = self._interrupt.reading(map(prompt_list, [prompts]))
        sequences = [encode_prompt(prompt, self.tokenizer)[0] for prompt in many]
        scores = self._read(sequences, list(map(len, sequences)), embedding=True)
        states = [score.embedding or [] for score in scores]
        lengths = [math.hypot(*state) if normalized else 1.0 for state in states]
        return [[value / (length or 1.0) for value in state] for state, length in zip(states, lengths, strict=True)]

    def _read(
        self,
        prompts: SequenceOf[Prompt],
        starts: SequenceOf[int],
        temperature: float = 1.0,
        embedding: bool = False,
        top: int = 0,
    ) -> list[PromptScore]:
        """Run prompts without generating; return their logprobs from `starts` on, with `top` alternatives each, and
        their embeddings."""
        params, queue, scores = SamplingParams(max_tokens=0, prompt_logprobs=top), OutputQueue(), list[PromptScore]()
        try:
            for prompt, first in zip(prompts, starts, strict=True):
                id = self._loop.begin(Request(prompt, params), queue, (first, temperature))
                score = self._loop.active[id].samples[0].sequence.score
                assert score is not None
                score.embedding = [] if embedding else None
                scores.append(score)
            while queue.running:
                self._loop.advance()
        finally:
            self._loop.abort(list(queue.running))
        return scores


def _answer_ids(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids that a tokenizer writes for a text that follows other text, without an added space before it.
    Raises ValueError if these ids are not the text."""
    if tokenizer is None:
        raise ValueError("this model has no tokenizer files, so choices have no tokens; use score with ids")
    before, ids = (tokenizer.encode("\n" + end, special=False) for end in ("", text))
    ids = ids[len(before) :] if ids[: len(before)] == before else tokenizer.encode(text, special=False)
    if not ids or Detokenizer(tokenizer, before).push(ids, last=True) != text:
        raise ValueError(f"the choice {text!r} cannot be encoded on its own; give another one")
    return ids


def _weight(logprobs: SequenceOf[SequenceOf[float]]) -> float:
    """Return the logarithm of the probability of a choice. logprobs: of its ids and of one end, then of other ends."""
    (*answer, end), *others = logprobs
    return math.fsum(answer) + _log_sum_exp([end, *(other for (other,) in others)])


def _log_sum_exp(values: SequenceOf[float]) -> float:
    most = max(values)
    return most + math.log(math.fsum(math.exp(value - most) for value in values))


def _softmax(values: SequenceOf[float]) -> list[float]:
    total = _log_sum_exp(values)
    return [math.exp(value - total) for value in values]


def _reads_last_token(folder: Path) -> bool:
    """Return whether a model's embeddings are normalized. Raises ValueError unless its files say that an embedding is
    the hidden state of the last token."""
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        kinds = [each["type"].rpartition(".")[2] for each in modules]
        place = next(each["path"] for each in modules if each["type"].endswith(".Pooling"))
        pooling = json.loads((folder / place / "config.json").read_bytes())
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        needed = "modules.json and the config.json of its pooling, as models for sentence-transformers have them"
        missing = isinstance(error, FileNotFoundError) and Path(error.filename).relative_to(folder)
        reason = f"there is no {missing}" if missing else repr(error)
        raise ValueError(f"this model has no embeddings: embed needs {needed} ({reason})") from None
    flags = [name.removeprefix("pooling_mode_") for name, value in pooling.items() if value is True]
    modes = (
        [pooling["pooling_mode"]] if "pooling_mode" in pooling else [each for each in flags if "include" not in each]
    )
    if modes != ["lasttoken"] or kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        what = f"{' and '.join(map(str, modes))} of {', '.join(kinds)}"
        raise ValueError(f"embed reads the last token's state, normalized or not; this model asks for {what}")
    return "Normalize" in kinds
