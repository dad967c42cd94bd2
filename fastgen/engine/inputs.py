"""The input side of the engine: prompts and parameters are checked, and requests become sequences."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from fastgen.engine.features import asks_for_mask
from fastgen.engine.outputs import ActiveRequest, ActiveSample, OutputQueue
from fastgen.engine.prompts import params_list, prompt_list
from fastgen.engine.seeds import seed_of
from fastgen.model.config import ModelConfig
from fastgen.prompt_score import PromptScore
from fastgen.request import (
    MAX_BIASES,
    PRIORITY,
    Completion,
    Params,
    Prompt,
    Request,
    SamplingParams,
    Sequence,
    empty_drawn,
    params_of,
)
from fastgen.text.tokenizer import Tokenizer, check_needs, encode_prompt

if TYPE_CHECKING:  # these are imported for the first request that needs them
    from fastgen.engine.masks import MaskMaker
    from fastgen.limits import RepetitionDetector, ThinkingBudget


class InputProcessor:
    """Turns requests into sequences.

    context: maximum number of tokens of prompt and output together. seed: requests without a seed derive theirs from
    this seed and a counter; None: from the operating system. defaults: the parameters of requests that have none.
    """

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        context: int,
        seed: int | None,
        defaults: SamplingParams,
    ) -> None:
        self.model, self.tokenizer, self.context, self.defaults = model, tokenizer, context, defaults
        self._seed = os.urandom(8) if seed is None else seed
        self._seeds = itertools.count()

    @cached_property
    def _masks(self) -> MaskMaker:
        """Makes the masks of requests; imported for the first request that asks for one, since it reads grammars."""
        from fastgen.engine.masks import MaskMaker

        return MaskMaker(self.model, self.tokenizer)

    def pair(
        self, prompts: Prompt | Iterable[Prompt], params: Params | Iterable[Params]
    ) -> list[tuple[Prompt, Params]]:
        """Return each prompt with its parameters. Raises ValueError or TypeError for what is wrong for all prompts:
        parameters that they share, a missing tokenizer or chat template, and a list of parameters of another length."""
        many = prompt_list(prompts)
        for prompt in many if self.tokenizer is None or self.tokenizer.hf.chat_template is None else ():
            check_needs(prompt, self.tokenizer)
        if params is None or isinstance(params, SamplingParams | Mapping):
            shared = params_of(params, self.defaults)
            self.check_params(shared)  # before anything runs
            if asks_for_mask(shared):
                self._masks.mask_of(shared)
            return [(prompt, shared) for prompt in many]
        each = params_list(params, len(many))
        return [(prompt, params_of(own, self.defaults)) for prompt, own in zip(many, each, strict=True)]

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError or TypeError for parameters that the model cannot be sampled with."""
        params.validate(self.model.vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("this model has no tokenizer files, so stop strings cannot be found; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise ValueError("this model has no tokenizer files, so bad_words cannot be found; use a mask")
        if params.thinking_token_budget is not None and self.tokenizer is None:
            raise ValueError(
                "this model has no tokenizer files, so its reasoning cannot be found; leave thinking_token_budget out"
            )
        edited = len(params.logit_bias or ()) + (len(self._stop_ids(params)) if params.min_tokens else 0)
        if edited > MAX_BIASES:
            raise ValueError(
                f"logit_bias and the stop ids that min_tokens holds back are {edited} tokens; they may be at most "
                f"{MAX_BIASES}: a mask can forbid any number"
            )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos_ids = () if params.ignore_eos else self.model.eos_ids
        return frozenset(id for id in (*params.stop_token_ids, *eos_ids) if 0 <= id < self.model.vocab_size)

    def ids_to_score(self, prompt: Prompt, start: int) -> list[int]:
        """Return the ids of a sequence whose logprobs from `start` on are wanted, at least 1. Raises ValueError or
        TypeError for a sequence that cannot be scored."""
        ids, _ = encode_prompt(prompt, self.tokenizer)
        self._check_prompt(ids, SamplingParams(max_tokens=0))
        check_start(start, ids, least=1)
        return ids

    def process(
        self, id: str | int, request: Request, queue: OutputQueue | None, score: tuple[int, float] | None
    ) -> ActiveRequest:
        """Return a request's sequences. score: (first position, temperature) of the prompt logprobs.

        Raises ValueError or TypeError for wrong parameters, for a prompt that cannot be served, and for a completion
        that cannot be resumed.
        """
        params, resume = params_of(request.params, self.defaults), request.resume
        self.check_params(params)
        if request.priority != 0:
            PRIORITY.check(request.priority)
        ids, text = encode_prompt(request.prompt, self.tokenizer)
        self._check_prompt(ids, params)
        stop_ids = self._stop_ids(params)
        mask, rest = self._masks.mask_of(params, ids, stop_ids) if asks_for_mask(params) else (None, params)
        if score is None and params.prompt_logprobs is not None:
            score = (0, 1.0)
        if score is not None:
            check_start(score[0], ids)
        if resume is not None:
            check_resumed(resume, params, self.model.vocab_size)
        seed, thinking = self._seed_of(params, resume), self._thinking(params, ids)
        most = self.context if params.max_tokens is None else len(ids) + params.max_tokens
        sequences = [
            Sequence(
                request_id=id,
                index=index,
                params=rest,
                token_ids=list(ids),
                prompt_len=len(ids),
                max_len=min(most, self.context),
                seed=seed,
                stop_ids=stop_ids,
                mask=None if mask is None else self._masks.copy(mask),
                thinking=thinking,
                repetition=self._repetition(params),
                priority=request.priority,
            )
            for index in (range(params.n) if resume is None else (resume.index,))
        ]
        if score is not None:
            sequences[0].score = PromptScore(*score, [math.nan] * len(ids))
            if params.prompt_logprobs:
                sequences[0].score.top_logprobs, sequences[0].score.ranks = [{} for _ in ids], [0] * len(ids)
        samples = [ActiveSample(sequence, params.min_tokens) for sequence in sequences]
        if self.tokenizer is not None and (queue is None or params.stop_strings):
            for sample in samples:
                sample.begin_text(self.tokenizer)
        if resume is not None:
            self._resume(samples[0], resume)
        return ActiveRequest(id, ids, samples, queue, added=time.perf_counter(), prompt=text)

    def _thinking(self, params: SamplingParams, ids: list[int]) -> ThinkingBudget | None:
        """Return the budget of the reasoning after a prompt; None if it has none, or the model does not reason."""
        if params.thinking_token_budget is None or self.tokenizer is None:
            return None
        from fastgen.text.reasoning import thinking_budget

        return thinking_budget(params.thinking_token_budget, self.tokenizer, ids)

    def _repetition(self, params: SamplingParams) -> RepetitionDetector | None:
        """Return a detector for one sample, or None if the parameters ask for none."""
        if not params.repetition_detection or not params.repetition_detection.get("max_pattern_size"):
            return None
        from fastgen.limits import RepetitionDetector

        return RepetitionDetector(params.repetition_detection)

    def _seed_of(self, params: SamplingParams, resume: Completion | None) -> int:
        if params.seed is not None:
            return int(params.seed)
        if resume is None:
            return seed_of(self._seed, next(self._seeds))
        if resume.seed is None:
            raise ValueError("the completion has no seed to continue its draws with; give params one")
        return resume.seed

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
            raise ValueError(f"the completion ends with {token_ids[-1]}, which is a stop id; it cannot go on")
        if sequence.mask is not None:
            try:
                for token in token_ids:
                    sequence.mask.accept(token)
            except Exception as error:  # the user's code
                raise ValueError(f"the mask does not accept the completion: it raised {error!r}") from error
        stop = sample.resume(completion, self.tokenizer)
        if stop is not None:
            raise ValueError(f"the completion has the stop string {stop!r} already; it cannot go on")

    def _check_prompt(self, ids: list[int], params: SamplingParams) -> None:
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
                "shorten it, or raise max_model_len or the KV pool if the model allows it"
            )


def check_start(start: int, ids: list[int], least: int = 0) -> None:
    """Raise ValueError if `start` cannot be the first position of a sequence to score. least: the smallest one."""
    if not least <= start <= len(ids):
        raise ValueError(f"start is {start}; it must be from {least} to the sequence's length, {len(ids)}")


def check_resumed(completion: Completion, params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError or TypeError if a completion cannot be resumed with these parameters."""
    if not isinstance(completion, Completion):
        raise TypeError(f"resume must be a Completion, not {type(completion).__name__}")
    if completion.finish_reason not in ("length", "abort"):
        raise ValueError(f"the completion ended with {completion.finish_reason!r}; 'length' and 'abort' can be resumed")
    if params.n != 1:
        raise ValueError(f"n is {params.n}; a request resumes one completion, so give n=1 and one request each")
    for name in empty_drawn(params).lists():
        values = getattr(completion, name)
        if values is None or len(values) != len(completion.token_ids):
            raise ValueError(f"the completion has not one entry of {name} for each token, and params ask for it")
    if completion.token_ids and not 0 <= min(completion.token_ids) <= max(completion.token_ids) < vocab_size:
        raise ValueError(f"the completion holds an id outside the vocabulary of {vocab_size} tokens")
