"""Thinking and calls on POST /v1/responses: every cut of the text; refusals; a forced call by the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from real_server import client_of, shipped_server
from server_fakes import ByteTokenizer, MockEngine, post
from test_bug_reports_tools import HERMES, script_of
from test_http_responses import URL, named_events

THINKING = {"chat_template_kwargs": {"thinking": True}}
TOOL: Any = {
    "type": "function", "name": "f", "description": "Does it.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                   "required": ["a"], "additionalProperties": False},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def outputs(text: str, cuts: list[int], body: dict[str, Any], finish: str = "stop") -> tuple[list[Any], list[Any]]:
    """The whole answer's items and the stream's, without their ids; what the stream's events say is checked."""
    engine = MockEngine(script_of(text, cuts, finish), ByteTokenizer(HERMES), 4096)
    asked = {"input": "hi", "max_output_tokens": 10} | body
    whole = post(engine, URL, asked).json()
    found = named_events(post(engine, URL, asked | {"stream": True}).text)
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}" and last["status"] == whole["status"]
    assert last["usage"] == whole["usage"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    added = [event for event in found if event["type"] == "response.output_item.added"]
    assert done == last["output"] and [event["output_index"] for event in added] == list(range(len(done)))
    assert [event["item"]["id"] for event in added] == [item["id"] for item in done] and len(
        {i["id"] for i in done}
    ) == len(done)
    for index, item in enumerate(done):
        pieces = "".join(e["delta"] for e in found if e["type"].endswith(".delta") and e["output_index"] == index)
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert pieces == said and {
            e["item_id"] for e in found if e.get("output_index") == index and "item_id" in e
        } == {item["id"]}
    return bare(whole["output"]), bare(done)


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def thought(text: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "reasoning", "status": status, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


CALLED = {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "status": "completed"}


@pytest.mark.parametrize("text, body, items", [
    ("ab</think>cd", THINKING, [thought("ab"), said("cd")]),
    ("cd", {}, [said("cd")]), ("", {}, [said("")]),
    (CALL, {"tools": [TOOL]}, [CALLED]), ("cd" + CALL, {"tools": [TOOL]}, [said("cd"), CALLED]),
    (CALL + CALL, {"tools": [TOOL]}, [CALLED, CALLED]),
    ("ab</think>cd" + CALL, {"tools": [TOOL]} | THINKING, [thought("ab"), said("cd"), CALLED]),
    ("ab</think>" + CALL, {"tools": [TOOL]} | THINKING, [thought("ab"), CALLED]),
])  # fmt: skip
def test_items_are_the_same_under_every_cut(text, body, items):
    places = range(1, len(text), 1 if len(text) < 20 else 7)
    for cuts in [[], *([a] for a in places), *map(list, itertools.islice(itertools.combinations(places, 2), 20))]:
        assert outputs(text, cuts, body) == (items, items), cuts


@pytest.mark.parametrize("text, body, items", [
    ("ab", THINKING, [thought("ab", "incomplete")]), ("cd", {}, [said("cd", "incomplete")]),
    ("ab</think>cd", THINKING, [thought("ab"), said("cd", "incomplete")]),
    ("", {}, [said("", "incomplete")]),
    (CALL, {"tools": [TOOL]}, [CALLED]),
])  # fmt: skip
def test_what_was_cut_off_is_incomplete(text, body, items):
    whole, streamed = outputs(text, [], body, "length")
    assert whole == streamed == items


@pytest.mark.parametrize("body, param", [
    ({"tools": [{"type": "function"}]}, "tools[0]"), ({"tools": [{"type": "mcp"}]}, "tools[0]"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL], "tool_choice": "x"}, "tool_choice"),
])  # fmt: skip
def test_refusals_name_the_fields_of_this_api(body, param):
    engine = MockEngine(None, ByteTokenizer(HERMES), 4096)
    response = post(engine, URL, {"input": "hi"} | body)
    assert response.status_code == 400 and not engine.started
    assert response.json()["error"]["param"] == param, response.text
    assert ".function" not in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with shipped_server(max_model_len=1024) as server:
        yield client_of(server)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_forced_call_and_its_result_through_the_client(client, choice):
    asked: dict[str, Any] = {"model": "shipped", "tools": [TOOL], "tool_choice": choice, "temperature": 0,
                             "max_output_tokens": 200, "parallel_tool_calls": choice != "required"}  # fmt: skip
    answer = client.responses.create(input="go", **asked)
    [call] = answer.output
    assert call.type == "function_call" and call.name == "f" and call.call_id and answer.output_text == ""
    assert 0 <= json.loads(call.arguments)["a"] <= 9
    with client.responses.stream(input="go", **asked) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds and streamed.arguments == call.arguments
    history: list[Any] = [{"role": "user", "content": "go"}, call,
                          {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]  # fmt: skip
    after = client.responses.create(
        model="shipped", input=history, tools=[TOOL], tool_choice="none", max_output_tokens=8
    )
    assert after.output[0].type == "message"
