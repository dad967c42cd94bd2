"""The methods of a Generator that only compute prefills: scores, probabilities of choices, embeddings and hidden
states."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from pathlib import Path
from typing import overload

from torch import Tensor

from fastgen.engine.interrupts import OneCaller
from fastgen.engine.loop import Loop
from fastgen.engine.options import EngineConfig
from fastgen.engine.outputs import OutputQueue
from fastgen.engine.prompts import Scores, TopScores, pair_scores, prompt_list, prompt_source
from fastgen.engine.team import on_all_ranks
from fastgen.model.config import ModelConfig
from fastgen.option import check_items
from fastgen.prompt_score import Positions, PromptScore
from fastgen.request import Prompt, Request, SamplingParams
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.tokenizer import Tokenizer, encode_prompt


class PrefillOnly:
    """The methods of Generator that compute something of prompts and generate nothing."""

    tokenizer: Tokenizer | None
    config: EngineConfig
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
        a position whose logits are not finite. logprobs: number of alternatives (1 to 128). The result is then a
        pair, whose second list has a dict for each float, as in `RequestOutput.prompt_top_logprobs`: the most likely
        tokens at that position with their raw logprobs (at temperature 1).

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
        states = [vectors[0, 0].float().tolist() for vectors in self._states(many, -1, "last")]
        lengths = [math.hypot(*state) if normalized else 1.0 for state in states]
        return [[value / (length or 1.0) for value in state] for state, length in zip(states, lengths, strict=True)]

    @on_all_ranks
    def features(
        self,
        sequences: Prompt | Iterable[Prompt],
        layers: int | Iterable[int] = -1,
        positions: Positions | Iterable[Positions] = "all",
    ) -> list[Tensor]:
        """Return hidden states of each sequence: [layers, positions, hidden] on the CPU, in the dtype of the model.

        sequences: see `generate`. layers: an index or several, as in transformers' `hidden_states`: 0 is the embedding,
            as it enters the first layer; i is the residual stream after layer i; the last index, the number of layers,
            is the output of the final norm (the stream before it has no index). Negative ones count from the end.
        positions: "all"; "last", the last token of each sequence; a list of positions for all sequences; or a list of
            such lists, one for each sequence. Negative ones count from the end. Rows are in the order of positions.

        Like logprobs, the bits depend neither on other requests nor on chunks and cached prefixes. Tokens before the
        first position may come from the prefix cache. For more sequences than fit in memory, use `write_features`.

        Raises ValueError or TypeError for a sequence that cannot be served, for layers or positions that do not exist,
        and with several ranks for layers other than the last.
        """
        (many,) = self._interrupt.reading(map(prompt_list, [sequences]))
        return self._states(many, layers, positions)

    @on_all_ranks
    def write_features(
        self,
        folder: str | Path,
        sequences: Prompt | Iterable[Prompt],
        layers: int | Iterable[int] = -1,
        positions: Positions | Iterable[Positions] = "all",
        shard_bytes: int = 2**30,
    ) -> list[Path]:
        """Write hidden states of any number of sequences to a folder, and return the paths of the new files.

        folder: created if it does not exist. sequences: see `generate`; an iterable is read as the engine needs it.
        layers, positions: see `features`; the positions for each sequence may also be an iterable. shard_bytes: number
            of bytes of hidden states at which a file ends.

        The files features-00000.safetensors, features-00001.safetensors, ... have "layer.I", [rows, hidden], for each
        layer index I (not negative); "positions", int64 [rows]; and "offsets", int64 [sequences + 1]: within a file,
        sequence s has the rows offsets[s] to offsets[s + 1] - 1. In the metadata, "first" is the number of the file's
        first sequence. A sequence that cannot be served has no rows, and the log says why.

        Raises ValueError for a folder that already has such files, and what `features` raises.
        """
        from fastgen.hidden_states import ShardWriter, StateReader, with_positions, write

        reader = StateReader(self._loop, self.tokenizer, self.model_config, layers)
        pairs = self._interrupt.reading(with_positions(prompt_source(sequences), positions))
        return write(reader, pairs, ShardWriter(folder, reader.layers, shard_bytes))

    def _states(
        self,
        prompts: SequenceOf[Prompt],
        layers: int | Iterable[int],
        positions: Positions | Iterable[Positions],
    ) -> list[Tensor]:
        """Return the hidden states of prompts; see `features`."""
        from fastgen.hidden_states import StateReader, with_positions

        reader, values = StateReader(self._loop, self.tokenizer, self.model_config, layers), list[Tensor]()
        with closing(reader.read(with_positions(prompts, positions))) as sequences:
            for states in sequences:
                if states.error is not None:
                    raise states.error
                values.append(states.values)
        return values

    def _read(
        self, prompts: SequenceOf[Prompt], starts: SequenceOf[int], temperature: float = 1.0, top: int = 0
    ) -> list[PromptScore]:
        """Run prompts without generating; return their logprobs beginning at `starts`, with `top` alternatives each."""
        params, queue, scores = SamplingParams(max_tokens=0, prompt_logprobs=top), OutputQueue(), list[PromptScore]()
        try:
            for prompt, first in zip(prompts, starts, strict=True):
                id = self._loop.begin(Request(prompt, params), queue, (first, temperature))
                score = self._loop.active[id].samples[0].sequence.score
                assert score is not None
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
