"""Grammars as text: what a caller wants of an answer (a JSON schema, a regular expression, choices) in llguidance's
Lark dialect. The text travels in `SamplingParams.grammar`; `engine.grammar` turns it into masks.

Only strings: nothing is compiled or checked here beyond what the spelling needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

JSON_WHITESPACE = r"( ?|\n[ \t]{0,32})"
"""Between the tokens of a JSON text: a space, or a new line and its indent. Bounded: a model that has lost its way
would write blanks until its last token."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def json_schema(schema: Mapping[str, Any]) -> str:
    """Every JSON text that the schema allows."""
    return f"start: {json_part(schema)}\n"


def json_part(schema: Mapping[str, Any]) -> str:
    """A JSON schema as a part of a Lark rule."""
    options = {"whitespace_pattern": JSON_WHITESPACE}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def regex(pattern: str) -> str:
    r"""Every text that the whole pattern (Rust's syntax, a large part of Python's) matches. `\d` is 0 to 9."""
    return f"start: /{regex_to_lark(pattern, 'd')}/\n"


def choice(options: Sequence[str]) -> str:
    """One of the texts, as one terminal: a rule of its own for each would make too wide a parser of thousands."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, options)) + "\n"


def literal(text: str) -> str:
    """A text as a part of a Lark rule."""
    return json.dumps(text)


def composed(rules: str, body: str) -> str:
    """Lark rules that refer to another grammar as `@body`. Raises ValueError if that is not Lark itself."""
    if body.lstrip().startswith("{"):
        raise ValueError("a grammar in JSON form cannot be a part of another")
    parts = [{"name": "top", "lark_grammar": rules}, {"name": "body", "lark_grammar": body}]
    return json.dumps({"grammars": parts})
