"""Token masks in the engine: those that parameters ask for, and the tokens that they allow in a step. No torch here."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from fastgen.engine.interface import PlanFeature
from fastgen.model.config import ModelConfig
from fastgen.request import SamplingParams, Sequence, Status, TokenMask
from fastgen.text.grammar import Compiler, LaterEnd, TokenRules, named_error, params_grammar, structure_name, token_row
from fastgen.text.reasoning import after_reasoning
from fastgen.text.tokenizer import Tokenizer

CACHED_RULES = 64  # number of pairs of allowed_token_ids and bad_words


class MaskMaker:
    """Makes the masks that sampling parameters ask for: grammars, token rules, and masks of the user."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._token_rules = lru_cache(CACHED_RULES)(self._read_rules)

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._tokenizer, self._model.vocab_size, self._model.eos_ids)

    def mask_of(
        self, params: SamplingParams, prompt_ids: SequenceOf[int] = (), stop_ids: Collection[int] = ()
    ) -> tuple[TokenMask | None, SamplingParams]:
        """Return the mask that parameters ask for, or None if they ask for none (each sample gets a copy of it); and
        the parameters without what the mask does. A grammar begins after the reasoning that the prompt leaves open.
        stop_ids: those that min_tokens holds back. Raises ValueError or TypeError for a wrong grammar."""
        grammar = params_grammar(params)
        try:
            mask = params.mask
            if grammar is not None:
                grammar = after_reasoning(grammar, self._tokenizer, prompt_ids, self._model.eos_ids)
                mask = self._compiler.compile(grammar)
        except ValueError as error:
            raise named_error(structure_name(params), error) from None
        if params.allowed_token_ids is not None or params.bad_words:
            allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
            mask = TokenRules(mask, *self._token_rules(allowed, tuple(params.bad_words)))
        if mask is not None and params.min_tokens:
            mask = LaterEnd(mask, self._model.vocab_size, stop_ids, params.min_tokens)
            params = replace(params, min_tokens=0)
        return mask, params

    def _read_rules(self, allowed: tuple[int, ...] | None, words: tuple[str, ...]) -> tuple[Any, list[list[int]]]:
        """Return the row and the words of TokenRules. Raises ValueError for a word without tokens."""
        written = [text for word in words for text in (word, " " + word.lstrip())]
        tokenizer = self._tokenizer
        id_lists = [] if tokenizer is None else [tokenizer.encode(text, special=False) for text in written]
        if [] in id_lists:
            raise ValueError(f"bad_words has {written[id_lists.index([])]!r}, which has no tokens; remove it")
        valid = [ids for ids in id_lists if ids and max(ids) < self._model.vocab_size]
        row = token_row(self._model.vocab_size, allowed, [ids[0] for ids in valid if len(ids) == 1])
        return row, [ids for ids in valid if len(ids) > 1]

    def copy(self, mask: TokenMask) -> TokenMask:
        """Return a copy of a mask for one sample. Raises ValueError if the user's class cannot be copied."""
        try:
            return deepcopy(mask)
        except Exception as error:
            raise ValueError(f"the mask cannot be copied (copy.deepcopy): {error!r}") from error


class Masks(PlanFeature):
    """The masks of sequences in the steps that draw for them."""

    makes_masks = True

    def fill_masks(self, sequences: SequenceOf[Sequence], vocab_size: int) -> np.ndarray:
        """Fill the rows. A mask that raises allows no token: the draw is then -1, which ends only this sequence."""
        rows = super().fill_masks(sequences, vocab_size)
        for row, sequence in zip(rows, sequences, strict=True):
            if sequence.mask is not None and sequence.status is Status.RUNNING:
                try:
                    sequence.mask.fill(row)
                except Exception as error:  # the user's code
                    sequence.error = f"the mask raised {error!r}"
                    row[:] = 0
        return rows

    def accepts(self, sequence: Sequence, token: int) -> bool:
        """Advance the sequence's mask by a token that was drawn."""
        if sequence.mask is None:
            return True
        if token < 0:
            sequence.error = sequence.error or "the mask allowed no token"
            return False
        try:
            sequence.mask.accept(token)
        except Exception as error:  # the user's code
            sequence.error = f"the mask raised {error!r}"
            return False
        return True
