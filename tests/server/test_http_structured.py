"""Structured output through the real server and the shipped model: what comes back is what was asked for.

The shipped model knows nothing of JSON, so a valid answer is the grammar's doing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from real_server import client_of, shipped_server
from server_fakes import Live, MockEngine, events, post

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES: Any = [{"role": "user", "content": "Who goes there?"}]


class Mood(StrEnum):
    GLAD = "glad"
    SAD = "sad"


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    mood: Mood
    friends: list[str] = Field(max_length=2)


SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with shipped_server(max_model_len=512) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return client_of(server)


def ask(server: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_client_parses_into_a_model(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="shipped", messages=MESSAGES, response_format=Person, seed=seed, max_tokens=300
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
        assert answer.usage is not None and answer.usage.completion_tokens > 10


def test_the_client_parses_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "shipped", "messages": MESSAGES, "seed": 4, "max_tokens": 300}
    with client.chat.completions.stream(**asked, response_format=Person) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message
    assert kinds.count("content.delta") > 3 and kinds[-1] == "content.done"
    whole = client.chat.completions.parse(**asked, response_format=Person).choices[0].message
    assert isinstance(streamed.parsed, Person) and streamed.content == whole.content


def test_responses_take_the_same_format(server: Live, client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="shipped", input="Who?", text_format=Person, max_output_tokens=300)
    assert isinstance(answer.output_parsed, Person)
    bad = {"input": "Who?", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}
    error = httpx.post(server.url + RESPONSES, json=bad, timeout=60)
    assert error.status_code == 400 and error.json()["error"]["param"] == "text.format.schema"


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "json"),
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
    ({"guided_json": SCHEMA}, "json"),
    ({"structured_outputs": {"regex": r"\d{2}/[a-c]{3}"}}, r"\d{2}/[a-c]{3}"),
    ({"guided_regex": r"(yes|no) \d"}, r"(yes|no) \d"),
    ({"structured_outputs": {"choice": ['say "no"', "oui/ja"]}}, 'say "no"|oui/ja'),
    ({"guided_choice": ["☂", "☀"]}, "☂|☀"),
    ({"structured_outputs": {"grammar": 'start: "ab" | "ba" start\n'}}, "(ba)*ab"),
    ({"guided_grammar": 'start: WORD "!"\nWORD: /[a-z]{2,5}/\n'}, "[a-z]{2,5}!"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "expected"), FORMS)
def test_every_form_on_both_routes(server: Live, path: str, fields: dict[str, Any], expected: str) -> None:
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once"}
    answer = ask(server, path, body | fields | {"n": 3, "temperature": 1.5, "max_tokens": 300})
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        if expected == "json":
            value = json.loads(text)
            assert list(value) == ["a", "b"] and value["a"] in range(10) and value["b"] in (True, False)
        else:
            assert re.fullmatch(expected, text), text


def test_any_object_and_a_cut(server: Live) -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "temperature": 0, "max_tokens": 40}
    choice = ask(server, CHAT, body)["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    body["max_tokens"] = 2
    assert ask(server, CHAT, body)["choices"][0]["finish_reason"] == "length"


def test_streamed_is_whole_with_logprobs(server: Live) -> None:
    body = {
        "messages": MESSAGES, "temperature": 0, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    whole = ask(server, CHAT, body)
    texts = ["", ""]
    *chunks, done = events(httpx.post(server.url + CHAT, json=body | {"stream": True}, timeout=60).text)
    assert done == "[DONE]"
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    spelled = bytes(byte for entry in whole["choices"][0]["logprobs"]["content"] for byte in entry["bytes"])
    assert spelled.decode().startswith(texts[0])


# What cannot be used


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$defs": links | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (schema_format({"type": "nothing"}), "response_format.json_schema.schema"),
    (schema_format({"not": {"type": "integer"}}), "response_format.json_schema.schema"),
    (schema_format({"$ref": "http://169.254.169.254/"}), "response_format.json_schema.schema"),
    (schema_format(chain(3000)), "response_format.json_schema.schema"),
    (schema_format({"enum": ["x" * 1000 + str(i) for i in range(400)]}), "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "(" * 10_000 + "a" + ")" * 10_000}, "guided_regex"),
    ({"guided_regex": "a{100000000}"}, "guided_regex"),
    (schema_format({"type": "string", "pattern": "^a{100000000}$"}), "response_format.json_schema.schema"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"structured_outputs": {"grammar": 'start: A\nA: ' + "&".join(f"/(.*a.{{{i}}})*/" for i in range(30))}},
     "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_used_is_a_400_that_names_the_field(server: Live, stream: bool) -> None:
    for fields, param in REFUSED:
        response = httpx.post(server.url + CHAT, json={"messages": MESSAGES, "stream": stream} | fields, timeout=60)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), fields
        assert len(error["message"]) < 600
    assert ask(server, CHAT, {"messages": MESSAGES, "guided_regex": "ok"})["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("levels", [100, 1000, 100_000])
def test_deep_schemas_end_at_the_door(levels: int) -> None:
    engine = MockEngine()
    schema = b'{"items":' * levels + b"true" + b"}" * levels
    body = (
        b'{"messages":[{"role":"user","content":"hi"}],"response_format":{"type":"json_schema","json_schema":'
        b'{"name":"a","schema":' + schema + b"}}}"
    )
    error = post(engine, CHAT, body)
    assert error.status_code == 400 and error.json()["error"]["code"] == "nesting_too_deep"
    assert not engine.started


def test_a_schema_deeper_than_the_compiler_reads(server: Live) -> None:
    """Under the door's bound on nesting, or in a string that the door does not look into."""
    for levels in (90, 200):
        body = {"messages": MESSAGES, "guided_json": json.dumps(deep(levels)), "max_tokens": 5}
        response = httpx.post(server.url + CHAT, json=body, timeout=60)
        assert response.status_code == (200 if levels == 90 else 400), response.text
