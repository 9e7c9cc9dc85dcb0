"""A client that goes away (F2): what it asked for is aborted at once, exactly once, and what has finished never is."""

from __future__ import annotations

import json
import random
import socket

import httpx
import pytest
from server_fakes import HANG, MockEngine, eventually, live, say

from coterie.engine.output import ChoiceDelta, PromptInfo

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def endless(prompt, params):
    """Three tokens a choice, then silence."""
    items = [PromptInfo()]
    for token in range(3):
        items += [ChoiceDelta(i, "a", (token,)) for i in range(params.n)]
    return [*items, HANG]


def open_request(url: str, path: str, body: dict) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("script", [endless, lambda *_: [HANG]], ids=["decoding", "queued"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path, body, prompts", [
    (CHAT, HELLO, 1), (CHAT, HELLO | {"n": 4}, 1), (TEXT, {"prompt": ["a", "b", "c"]}, 3),
])  # fmt: skip
def test_hang_up_aborts_each_prompt_once(path, body, prompts, stream, script):
    engine = MockEngine(script)
    with live(engine) as server:
        connection = open_request(server.url, path, body | {"stream": stream})
        assert eventually(lambda: len(engine.started) == prompts)
        assert engine.aborted == []
        connection.close()
        assert eventually(lambda: len(engine.aborted) == prompts)
        assert eventually(lambda: server.server.state.num_running == 0)
    assert sorted(engine.aborted) == sorted(engine.started)


def test_hang_up_after_three_tokens():
    engine = MockEngine(endless)
    with live(engine) as server:
        with httpx.stream("POST", server.url + TEXT, json={"prompt": "a", "stream": True}) as response:
            seen = ""
            for piece in response.iter_text():
                seen += piece
                if seen.count("data: ") == 3:
                    break
        assert eventually(lambda: engine.aborted == engine.started)


def test_two_hundred_clients_half_of_whom_go():
    choose = random.Random(7)
    engine = MockEngine(lambda prompt, params: (endless if len(prompt) % 2 else say("Hello"))(prompt, params))
    with live(engine) as server:
        hung, done = 0, 0
        for _ in range(200):
            leaves = choose.random() < 0.5
            body = {"prompt": [1] * (3 if leaves else 2), "stream": choose.random() < 0.5, "n": choose.choice([1, 4])}
            connection = open_request(server.url, TEXT, body)
            if leaves:
                hung += 1
                assert eventually(lambda expected=hung + done: len(engine.started) == expected)
            else:
                done += 1
                connection.settimeout(10)
                assert connection.recv(12) == b"HTTP/1.1 200"
                assert eventually(lambda expected=done: len(engine.finished) == expected)
            connection.close()
        assert eventually(lambda: len(engine.aborted) == hung)
        assert eventually(lambda: server.server.state.num_running == 0)
    assert len(engine.finished) == done and not set(engine.finished) & set(engine.aborted)


def test_a_finished_request_is_not_aborted():
    engine = MockEngine()
    with live(engine) as server, httpx.Client(base_url=server.url) as client:
        for stream in (True, False):
            for body in (HELLO, HELLO | {"n": 4}):
                assert client.post(CHAT, json=body | {"stream": stream}).status_code == 200
    assert len(engine.finished) == 4 and engine.aborted == []


def test_hang_up_while_the_body_is_sent_starts_nothing():
    engine = MockEngine()
    with live(engine) as server:
        connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"prompt"')
        connection.close()
        assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200
    assert len(engine.started) == 1
