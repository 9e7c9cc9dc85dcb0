"""What is refused before it reaches the engine: keys, body size, speed, nesting, and fields that are wrong."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import ExitStack

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import ByteTokenizer, MockEngine, ask, eventually, get, live, make_state, post

from coterie.server.config import Access, ApiKey
from coterie.server.limits import BODIES, json_depth

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def refused(response: httpx.Response, status: int = 400) -> dict:
    """The error of a refused request; its body has OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\a\n😀'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[]{}"\\'), inner, max_size=3),
    max_leaves=20,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(JSON)
def test_depth_is_that_of_the_value(value):
    assert json_depth(json.dumps(value).encode()) == depth(value)
    assert json_depth(json.dumps(value, ensure_ascii=False, indent=1).encode()) == depth(value)


@pytest.mark.parametrize("levels", [64, 98])
def test_nesting_that_is_accepted(levels):
    body = b'{"messages":[{"role":"user","content":"hi"}],"x":' + b"[" * levels + b"]" * levels + b"}"
    assert post(MockEngine(), CHAT, body).status_code == 200


@pytest.mark.parametrize("levels", [1_000, 100_000])
@pytest.mark.parametrize("field", ["x", "tools", "chat_template_kwargs", "metadata", "response_format"])
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"1}"), (b"[", b"")])
def test_deep_nesting_is_refused(levels, field, brackets):
    engine = MockEngine()
    opening, closing = brackets
    middle = b"" if closing != b"1}" else b"1" + b"}" * levels
    nested = opening * levels + (middle or closing * levels)
    body = b'{"messages":[{"role":"user","content":"hi"}],"' + field.encode() + b'":' + nested + b"}"
    assert refused(post(engine, CHAT, body))["code"] == "nesting_too_deep"
    assert post(engine, CHAT, HELLO).status_code == 200


def test_key_is_required_before_the_body_is_read():
    state = make_state(MockEngine(), access=Access(api_keys=(ApiKey("secret-ключ"),)), max_body_bytes=10)
    too_large = b"[" * 1_000_000
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}, {"Authorization": ""}):
        error = refused(post(state, CHAT, too_large, **headers), 401)
        assert error["code"] == "invalid_api_key"
        assert refused(get(state, "/nowhere", **headers), 401)
        for path in ("/v1/models", "/version", "/metrics", "/openapi.json"):
            assert get(state, path, **headers).status_code == 401
        for path in ("/health", "/ping", "/ready"):
            assert get(state, path, **headers).status_code == 200


def test_right_key_opens():
    state = make_state(MockEngine(), access=Access(api_keys=(ApiKey("secret"),)))
    for value in ("Bearer secret", "bearer secret"):
        assert post(state, CHAT, HELLO, Authorization=value).status_code == 200
        assert get(state, "/metrics", Authorization=value).status_code == 200


def test_body_cap_counts_what_arrives():
    state = make_state(MockEngine(), max_body_bytes=1000)

    async def in_pieces():
        for _ in range(1000):
            yield b" " * 100

    declared = refused(post(state, CHAT, b" " * 1001), 413)
    chunked = refused(ask(state, lambda client: client.post(CHAT, content=in_pieces())), 413)
    assert declared["code"] == chunked["code"] == "body_too_large"
    padded = json.dumps(HELLO).encode().ljust(1000)
    assert post(state, CHAT, padded).status_code == 200


def test_compressed_body_is_refused():
    response = post(MockEngine(), CHAT, b"\x1f\x8b", **{"Content-Encoding": "gzip"})
    assert refused(response, 415)["code"] == "unsupported_encoding"


def read_answer(connection: socket.socket) -> bytes:
    connection.settimeout(10)
    answer = b""
    while piece := connection.recv(4096):
        answer += piece
    return answer


def test_slow_body_gets_408_and_the_connection_ends():
    with live(MockEngine(), max_body_seconds=0.3) as server:
        connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        for _ in range(3):
            connection.sendall(b" ")
            time.sleep(0.05)
        answer = read_answer(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_timeout"
        assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200


def test_half_sent_bodies_are_bounded_together_and_nobody_else_is_disturbed():
    """More than a few of the largest at once are told to come back; small ones, and large ones later, are taken."""
    with live(MockEngine(), max_body_bytes=100_000) as server, ExitStack() as stack:
        port = int(server.url.rsplit(":", 1)[1])
        opening = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(BODIES)]
        for connection in held:
            connection.sendall(opening + b" " * 99_999)
        late = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.3)
        late.sendall(opening + b" " * 99_000)
        answer = read_answer(late)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer.lower()
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "too_many_bodies"
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200, "small ones are no burden"
        for connection in held:
            connection.close()
        padded = json.dumps(HELLO).encode().ljust(90_000)
        assert eventually(lambda: httpx.post(server.url + CHAT, content=padded).status_code == 200)


