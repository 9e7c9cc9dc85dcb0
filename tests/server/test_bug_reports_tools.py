"""Bug reports C2, C3 and C4 through the HTTP routes: thinking tags, streamed arguments, how a call ends.

The engine is scripted: it says a text, cut into deltas at the places that a test chooses. Streamed and whole answers
must say the same, under every cut.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from server_fakes import ByteTokenizer, MockEngine, Script, ask, events, logprob_row, make_state, post

from coterie.engine.messages import SamplingParams, TokenLogprob
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server.config import ParserNames

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
}
THINKS = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
    "{% if thinking is defined and thinking %}<think>\n{% elif thinking is defined %}<think></think>{% endif %}"
)
HERMES = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + THINKS
DEEPSEEK = "{% if tools %}<｜tool▁sep｜>{{ tools | tojson }}{% endif %}" + THINKS
EOS = 257


def script_of(text: str, cuts: Sequence[int], finish: str) -> Script:
    """Says `text` in pieces, then lets go of its end token alone. A token is a byte."""
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]

    def script(prompt: list[int], params: SamplingParams) -> list[Any]:
        def row(token: int) -> tuple[TokenLogprob, ...]:
            return tuple(logprob_row(token, params.logprobs or 0))

        deltas = []
        for piece in pieces:
            logprobs = None if params.logprobs is None else tuple(map(row, piece.encode()))
            deltas.append(ChoiceDelta(0, piece, tuple(piece.encode()), logprobs))
        end = ChoiceDelta(0, "", (EOS,) if finish == "stop" else (), None, finish)  # type: ignore[arg-type]
        return [PromptInfo(), *deltas, end]

    return script


def says(
    template: str,
    text: str,
    all_cuts: Iterable[Sequence[int]],
    body: dict[str, Any],
    finish: str = "stop",
    **config: Any,
) -> list[dict[str, Any]]:
    """What the answer says under each of the cuts, streamed and whole, with the usage, which must be the same."""
    engine = MockEngine(None, ByteTokenizer(template), 4096)
    asked = HELLO | body
    streams = asked | {"stream": True, "stream_options": {"include_usage": True}}

    async def work(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        found = []
        for cuts in all_cuts:
            engine.script = script_of(text, cuts, finish)
            whole = (await client.post(CHAT, json=asked)).json()
            *chunks, last, done = events((await client.post(CHAT, json=streams)).text)
            assert done == "[DONE]" and last["usage"] == whole["usage"]
            streamed = together(chunk["choices"][0] for chunk in chunks)
            found.append({"whole": seen(whole["choices"][0]), "streamed": streamed, "usage": whole["usage"]})
        return found

    return ask(make_state(engine, **config), work)


def say(template: str, text: str, body: dict[str, Any], finish: str = "stop", **config: Any) -> dict[str, Any]:
    """The same, of a text that comes at once."""
    (found,) = says(template, text, [[]], body, finish, **config)
    return found


def seen(choice: dict[str, Any]) -> dict[str, Any]:
    """What a whole answer says."""
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert "tool_calls" not in message or calls, "never an empty list"
    reasoning = message.get("reasoning_content", "")
    assert message.get("reasoning", "") == reasoning
    found = {"content": message["content"] or "", "reasoning": reasoning, "calls": calls}
    return found | {"finish_reason": choice["finish_reason"]}


def together(choices: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """A stream's deltas as a client puts them together."""
    content, reasoning, finish = "", "", None
    calls: list[list[str]] = []
    ids = []
    for choice in choices:
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                assert call["type"] == "function" and call["function"]["name"]
                ids.append(call["id"])
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    assert len(set(ids)) == len(ids)
    found = {"content": content, "reasoning": reasoning, "calls": [tuple(call) for call in calls]}
    return found | {"finish_reason": finish}


def cuts_of(text: str) -> Iterator[list[int]]:
    """All at once, pieces of several sizes from one character up, and one cut at each of the last places. (What the
    parser says under every cut is in test_parsers.)"""
    yield []
    yield from (list(range(size, len(text), size)) for size in (1, 2, 3, 5, 8, 13))
    yield from ([cut] for cut in range(max(1, len(text) - 16), len(text)))


@pytest.mark.parametrize(("thinking", "reasoning", "content"), [
    (True, "ab", "cd"), (False, "", "ab</think>cd"), (None, "ab", "cd"),
])  # fmt: skip
def test_c2_only_the_closing_tag(thinking: bool | None, reasoning: str, content: str) -> None:
    text = "ab</think>cd"
    body = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    for found in says(THINKS, text, cuts_of(text), body):
        assert found["whole"] == {"content": content, "reasoning": reasoning, "calls": [], "finish_reason": "stop"}
        if thinking is None:  # what was sent as content stays content; the stray tag is not shown
            assert found["streamed"] == found["whole"] | {"content": "abcd", "reasoning": ""}
        else:
            assert found["streamed"] == found["whole"]
        expected = len(b"ab</think>") if reasoning else 0
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected


