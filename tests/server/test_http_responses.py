"""POST /v1/responses: the chat path in another envelope, whole and streamed."""

from __future__ import annotations

import json

import openai
import pytest
from server_fakes import MockEngine, get, live, make_state, post, say

from coterie.engine.output import ChoiceDelta, PromptInfo

URL = "/v1/responses"
CHAT = "/v1/chat/completions"


def named_events(text: str) -> list[dict]:
    """The events of a stream; each one's name is its type, numbers run from 0, and there is no [DONE]."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


def test_text_in_text_out():
    answer = post(MockEngine(say("Hello", cached=3)), URL, {"input": "hi", "model": "mock-model"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == answer.json()["id"]
    body = answer.json()
    assert body["object"] == "response" and body["status"] == "completed" and body["id"].startswith("resp_")
    assert body["error"] is None and body["incomplete_details"] is None and body["store"] is False
    [item] = body["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert body["usage"] == {
        "input_tokens": 20, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 25,
    }  # fmt: skip


SYSTEM = {"role": "system", "content": "be"}
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("request_, messages", [
    ({"input": "hi"}, [USER]),
    ({"input": "hi", "instructions": "be"}, [SYSTEM, USER]),
    ({"input": [USER]}, [USER]),
    ({"input": [{"type": "message"} | USER], "instructions": "be"}, [SYSTEM, USER]),
    ({"input": [{"role": "developer", "content": "be"}, USER]}, [SYSTEM, USER]),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "hi"]}]}, [USER]),
    ({"input": [USER, {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                 "content": [{"type": "output_text", "text": "yes", "annotations": []}]}, USER]}, [USER, SAID, USER]),
    ({"input": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "yes"}]}]}, [USER, SAID]),
])  # fmt: skip
def test_the_engine_sees_what_a_chat_would_give_it(request_, messages):
    engine = MockEngine()
    assert post(engine, URL, request_).status_code == 200
    assert post(engine, CHAT, {"messages": messages}).status_code == 200
    assert post(engine, "/tokenize", {"messages": messages}).json()["tokens"] == engine.asked[0][0]
    assert engine.asked[0] == engine.asked[1]


def test_function_calls_of_one_turn_become_one_message(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
                        "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments }}>{% endfor %}"
                        "{{ m.tool_call_id or '' }}{% endfor %}")  # fmt: skip
    engine = MockEngine()
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "5"}
    body = {"input": [USER, call, call | {"call_id": "b"}, result, result | {"call_id": "b"}]}
    assert post(make_state(engine, chat_template=str(template)), URL, body).status_code == 200
    seen = bytes(engine.asked[0][0]).decode()
    assert seen == "[user]hi[assistant]<a f {}><b f {}>[tool]5a[tool]5b"


def test_fields_reach_the_engine():
    engine = MockEngine()
    body = {"input": "hi", "max_output_tokens": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
            "seed": 7, "stop": "x", "min_p": 0.1, "metadata": {"a": "b"}, "text": {"verbosity": "low"},
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "low"}, "user": "u", "store": True, "parallel_tool_calls": False}  # fmt: skip
    answer = post(make_state(engine, strict_api=True), URL, body).json()
    params = engine.asked[0][1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (2, 0.5, 0.9, 5, 7)
    assert params.stop == ("x",) and params.min_p == 0.1 and params.n == 1
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
    assert (answer["max_output_tokens"], answer["temperature"], answer["top_p"]) == (2, 0.5, 0.9)
    assert answer["metadata"] == {"a": "b"} and answer["reasoning"]["effort"] == "low"


def test_what_include_asks_for_in_vain_is_said(caplog):
    """Clients send it unasked, so it is no error unless the server is strict; the log says it once each."""
    state, body = make_state(MockEngine()), {"input": "hi", "include": ["reasoning.encrypted_content", "x"]}
    for _ in range(2):
        assert post(state, URL, body).status_code == 200
    assert sum("'reasoning.encrypted_content' of include is ignored" in line for line in caplog.messages) == 1
    refused = post(make_state(MockEngine(), strict_api=True), URL, body | {"include": ["x"]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "include"
    assert "'x' of include" in refused.json()["error"]["message"]


def test_long_input_is_cut_only_if_asked():
    engine = MockEngine()
    long = {"input": "a" * 500, "max_output_tokens": 8}
    error = post(engine, URL, long).json()["error"]
    assert error["param"] == "input" and "128" in error["message"]
    assert post(engine, URL, long | {"truncation": "auto"}).status_code == 200
    assert len(engine.asked[0][0]) == 120
    assert post(engine, URL, {"input": "hi", "max_output_tokens": 1000}).json()["error"]["param"] == "max_output_tokens"


@pytest.mark.parametrize("body, param, code", [
    ({}, "input", None), ({"input": []}, "input", None), ({"input": 5}, "input", None),
    ({"input": [{}]}, "input[0].role", None), ({"input": [USER, {"role": "x", "content": "a"}]}, "input[1].role", None),
    ({"input": [USER, {"role": "user"}], "instructions": "be"}, "input[1].content", None),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/"}]}]},
     "input[0].content[0]", "not_supported"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "not_supported"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments", None),
    ({"input": [{"type": "reasoning"}]}, "input", None),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not_supported"),
    ({"input": "a", "conversation": "c"}, "conversation", "not_supported"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt", "not_supported"),
    ({"input": "a", "background": True}, "background", "not_supported"), ({"input": "a", "n": 2}, "n", "not_supported"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]", "not_supported"),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", None), ({"input": "a", "temperature": 3}, "temperature", None),
    ({"input": "a", "truncation": "x"}, "truncation", None),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", None),
    ({"input": "a", "max_tokens": 0}, "max_tokens", None),
    ({"input": "a", "text": {"format": {"type": "x"}}}, "text.format.type", None),
])  # fmt: skip
def test_refusals_name_the_fields_of_this_api(body, param, code):
    engine = MockEngine()
    response = post(engine, URL, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].replace("[...]", "[0]") == param and error["code"] == code
    assert "messages" not in error["message"]
    assert not engine.started


def test_a_fault_of_the_template_names_the_input(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('no') }}")
    error = post(make_state(MockEngine(), chat_template=str(template)), URL, {"input": "hi"}).json()["error"]
    assert error["param"] == "input" and error["message"] == "input: the chat template refuses them: no"


def test_stream_begins_ends_and_adds_up():
    found = named_events(post(MockEngine(say("Hello")), URL, {"input": "hi", "stream": True}).text)
    assert [event["type"] for event in found] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 5, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == "Hello" == found[9]["text"]
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    whole = post(MockEngine(say("Hello")), URL, {"input": "hi"}).json()
    streamed = found[-1]["response"]
    for body in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            body.pop(name)
        body["output"][0].pop("id")
    assert streamed == whole
    ids = {e["item_id"] for e in found if "item_id" in e} | {e["item"]["id"] for e in found if "item" in e}
    assert len(ids) == 1


def test_stream_that_is_cut_off_is_incomplete():
    found = named_events(post(MockEngine(), URL, {"input": "hi", "stream": True, "max_output_tokens": 2}).text)
    assert found[-1]["type"] == "response.incomplete" and found[-2]["item"]["status"] == "incomplete"


def test_logprobs_whole_and_streamed():
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    logprobs = post(MockEngine(), URL, body).json()["output"][0]["content"][0]["logprobs"]
    assert bytes(b for entry in logprobs for b in entry["bytes"]) == b"Hello"
    assert len(logprobs[0]["top_logprobs"]) == 2
    found = named_events(post(MockEngine(), URL, body | {"stream": True}).text)
    assert [x for e in found if e["type"].endswith("text.delta") for x in e["logprobs"]] == logprobs


def test_failure_in_mid_stream_is_told_and_raised_by_the_client():
    def script(*_):
        return [PromptInfo(), ChoiceDelta(0, "a", (1,)), 0.05, RuntimeError("x")]

    found = named_events(post(MockEngine(script), URL, {"input": "hi", "stream": True}).text)
    assert [event["type"] for event in found[-2:]] == ["response.failed", "error"]
    assert found[-2]["response"]["status"] == "failed" and found[-1]["code"] == "internal_error"
    with live(MockEngine(script)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError):
            list(client.responses.create(model="mock-model", input="hi", stream=True))


def test_what_was_not_stored_cannot_be_had():
    for path in (f"{URL}/resp_1", f"{URL}/resp_1/input_items"):
        response = get(MockEngine(), path)
        assert response.status_code == 404 and response.json()["error"]["code"] == "route_not_found"
