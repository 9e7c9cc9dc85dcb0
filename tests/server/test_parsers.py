"""AnswerParser: whatever a family's answer holds is found, however the text is cut, and what is quoted stays text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.server.formats import HERMES, THINK, TOOL_FORMAT_NAMES, TOOL_FORMATS, Call, Tool, ToolFormat
from coterie.server.parsers import AnswerParser, ParseRules, Start, start_of
from coterie.server.parts import Parsed

FORMS = {form.name: form for form in TOOL_FORMATS}


def read(rules: ParseRules, start: Start, pieces: Sequence[str]) -> tuple[Any, ...]:
    """Everything that can be seen of an answer, whole and (last) as a stream tells it."""
    parser, found, told = AnswerParser(rules, start), Parsed(), list[list[Any]]()
    for piece in [*pieces, None]:
        parts = parser.finish() if piece is None else parser.push(piece)
        found.add(parts)
        for part in parts:
            if part.kind == "begun":
                told.append(["call", "", part.name, part.id])
            elif part.kind == "arguments" or (told and part.kind == told[-1][0]):
                told[-1][1] += part.text
            else:
                told.append([part.kind, part.text])
    segments = [(segment.kind, segment.text) for segment in found.segments]
    whole = (found.reasoning, found.content, found.calls, found.reassigned, parser.reasoning_end, parser.in_call)
    return *whole, segments, told


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
        inner = (
            name
            + "\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
                for key, value in arguments.items()
            )
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
    reasoning, content, calls, _, end, in_call, *_ = read_every_way(rules, "answer", text)
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
        _, content, calls, _, _, in_call, *_ = read(rules, "answer", [text[:length]])
        assert len(calls) == (length >= one) + (length >= two), length
        if length < one:
            assert content == text[:length], "no call: all of it is content"
        elif length < two:
            shown = content.removeprefix("Hm.").strip()
            assert text[one:length].strip().endswith(shown) and (shown or not in_call), "the second shows as it is"
        else:
            assert content.startswith("Hm.") and not in_call


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("is_limited", [False, True])
def test_behind_a_forced_call_nothing_cut_off_is_content(form: ToolFormat, is_limited: bool) -> None:
    rules = ParseRules(None, form, max_calls=1 if is_limited else None, is_forced=True)
    first, second = spelled(form, "f", {"a": 1}), spelled(form, "g", {"b": [2]})
    text = answer(form, [first, second])
    opening = 0 if form.section is None else text.index(form.section.open) + len(form.section.open)
    one, two = text.index(first, opening) + len(first), text.index(second, opening) + len(second)
    for length in range(len(text) + 1):
        found = read(rules, "answer", [text[:length]])
        assert read(rules, "answer", list(text[:length]))[:7] == found[:7]
        _, content, calls, *_, segments, told = found
        if length < one:
            assert (content, calls) == (text[:length], []), "no call: all of it is content"
            continue
        assert values(calls) == [("f", {"a": 1}), ("g", {"b": [2]})][: 1 + (length >= two and not is_limited)]
        assert content == "" and {kind for kind, _ in segments} == {"call"}
        assert "".join(text for kind, text, *_ in told if kind != "call") == ""


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
    bad = '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>'
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


# Calls that are given out while they come


def sent_so_far(form: ToolFormat, text: str) -> list[tuple[str, str]]:
    """What a stream has told of a call after each character: its name and its arguments."""
    parser, name, arguments, found = AnswerParser(ParseRules(None, form), "answer"), "", "", []
    for character in text:
        for part in parser.push(character):
            name = part.name or name
            arguments += part.text if part.kind == "arguments" else ""
        found.append((name, arguments))
    return found


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a_call_is_told_while_it_comes(form: ToolFormat) -> None:
    """The name before any argument is complete; JSON with every character, pairs of tags one by one."""
    given = {"a": "xyz" * 20, "b": [1, {"c": "}"}], "s": 'say "}"'}
    text = answer(form, [spelled(form, "f", given)])
    sent = sent_so_far(form, text)
    begun = next(place for place, (name, _) in enumerate(sent) if name)
    assert begun < text.index("xyzxyz"), "the name is told first"
    assert json.loads(sent[-1][1]) == given
    steps = [now[1] for before, now in itertools.pairwise(sent) if now[1] != before[1]]
    if form.pairs is not None:
        assert steps[0].startswith('{"a": "xyz') and len(steps) == len(given) + 1
        assert steps[-1] == steps[-2] + "}"
        return
    body = json.dumps(given, ensure_ascii=False)
    start = text.index(body)
    for place in range(start, start + len(body) - 1):
        assert sent[place][1] == text[start : place + 1], "nothing is held but what may be a tag or the end"
    assert steps[-1] == body and steps[-2] == body[:-1]


def told_calls(found: tuple[Any, ...]) -> list[list[Any]]:
    return [one for one in found[-1] if one[0] == "call"]


BROKEN = ['{"a": }', '{"a": 1', '{"a": 1}}', '{"a": 1} x', '{"a": "b', "{{}", '{"a" 1}', "{]"]


@pytest.mark.parametrize("form", [form for form in TOOL_FORMATS if form.pairs is None], ids=lambda form: form.name)
@pytest.mark.parametrize("arguments", BROKEN)
def test_a_call_that_breaks_is_content_and_never_json(form: ToolFormat, arguments: str) -> None:
    """The whole answer shows the block; a stream, which has told it as a call, keeps that open and shows it no more."""
    good = spelled(form, "g", {"b": [2]})
    bad = spelled(form, "f", {}).replace("{}", arguments)
    one = answer(form, [bad])
    for text in (one, one[: one.index(arguments) + len(arguments)], answer(form, [good, bad, good])):
        found = read_every_way(ParseRules(None, form), "answer", text)
        whole, told = found[2], told_calls(found)
        assert [call.name for call in whole] == ["g"] * text.count(good)
        assert arguments in found[1], "the whole answer shows it"
        assert [call[2] for call in told] == (["g", "f", "g"] if good in text else ["f"])
        for _, sent, name, _ in told:
            if name == "f":
                with pytest.raises(json.JSONDecodeError):
                    json.loads(sent)
        assert not any(one[0] == "content" and one[1].strip() for one in found[-1])


def test_arguments_before_the_name_come_whole() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'
    found = read_every_way(ParseRules(None, HERMES), "answer", text)
    assert values(found[2]) == [("f", {"a": 1})] and told_calls(found) == [["call", '{"a": 1}', "f", None]]
    assert sent_so_far(HERMES, text)[-2] == ("", "")


def test_arguments_that_are_said_twice_are_no_call_that_was_told() -> None:
    """Readers of JSON take the last of two members; a stream has told the first."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}</tool_call>'
    found = read_every_way(ParseRules(None, HERMES), "answer", text)
    assert found[1:3] == (text, []) and told_calls(found) == [["call", '{"a": 1', "f", None]]


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

