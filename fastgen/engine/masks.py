"""Token masks in the engine: the rows that a step's draws are restricted by, and the tokens that masks accept.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from fastgen.request import Sequence, Status

NOT_FINITE = "the logits are not finite"


def fill_masks(sequences: SequenceOf[Sequence], vocab_size: int) -> np.ndarray:
    """Return the allowed tokens of the sequences that draw: int32 [R, ceil(V / 32)]. All must know their last token.

    If a mask raises, no token is allowed: the drawn token is then -1, which ends only this sequence.
    """
    rows = np.full((len(sequences), -(-vocab_size // 32)), -1, dtype=np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        if sequence.mask is not None and sequence.status is Status.RUNNING:
            try:
                sequence.mask.fill(row)
            except Exception as error:  # the user's code
                sequence.error = f"the mask raised {error!r}"
                row[:] = 0
    return rows


def accepts(sequence: Sequence, token: int) -> bool:
    """Advance a sequence's mask by its next token. Return False, with the reason in `error`, if there can be none."""
    if token < 0:
        reason = NOT_FINITE if sequence.mask is None else "the mask allowed no token"
        if sequence.mask is not None and sequence.output_len < sequence.params.min_tokens:
            reason += "; min_tokens forbids an end so early"
        sequence.error = sequence.error or reason
        return False
    if sequence.mask is not None:
        try:
            sequence.mask.accept(token)
        except Exception as error:  # the user's code
            sequence.error = f"the mask raised {error!r}"
            return False
    return True
