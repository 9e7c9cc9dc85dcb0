"""AnswerParser: an answer's text, as it comes, split into reasoning, content and tool calls by the tags of a family.

It follows the detokeniser and the stop strings and works as they do (the same `StopChecker` holds back what may be a
tag), so the result depends on the text and never on how it was cut. States:

  OPEN      nothing but blanks yet, and the prompt does not say whether the model thinks: an opening tag decides
  THINKING  until the closing tag
  ANSWER    until a call or a section of calls opens
  SECTION   between the tags of a section, outside a call
  CALL      until the call closes; its arguments are given out as they come (`server.call_reader`)

Quoted tags are text: after the end of thinking its tags mean nothing, and a block that is no call is content; if it had
begun to be given out as one, it is `broken`. While the prompt left it open, a closing tag without an opening one makes
all text before it reasoning (`reassigned`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from coterie.engine.detokenizer import StopChecker, StopMatch
from coterie.server.call_reader import CallReader
from coterie.server.formats import Tags, ToolFormat, Tools
from coterie.server.parts import Part, PartKind


class _State(Enum):
    OPEN = auto()
    THINKING = auto()
    ANSWER = auto()
    SECTION = auto()
    CALL = auto()


Start = Literal["open", "thinking", "answer"]
"""What the prompt's end says: nothing, that the model thinks, that it does not."""


def start_of(prompt: str, tags: Tags | None) -> Start:
    """The state in which an answer to this prompt begins."""
    tail = prompt.rstrip()
    if tags is None or tail.endswith(tags.close):
        return "answer"
    return "thinking" if tail.endswith(tags.open) else "open"


@dataclass(frozen=True, slots=True)
class ParseRules:
    """What to look for. `thinking` None: text that looks like it is content; `calls` None: likewise.
    max_calls: calls beyond it are dropped. is_forced: a grammar lets nothing but calls follow a call, so what is cut
    off behind one is dropped too."""

    thinking: Tags | None = None
    calls: ToolFormat | None = None
    tools: Tools = field(default_factory=dict)
    max_calls: int | None = None
    is_forced: bool = False