def test_endless_chunked_body_gets_413_while_it_is_sent():
    with live(MockEngine(), max_body_bytes=100_000) as server:
        sent = 0

        def endless():
            nonlocal sent
            while sent < 50_000_000:
                sent += 10_000
                yield b"x" * 10_000

        response = httpx.post(server.url + CHAT, content=endless())
        assert refused(response, 413)["code"] == "body_too_large"
        assert sent < 50_000_000
        assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200


@pytest.mark.parametrize("field, value", [
    ("temperature", -1), ("temperature", 2.1), ("temperature", "0.5"), ("temperature", True), ("top_p", -0.1),
    ("top_p", 1.5), ("top_p", "1"), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("min_p", -1),
    ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3), ("seed", 2**64), ("seed", 1.5),
    ("n", 0), ("n", 1_000_000), ("max_tokens", -1), ("max_tokens", 2**63), ("max_tokens", 10**6), ("max_tokens", 1.5),
    ("min_tokens", -1), ("min_tokens", 10**6), ("stop", ["a"] * 100_000), ("stop", [""]), ("stop", 5),
    ("stop_token_ids", [-1]), ("stop_token_ids", [300]), ("stop_token_ids", [True]), ("stop_token_ids", ["1"]),
    ("logit_bias", {"999999": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 5}), ("logit_bias", {"1": "5"}),
    ("logit_bias", {str(i): 1 for i in range(100_000)}), ("logit_bias", [1]), ("stream", "yes"), ("ignore_eos", 1),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("model", 5), ("model", "m" * 10_000),
])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bad_values_name_their_field(path, field, value):
    engine = MockEngine()
    base = HELLO if path == CHAT else {"prompt": "hi"}
    error = refused(post(engine, path, base | {field: value}))
    assert error["param"].split("[")[0].split(".")[0] == field
    assert field in error["message"]
    assert engine.started == engine.finished, "nothing bad may reach the engine"
    assert post(engine, path, base).status_code == 200


