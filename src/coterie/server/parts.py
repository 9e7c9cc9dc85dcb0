"""What an answer consists of: parts in the order in which they were said, and the same put together.

A stream sends parts on as they come, a whole answer is their sum; neither reads the text again. Not here: how parts are
found (`server.parsers`), log-probabilities, JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from coterie.server.formats import Call
from coterie.server.turns import EncodedList

PartKind = Literal["reasoning", "content", "begun", "arguments", "called", "broken", "reassigned"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer. Calls are said one after another, so a part of a call belongs to the last that has begun.

    reasoning, content: text. begun: a call with this name and id. arguments: a piece of its arguments. called: it is
    complete. broken: it never will be, and `text`, tags included, is content, if any; a stream has already shown it
    as a call, and does not show it again. reassigned: all content before it was reasoning, which a stream cannot take
    back either.
    """

    kind: PartKind
    text: str = ""
    name: str = ""
    id: str | None = None


@dataclass(slots=True)
class Segment:
    """Neighbouring parts as one: a thought, a text, or a call with its arguments. `logprobs`: of its tokens, if those
    are kept with it."""

    kind: Literal["reasoning", "content", "call"]
    pieces: list[str] = field(default_factory=list)
    name: str = ""
    id: str | None = None
    logprobs: EncodedList = field(default_factory=EncodedList)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    def as_call(self) -> list[Part]:
        """A complete call's parts."""
        begun, called = Part("begun", name=self.name, id=self.id), Part("called")
        return [begun, Part("arguments", self.text), called]


@dataclass(slots=True)
class Parsed:
    """An answer as it stands. `reassigned`: whether content was found to be reasoning."""

    segments: list[Segment] = field(default_factory=list)
    reassigned: bool = False
    _in_call: bool = False
    _early: EncodedList = field(default_factory=EncodedList)

    def add(self, parts: Iterable[Part]) -> None:
        """Take what follows."""
        for part in parts:
            match part.kind:
                case "begun":
                    self._in_call = True
                    self._open(Segment("call", name=part.name, id=part.id))
                case "arguments":
                    self.segments[-1].pieces.append(part.text)
                case "called":
                    self._in_call = False
                case "broken":
                    self._break(part.text)
                case "reassigned":
                    self.reassigned = True
                    for segment in self.segments:
                        segment.kind = "reasoning" if segment.kind == "content" else segment.kind
                case "reasoning" | "content":
                    self._text(part.kind, part.text)

    @property
    def last_logprobs(self) -> EncodedList:
        """Where log-probabilities belong now: to the last segment, or to the first that will be."""
        return self.segments[-1].logprobs if self.segments else self._early

    @property
    def reasoning(self) -> str:
        """All thoughts."""
        return "".join(segment.text for segment in self.segments if segment.kind == "reasoning")

    @property
    def content(self) -> str:
        """All text that is neither thought nor call."""
        return "".join(segment.text for segment in self.segments if segment.kind == "content")

    @property
    def calls(self) -> list[Call]:
        """All calls."""
        return [Call(segment.name, segment.text, segment.id) for segment in self.segments if segment.kind == "call"]

    def _break(self, text: str) -> None:
        logprobs = self.segments.pop().logprobs if self._in_call else EncodedList()
        self._in_call = False
        if text:
            self._text("content", text)
        self.last_logprobs.add(logprobs)

    def _text(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not self.segments or self.segments[-1].kind != kind:
            self._open(Segment(kind))
        self.segments[-1].pieces.append(text)

    def _open(self, segment: Segment) -> None:
        segment.logprobs, self._early = self._early, EncodedList()
        self.segments.append(segment)
