"""From token ids to text that is safe to show: whole characters only, and never the start of a stop string.

`IncrementalDetokenizer` holds back an incomplete character, `StopChecker` a possible start of a stop string, and
`ChoiceText` joins both into the one pipeline of a choice, with one flush point (`finish`). Streamed and whole answers
are the same text because there is no other way to make it. No engine and no I/O here.

Stop rule: of all occurrences in the text the one that starts first wins; of two that start together the shorter one. It
depends on the text only, not on how the text was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from coterie.engine.messages import SamplingParams, TokenLogprob
from coterie.engine.tokenizer import Tokenizer

Logprobs = tuple[TokenLogprob, ...]


class IncrementalDetokenizer:
    """Text of one choice, token by token. All deltas and the flush together are the whole decode.

    A byte that can no longer become a character is U+FFFD as soon as the next byte shows it; an incomplete character at
    the end is one U+FFFD. A SentencePiece text keeps its leading space: it continues a prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown_special_ids: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(shown_special_ids) if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = _Window(tokenizer) if tokenizer.form == "other" else None

    def push(self, token_id: int) -> str:
        """Take one token and return the characters that it completes."""
        if token_id in self._skipped:
            return ""
        if self._window is not None:
            return self._window.push(token_id)
        return self._utf8.decode(self._tokenizer.id_to_bytes(token_id))

    def flush(self) -> str:
        """Return what was held back; nothing may be pushed after it."""
        return self._utf8.decode(b"", True) if self._window is None else self._window.flush()


class _Window:
    """Text of a tokenizer that only its library can spell: decode a few tokens before and after, show what is new."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        if not self._tokenizer.has_id(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._decode(self._ids[: self._shown])) :]
        self._ids = self._ids[self._shown :] if self._shown and len(self._ids) > self._shown else self._ids
        self._shown = len(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found at characters [start, end) of the choice's text."""

    stop: str
    start: int
    end: int


class StopChecker:
    """Watches a growing text for stop strings and holds back only the longest tail that may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len))
        self._held = ""
        self._released = 0

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to watch for."""
        return bool(self._stops)

    @property
    def released(self) -> int:
        """Characters given out so far."""
        return self._released

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """Add text; return what may be shown, and the match that ends the choice if there is one."""
        if not self._stops:
            self._released += len(text)
            return text, None
        self._held += text
        return self._scan(final=False)

    def take(self) -> str:
        """What is held back, which is forgotten here. After a match it begins with that."""
        text, self._held = self._held, ""
        return text

    def skip(self, text: str) -> str:
        """Show text without watching it; only before anything is watched."""
        assert not self._held, "skip() after push()"
        self._released += len(text)
        return text

    def flush(self) -> tuple[str, StopMatch | None]:
        """No more text comes: what was held is shown, unless a stop string lies in it."""
        return self._scan(final=True)

    def _scan(self, *, final: bool) -> tuple[str, StopMatch | None]:
        """The first position that is a match, or may still become one, decides."""
        held = self._held
        for position in range(len(held)):
            for stop in self._stops:
                if held.startswith(stop, position):
                    start = self._released + position
                    return self._release(position), StopMatch(stop, start, start + len(stop))
                if not final and stop.startswith(held[position:]):
                    break
            else:
                continue
            return self._release(position), None
        return self._release(len(held)), None

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._released += count
        return text


class ShownText(msgspec.Struct, frozen=True, gc=False):
    """What a step adds to a choice: text, the tokens wholly shown with it, and the stop string that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None
    stop: str | None = None


@dataclass(slots=True)
class _HeldToken:
    """A token whose text ends at character `end` of the choice."""

    token_id: int
    logprobs: Logprobs | None
    end: int


class ChoiceText:
    """The one pipeline of a choice. Without a tokenizer the text is empty and every token passes at once.

    Tokens leave with the text that they complete, so that none shows a piece of a stop string early; those that begin
    after a stop string's end are dropped.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                shown_special_ids=params.shown_special_ids,
            )
        )
        self._stops = StopChecker(params.stop)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._with_logprobs = params.logprobs is not None
        self._held: deque[_HeldToken] = deque()
        self._length = 0
        self._num_tokens = 0

    def push(self, token_ids: list[int], logprobs: list[list[TokenLogprob]] | None) -> ShownText:
        """Take one step's tokens. After a result with `stop` the choice is over."""
        if logprobs is None and not self._with_logprobs and not self._stops.has_stops:
            return self._pass(token_ids)
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            piece = "" if self._detokenizer is None else self._detokenizer.push(token_id)
            text, match = self._watch(piece, token_id, None if logprobs is None else tuple(logprobs[index]))
            pieces.append(text)
            if match is not None:
                return self._stopped("".join(pieces), match)
        return self._show("".join(pieces))

    def _pass(self, token_ids: list[int]) -> ShownText:
        """Without stop strings and log-probabilities nothing is ever held: the same result with less work a token."""
        text = "" if self._detokenizer is None else "".join(map(self._detokenizer.push, token_ids))
        self._num_tokens += len(token_ids)
        self._length += len(text)
        return ShownText(self._stops.skip(text), tuple(token_ids), None)

    def finish(self, token_ids: list[int], logprobs: list[list[TokenLogprob]] | None, *, by_token: bool) -> ShownText:
        """Take the last step's tokens and give out all that is held. `by_token`: the last one is a stop token, which
        counts but is no text (unless `include_stop_str_in_output`)."""
        silent = by_token and not self._include_stop
        shown = self.push(token_ids[:-1] if silent else token_ids, logprobs)
        if shown.stop is not None:
            return shown
        tail = "" if self._detokenizer is None else self._detokenizer.flush()
        text, match = self._watched(tail)
        if match is None:
            rest, match = self._stops.flush()
            text += rest
        self._length += len(tail)
        if match is not None:
            return _joined(shown, self._stopped(text, match))
        if silent:
            last = None if logprobs is None else tuple(logprobs[-1])
            self._held.append(_HeldToken(token_ids[-1], last, self._length))
        return _joined(shown, self._take(text, len(self._held)))

    def _watch(self, piece: str, token_id: int, logprobs: Logprobs | None) -> tuple[str, StopMatch | None]:
        """Stop strings count only after `min_tokens`: text before that passes unwatched."""
        self._num_tokens += 1
        self._length += len(piece)
        self._held.append(_HeldToken(token_id, logprobs, self._length))
        return self._watched(piece)

    def _watched(self, piece: str) -> tuple[str, StopMatch | None]:
        if self._num_tokens <= self._min_tokens:
            return self._stops.skip(piece), None
        return self._stops.push(piece)

    def _show(self, text: str) -> ShownText:
        ready = 0
        while ready < len(self._held) and self._held[ready].end <= self._stops.released:
            ready += 1
        return self._take(text, ready)

    def _stopped(self, text: str, match: StopMatch) -> ShownText:
        """Keep the tokens up to the one that completes the stop string."""
        counted = 0
        while counted < len(self._held) and (counted == 0 or self._held[counted - 1].end < match.end):
            counted += 1
        return self._take(text + match.stop if self._include_stop else text, counted, match.stop)

    def _take(self, text: str, count: int, stop: str | None = None) -> ShownText:
        taken = [self._held.popleft() for _ in range(count)]
        logprobs = tuple(token.logprobs or () for token in taken) if self._with_logprobs else None
        return ShownText(text, tuple(token.token_id for token in taken), logprobs, stop)


def _joined(first: ShownText, second: ShownText) -> ShownText:
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or ())
    return ShownText(first.text + second.text, first.token_ids + second.token_ids, logprobs, second.stop)