@pytest.mark.parametrize("number", [b"NaN", b"-NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"min_p"])
def test_numbers_that_json_has_not(number, field):
    error = refused(post(MockEngine(), TEXT, b'{"prompt":"hi","' + field + b'": ' + number + b"}"))
    assert error["param"] == field.decode()


def test_number_too_large_for_a_float():
    assert refused(post(MockEngine(), TEXT, b'{"prompt":"hi","temperature":1e999}'))["param"] == "temperature"


@pytest.mark.parametrize("value", [0, 1e-9, 1e-4, 2])
def test_accepted_temperatures(value):
    engine = MockEngine()
    assert post(engine, TEXT, {"prompt": "hi", "temperature": value, "top_p": 0, "top_k": 0}).status_code == 200
    assert engine.asked[0][1].temperature == (0 if value <= 1e-5 else value)


def test_bias_is_clamped():
    engine = MockEngine()
    assert post(engine, TEXT, {"prompt": "hi", "logit_bias": {"5": 1e30, "6": -1e30}}).status_code == 200
    assert engine.asked[0][1].logit_bias == {5: 100.0, 6: -100.0}


@pytest.mark.parametrize("prompt", [
    [-1], [300], [2**32 - 1], [True], [1.5], [[1, -1]], [[1], [300]], [], "", [[]], ["a", 1], [1, [2]], ["a", None],
    {"a": 1}, 5, None, ["a"] * 100_000, [[1]] * 1000,
])  # fmt: skip
def test_bad_prompts(prompt):
    engine = MockEngine()
    engine.tokenizer.encode = lambda text, *, add_special_tokens: list(text.encode())
    error = refused(post(engine, TEXT, {"prompt": prompt}))
    assert error["param"].split("[")[0] == "prompt"
    assert sorted(engine.started) == sorted(engine.aborted), "what had started was stopped"
    assert post(engine, TEXT, {"prompt": "hi"}).status_code == 200


@pytest.mark.parametrize("length, max_tokens, fits", [
    (127, 1, True), (127, None, True), (128, 1, False), (128, None, False), (129, 1, False), (100_000, 1, False),
    (100, 28, True), (100, 29, False), (100, 10**6, False), (120, None, True),
])  # fmt: skip
def test_context_is_a_limit_with_three_numbers(length, max_tokens, fits):
    engine = MockEngine()
    body = {"prompt": [5] * length} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    response = post(engine, TEXT, body)
    if fits:
        assert response.status_code == 200
    else:
        error = refused(response)
        assert error["param"] == ("prompt" if length >= 128 else "max_tokens")
        assert "128" in error["message"] and str(length) in error["message"]
        assert (f"max_tokens={max_tokens}" if max_tokens else "no max_tokens") in error["message"]
    assert post(engine, TEXT, {"prompt": "the request behind"}).status_code == 200


def test_chat_names_its_own_fields():
    engine = MockEngine()
    long = {"messages": [{"role": "user", "content": "a" * 500}]}
    assert refused(post(engine, CHAT, long))["param"] == "messages"
    error = refused(post(engine, CHAT, HELLO | {"max_completion_tokens": 1000}))
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(("path", "body", "name"), [
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, "max_tokens"),
    (CHAT, HELLO, "max_completion_tokens"), (CHAT, HELLO, "max_tokens"), (TEXT, {"prompt": "a" * 500}, "max_tokens"),
    (TEXT, {"prompt": "a" * 500}, "max_completion_tokens"),
    ("/v1/responses", {"input": "a" * 500}, "max_output_tokens"),
    ("/v1/responses", {"input": "a" * 500}, "max_tokens"), ("/v1/responses", {"input": "a"}, "max_output_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("length", [5, 10**6])
def test_a_length_is_called_what_the_client_called_it(path, body, name, length):
    """Whichever field is at fault: too long a prompt, or too long an answer."""
    response = post(MockEngine(), path, body | {name: length})
    if "a" * 500 in json.dumps(body) or length > 128:
        message = refused(response)["message"]
        assert f"{name}={length}" in message
        assert set(re.findall(r"max_\w*tokens", message)) == {name}


@pytest.mark.parametrize(("path", "body", "name"), [
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, "max_completion_tokens"),
    ("/v1/responses", {"input": "a" * 500}, "max_output_tokens"), (TEXT, {"prompt": "a" * 500}, "max_tokens"),
])  # fmt: skip
def test_a_length_that_nobody_asked_for_is_called_what_the_route_calls_it(path, body, name):
    message = refused(post(MockEngine(), path, body))["message"]
    assert f"no {name} was asked for" in message and re.findall(r"max_\w*tokens", message) == [name]


def test_truncated_prompt_keeps_its_end():
    engine = MockEngine()
    post(engine, TEXT, {"prompt": [5] * 200 + [6, 7], "truncate_prompt_tokens": 3})
    post(engine, TEXT, {"prompt": [5] * 200, "truncate_prompt_tokens": -1, "max_tokens": 28})
    assert engine.asked[0][0] == [5, 6, 7]
    assert engine.asked[1][0] == [5] * 100


@pytest.mark.parametrize("body", [b"", b"  ", b"{", b"[]", b'"a"', b"null", b'{"prompt":"a"} x', b'{"prompt":"\xff"}',
                                  b'{"prompt":"\\ud800"}', b"\x00", b"NaN"])  # fmt: skip
def test_bodies_that_are_no_object(body):
    refused(post(MockEngine(), TEXT, body))


def test_missing_field_is_named():
    assert refused(post(MockEngine(), TEXT, {}))["param"] == "prompt"
    assert refused(post(MockEngine(), CHAT, {}))["param"] == "messages"
    assert refused(post(MockEngine(), CHAT, {"messages": [{}]}))["param"] == "messages[0].role"


@pytest.mark.parametrize("field, count, path", [
    ("messages", 100_000, CHAT), ("messages", 5000, CHAT), ("tools", 10_000, CHAT), ("n", 129, CHAT), ("n", 129, TEXT),
])  # fmt: skip
def test_fan_out_is_bounded(field, count, path):
    value = {"messages": HELLO["messages"] * count, "tools": [{"type": "function"}] * count, "n": count}[field]
    base = HELLO if path == CHAT else {"prompt": "hi"}
    engine = MockEngine()
    assert refused(post(engine, path, base | {field: value}))["param"] == field
    assert not engine.started


def test_prompts_times_n_is_bounded():
    engine = MockEngine()
    assert refused(post(engine, TEXT, {"prompt": ["a"] * 65, "n": 2}))["param"] == "n"
    assert not engine.started
    assert refused(post(engine, CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}))["param"] == "top_logprobs"
    assert refused(post(engine, TEXT, {"prompt": "a", "best_of": 10**6}))["param"] == "best_of"


def test_unknown_fields_are_told_once(caplog):
    engine, state = MockEngine(), make_state(MockEngine())

    async def work(client):
        for _ in range(3):
            await client.post(CHAT, json=HELLO | {"brand_new": 1, "evil\nname": 2, "user": "me", "metadata": {}})

    ask(state, work)
    told = [record.getMessage() for record in caplog.records if "unknown request field" in record.getMessage()]
    assert sorted(told) == [f"unknown request field {name} is ignored" for name in ("'evil\\nname'", "brand_new")]
    strict = make_state(engine, strict_api=True)
    assert refused(post(strict, CHAT, HELLO | {"brand_new": 1}))["param"] == "brand_new"
    ignored = {"user": "me", "metadata": {}, "store": True, "service_tier": "auto", "prompt_cache_key": "k",
               "safety_identifier": "s"}  # fmt: skip
    assert post(strict, CHAT, HELLO | ignored).status_code == 200


@pytest.mark.parametrize("extra", [
    {"response_format": {"type": "structural_tag"}},
    {"functions": [{"name": "f"}]}, {"audio": {"voice": "a"}}, {"modalities": ["text", "audio"]},
    {"allowed_token_ids": [5]}, {"bad_words": ["a"]},
    {"return_token_ids": True}, {"echo": True}, {"web_search_options": {}},
    {"web_search_options": {"user_location": None}},
])  # fmt: skip
def test_what_would_change_the_answer_is_refused_not_ignored(extra):
    error = refused(post(MockEngine(), CHAT, HELLO | extra))
    assert error["code"] == "not_supported"
    assert error["param"] == next(iter(extra))


@pytest.mark.parametrize("extra", [
    {"modalities": ["text"]}, {"web_search_options": None}, {"audio": {}},
    {"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"tool_choice": None},
    {"response_format": {"type": "text"}}, {"response_format": None}, {"functions": []}, {"guided_json": None},
    {"echo": False, "bad_words": [], "allowed_token_ids": None, "return_token_ids": False},
    {"stop": None, "temperature": None, "n": None, "logit_bias": None, "seed": None, "max_tokens": None},
    {"tools": [{"type": "function"}], "tool_choice": "none"},
])  # fmt: skip
def test_what_asks_for_nothing_is_accepted(extra):
    assert post(MockEngine(), CHAT, HELLO | extra).status_code == 200


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "file:///etc/passwd", "data:image/png;base64,AAAA"])
def test_nothing_is_fetched(url, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "file", "file": {}}):
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]
        error = refused(post(MockEngine(), CHAT, {"messages": messages}))
        assert error["code"] == "not_supported" and error["param"] == "messages[0].content[1]"


