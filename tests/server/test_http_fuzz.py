"""Clients that are no friends: odd bodies, cut-off requests, hang-ups at any byte, readers that do not read.

Whatever they do, nobody gets a 5xx, streams are whole events, the next request is served, and the engine ends empty.
"""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_server import CHAT, TEXT, Live, Spy, long_folder, open_request, real_server, wait

RESPONSES = "/v1/responses"
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, -0.5, 1e308, 2**31, 2**53 + 1, 2**64, -(2**63), 10**30, "", "a", "0.5",
    "\u00e9\u0000\U0001f600", "a" * 2000, [], [[]], [1], ["a"], [None], {}, {"a": 1}, {"1": 1}, {"-1": 5},
]  # fmt: skip
IDS = st.integers(0, 263)
FLAGS = st.booleans()
FIELDS = {
    "max_tokens": st.integers(0, 9), "max_output_tokens": st.integers(0, 9), "max_completion_tokens": st.integers(0, 9),
    "min_tokens": st.integers(0, 3), "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "min_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300), "repetition_penalty": st.floats(0.5, 2), "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2), "seed": st.integers(-(2**63), 2**63 - 1), "n": st.integers(1, 3),
    "stop": st.lists(st.text(min_size=1, max_size=2), max_size=3), "stop_token_ids": st.lists(IDS, max_size=3),
    "logit_bias": st.dictionaries(IDS.map(str), st.floats(-200, 200), max_size=3), "ignore_eos": FLAGS,
    "skip_special_tokens": FLAGS, "include_stop_str_in_output": FLAGS, "truncate_prompt_tokens": st.integers(-1, 5),
    "logprobs": st.integers(0, 3) | FLAGS, "top_logprobs": st.integers(0, 3), "echo": FLAGS,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": FLAGS, "continuous_usage_stats": FLAGS}),
} | dict.fromkeys(
    ("tools", "response_format", "metadata", "user", "chat_template_kwargs", "reasoning_effort", "brand_new"),
    st.sampled_from(ODD),
)  # fmt: skip
TEXTS = st.text(max_size=12)
PROMPTS = TEXTS | st.lists(IDS, min_size=1, max_size=8) | st.lists(TEXTS, min_size=1, max_size=3)
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "x"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=3)
SUBJECTS = {TEXT: ("prompt", PROMPTS), CHAT: ("messages", MESSAGES), RESPONSES: ("input", TEXTS | MESSAGES)}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body: most fields sane, some not, some of another route."""
    path = draw(st.sampled_from(sorted(SUBJECTS)))
    subject, values = SUBJECTS[path]
    body: dict[str, Any] = {"max_tokens": 8, "stream": draw(st.booleans()), subject: draw(values)}
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True)):
        body[name] = draw(FIELDS[name])
    for name in draw(st.lists(st.sampled_from([*sorted(FIELDS), subject, "stream", "model"]), max_size=1)):
        body[name] = draw(st.sampled_from(ODD))
    return path, body


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[tuple[Live, Spy]]:
    folder = long_folder(tmp_path_factory.mktemp("model"))
    limits = {"max_model_len": 2048, "kv_cache_tokens": 4096, "max_running_requests": 4, "max_queued_requests": 16}
    with real_server(folder, {"max_body_seconds": 2.0}, **limits) as pair:
        yield pair


def judge(status: int, kind: str, data: bytes) -> None:
    """Every answer has a status that blames the client or nobody, and the shape that goes with it."""
    assert status in (200, 400, 404, 429), (status, data)
    if kind.startswith("text/event-stream"):
        events = [block for block in data.decode().split("\n\n") if block and not block.startswith(":")]
        bodies = [event.split("data: ", 1)[1] for event in events]
        ends = bodies.pop() if bodies[-1] == "[DONE]" else json.loads(bodies[-1])["type"]
        assert ends == "[DONE]" or ends in ("response.completed", "response.incomplete"), data
        assert all("error" not in json.loads(body) for body in bodies if ends == "[DONE]")
    else:
        assert kind == "application/json"
        assert ("error" in json.loads(data)) == (status != 200) or "output" in json.loads(data)


def still_serves(url: str) -> None:
    answer = httpx.post(url + TEXT, json={"prompt": "hi", "max_tokens": 2, "ignore_eos": True}, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


QUIET = settings(derandomize=True, suppress_health_check=list(HealthCheck))


@settings(QUIET, max_examples=80)
@given(requests())
def test_any_body_gets_an_answer_of_its_kind(bench, request_):
    path, body = request_
    server, _ = bench
    with httpx.stream("POST", server.url + path, json=body, timeout=30) as answer:
        judge(answer.status_code, answer.headers["content-type"], answer.read())


@settings(QUIET, max_examples=60)
@given(st.data())
def test_bytes_that_are_no_request_body(bench, data):
    """A good body with a piece cut out, doubled or overwritten."""
    path, body = data.draw(requests())
    raw = bytearray(json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode())
    at = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(at, min(len(raw), at + 8)))
    raw[at:end] = data.draw(
        st.binary(max_size=4) | st.sampled_from([b"NaN", b"\\ud800", b'"', b"{", b"]", b"1e999", b"-", b"\0"])
    )
    answer = httpx.post(bench[0].url + path, content=bytes(raw), timeout=30)
    judge(answer.status_code, answer.headers["content-type"], answer.content)


@settings(QUIET, max_examples=60)
@given(requests(), st.integers(0, 3000), st.integers(0, 400), st.booleans())
def test_hanging_up_at_any_byte_leaves_nothing_behind(bench, request_, read, sent, reset):
    """Some bytes of the request go out, some of the answer are read, then the connection ends, rudely or not."""
    server, spy = bench
    path, body = request_
    data = json.dumps(body | {"max_tokens": 100, "ignore_eos": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    connection.settimeout(10)
    whole = head + data
    connection.sendall(whole if read else whole[:sent])
    while read > 0 and (piece := connection.recv(min(read, 512))):
        read -= len(piece)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait(lambda: spy.is_quiet)


def test_afterwards_all_is_as_before(bench):
    server, spy = bench
    still_serves(server.url)
    wait(lambda: spy.is_quiet)
    spy.core.check_integrity()
    metrics = httpx.get(server.url + "/metrics").text
    answers = re.findall(r'http_requests_total\{path="(.*?)",status="(\d+)"\} (\d+)', metrics)
    assert not [answer for answer in answers if answer[1] >= "500"]
    good = {path: int(count) for path, status, count in answers if status == "200"}
    assert all(good[path] >= 10 for path in SUBJECTS), "enough was answered for the rest to mean something"
    assert spy.aborts, "some hung up while their answer was computed"


def test_a_reader_that_does_not_read_holds_up_nobody(bench):
    """Its socket fills, the server waits for it alone; when it goes, what it left is aborted."""
    server, spy = bench
    before = len(spy.aborts)
    long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 3}
    lazy = open_request(server.url, long)
    wait(lambda: spy.core.scheduler.num_running >= 3)
    for _ in range(5):
        still_serves(server.url)
    lazy.close()
    wait(lambda: spy.is_quiet)
    assert len(spy.aborts) - before in (0, 3)
