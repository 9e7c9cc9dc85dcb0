"""What is wrong with a grammar, in the words of whoever sent it: a regular expression, a JSON schema, or Lark.

llguidance speaks of the text that it was given, which for a schema or a regular expression is not what the client
wrote, and puts the reason behind an excerpt of it. Only texts: nothing is compiled here.
"""

from __future__ import annotations

import re

_LONGEST = 300
_SHOWN = 80
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX = re.compile(r'^invalid regex (".*?") \(in regex\): (.*)$', re.DOTALL)
_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)
_CARET = re.compile(r"^ {4}( *)\^+ *$", re.MULTILINE)
_SCHEMA = "failed to compile JSON schema: "
_KEYS = re.compile(r"^Unimplemented keys: \[(.*)\]$")
_TOO_LARGE = re.compile(r"TooComplex|too many|too large|fuel|exceed", re.IGNORECASE)
_NO_TOKEN = "NoExtensionBias"


def in_words(message: str) -> str:
    """An error of llguidance as a sentence, without its excerpts, and not longer than a client wants to read."""
    message = message.strip()
    found = _PLACE.match(message)
    text = message[found.end() :] if found else message
    if regex := _REGEX.match(text):
        return _cut(f"the regular expression {_short(regex[1])} cannot be used: {_regex_reason(regex[2])}")
    if text.startswith(_SCHEMA):
        return _cut(f"the JSON schema cannot be enforced: {_schema_reason(text.removeprefix(_SCHEMA))}")
    if _TOO_LARGE.search(text):
        return _cut(f"the grammar is too large or too ambiguous; make it simpler ({_first_line(text)})")
    if _NO_TOKEN in text:
        return (
            "the grammar leads to a place where nothing may follow and the answer may not end; look for a rule that"
            " needs itself, or parts that contradict each other"
        )
    where = f"line {found[1]}, column {found[2]}: " if found else ""
    return _cut(f"the grammar cannot be used: {where}{_first_line(text) or 'unknown error'}")


def _regex_reason(text: str) -> str:
    """The parser's own reason, with its place if that is one; else the first line."""
    reason = _REASON.search(text)
    if reason is None:
        line = _first_line(text)
        return "look-around, word boundaries included, is not supported" if "lookaround" in line else line
    caret = _CARET.search(text)
    return reason[1] + (f" (at character {len(caret[1]) + 1})" if caret else "")


def _schema_reason(text: str) -> str:
    if text.startswith("regex parse error"):
        return f"a pattern: {_regex_reason(text)}"
    line = _first_line(text)
    if keys := _KEYS.match(line):
        return f"these keywords are not supported: {keys[1].replace(chr(34), '')}"
    return line[:1].lower() + line[1:]


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]


def _short(quoted: str) -> str:
    quoted = quoted.replace("\\\\", "\\")
    return quoted if len(quoted) <= _SHOWN else quoted[: _SHOWN - 4] + '..."'


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