@pytest.mark.parametrize("message, where", [
    ({"role": "root", "content": "a"}, "messages[0].role"), ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"), ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [5]}, "messages[0].content[0]"), (5, "messages[0]"),
])  # fmt: skip
def test_bad_messages_are_located(message, where):
    assert refused(post(MockEngine(), CHAT, {"messages": [message]}))["param"].replace("[...]", "[0]") == where


def test_other_models_are_404():
    engine = MockEngine()
    for name in ("gpt-4", "../../etc/passwd", ""):
        error = refused(post(engine, CHAT, HELLO | {"model": name}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
    assert refused(get(engine, "/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert get(engine, "/v1/models/mock-model").json()["max_model_len"] == 128
    renamed = make_state(engine, served_model_name="org/name")
    assert post(renamed, CHAT, HELLO | {"model": "org/name"}).json()["model"] == "org/name"
    assert get(renamed, "/v1/models/org/name").status_code == 200


def test_wrong_routes_and_methods_are_told_what_there_is():
    engine = MockEngine()
    error = refused(get(engine, "/v1"), 404)
    assert error["code"] == "route_not_found" and "/openapi.json" in error["message"]
    response = get(engine, TEXT)
    assert response.headers["allow"] == "POST" and "this route takes POST" in refused(response, 405)["message"]
    for path in ("/v1/models", "/v1/models/mock-model", "/health", "/ready", "/ping", "/version", "/metrics"):
        head = get(engine, path, "HEAD")
        assert head.status_code == 200 and head.content == b"", path
    assert get(engine, "/v1/models/gpt-4", "HEAD").status_code == 404


@pytest.mark.parametrize("count", [3, 10_000])
def test_ids_are_spelled_the_same_on_the_loop_and_off_it(count):
    ids = [256, *(65 + i % 26 for i in range(count))]
    text = "<s>" + "".join(map(chr, ids[1:]))
    assert post(MockEngine(), "/detokenize", {"tokens": ids}).json() == {"prompt": text}
    body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = post(MockEngine(), "/tokenize", body).json()
    assert answer["tokens"] == ids and answer["token_strs"] == ["<s>", *text[3:]]


def test_model_without_a_tokenizer_takes_ids():
    engine = MockEngine(tokenizer=None)
    assert refused(post(engine, TEXT, {"prompt": "hi"}))["param"] == "prompt"
    assert refused(post(engine, CHAT, HELLO))["param"] == "messages"
    assert post(engine, TEXT, {"prompt": [1, 2]}).status_code == 200


def test_tokenizer_is_asked_off_the_loop_for_long_texts():
    class Long(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return [1] * (len(text) // 1000)

    engine = MockEngine(tokenizer=Long())
    assert post(engine, TEXT, {"prompt": "a" * 50_000}).json()["usage"]["prompt_tokens"] == 50
