"""The input side of the engine: prompts and parameters are checked, and requests become sequences."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import cached_property
from numbers import Integral, Real

from fastgen.engine.outputs import ActiveRequest, ActiveSample, OutputQueue
from fastgen.grammar import Compiler, params_rule
from fastgen.model.config import ModelConfig
from fastgen.request import (
    MAX_BIASES,
    Completion,
    Drawn,
    Prompt,
    Request,
    SamplingParams,
    Sequence,
    TokenMask,
)
from fastgen.tokenizer import Tokenizer, encode_prompt


class InputProcessor:
    """Turns requests into sequences.

    context: the most tokens of prompt and output together. seed: requests without a seed derive theirs from it and a
    counter; None: a seed from the operating system.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, context: int, seed: int | None) -> None:
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self._seed = os.urandom(8) if seed is None else str(seed).encode()
        self._seeds = itertools.count()

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler.of(self.tokenizer, self.model)

    def _mask_of(self, params: SamplingParams) -> TokenMask | None:
        """Return the mask of parameters, which the samples share so far. Raises ValueError or TypeError."""
        rule = params_rule(params)
        return params.mask if rule is None else self._compiler.compile(f"start: {rule}")

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError or TypeError for parameters that the model can not be sampled with."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        params.validate(self.model.vocab_size)
        edited = len(params.logit_bias or ()) + (len(self._stop_ids(params)) if params.min_tokens else 0)
        if edited > MAX_BIASES:
            raise ValueError(
                f"logit_bias and the stop ids that min_tokens holds back are {edited} tokens; they may be at most "
                f"{MAX_BIASES}: a mask can forbid any number"
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos_ids = () if params.ignore_eos else self.model.eos_ids
        return frozenset(id for id in (*params.stop_token_ids, *eos_ids) if 0 <= id < self.model.vocab_size)

    def process(
        self, id: str | int, request: Request, queue: OutputQueue | None, score: tuple[int, float] | None
    ) -> ActiveRequest:
        """Return a request's sequences. score: (first position, temperature) of the prompt logprobs.

        Raises ValueError or TypeError for wrong parameters, for a prompt that can not be served, and for a completion
        that can not be resumed.
        """
        self.check_params(request.params)
        params, resume = request.params, request.resume
        ids = self._prompt_ids(request.prompt, params)
        if score is None and params.prompt_logprobs is not None:
            score = (0, 1.0)
        if score is not None and not 0 <= score[0] <= len(ids):
            raise ValueError(f"start is {score[0]}; it must be from 0 to the sequence's length, {len(ids)}")
        if resume is not None:
            check_resumed(resume, params, self.model.vocab_size)
        seed, stop_ids, mask = self._seed_of(request), self._stop_ids(params), self._mask_of(params)
        most = self.context if params.max_tokens is None else len(ids) + params.max_tokens
        sequences = [
            Sequence(
                request_id=id,
                index=index,
                params=params,
                token_ids=list(ids),
                prompt_len=len(ids),
                max_len=min(most, self.context),
                seed=seed,
                stop_ids=stop_ids,
                mask=_copy_mask(mask),
            )
            for index in (range(params.n) if resume is None else (resume.index,))
        ]
        if score is not None:
            _want_scores(sequences[0], *score)
        samples = [ActiveSample(sequence) for sequence in sequences]
        if self.tokenizer is not None and (queue is None or params.stop_strings):
            for sample in samples:
                sample.begin_text(self.tokenizer)
        if resume is not None:
            self._resume(samples[0], resume)
        return ActiveRequest(id, ids, samples, queue, added=time.perf_counter())

    def _seed_of(self, request: Request) -> int:
        if request.params.seed is not None:
            return int(request.params.seed)
        if request.resume is None:
            return self._next_seed()
        if request.resume.seed is None:
            raise ValueError("the completion has no seed to continue its draws with; give params one")
        return request.resume.seed

    def _resume(self, sample: ActiveSample, completion: Completion) -> None:
        """Begin a sample with a completion that `check_resumed` has checked. Raises ValueError if the sample would have
        ended with it, or if it leaves no room."""
        sequence, token_ids = sample.sequence, completion.token_ids
        if sequence.prompt_len + len(token_ids) >= sequence.max_len:
            limit = f"the context of {self.context} tokens is full"
            if sequence.max_len < self.context:
                limit = f"max_tokens is {sequence.params.max_tokens}; raise it"
            raise ValueError(f"the completion has {len(token_ids)} tokens already, and {limit}")
        if len(token_ids) > sequence.params.min_tokens and token_ids[-1] in sequence.stop_ids:
            raise ValueError(f"the completion ends with {token_ids[-1]}, which is a stop id; it can not go on")
        if sequence.mask is not None:
            try:
                for token in token_ids:
                    sequence.mask.accept(token)
            except Exception as error:  # the user's code
                raise ValueError(f"the mask does not accept the completion: it raised {error!r}") from error
        stop = sample.resume(completion, self.tokenizer)
        if stop is not None:
            raise ValueError(f"the completion has the stop string {stop!r} already; it can not go on")

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        ids = encode_prompt(prompt, self.tokenizer)
        vocab_size, context = self.model.vocab_size, self.context
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise ValueError(f"the prompt holds the id {wrong}, outside the vocabulary of {vocab_size} tokens")
        room = context if params.max_tokens == 0 else context - 1
        if len(ids) > room:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the context of {context} tokens has room for {room}; "
                "shorten it, or raise max_model_len or the KV pool where the model allows it"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("this model has no tokenizer files, so stop strings can not be found; use stop_token_ids")
        return ids

    def _next_seed(self) -> int:
        digest = hashlib.blake2b(self._seed + b":%d" % next(self._seeds), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _want_scores(sequence: Sequence, start: int, temperature: float) -> None:
    """Ask for the logprobs of the prompt's tokens from position `start` on."""
    sequence.score_start, sequence.score_temperature = start, temperature
    sequence.prompt_logprobs = [math.nan] * sequence.prompt_len
    if sequence.params.prompt_logprobs:
        sequence.prompt_top_logprobs = [{} for _ in range(sequence.prompt_len)]


def check_resumed(completion: Completion, params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError or TypeError if a completion can not be resumed with these parameters."""
    if not isinstance(completion, Completion):
        raise TypeError(f"resume must be a Completion, not {type(completion).__name__}")
    if completion.finish_reason not in ("length", "abort"):
        raise ValueError(f"the completion ended with {completion.finish_reason!r}; 'length' and 'abort' can be resumed")
    if params.n != 1:
        raise ValueError(f"n is {params.n}; a request resumes one completion, so give n=1 and one request each")
    for name in Drawn.empty(params).lists():
        values = getattr(completion, name)
        if values is None or len(values) != len(completion.token_ids):
            raise ValueError(f"the completion has not one entry of {name} for each token, and params ask for it")
    if completion.token_ids and not 0 <= min(completion.token_ids) <= max(completion.token_ids) < vocab_size:
        raise ValueError(f"the completion holds an id outside the vocabulary of {vocab_size} tokens")


def _copy_mask(mask: TokenMask | None) -> TokenMask | None:
    """Return a copy of a mask for one sample. Raises ValueError if the user's class can not be copied."""
    try:
        return deepcopy(mask)
    except Exception as error:
        raise ValueError(f"the mask can not be copied (copy.deepcopy): {error!r}") from error


def prompt_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A string, and a list that begins with an int or a dict, is one prompt."""
    if hasattr(prompts, "tolist"):  # a tensor or array of ids
        prompts = prompts.tolist()
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping))
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]


def pair_prompts(
    prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters. Raises ValueError if a list of parameters has another length."""
    many = prompt_list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, SamplingParams() if params is None else params) for prompt in many]
    if len(params) != len(many):
        raise ValueError(f"there are {len(many)} prompts and {len(params)} params; give one, or one a prompt")
    return list(zip(many, params, strict=True))


def pair_scores(
    sequences: SequenceOf[Prompt], start: int | SequenceOf[int], temperature: float
) -> tuple[list[Prompt], list[int]]:
    """Return the sequences to score, and the first position of each. Raises ValueError or TypeError for arguments that
    do not fit together."""
    if not (isinstance(temperature, Real) and 0 < float(temperature) < math.inf):
        raise ValueError(f"temperature is {temperature}; scores need one above 0")
    prompts = prompt_list(sequences)
    starts = [start] * len(prompts) if isinstance(start, Integral) else list(start)
    if not all(isinstance(first, Integral) for first in starts):
        raise TypeError(f"start must be an integer, or one a sequence, not {start!r}")
    if len(starts) != len(prompts):
        raise ValueError(f"there are {len(prompts)} sequences and {len(starts)} starts; give one start a sequence")
    return prompts, starts
