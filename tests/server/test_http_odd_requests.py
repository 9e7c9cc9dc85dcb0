"""Requests that no client of ours sends: other servers' routes, odd methods, framing, encodings and JSON. Each gets an
answer of the right kind, in OpenAI's shape where HTTP itself was understood, and the server serves on."""

from __future__ import annotations

import codecs
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from server_fakes import Live, MockEngine, get, live, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = json.dumps({"prompt": "hi"}).encode()


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", [
    "/", "/v1", "/v1/", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/v1/audio/transcriptions",
    "/v1/audio/speech", "/v1/images/generations", "/v1/moderations", "/v1/files", "/v1/batches", "/v1/messages",
    "/v1/tokenizer_info", "/api/tags", "/api/generate", "/docs", "/favicon.ico", "/V1/MODELS", "//v1/models",
    "/v1/chat/completions/", "/health/", "/v1/models%00", "/../etc/passwd",
])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_routes_of_other_servers_are_a_404_with_a_body_and_never_a_redirect(method, path):
    assert error_of(get(MockEngine(), path, method), 404)["code"] == "route_not_found"


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "MADE-UP"])
@pytest.mark.parametrize("path, allowed", [
    (CHAT, "POST"), ("/v1/responses", "POST"), ("/tokenize", "POST"), ("/v1/models", "GET, HEAD"),
    ("/v1/models/a", "GET, HEAD"), ("/metrics", "GET, HEAD"), ("/health", "GET, HEAD"),
])  # fmt: skip
def test_wrong_methods_are_told_the_right_ones(method, path, allowed):
    response = get(MockEngine(), path, method)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "text/plain", "a", "", None])
def test_any_content_type_will_do_for_a_program(kind):
    headers = {} if kind is None else {"Content-Type": kind}
    assert post(MockEngine(), CHAT, HELLO, **headers).status_code == 200


