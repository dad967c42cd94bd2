"""From ids to text while an output grows: whole characters, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.text.tokenizer import BROKEN, Tokenizer

CONTEXT_IDS = 6  # number of prompt ids decoded before an output, so that its first token keeps its leading space


class Detokenizer:
    """An incremental detokenizer for one output.

    New ids are decoded together with the ids that last added text, and the text that the new ids add is returned. Text
    that ends in the middle of a character is held back. One call with many ids gives the same text as one call per id.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # A decoder with byte fallback decodes a whole run of bytes wrongly if it begins in the middle of a character.
        starts = [list(prompt_ids[-count:]) for count in range(CONTEXT_IDS, CONTEXT_IDS + 4)]
        whole = (ids for ids in starts if not tokenizer.decode(ids).startswith(BROKEN))
        self._context = next(whole, [])
        self._seen = tokenizer.decode(self._context)
        self._fresh: list[int] = []  # ids that have not added text yet

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """Return the text that new ids add. last: these are the last ids, so return broken characters, too."""
        fresh = [*self._fresh, *ids]
        text = self._tokenizer.decode(self._context + fresh)
        if BROKEN in text and len(ids) > 1:
            return "".join(self.push([token]) for token in ids[:-1]) + self.push(ids[-1:], last)
        self._fresh = fresh
        if text.endswith(BROKEN) and not last:
            return ""
        new = text[len(self._seen) :] if text.startswith(self._seen) else self._tokenizer.decode(fresh)
        if new:
            seen = self._tokenizer.decode(fresh)
            if not seen and len(self._context) < 2 * CONTEXT_IDS:  # a leading space was stripped
                fresh = self._context + fresh
                seen = self._tokenizer.decode(fresh)
            self._context, self._fresh, self._seen = fresh, [], seen
        return new


class StopFinder:
    """A search for stop strings in a growing text. It holds back the end of the text that may become a stop string.
    shown: the stop string stays at the end of the text."""

    def __init__(self, stops: Sequence[str], shown: bool = False) -> None:
        self._stops, self._shown = tuple(stops), shown
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return (the text that can be shown now, the stop string that was found or None)."""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda pair: pair[0])
            self._held = ""
            return text[: at + len(stop) * self._shown], stop
        shown = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class OutputText:
    """The growing text of one output, which ends before the first stop string, or after it if stops are `shown`."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str], shown: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._finder = StopFinder(stops, shown)
        self.text = ""

    def push(self, ids: Sequence[int], *, may_stop: bool = True, last: bool = False) -> str | None:
        """Add ids, and return the stop string that they complete, or None. may_stop: look for stop strings. last: these
        are the last ids."""
        new = self._detokenizer.push(ids, last)
        new, stop = self._finder.push(new) if may_stop else (self._finder.flush() + new, None)
        self.text += new
        if last and stop is None:
            self.text += self._finder.flush()
        return stop
