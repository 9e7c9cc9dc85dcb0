"""AnswerParser: whatever a family's answer holds is found, however the text is cut, and what is quoted stays text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.server.formats import HERMES, THINK, TOOL_FORMAT_NAMES, TOOL_FORMATS, Call, Tool, ToolFormat
from coterie.server.parsers import AnswerParser, Parsed, ParseRules, Start, start_of

FORMS = {form.name: form for form in TOOL_FORMATS}


def read(rules: ParseRules, start: Start, pieces: Sequence[str]) -> tuple[Any, ...]:
    """Everything that can be seen of an answer."""
    parser, found = AnswerParser(rules, start), Parsed()
    for piece in pieces:
        found = found.joined(parser.push(piece))
    found = found.joined(parser.finish())
    return found.reasoning, found.content, found.calls, found.reassigned, parser.reasoning_end, parser.in_call


def read_every_way(rules: ParseRules, start: Start, text: str) -> tuple[Any, ...]:
    """The one result of reading a text whole, a character at a time, and cut once at every place."""
    whole = read(rules, start, [text])
    assert read(rules, start, list(text)) == whole
    for cut in range(len(text) + 1):
        assert read(rules, start, [text[:cut], text[cut:]]) == whole, cut
    return whole


def spelled(form: ToolFormat, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of the family writes it."""
    body = json.dumps(arguments, ensure_ascii=False)
    if form.name == "hermes":
        inner = f'\n{{"name": "{name}", "arguments": {body}}}\n'
    elif form.name == "deepseek_v3":
        inner = f"function<｜tool▁sep｜>{name}\n```json\n{body}\n```"
    elif form.name == "deepseek_v31":
        inner = f"{name}<｜tool▁sep｜>{body}"
    elif form.name == "kimi_k2":
        inner = f"functions.{name}:0<|tool_call_argument_begin|>{body}"
    elif form.name == "glm45":
        inner = name + "\n" + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
    elif form.name == "qwen3_coder":
        members = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        inner = f"\n<function={name}>\n{members}</function>\n"
    else:
        inner = f'{name}">\n' + "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{as_text(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
    return form.call.open + inner + form.call.close


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def answer(form: ToolFormat, calls: Sequence[str]) -> str:
    text = form.separator.join(calls)
    if form.section is None:
        return text
    before, after = form.section_padding
    return form.section.open + before + text + after + form.section.close


