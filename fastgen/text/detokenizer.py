"""From ids to text while an output grows: whole characters, and stop strings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fastgen.text.tokenizer import BROKEN, Tokenizer

CONTEXT_IDS = 6  # number of prompt ids decoded before an output, so that its first token keeps its leading space


class Detokenizer:
    """An incremental detokenizer for one output.

    New ids are decoded together with the ids that last added text, and the text that the new ids add is returned. Text
    that ends in the middle of a character is held back. One call with many ids gives the same text as one call per id.
    special: as in Tokenizer.decode.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], special: bool = False) -> None:
        self._decode = partial(tokenizer.decode, special=special)
        # A decoder with byte fallback decodes a whole run of bytes wrongly if it begins in the middle of a character.
        starts = [list(prompt_ids[-count:]) for count in range(CONTEXT_IDS, CONTEXT_IDS + 4)]
        whole = (ids for ids in starts if not self._decode(ids).startswith(BROKEN))
        self._context = next(whole, [])
        self._seen = self._decode(self._context)
        self._fresh: list[int] = []  # ids that have not added text yet

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """Return the text that new ids add. last: these are the last ids, so also return broken characters."""
        fresh = [*self._fresh, *ids]
        text = self._decode(self._context + fresh)
        if BROKEN in text and len(ids) > 1:
            return "".join(self.push([token]) for token in ids[:-1]) + self.push(ids[-1:], last)
        self._fresh = fresh
        if text.endswith(BROKEN) and not last:
            return ""
        new = text[len(self._seen) :] if text.startswith(self._seen) else self._decode(fresh)
        if new:
            seen = self._decode(fresh)
            if not seen and len(self._context) < 2 * CONTEXT_IDS:  # a leading space was stripped
                fresh = self._context + fresh
                seen = self._decode(fresh)
            self._context, self._fresh, self._seen = fresh, [], seen
        return new


class StopFinder:
    """A search for stop strings in a growing text. It holds back the end of the text that may become a stop string.
    shown: the stop string stays at the end of the text.

    Parts of the text may be hidden, such as special tokens: they are never shown, but stop strings are found in the
    whole text as well as in what is shown of it.
    """

    def __init__(self, stops: Sequence[str], shown: bool = False) -> None:
        self._stops, self._shown = tuple(stops), shown
        self._held = ""
        self._hidden: set[int] = set()  # indices of hidden characters in it

    def push(self, text: str, hidden: bool = False) -> tuple[str, str | None]:
        """Add text. Return (the text that can be shown now, the stop string that was found or None)."""
        if hidden:
            self._hidden.update(range(len(self._held), len(self._held) + len(text)))
        text = self._held = self._held + text
        matches, ends = [], [len(text)]
        for view, places in self._views(text):
            for stop in self._stops:
                at = view.find(stop)
                matches += [(places[at], stop)] if at >= 0 else []
                ends.append(places[len(view) - overlap(view, stop)])
        if matches:
            at, stop = min(matches, key=lambda pair: pair[0])
            shown, self._held = self._take(at), ""
            return shown + stop * self._shown, stop
        return self._take(min(ends)), None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        return self._take(len(self._held))

    def _views(self, text: str) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield the text and, if a part is hidden, the rest of it; with the index in the text of each character, and of
        the end."""
        yield text, range(len(text) + 1)
        if self._hidden:
            places = [at for at in range(len(text)) if at not in self._hidden]
            yield "".join(text[at] for at in places), [*places, len(text)]

    def _take(self, end: int) -> str:
        """Remove the text before an index, and return what is not hidden of it."""
        text, self._held = self._held[:end], self._held[end:]
        if self._hidden:
            text = "".join(char for at, char in enumerate(text) if at not in self._hidden)
            self._hidden = {at - end for at in self._hidden if at >= end}
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class OutputText:
    """The growing text of one output, which ends before the first stop string, or after it if stops are `shown`.
    special: True: it shows special tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str],
        shown: bool = False,
        special: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, special)
        self._finder = StopFinder(stops, shown)
        self._hidden_texts = tokenizer.hidden_texts if stops and not special else {}
        self.text = ""

    def push(self, ids: Sequence[int], *, may_stop: bool = True, last: bool = False) -> str | None:
        """Add ids, one at a time if there are stop strings, and return the stop string that they complete, or None.
        may_stop: look for stop strings. last: these are the last ids."""
        new = self._detokenizer.push(ids, last)
        new, stop = self._finder.push(new) if may_stop else (self._finder.flush() + new, None)
        self.text += new
        for text in map(self._hidden_texts.get, ids):
            if text is not None and may_stop and stop is None:
                new, stop = self._finder.push(text, hidden=True)
                self.text += new
        if last and stop is None:
            self.text += self._finder.flush()
        return stop
