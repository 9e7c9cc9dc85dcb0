"""Thoughts and calls in the Responses API: items in order, the same streamed and whole, and the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import ByteTokenizer, MockEngine, live, post
from test_bug_reports_tools import HERMES, hermes, script_of
from test_http_responses import named_events

URL = "/v1/responses"
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "fg"]
THINK = {"chat_template_kwargs": {"thinking": True}}
CALLS = hermes('{"a": 1}') + "\n" + hermes('{"b": [2]}', "g")


def engine_that_says(text: str, size: int = 3, finish: str = "stop") -> MockEngine:
    return MockEngine(script_of(text, range(size, len(text), size), finish), ByteTokenizer(HERMES), 4096)


CASES: list[tuple[str, dict[str, Any], list[tuple[str, Any]]]] = [
    ("plain", {}, [("message", "plain")]),
    ("", {"tools": TOOLS}, [("message", "")]),
    ("ab</think>cd", THINK, [("reasoning", "ab"), ("message", "cd")]),
    ("ab", THINK, [("reasoning", "ab")]),
    (f"Hm.\n{CALLS}", {"tools": TOOLS}, [("message", "Hm."), ("f", '{"a": 1}'), ("g", '{"b": [2]}')]),
    (f"ab</think>{CALLS}", THINK | {"tools": TOOLS}, [("reasoning", "ab"), ("f", '{"a": 1}'), ("g", '{"b": [2]}')]),
    (
        f"ab\n{hermes('{}')}\ncd{hermes('{}', 'g')}ef",
        {"tools": TOOLS},
        [("message", "ab"), ("f", "{}"), ("message", "cd"), ("g", "{}"), ("message", "ef")],
    ),
    (f"ab</think>cd\n{hermes('{}')}", THINK | {"tools": TOOLS}, [("reasoning", "ab"), ("message", "cd"), ("f", "{}")]),
]


def items(output: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    found = []
    for item in output:
        if item["type"] == "function_call":
            assert item["call_id"] and item["status"] == "completed"
            found.append((item["name"], item["arguments"]))
        else:
            found.append((item["type"], "".join(part["text"] for part in item["content"])))
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "body", "expected"), CASES)
def test_items_whole_and_streamed(text: str, body: dict[str, Any], expected: list[tuple[str, Any]], size: int) -> None:
    asked = {"input": "hi"} | body
    whole = post(engine_that_says(text, size), URL, asked).json()
    assert items(whole["output"]) == expected
    events = named_events(post(engine_that_says(text, size), URL, asked | {"stream": True}).text)
    last = events[-1]
    assert last["type"] == "response.completed" and items(last["response"]["output"]) == expected
    assert last["response"]["usage"] == whole["usage"]
    open_items: dict[int, dict[str, Any]] = {}
    done = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(done) and not open_items
            open_items[event["output_index"]] = event["item"] | {"said": ""}
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == open_items[event["output_index"]]["id"]
            open_items[event["output_index"]]["said"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            begun = open_items.pop(event["output_index"])
            assert begun["id"] == event["item"]["id"] and begun["said"] == items([event["item"]])[0][1]
            done.append(event["item"])
    assert done == last["response"]["output"] and len({item["id"] for item in done}) == len(done)
    reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert (reasoning > 0) == (expected[0][0] == "reasoning")


PIECES = [
    "ab", " ", "\n\n", "<think>", "</think>", "<tool_call>", "</tool_call>", hermes('{"a": 1}'), hermes("{}", "g"),
    "漢", '{"name": "f"}', "<tool", "cd",
]  # fmt: skip


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.integers(1, 9),
    st.sampled_from([{}, {"tools": TOOLS}, THINK, THINK | {"tools": TOOLS}]), st.sampled_from(["stop", "length"]),
)  # fmt: skip
def test_any_text_gives_the_same_items_whole_and_streamed(
    text: str, size: int, body: dict[str, Any], finish: str
) -> None:
    asked = {"input": "hi", "top_logprobs": 1} | body
    whole = post(engine_that_says(text, size, finish), URL, asked).json()
    last = named_events(post(engine_that_says(text, size, finish), URL, asked | {"stream": True}).text)[-1]["response"]
    if "chat_template_kwargs" not in body and "</think>" in text:
        return  # thinking that shows at its end: see the next test
    assert without_ids(last) == without_ids(whole)
    assert last["status"] == whole["status"] and last["usage"] == whole["usage"]


def without_ids(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: item[name] for name in item.keys() - {"id", "call_id"}} for item in body["output"]]


def test_what_a_stream_cannot_take_back() -> None:
    """A call that breaks after it was told, and thinking that shows at its end: the whole answer knows better."""
    broken = "So: " + hermes('{"a": }') + " cd"
    whole = post(engine_that_says(broken), URL, {"input": "hi", "tools": TOOLS}).json()
    assert items(whole["output"]) == [("message", broken)]
    last = named_events(post(engine_that_says(broken), URL, {"input": "hi", "tools": TOOLS, "stream": True}).text)[-1]
    said, call, more = last["response"]["output"]
    assert (call["type"], call["name"]) == ("function_call", "f")
    assert (call["arguments"], call["status"]) == ('{"a": ', "incomplete")
    assert items([said, more]) == [("message", "So:"), ("message", " cd")]
    late = "ab</think>cd"
    assert items(post(engine_that_says(late), URL, {"input": "hi"}).json()["output"]) == [
        ("reasoning", "ab"), ("message", "cd"),
    ]  # fmt: skip
    last = named_events(post(engine_that_says(late), URL, {"input": "hi", "stream": True}).text)[-1]
    assert items(last["response"]["output"]) == [("message", "abcd")]


def test_arguments_are_told_while_they_come() -> None:
    told = named_events(post(engine_that_says(CALLS, 1), URL, {"input": "hi", "tools": TOOLS, "stream": True}).text)
    kinds = [event["type"].removeprefix("response.") for event in told]
    first = kinds.index("output_item.added")
    one = kinds[first : kinds.index("output_item.done") + 1]
    assert one[0] == "output_item.added" and one[-2:] == ["function_call_arguments.done", "output_item.done"]
    assert set(one[1:-2]) == {"function_call_arguments.delta"} and len(one) > 8
    assert told[first]["item"]["name"] == "f" and told[first]["item"]["arguments"] == ""


def test_the_official_client_collects_calls() -> None:
    with live(engine_that_says(f"ab</think>{CALLS}")) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        asked: Any = {"model": "mock-model", "input": "hi", "tools": TOOLS, "extra_body": THINK}
        whole = client.responses.create(**asked)
        assert [(item.name, item.arguments) for item in whole.output if item.type == "function_call"] == [
            ("f", '{"a": 1}'), ("g", '{"b": [2]}'),
        ]  # fmt: skip
        with client.responses.stream(**asked) as stream:
            final = list(stream)[-1].response
    assert [json.loads(item.arguments) for item in final.output if item.type == "function_call"] == [
        {"a": 1}, {"b": [2]},
    ]  # fmt: skip
