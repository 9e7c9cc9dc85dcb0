"""CallReader: one call read while its text comes, so that its arguments can be sent before it is complete.

It only foresees what `ToolFormat.read` will say of the whole: a call has begun once its name is known and its arguments
have, as far as the text allows (`ToolFormat.head`); at the closing tag the format judges. What was foreseen depends on
the text, never on how it was cut. The last bracket waits for the judgement, so that the arguments of a call that
breaks are never JSON that somebody might act on. Where the text keeps its name for the end, the call comes whole.
"""

from __future__ import annotations

import re

from coterie.server.formats import FUNCTION_NAME, Call, Pairs, Tool, ToolFormat, Tools
from coterie.server.parts import Part

_MAX_HEAD = 2048
"""Characters in which a call must begin to be sent while it comes."""


class CallReader:
    """One call between its tags. `has_begun`: whether parts were given out that cannot be taken back."""

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form, self._tools = form, tools
        self._start = ""
        self._gave_up = False
        self._name = ""
        self._sent: list[str] = []
        self._text: _Object | _Pairs | None = None

    @property
    def has_begun(self) -> bool:
        return self._text is not None

    def push(self, text: str) -> list[Part]:
        """Take more text; return what it settles."""
        if self._text is not None:
            return self._arguments(self._text.push(text))
        if self._gave_up:
            return []
        self._start += text
        head = self._form.head(self._start[:_MAX_HEAD])
        if head is None:
            self._gave_up = len(self._start) >= _MAX_HEAD
            return []
        if not FUNCTION_NAME.fullmatch(head.name):
            self._gave_up = True
            return []
        self._name = head.name
        pairs = self._form.pairs
        self._text = _Object() if pairs is None else _Pairs(pairs, self._tools.get(head.name))
        return [Part("begun", name=head.name, id=head.id), *self._arguments(self._text.push(self._start[head.end :]))]

    def close(self, call: Call | None) -> list[Part] | None:
        """The end of the call, as its format has read it; None if it is no call or not the one that has begun."""
        sent = "".join(self._sent)
        if call is None or (self.has_begun and (call.name != self._name or not call.arguments.startswith(sent))):
            return None
        begun = [] if self.has_begun else [Part("begun", name=call.name, id=call.id)]
        return [*begun, *self._arguments(call.arguments[len(sent) :]), Part("called")]

    def _arguments(self, text: str) -> list[Part]:
        if not text:
            return []
        self._sent.append(text)
        return [Part("arguments", text)]


_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class _Object:
    """The text of a JSON object without its closing bracket, whether or not it is valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._is_over = False

    def push(self, text: str) -> str:
        """The part of the text that belongs to the object."""
        place = 0
        while not self._is_over and place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if found is None:
                return text
            self._mark(found[0])
            place = found.end()
        return text[: max(0, place - 1)] if self._is_over and place else text[:place]

    def _mark(self, mark: str) -> None:
        if mark == '"':
            self._in_string = not self._in_string
        elif mark == "\\":
            self._escaped = True
        else:
            self._depth += 1 if mark in "{[" else -1
            self._is_over = self._depth == 0


class _Pairs:
    """The members of a JSON object, each once its pair of tags is complete; what is left open is the object's end."""

    def __init__(self, pairs: Pairs, tool: Tool | None) -> None:
        self._pairs, self._tool = pairs, tool
        self._text = ""
        self._place = self._seen = 0
        self._opening = "{"

    def push(self, text: str) -> str:
        """The members that the text completes."""
        self._text += text
        members = []
        while (closing := self._text.find(self._pairs.closing, self._seen)) >= 0:
            self._seen = closing + len(self._pairs.closing)
            found = self._pairs.pattern.match(self._text, self._place, self._seen)
            if found is not None:
                members.append(self._opening + self._pairs.member(found, self._tool))
                self._place, self._opening = self._seen, ", "
        self._seen = max(self._seen, len(self._text) - len(self._pairs.closing) + 1)
        return "".join(members)
