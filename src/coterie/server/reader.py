"""ChoiceReader: one choice's deltas read as reasoning, content and calls, its reasoning tokens counted, its end named.

Whole and streamed answers read the same deltas through the same reader. Not here: what a tag is (`server.parsers`).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coterie.engine.output import ChoiceDelta
from coterie.server.parsers import AnswerParser, ParseRules, Start
from coterie.server.parts import Part

if TYPE_CHECKING:
    from coterie.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reading:
    """How a request's answers are to be read. `hidden`: tokens that add no text."""

    rules: ParseRules = field(default_factory=ParseRules)
    start: Start = "answer"
    hidden: frozenset[int] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.rules.thinking is None and self.rules.calls is None


class ChoiceReader:
    """Reads one choice. `finish_reason` is there once its last delta was read."""

    def __init__(self, reading: Reading, tokenizer: Tokenizer | None) -> None:
        self._reading, self._tokenizer = reading, tokenizer
        self._parser = AnswerParser(reading.rules, reading.start)
        self._num_tokens = 0
        self._num_bytes = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None

    def read(self, delta: ChoiceDelta) -> list[Part]:
        """What a delta adds; the last one also gives out what was held."""
        if self._reading.is_plain:
            self.finish_reason = delta.finish_reason
            return [Part("content", delta.text)] if delta.text else []
        found = self._parser.push(delta.text)
        if self._reading.rules.thinking is not None:
            self._count(delta.token_ids)
        if delta.finish_reason is not None:
            found += self._parser.finish()
            called = self._parser.num_calls and not self._parser.in_call
            self.finish_reason = "tool_calls" if called else delta.finish_reason
        return found

    def _count(self, token_ids: tuple[int, ...]) -> None:
        """A token is reasoning if it begins before the end of reasoning, however the text was cut."""
        end = self._parser.reasoning_end
        if end is None or end > self._num_bytes:
            self.reasoning_tokens = self._num_tokens  # so far everything was, perhaps as only now is known
        for token in token_ids:
            if end is None or self._num_bytes < end:
                self.reasoning_tokens += 1
            if token not in self._reading.hidden and self._tokenizer is not None:
                self._num_bytes += len(self._tokenizer.id_to_bytes(token))
        self._num_tokens += len(token_ids)


def call_id() -> str:
    """A fresh id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"