@pytest.mark.parametrize("thinking", [True, False, None])
def test_c2_quoted_tags_are_text(thinking: bool | None) -> None:
    quoted = "Write `<think>` and `</think>`." if thinking is not None else "Write `<think>` first."
    text = f"so</think>\n\n{quoted}" if thinking else quoted
    body = {} if thinking is None else {"chat_template_kwargs": {"thinking": thinking}}
    for found in says(THINKS, text, cuts_of(text), body):
        assert found["streamed"] == found["whole"]
        assert found["whole"]["content"] == quoted and found["whole"]["reasoning"] == ("so" if thinking else "")


def test_c2_thinking_that_the_model_opens_and_never_closes() -> None:
    for found in says(THINKS, "<think>\nab", cuts_of("<think>\nab"), {}, "length"):
        assert found["streamed"] == found["whole"]
        assert found["whole"] == {"content": "", "reasoning": "ab", "calls": [], "finish_reason": "length"}
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10


@pytest.mark.parametrize("effort", ["none", "high"])
def test_c2_effort_is_a_switch_as_well(effort: str) -> None:
    found = say(THINKS, "ab</think>cd", {"reasoning_effort": effort})
    assert found["whole"]["reasoning"] == ("" if effort == "none" else "ab")


def test_c2_turned_off() -> None:
    found = say(THINKS, "<think>ab</think>cd", {}, parsers=ParserNames(reasoning="none"))
    assert found["streamed"] == found["whole"] and found["whole"]["content"] == "<think>ab</think>cd"


