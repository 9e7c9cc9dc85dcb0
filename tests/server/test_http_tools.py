"""Tools through the real server and the shipped model, which knows of none: forced calls are the grammar's doing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from real_server import client_of, shipped_server
from server_fakes import Live

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Prague?"}]


class Weather(BaseModel):
    """The weather of a town."""

    city: str = Field(max_length=10)
    days: int = Field(ge=1, le=7)


class Move(BaseModel):
    """Move about."""

    steps: list[int] = Field(max_length=3)
    fast: bool


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Move)]
KINDS: dict[str, type[BaseModel]] = {"Weather": Weather, "Move": Move}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with shipped_server(max_model_len=2048) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return client_of(server)


def ask(server: Live, **body: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "seed": 1} | body
    response = httpx.post(server.url + CHAT, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check(call: Any) -> None:
    KINDS[call["function"]["name"]].model_validate_json(call["function"]["arguments"])


@pytest.mark.parametrize("parallel", [openai.omit, True, False])
def test_a_named_tool_is_called_once(client: openai.OpenAI, parallel: Any) -> None:
    """What instructor does by default."""
    for name, kind in KINDS.items():
        answer = client.chat.completions.create(
            model="shipped", messages=MESSAGES, tools=TOOLS, max_tokens=300,
            tool_choice={"type": "function", "function": {"name": name}}, parallel_tool_calls=parallel,
        )  # fmt: skip
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
        (call,) = message.tool_calls or []
        assert call.type == "function" and call.id and call.function.name == name
        kind.model_validate_json(call.function.arguments)


def test_parse_and_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "shipped", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 2,
        "max_tokens": 300, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert whole and all(isinstance(call.function.parsed_arguments, (Weather, Move)) for call in whole)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and streamed.finish_reason == "tool_calls"
    assert [call.function.arguments for call in streamed.message.tool_calls or []] == [
        call.function.arguments for call in whole
    ]


@pytest.mark.parametrize("parallel", [True, False])
def test_required(server: Live, parallel: bool) -> None:
    counts = set()
    for seed in range(4):
        body = {"tool_choice": "required", "parallel_tool_calls": parallel, "seed": seed, "temperature": 1.5}
        choice = ask(server, **body)
        calls = choice["message"]["tool_calls"]
        counts.add(len(calls))
        assert choice["message"]["content"] is None, "a call that is cut off leaves no tags"
        for call in calls:
            check(call)
    assert parallel or counts == {1}


def test_a_forced_call_that_is_cut_is_no_call(server: Live) -> None:
    choice = ask(server, tool_choice="required", max_tokens=8)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith("<tool_call>")


def test_tools_or_a_structure(server: Live) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}}}
    bias = {"<": 100.0, "{": 100.0}
    for first in bias:
        ids = httpx.post(server.url + "/tokenize", json={"prompt": first, "add_special_tokens": False}).json()["tokens"]
        choice = ask(server, response_format=wanted, logit_bias={str(ids[0]): 100.0}, temperature=0, max_tokens=400)
        if first == "{":
            assert isinstance(json.loads(choice["message"]["content"])["ok"], bool)
        elif choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                check(call)
        else:
            assert choice["message"]["content"].startswith("<tool_call>")


def test_auto_leaves_the_model_alone(server: Live) -> None:
    choice = ask(server, tool_choice="auto", temperature=0, max_tokens=20)
    assert choice["finish_reason"] in ("stop", "length") and "tool_calls" not in choice["message"]
    plain = ask(server, tool_choice="none", temperature=0, max_tokens=20)
    assert "tool_calls" not in plain["message"]


def test_a_round_trip(client: openai.OpenAI) -> None:
    """Call, result, answer: what the client sends back is accepted."""
    messages: list[Any] = list(MESSAGES)
    asked: dict[str, Any] = {"model": "shipped", "tools": TOOLS, "max_tokens": 200, "seed": 3}
    first = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0].message
    assert first.tool_calls
    messages.append(first)
    for call in first.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert second.choices[0].message.content is not None