def values(calls: Sequence[Call]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


ENDINGS: list[dict[str, Any]] = [
    {"a": 123}, {"a": True}, {"a": None}, {"a": [1, 2]}, {"a": {"a": {"b": 1}}}, {"a": "x"}, {"a": "\"}"}, {},
    {"s": "漢👩‍👧", "n": -1.5e3}, {"a": "{[}]"},
]  # fmt: skip
STRINGS = {"x": "string", "s": "string"}


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("arguments", ENDINGS, ids=json.dumps)
def test_a_call_under_every_cut(form: ToolFormat, arguments: dict[str, Any]) -> None:
    tool = Tool("f", {"type": "object", "properties": {"s": {"type": "string"}}})
    rules = ParseRules(THINK, form, {"f": tool})
    text = "I look.\n\n" + answer(form, [spelled(form, "f", arguments), spelled(form, "g", {"z": 1})])
    reasoning, content, calls, _, end, in_call = read_every_way(rules, "answer", text)
    assert (reasoning, content, end, in_call) == ("", "I look.", 0, False)
    assert values(calls) == [("f", arguments), ("g", {"z": 1})]
    text = "so\n</think>\n\n" + answer(form, [spelled(form, "f", {})])
    _, content, calls, *_ = read_every_way(rules, "thinking", text)
    assert content == "" and values(calls) == [("f", {})]


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_what_is_cut_off_is_content(form: ToolFormat) -> None:
    """At every length: complete calls are given out, and nothing that was said is lost."""
    rules = ParseRules(None, form)
    first, second = spelled(form, "f", {"a": 1}), spelled(form, "g", {"b": [2]})
    text = "Hm. " + answer(form, [first, second])
    opening = 0 if form.section is None else text.index(form.section.open) + len(form.section.open)
    one, two = text.index(first, opening) + len(first), text.index(second, opening) + len(second)
    for length in range(len(text) + 1):
        _, content, calls, _, _, in_call = read(rules, "answer", [text[:length]])
        assert len(calls) == (length >= one) + (length >= two), length
        if length < one:
            assert content == text[:length], "no call: all of it is content"
        elif length < two:
            shown = content.removeprefix("Hm.").strip()
            assert text[one:length].strip().endswith(shown) and (shown or not in_call), "the second shows as it is"
        else:
            assert content.startswith("Hm.") and not in_call


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("body", ["", "f", "nonsense {", '{"name": 3}', "f<｜tool▁sep｜>[1]", 'f">x', "{" * 500])
def test_blocks_that_are_no_calls_are_content(form: ToolFormat, body: str) -> None:
    if form.name == "glm45" and body == "f":
        pytest.skip("a name alone is a call there")
    block = form.call.open + body + form.call.close
    if form.section is not None:
        block = form.section.open + block + form.section.close
    for text in (block, f"Look: {block} There.", f"{block}\n"):
        reasoning, content, calls, *_ = read_every_way(ParseRules(THINK, form), "answer", text)
        assert (reasoning, content, calls) == ("", text, [])


def test_a_bad_block_between_good_ones() -> None:
    good = spelled(HERMES, "f", {"a": 1})
    bad = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": }}\n</tool_call>"
    _, content, calls, *_ = read_every_way(ParseRules(None, HERMES), "answer", f"{good}\n{bad}\n{good}")
    assert content.strip() == bad and values(calls) == [("f", {"a": 1})] * 2
    form = FORMS["deepseek_v31"]
    text = answer(form, [spelled(form, "f", {}), form.call.open + "f<｜tool▁sep｜>{" + form.call.close])
    _, content, calls, *_ = read_every_way(ParseRules(None, form), "answer", text)
    assert content == form.call.open + "f<｜tool▁sep｜>{" + form.call.close and values(calls) == [("f", {})]


def test_an_empty_section_is_content() -> None:
    form = FORMS["deepseek_v31"]
    assert form.section is not None
    text = form.section.open + form.section.close
    assert read_every_way(ParseRules(None, form), "answer", text)[1:3] == (text, [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = answer(HERMES, [spelled(HERMES, name, {}) for name in "fgh"])
    _, content, calls, *_ = read_every_way(ParseRules(None, HERMES, max_calls=1), "answer", text)
    assert content == "" and [call.name for call in calls] == ["f"]


# Thinking


@pytest.mark.parametrize(("start", "text", "reasoning", "content", "reassigned"), [
    ("thinking", "ab</think>cd", "ab", "cd", False),
    ("thinking", "\nab\n\n</think>\n\ncd\n", "ab", "cd\n", False),
    ("thinking", "<think>\nab</think>cd", "ab", "cd", False),
    ("thinking", "ab <think> ab</think>cd", "ab <think> ab", "cd", False),
    ("thinking", "ab", "ab", "", False),
    ("thinking", "ab</thi", "ab</thi", "", False),
    ("thinking", "</think>cd", "", "cd", False),
    ("thinking", "ab</think>cd <think>x</think> y", "ab", "cd <think>x</think> y", False),
    ("open", "<think>ab</think>cd", "ab", "cd", False),
    ("open", "\n<think>\nab\n</think>\ncd", "ab", "cd", False),
    ("open", "ab</think>cd", "ab", "cd", True),
    ("open", "ab</think>cd</think>ef", "ab", "cd</think>ef", True),
    ("open", "Say `<think>` first.", "", "Say `<think>` first.", False),
    ("open", " cd <thin", "", " cd <thin", False),
    ("open", "<think>", "", "", False),
    ("answer", "ab</think>cd", "", "ab</think>cd", False),
    ("answer", "Write `<think>`.", "", "Write `<think>`.", False),
    ("answer", "\n\ncd", "", "cd", False),
])  # fmt: skip
def test_thinking(start: Start, text: str, reasoning: str, content: str, reassigned: bool) -> None:
    for calls in (None, HERMES):
        found = read_every_way(ParseRules(THINK, calls), start, text)
        assert found[:4] == (reasoning, content, [], reassigned)


def test_without_tags_everything_is_content() -> None:
    for text in ("ab</think>cd", " <think>a</think> <tool_call>{}</tool_call> ", "<tool_call>"):
        assert read_every_way(ParseRules(), "answer", text)[:3] == ("", text, [])


def test_where_an_answer_begins() -> None:
    assert start_of("<｜Assistant｜><think>\n", THINK) == "thinking"
    assert start_of("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK) == "answer"
    assert start_of("<|im_start|>assistant\n", THINK) == "open"
    assert start_of("<think>", None) == "answer"


# Everything at once, cut at random

WORDS = st.text("ab <>/|\n漢{}\"", max_size=12)
VALUES = st.one_of(st.integers(), st.booleans(), st.lists(st.integers(), max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=2)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_answer_under_any_cuts(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(TOOL_FORMATS))
    start: Start = data.draw(st.sampled_from(["open", "thinking", "answer"]))
    parts = [data.draw(WORDS)]
    if data.draw(st.booleans()):
        parts += [data.draw(st.sampled_from(["<think>", ""])), data.draw(WORDS), "</think>", data.draw(WORDS)]
    for _ in range(data.draw(st.integers(0, 2))):
        calls = [spelled(form, "f", data.draw(ARGUMENTS)) for _ in range(data.draw(st.integers(0, 2)))]
        parts += [answer(form, calls), data.draw(WORDS)]
    text = "".join(parts)[: data.draw(st.integers(0, 400))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    rules = ParseRules(THINK, form)
    whole = read(rules, start, [text])
    assert read(rules, start, pieces) == read(rules, start, list(text)) == whole
    for call in whole[2]:
        assert isinstance(json.loads(call.arguments), dict)


def test_names_of_parsers() -> None:
    assert {"hermes", "qwen3", "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2"} <= set(TOOL_FORMAT_NAMES)
