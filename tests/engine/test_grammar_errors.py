"""What a client hears of a grammar that cannot be used: the reason, in its own words, however llguidance puts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from coterie.engine import grammar_text
from coterie.engine.errors import InvalidRequest
from coterie.engine.grammar_check import GrammarCheck, Outline
from coterie.engine.grammar_errors import in_words


@pytest.fixture(scope="module")
def check() -> Iterator[GrammarCheck]:
    found = GrammarCheck(Outline(300, {}))
    yield found
    found.close()


def said(check: GrammarCheck, grammar: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        check.check(grammar)
    assert error.value.param == "grammar" and len(str(error.value)) <= 300 and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("pattern", "reason"), [
    ("(", "unclosed group (at character 1)"), ("a" * 200 + "(", "unclosed group (at character 201)"),
    ("[z-a]", "invalid character class range, the start must be <= the end (at character 2)"),
    ("(?=a)b", "look-around, including look-ahead and look-behind, is not supported (at character 1)"),
    (r"(a)\1", "backreferences are not supported (at character 4)"),
    (r"\p{foo}", "Unicode property not found (at character 1)"),
    (r"\bfoo\b", "look-around, word boundaries included, is not supported"),
])  # fmt: skip
def test_regular_expressions(check: GrammarCheck, pattern: str, reason: str) -> None:
    shown = pattern if len(pattern) < 80 else pattern[:75] + "..."
    assert said(check, grammar_text.regex(pattern)) == f'the regular expression "{shown}" cannot be used: {reason}'


@pytest.mark.parametrize(("schema", "reason"), [
    ({"properties": {"a": {"not": {}}}}, "these keywords are not supported: not"),
    ({"type": "string", "pattern": "(?=a)"}, "a pattern: look-around, including look-ahead and look-behind, is not"),
    ({"type": "strin"}, "invalid type: strin"),
    ({"type": "string", "format": "odd"}, "unknown format: odd"), ({"$ref": "#/x"}, "pointer '/x' does not exist"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "unsatisfiable schema: incompatible types"),
])  # fmt: skip
def test_schemas(check: GrammarCheck, schema: dict[str, Any], reason: str) -> None:
    assert said(check, grammar_text.json_schema(schema)).startswith(f"the JSON schema cannot be enforced: {reason}")


@pytest.mark.parametrize(("grammar", "words"), [
    ("start: foo", 'line 1, column 8: unknown name: "foo"'),
    ('start: A\nA: A "b"', "line 2, column 4: circular reference"),
    ('foo: "a"', "cannot be used: no start rule found"), ("", "cannot be used: Empty grammar"),
    ("start: start", "nothing may follow and the answer may not end"),
    ('start: "a" start', "too large"), ("start: /a{1000000}/", "too large"),
])  # fmt: skip
def test_lark(check: GrammarCheck, grammar: str, words: str) -> None:
    assert words in said(check, grammar)


def test_names_of_the_library_are_not_shown() -> None:
    for name in ("NoExtensionBias", "ParserTooComplex", "LexerTooComplex"):
        assert in_words(name).startswith("the grammar ") and "NoExtension" not in in_words(name)
    assert in_words("") == "the grammar cannot be used: unknown error"
    assert len(in_words("x" * 5000)) == 300
