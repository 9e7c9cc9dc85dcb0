"""`coterie chat` against a stub server: turns, history, streaming, commands, and each way a server can fail."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from coterie.cli.main import run


class Stub(BaseHTTPRequestHandler):
    """Echoes the last message in two deltas; behaviour is chosen by `server.mode`."""

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        data = [] if self.server.mode == "no models" else [{"id": "stub-model"}]
        self._send(200, b"<html>" if self.server.mode == "html" else json.dumps({"data": data}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.mode == "busy":
            self._send(429, json.dumps({"error": {"message": "the queue is full", "type": "rate_limit"}}).encode())
            return
        text = body["messages"][-1]["content"]
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        if self.server.mode == "thinks":
            names = ("reasoning_content", "reasoning")
            events += [{"choices": [{"delta": dict.fromkeys(names, part)}]} for part in ("so [b]", " so")]
        events += [{"choices": [{"delta": {"content": part}}]} for part in ("you said ", text)]
        if self.server.mode == "error event":
            events.append({"error": {"message": "the engine stopped"}})
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        lines.insert(1, ": ping\n\n")
        if self.server.mode == "dies":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ffff\r\n" + "".join(lines).encode())  # a chunk that never ends
            return
        if self.server.mode != "cut":
            lines.append("data: [DONE]\n\n")
        self._send(200, "".join(lines).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def stub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.mode, server.bodies, server.keys = "fine", [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def talk(stub, monkeypatch, lines: str, *flags: str) -> int:
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return run(["chat", f"http://127.0.0.1:{stub.server_port}", *flags])


def test_turns_carry_the_conversation_and_each_answer_has_its_line(stub, monkeypatch, capsys):
    assert talk(stub, monkeypatch, "hello\nagain\n", "--system", "be short", "--temperature", "0", "-n", "9") == 0
    shown = capsys.readouterr()
    assert shown.out == "you said hello\nyou said again\n"
    assert shown.err.count("7 tok in · 5 out · TTFT ") == 2
    assert "stub-model" in shown.err
    first, second = stub.bodies
    assert first["messages"] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "you said hello"},
        {"role": "user", "content": "again"},
    ]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("stub-model", 0.0, 9)
    assert first["stream"] is True
    assert "seed" not in first


def test_reset_forgets_exit_leaves_and_other_commands_are_explained(stub, monkeypatch, capsys):
    assert talk(stub, monkeypatch, "one\n/reset\n\n/help\ntwo\n/exit\nthree\n") == 0
    assert [body["messages"] for body in stub.bodies] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]
    assert "there is no /help" in capsys.readouterr().err


def test_key_and_url_forms(stub, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert talk(stub, monkeypatch, "", "--api-key", "secret") == 0
    assert run(["chat", "--url", f"http://127.0.0.1:{stub.server_port}/v1/"]) == 0
    assert run(["chat", "--url", f"127.0.0.1:{stub.server_port}"]) == 0
    assert stub.keys == ["Bearer secret", None, None]
    assert run(["chat", "--url", f"http://127.0.0.1:{stub.server_port}", "-m", "folder"]) == 2


def test_flags_that_a_server_would_not_hear_of_are_refused(stub, monkeypatch, capsys):
    assert talk(stub, monkeypatch, "hello\n", "--threads", "3", "-c", "99", "--temperature", "0") == 2
    error = capsys.readouterr().err
    assert "--max-model-len, --threads has no effect on a server" in error and "--temperature" not in error
    assert talk(stub, monkeypatch, "hello\n", "--tp", "2", "--rebalance-steps", "5") == 2
    assert "--tp, --rebalance-steps has no effect on a server" in capsys.readouterr().err
    assert stub.bodies == []


def test_thinking_is_shown_beside_the_answer(stub, monkeypatch, capsys):
    stub.mode = "thinks"
    assert talk(stub, monkeypatch, "hello\nagain\n") == 0
    shown = capsys.readouterr()
    assert shown.out == "you said hello\nyou said again\n"
    assert shown.err.count("so [b] so\n") == 2 and shown.err.index("so [b] so") < shown.err.index("7 tok in")
    assert stub.bodies[1]["messages"][1] == {"role": "assistant", "content": "you said hello"}, "not sent back"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("no models", "lists no model"),
        ("html", "did not answer with JSON"),
        ("busy", "answered 429: the queue is full"),
        ("error event", "the engine stopped"),
        ("cut", "closed the stream before the end"),
        ("dies", "broke off the answer"),
    ],
)
def test_failures_of_the_server_are_said_in_one_line(stub, monkeypatch, capsys, mode, said):
    stub.mode = mode
    assert talk(stub, monkeypatch, "hello\n") == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown and "unexpected" not in shown


def test_no_server_and_no_url(capsys):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    port = server.server_port
    server.server_close()
    assert run(["chat", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "no server answers at" in capsys.readouterr().err
    assert run(["chat", "--url", f"127.0.0.1:{port}"]) == 1
    assert f"no server answers at http://127.0.0.1:{port}/v1" in capsys.readouterr().err
    for url in ("ftp://127.0.0.1", "file:///etc"):
        assert run(["chat", "--url", url]) == 1
        assert f"'{url}' is not a URL of a server" in capsys.readouterr().err