ARGUMENTS = ['{"a": 123}', '{"a": true}', '{"a": null}', '{"a": [1, 2]}', '{"a":{"a":{"b":1}}}', '{"a": "}\\""}', "{}"]


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(*calls: tuple[str, str]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜>" for name, given in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("family", ["hermes", "deepseek"])
def test_c3_arguments_under_every_cut(family: str, arguments: str) -> None:
    template, call = (HERMES, hermes(arguments)) if family == "hermes" else (DEEPSEEK, deepseek(("f", arguments)))
    text = "Hm.\n" + call
    for found in says(template, text, cuts_of(text), TOOLS):
        expected = {"content": "Hm.", "reasoning": "", "calls": [("f", arguments)], "finish_reason": "tool_calls"}
        assert found["streamed"] == found["whole"] == expected
        assert isinstance(json.loads(found["whole"]["calls"][0][1]), dict)


@pytest.mark.parametrize("names", ["f", "fg"])
def test_c4_calls_then_a_lone_end(names: str) -> None:
    for template, text in (
        (HERMES, "\n".join(hermes('{"a": 1}', name) for name in names)),
        (DEEPSEEK, deepseek(*((name, '{"a": 1}') for name in names))),
    ):
        for found in says(template, text, [[], range(1, len(text))], TOOLS):
            assert found["streamed"] == found["whole"]
            assert found["whole"]["finish_reason"] == "tool_calls" and found["whole"]["content"] == ""
            assert found["whole"]["calls"] == [(name, '{"a": 1}') for name in names]


MALFORMED = [
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', '<tool_call>\n{"name": "f", "argum', "<tool_call></tool_call>",
    "<tool_call>\nnonsense\n</tool_call>", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>',
]  # fmt: skip


@pytest.mark.parametrize("block", MALFORMED)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_c4_a_malformed_block_is_content(block: str, finish: str) -> None:
    for found in says(HERMES, "So: " + block, cuts_of("So: " + block), TOOLS, finish):
        expected = {"content": "So: " + block, "reasoning": "", "calls": [], "finish_reason": finish}
        assert found["whole"] == expected
        if '"arguments": {' in block:  # a stream has begun to tell it: the call stays open, and no JSON
            assert found["streamed"] == expected | {"content": "So:", "calls": [("f", '{"a": 1')]}
        else:
            assert found["streamed"] == expected


def test_c4_cut_inside_arguments_after_a_complete_call() -> None:
    text = hermes('{"a": 1}') + "\n" + hermes('{"b": 2}')[:30]
    found = say(HERMES, text, TOOLS, "length")
    assert found["whole"]["calls"] == [("f", '{"a": 1}')] and found["whole"]["finish_reason"] == "length"
    assert found["streamed"] == found["whole"]
    for cuts in ([], range(1, 90)):
        text = hermes('{"a": 1}') + "\n" + hermes('{"b": 2}')[:46]
        (found,) = says(HERMES, text, [cuts], TOOLS, "length")
        assert found["whole"]["calls"] == [("f", '{"a": 1}')] and found["whole"]["finish_reason"] == "length"
        assert found["streamed"]["calls"] == [("f", '{"a": 1}'), ("f", '{"b": 2')], "as far as it came"
        assert found["streamed"]["finish_reason"] == "length" and found["streamed"]["content"] == ""
    found = say(HERMES, hermes('{"a": 1}'), TOOLS, "length")
    assert found["whole"]["finish_reason"] == "tool_calls", "nothing was cut off"


def test_arguments_are_sent_while_they_come() -> None:
    """OpenAI's form: first index, id, type and name with empty arguments, then pieces with nothing but the index."""
    text = "Hm.\n" + hermes('{"a": "hello"}') + "\n" + hermes('{"b": 2}', "g")
    engine = MockEngine(script_of(text, range(1, len(text)), "stop"), ByteTokenizer(HERMES), 4096)
    chunks = events(post(engine, CHAT, HELLO | TOOLS | {"stream": True}).text)[:-1]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    for number, name in enumerate("fg"):
        first, *rest = [delta for delta in deltas if delta["index"] == number]
        assert first["id"].startswith("call_") and first["type"] == "function"
        assert first["function"] == {"name": name, "arguments": ""}
        assert all(
            delta.keys() == {"index", "function"} and delta["function"].keys() == {"arguments"} for delta in rest
        )
        assert len(rest) > 5, "piece by piece"
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)


def test_one_call_if_parallel_calls_are_off_and_text_without_tools() -> None:
    text = hermes('{"a": 1}') + "\n" + hermes('{"b": 2}')
    assert len(say(HERMES, text, TOOLS | {"parallel_tool_calls": False})["whole"]["calls"]) == 1
    for body in ({}, TOOLS | {"tool_choice": "none"}):
        found = say(HERMES, text, body)
        assert found["whole"]["content"] == text and found["whole"]["finish_reason"] == "stop"


def test_what_is_held_to_a_grammar() -> None:
    """Strict tools and single calls, unless request or model say that the answer may not end with its call."""
    strict = {"tools": [{"type": "function", "function": one["function"] | {"strict": True}} for one in TOOLS["tools"]]}
    once, chat = {"parallel_tool_calls": False}, HELLO | TOOLS
    engine = MockEngine(None, ByteTokenizer(HERMES), 4096)
    assert post(engine, CHAT, chat | once).status_code == 200 and engine.asked[0][1].grammar is None, "no end token"
    refused = post(engine, CHAT, HELLO | strict)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    engine._door = replace(engine._door, has_end=True)
    for body, held in (
        (chat, False), (chat | {"parallel_tool_calls": True}, False), (chat | once, True), (HELLO | strict, True),
        (chat | once | {"min_tokens": 2}, False), (chat | once | {"ignore_eos": True}, False),
        (HELLO | strict | {"tool_choice": "none"}, False),
    ):  # fmt: skip
        assert post(engine, CHAT, body).status_code == 200
        assert (engine.asked[-1][1].grammar is not None) == held, body
    refused = post(engine, CHAT, HELLO | strict | {"min_tokens": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"
    engine._door.grammars.close()


def test_choices_are_read_apart() -> None:
    text = "ab</think>" + hermes('{"a": 1}')

    def script(prompt: list[int], params: SamplingParams) -> list[Any]:
        items: list[Any] = [PromptInfo()]
        for place, character in enumerate(text):
            last = "stop" if place == len(text) - 1 else None
            items += [ChoiceDelta(i, character, tuple(character.encode()), None, last) for i in range(2)]  # type: ignore[arg-type]
        return items

    engine = MockEngine(script, ByteTokenizer(HERMES), 4096)
    body = HELLO | TOOLS | {"n": 2, "chat_template_kwargs": {"thinking": True}}
    answer = post(engine, CHAT, body).json()
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}) == 2
    for choice in answer["choices"]:
        assert choice["message"]["reasoning_content"] == "ab" and choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len(b"ab</think>")


@pytest.mark.parametrize(("body", "param"), [
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS["tools"] * 2}, "tools[2]"),
    ({"tool_choice": "required"}, "tool_choice"),
    (TOOLS | {"tool_choice": "always"}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "function"}}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
])  # fmt: skip
def test_bad_tools_name_their_field(body: dict[str, Any], param: str) -> None:
    response = post(MockEngine(None, ByteTokenizer(HERMES), 4096), CHAT, HELLO | body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