class AnswerParser:
    """One answer. `push` its text, then `finish` once.

    reasoning_end: how many bytes of the text are reasoning with its tags; None while that goes on.
    num_calls: calls given out. in_call: whether a call is open, so that an end here cuts it off.
    """

    def __init__(self, rules: ParseRules, start: Start) -> None:
        self._rules = rules
        self.num_calls = 0
        self.reasoning_end: int | None = None if start == "thinking" else 0
        self._undecided = start == "open" and rules.thinking is not None
        self._trim = False  # blanks that come next follow on a tag and are dropped
        self._blanks = ""  # dropped if a tag follows
        self._raw = ""  # the block so far, to be shown as content if it is no call
        self._body = ""
        self._section_calls = 0
        self._is_told = False  # a block was shown as a call and is none
        self._drops = False  # what comes now is no content
        self._reader: CallReader | None = None
        self._parts: list[Part] = []
        self._num_bytes = 0
        self._state, self._finder = _State.ANSWER, StopChecker(())
        first = _State.THINKING if start == "thinking" else _State.OPEN if self._undecided else _State.ANSWER
        self._enter(first, trim=start == "thinking" or (start == "answer" and rules.thinking is not None))

    @property
    def in_call(self) -> bool:
        return self._state is _State.CALL

    def push(self, text: str) -> list[Part]:
        """Take more text; return what it settles."""
        self._num_bytes += len(text.encode("utf-8", "surrogatepass"))
        self._feed(text)
        return self._given()

    def finish(self) -> list[Part]:
        """No more text comes: give out what was held. A block that never closed is content, a dropped one nothing."""
        self._drops = self._rules.is_forced and self.num_calls > 0
        more: str | None = ""
        while more is not None:
            self._feed(more)
            finder = self._finder
            shown, match = finder.flush()
            more = self._settle(finder, shown, match)
        is_wanted = self._state is _State.CALL and self._reader is not None
        if is_wanted or (self._state is _State.SECTION and not self._section_calls):
            self._lose(self._raw + self._body)
        if self._state is not _State.THINKING and not self._drops:
            self._say("content", self._blanks)
        self._raw = self._body = self._blanks = ""
        return self._given()

    def _given(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _say(self, kind: PartKind, text: str) -> None:
        """Give out text, together with text of its kind just before it."""
        if not text:
            return
        if self._parts and self._parts[-1].kind == kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))

    def _feed(self, text: str) -> None:
        more: str | None = text
        while more is not None:
            finder = self._finder
            shown, match = finder.push(more)
            more = self._settle(finder, shown, match)

    def _settle(self, finder: StopChecker, shown: str, match: StopMatch | None) -> str | None:
        """Account for text and the tag behind it. Returns what must be looked at again, None if all is settled."""
        self._text(shown)
        if self._finder is not finder:  # the text has changed what is a tag
            return finder.take()
        if match is None:
            return None
        rest = finder.take()[len(match.stop) :]
        self._tag(match.stop, self._num_bytes - len(rest.encode("utf-8", "surrogatepass")))
        return rest

    def _enter(self, state: _State, *, trim: bool = False) -> None:
        """Go on in a state, looking for its tags. `trim`: drop the blanks that come next."""
        self._state, self._trim = state, trim
        thinking, calls = self._rules.thinking, self._rules.calls
        tags: list[str] = []
        if thinking is not None and (state is _State.THINKING or self._undecided):
            tags.append(thinking.close)
        if thinking is not None and (state is _State.OPEN or (state is _State.THINKING and trim)):
            tags.append(thinking.open)
        if calls is not None and state in (_State.OPEN, _State.ANSWER):
            tags.append(calls.call.open if calls.section is None else calls.section.open)
        elif calls is not None and state is _State.SECTION:
            tags += [calls.call.open, *([] if calls.section is None else [calls.section.close])]
        elif calls is not None and state is _State.CALL:
            tags = [calls.call.close]
        self._finder = StopChecker(tuple(tags))

    # Text between tags

    def _text(self, text: str) -> None:
        if not text:
            return
        is_blank = not text.strip()
        match self._state:
            case _State.OPEN if is_blank:
                self._blanks += text
            case _State.OPEN:
                self._enter(_State.ANSWER)
                self._content(text)
            case _State.THINKING:
                was_blank = self._trim
                self._say("reasoning", self._spaced(text))
                if was_blank and not self._trim:
                    self._enter(_State.THINKING)  # from here on an opening tag is text
            case _State.ANSWER:
                self._content(text)
            case _State.SECTION if is_blank and (self._raw or self._trim):  # behind a tag, not behind content
                self._raw += text
            case _State.SECTION:
                self._content(self._raw + text)
                self._raw = ""
            case _State.CALL:
                self._body += text
                if self._reader is not None:
                    self._parts += self._reader.push(text)

    def _content(self, text: str) -> None:
        if not self._drops:
            self._say("content", self._spaced(text))

    def _spaced(self, text: str) -> str:
        """The text behind the blanks that were held, without those at its own end, which are held in turn."""
        if self._trim:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._blanks += text
            return ""
        shown = self._blanks + kept
        self._blanks, self._trim = text[len(kept) :], False
        return shown

    # Tags

    def _tag(self, tag: str, offset: int) -> None:
        """A tag that ends at byte `offset` of the text."""
        match self._state:
            case _State.THINKING | _State.OPEN | _State.ANSWER if self._is_thinking_tag(tag):
                self._thinking_tag(tag, offset)
            case _State.OPEN | _State.ANSWER:
                self._raw, self._blanks, self._section_calls = self._blanks + tag, "", 0
                self._is_told = False
                has_section = self._rules.calls is not None and self._rules.calls.section is not None
                self._enter(_State.SECTION) if has_section else self._begin_call()
            case _State.SECTION if self._rules.calls is not None and tag == self._rules.calls.call.open:
                self._raw += tag
                self._begin_call()
            case _State.SECTION:
                if not self._section_calls:
                    self._lose(self._raw + tag)
                self._raw = ""
                self._enter(_State.ANSWER, trim=self._section_calls > 0)
            case _State.CALL:
                self._end_call(tag)

    def _is_thinking_tag(self, tag: str) -> bool:
        thinking = self._rules.thinking
        return thinking is not None and tag in (thinking.open, thinking.close)

    def _thinking_tag(self, tag: str, offset: int) -> None:
        assert self._rules.thinking is not None
        self._blanks = ""
        if tag == self._rules.thinking.open:
            self.reasoning_end = None
            self._undecided = False
            self._enter(_State.THINKING, trim=True)
            return
        if self._undecided:
            self._parts.append(Part("reassigned"))
        self.reasoning_end = offset
        self._undecided = False
        self._enter(_State.ANSWER, trim=True)

    def _begin_call(self) -> None:
        """A call beyond the limit is not given out, so it is read at its end only."""
        calls, limit = self._rules.calls, self._rules.max_calls
        assert calls is not None
        is_wanted = limit is None or self.num_calls < limit
        self._reader = CallReader(calls, self._rules.tools) if is_wanted else None
        self._enter(_State.CALL)

    def _end_call(self, tag: str) -> None:
        calls, reader = self._rules.calls, self._reader
        assert calls is not None
        call = calls.read(self._body, self._rules.tools)
        parts = [] if reader is None else reader.close(call)
        is_call = call is not None and parts is not None
        if is_call:
            self._undecided = False
            self._section_calls += 1
            self.num_calls += reader is not None
            self._parts += parts or []
        else:
            self._lose(self._raw + self._body + tag)
        self._raw = self._body = ""
        self._enter(_State.ANSWER if calls.section is None else _State.SECTION, trim=is_call)

    def _lose(self, text: str) -> None:
        """A block that is no call, tags included: content, unless a stream has shown some of it as a call."""
        self._is_told |= self._state is _State.CALL and self._reader is not None and self._reader.has_begun
        if not self._is_told:
            self._content(text)
        elif text:
            self._trim = False
            self._parts.append(Part("broken", "" if self._drops else text))