@pytest.mark.parametrize("kind, status", [
    ("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("text/plain", 415), ("", 415),
    ("application/x-www-form-urlencoded", 415), ("multipart/form-data; boundary=x", 415),
    ("text/plain; application/json", 415),
])  # fmt: skip
@pytest.mark.parametrize("origin", ["https://example.org", "null"])
def test_a_page_elsewhere_cannot_make_a_browser_spend_our_time(kind, status, origin):
    """Browsers send forms and plain text to any address without asking it; they name the page that made them."""
    engine = MockEngine()
    response = post(engine, CHAT, HELLO, **{"Content-Type": kind, "Origin": origin})
    assert response.status_code == status
    if status == 415:
        assert error_of(response, 415)["code"] == "unsupported_media_type"
        assert not engine.started


def test_encodings_of_json():
    whole = json.dumps(HELLO).encode()
    assert post(MockEngine(), CHAT, codecs.BOM_UTF8 + whole).status_code == 200
    assert post(MockEngine(), CHAT, whole, **{"Content-Encoding": "Identity"}).status_code == 200
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        error_of(post(MockEngine(), CHAT, json.dumps(HELLO).encode(encoding)), 400)
    error = error_of(post(MockEngine(), TEXT, b'{"prompt": "a \\ud83d b"}'), 400)
    assert "surrogate" in error["message"]


def test_the_last_of_two_equal_keys_counts_and_both_are_checked():
    engine = MockEngine()
    assert post(engine, TEXT, b'{"prompt": "a", "n": 3, "n": 2, "prompt": "b"}').status_code == 200
    assert engine.asked[0][1].n == 2 and engine.asked[0][0][1:] == list(b"b")
    for body in (b'{"prompt": "a", "n": 2, "n": 1000000}', b'{"prompt": "a", "n": 1000000, "n": 2}'):
        assert error_of(post(engine, TEXT, body), 400)["param"] == "n"


@pytest.mark.parametrize("text, param", [
    ('"logit_bias": {"5": NaN}', "logit_bias"), ('"logit_bias": {"5": 1, "6": -Infinity}', "logit_bias"),
    ('"temperature": nan', "temperature"), ('"logit_bias": {"5": 1e400}', "logit_bias"),
    ('"logit_bias": {"5": true}', "logit_bias"), ('"logit_bias": {"05": 1}', "logit_bias"),
    ('"logit_bias": {"1.0": 1}', "logit_bias"), ('"logit_bias": {"' + "9" * 5000 + '": 1}', "logit_bias"),
    ('"n": 1' + "0" * 5000, "n"), ('"temperature": 1' + "0" * 400, "temperature"), ('"max_tokens": 16.0', "max_tokens"),
    ('"seed": 1e400', "seed"), ('"logprobs": -1', "logprobs"), ('"logprobs": true', "logprobs"),
    ('"stream_options": []', "stream_options"), ('"stop": [null]', "stop[0]"),
])  # fmt: skip
def test_odd_numbers_and_kinds_name_their_field(text, param):
    error = error_of(post(MockEngine(), TEXT, ('{"prompt": "hi", ' + text + "}").encode()), 400)
    assert error["param"] == param and error["message"].startswith(param) and len(error["message"]) < 300


@pytest.mark.parametrize("path, body, name", [
    (CHAT, HELLO, "max_tokens"), (CHAT, HELLO, "max_completion_tokens"),
    (TEXT, {"prompt": "hi"}, "max_completion_tokens"), ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
    ("/v1/responses", {"input": "hi"}, "max_completion_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("value", [0, 100_000])
def test_a_length_is_called_what_the_client_called_it(path, body, name, value):
    if (path, value) == (TEXT, 0):
        return  # scores the prompt
    error = error_of(post(MockEngine(), path, body | {name: value}), 400)
    assert error["param"] == name and name in error["message"]
    assert name == "max_tokens" or "max_tokens" not in error["message"]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(MockEngine(), max_body_seconds=1.0) as running:
        yield running


def exchange(server: Live, data: bytes) -> bytes:
    """Send bytes, read until the server closes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(10)
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def head(*lines: str, method: str = "POST", path: str = TEXT, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: a", *lines, "", ""]).encode()


LENGTH = f"Content-Length: {len(PROMPT)}"
CLOSE, CHUNKED = "Connection: close", "Transfer-Encoding: chunked"
BYTES = b"".join(b"1\r\n%c\r\n" % byte for byte in PROMPT) + b"0\r\n\r\n"


@pytest.mark.parametrize("data, status", [
    (head(LENGTH, version="1.0") + PROMPT, 200), (head(CHUNKED, CLOSE) + BYTES, 200),
    (head(LENGTH, CLOSE, "Expect: 100-continue") + PROMPT, 100),
    (head(LENGTH, CLOSE, method="GET", path="/v1/models") + PROMPT, 200),
    (head(CLOSE, path="/health?" + "a" * 5000, method="GET"), 200), (head(CLOSE), 400),
    (head(CLOSE, LENGTH, CHUNKED) + BYTES, 400),
    (head(CHUNKED, CLOSE) + b"zz\r\n", 400), (head("Transfer-Encoding: gzip, chunked", CLOSE), 400),
    (head("Content-Length: -5"), 400), (head("Content-Length: abc"), 400),
    (head("Content-Length: 5", "Content-Length: 6"), 400),
    (head("Content-Length: 9" + "9" * 30), 400), (head(CLOSE, method="CONNECT", path="a:80"), 404),
    (head(CLOSE, method="OPTIONS", path="*"), 404), (b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03", 400),
    (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 400), (head(LENGTH) + PROMPT[:-1], 408),
    (head(CLOSE, *(f"X{i}: a" for i in range(1000)), path="/health", method="GET"), 200),
])  # fmt: skip
def test_odd_framing(server, data, status):
    answer = exchange(server, data)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:300]
    assert httpx.post(server.url + TEXT, content=PROMPT).status_code == 200


def test_pipelined_requests_are_answered_in_turn(server):
    one = head(LENGTH) + PROMPT
    answer = exchange(server, one * 3 + head(CLOSE, path="/version", method="GET"))
    assert answer.count(b"HTTP/1.1 200 ") == 4 and answer.endswith(b'"}') and b'{"version":' in answer