WORDS = st.text('ab <>/|\n漢{}"', max_size=12)
VALUES = st.one_of(st.integers(), st.booleans(), st.lists(st.integers(), max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=2)


@settings(max_examples=150)
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
    if data.draw(st.booleans()):
        parts = [*"".join(parts)]
        for place in data.draw(st.lists(st.integers(0, max(0, len(parts) - 1)), max_size=2)):
            parts[place : place + 1] = data.draw(st.sampled_from(["", "{", "}", '"', "\\", "<"]))
    text = "".join(parts)[: data.draw(st.integers(0, 400))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    rules = ParseRules(THINK, form)
    whole = read(rules, start, [text])
    assert read(rules, start, pieces) == read(rules, start, list(text)) == whole
    for call in whole[2]:
        assert isinstance(json.loads(call.arguments), dict)
    complete = [call.arguments for call in whole[2]]
    for _, sent, *_ in told_calls(whole):
        if not complete or sent != complete[0]:
            with pytest.raises(json.JSONDecodeError):
                json.loads(sent)
        else:
            complete.pop(0)
    assert not complete, "every complete call was told"


def test_blanks_behind_text_in_a_section_of_calls_are_text_however_they_come() -> None:
    """Found by the test above: a closing tag that is cut, and a blank behind it."""
    form = next(form for form in TOOL_FORMATS if form.name == "deepseek_v32")
    assert form.section is not None
    text = answer(form, [spelled(form, "f", {"a": 0})]).replace(form.section.close, form.section.close[1:] + " ")
    whole = read(ParseRules(THINK, form), "open", [text])
    assert read(ParseRules(THINK, form), "open", list(text)) == whole
    assert whole[1] == form.section.close[1:] + " " and len(whole[2]) == 1


def test_names_of_parsers() -> None:
    assert {"hermes", "qwen3", "deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2"} <= set(TOOL_FORMAT_NAMES)
