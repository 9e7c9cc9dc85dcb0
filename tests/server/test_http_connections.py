"""Connections that are slow, many, too large or ambiguous, as bytes on a socket: each ends in time, with an answer
where one can be given, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_fakes import HANG, Live, MockEngine, eventually, live

from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.server import acceptor
from coterie.server.config import Access, ApiKey, ConnectionLimits, TlsConfig
from coterie.server.connection import LINGER_SECONDS, BadHead, check_head

TEXT = "/v1/completions"
PROMPT = json.dumps({"prompt": "hi"}).encode()
LENGTH = f"Content-Length: {len(PROMPT)}"
SOON = 0.3
"""Seconds of the limits that are waited for."""
SMALL = ConnectionLimits(max_header_seconds=SOON, keep_alive_seconds=SOON, max_unread_seconds=SOON)


def connect(server: Live) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10)
    return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


def head(*lines: str, method: str = "POST", path: str = TEXT) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *lines, "", ""]).encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def code_of(answer: bytes) -> str:
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"]


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[MockEngine, Live]]:
    engine = MockEngine()
    with live(engine, connections=SMALL, max_body_seconds=SOON) as running:
        yield engine, running


@pytest.fixture
def server(serving: tuple[MockEngine, Live]) -> Live:
    return serving[1]


# Slow ones


@pytest.mark.parametrize("beginning, trickle", [
    (b"G", False), (b"GET /health HTTP/1.1\r\n", False), (b"GET / HTTP/1.1\r\nHost: a\r\n", False), (head()[:-2], True),
])  # fmt: skip
@pytest.mark.parametrize("before", [b"", head(LENGTH) + PROMPT], ids=["first", "second"])
def test_a_head_that_does_not_arrive_is_408_in_time(server, beginning, trickle, before):
    with connect(server) as connection:
        if before:
            connection.sendall(before)
            answer = b""
            while b'"usage"' not in answer:
                answer += connection.recv(65536)
        began = time.monotonic()
        connection.sendall(beginning)
        if trickle:  # a byte now and then does not buy time
            with contextlib.suppress(OSError):
                while time.monotonic() - began < 2 * SOON:
                    time.sleep(SOON / 8)
                    connection.sendall(b"a")
        answer = rest(connection)
        assert status_of(answer) == 408 and code_of(answer) == "request_timeout", answer
        assert time.monotonic() - began < SOON + LINGER_SECONDS + 5


@pytest.mark.parametrize("before", [b"", head(method="GET", path="/health")], ids=["new", "kept alive"])
def test_an_idle_connection_is_closed(server, before):
    with connect(server) as connection:
        connection.sendall(before)
        began = time.monotonic()
        answer = rest(connection)
        assert answer.count(b"HTTP/1.1") == (before != b"") and time.monotonic() - began < SOON + 5


def test_a_body_that_nobody_waits_for_ends_too(server):
    """Answered or timed out, its sender may not go on for ever."""
    lengths = [("Content-Length: 5000", b" "), ("Transfer-Encoding: chunked", b"1\r\n \r\n")]
    cases = [(framing, piece, path) for framing, piece in lengths for path in ("/nothing", "/health", TEXT)]

    def send(framing: str, piece: bytes, path: str) -> float:
        began = time.monotonic()
        with connect(server) as connection:
            connection.sendall(head(framing, path=path))
            with contextlib.suppress(OSError):
                while time.monotonic() - began < 30:
                    connection.sendall(piece)
                    time.sleep(SOON / 8)
        return time.monotonic() - began

    with ThreadPoolExecutor(len(cases)) as pool:
        assert max(pool.map(send, *zip(*cases, strict=True))) < SOON + LINGER_SECONDS + 8


def test_who_does_not_read_what_was_sent_is_cut_off():
    engine = MockEngine(lambda *_: [PromptInfo(), *(ChoiceDelta(0, "x" * 100_000, (1,)) for _ in range(400)), HANG])
    with live(engine, connections=SMALL) as server:
        with connect(server) as connection:
            data = json.dumps({"prompt": "hi", "stream": True}).encode()
            connection.sendall(head(f"Content-Length: {len(data)}") + data)
            assert eventually(lambda: len(engine.aborted) == 1)
        assert eventually(lambda: not server.server.state.num_running)


def test_who_reads_slowly_is_not():
    engine = MockEngine(lambda *_: [PromptInfo(), *(ChoiceDelta(0, "x" * 100_000, (1,)) for _ in range(60)),
                                    ChoiceDelta(0, "", finish_reason="stop")])  # fmt: skip
    with live(engine, connections=SMALL) as server, connect(server) as connection:
        data = json.dumps({"prompt": "hi", "stream": True}).encode()
        connection.sendall(head(f"Content-Length: {len(data)}", "Connection: close") + data)
        answer, began = b"", time.monotonic()
        while piece := connection.recv(400_000):
            answer += piece
            time.sleep(SOON / 8)
        assert answer.count(b"x") >= 6_000_000 and b"[DONE]" in answer and time.monotonic() - began > SOON


# Large ones


@pytest.mark.parametrize("data", [
    head("X: " + "a" * 200_000), head(*(f"X{i}: a" for i in range(20_000))), head(path="/" + "a" * 200_000),
    b"a" * 200_000, head("X: " + "a" * 200_000)[:-4], head(LENGTH, "X: " + "a" * 70_000) + PROMPT,
    head(LENGTH) + PROMPT + head("X: " + "a" * 200_000),
])  # fmt: skip
def test_too_long_a_head_is_an_answer_and_no_reset(server, data):
    with connect(server) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        last = answer[answer.rindex(b"HTTP/1.1") :]
        assert status_of(last) in (431, 400), last[:300]
        assert status_of(last) == 431 or data.startswith(b"aaa"), last[:300]
        assert code_of(last) == "bad_http" and b"Connection: close" in last


def test_a_head_up_to_the_limit_is_read(server):
    for line in ("X: " + "a" * 65_000, "X: " + "a" * 30_000 + "\r\nY: " + "b" * 30_000):
        with connect(server) as connection:
            connection.sendall(head(LENGTH, line, "Connection: close") + PROMPT)
            assert status_of(rest(connection)) == 200


def test_an_endless_head_is_answered_while_it_is_sent(server):
    with connect(server) as connection:
        connection.sendall(head()[:-2])
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 30:
                connection.sendall(b"X: " + b"a" * 60_000 + b"\r\n")
        assert time.monotonic() - began < LINGER_SECONDS + 8


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    access = Access(api_keys=(ApiKey("key"),))
    with live(MockEngine(), access=access, max_body_bytes=100_000, connections=SMALL) as running:
        yield running


@pytest.mark.parametrize("lines, path, status", [
    ([], TEXT, 401), (["Authorization: Bearer key"], "/nothing", 404), (["Authorization: Bearer key"], TEXT, 413),
    (["Authorization: Bearer key", "Content-Encoding: gzip"], TEXT, 415),
])  # fmt: skip
@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_to_a_body_that_is_still_sent_arrives(guarded, lines, path, status, chunked):
    """The client sends all of it before it reads, as many do; a reset would take the answer away."""
    body = b"x" * 3_000_000
    with connect(guarded) as connection:
        if chunked:
            connection.sendall(head("Transfer-Encoding: chunked", *lines, path=path))
            connection.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        else:
            connection.sendall(head(f"Content-Length: {len(body)}", *lines, path=path) + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        assert status_of(answer) == status


# Ambiguous ones

CHUNKED = "Transfer-Encoding: chunked"
HIDDEN = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
"""A request that one reader sees and another takes for a part of the body."""
FIVE = b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("data", [
    head(LENGTH, CHUNKED) + FIVE, head(CHUNKED, LENGTH) + FIVE, head("content-length: 0", "transfer-ENCODING: chunked"),
    head(LENGTH, "Transfer-Encoding: identity") + PROMPT, head("Content-Length: 6", "Content-Length: 5"),
    head(LENGTH, LENGTH) + PROMPT, head("Content-Length: 5, 5"), head("Content-Length: 5,"), head("Content-Length: +5"),
    head("Content-Length: 0x5"), head("Content-Length: 5 5"), head("Content-Length:"), head("Content-Length: -0"),
    head("Content-Length: 1e1"), head("Content-Length: 1_0"), head("Content-Length: 5;"),
    head("Content-Length: \u0665"),
    head(CHUNKED, CHUNKED) + FIVE, head("Transfer-Encoding: chunked, chunked"), head("Transfer-Encoding: identity"),
    head("Transfer-Encoding: xchunked"), head("Transfer-Encoding: gzip, chunked"),
    head("Transfer-Encoding: chunked, gzip"), head("X: a", "\tb"),
    head("Transfer-Encoding:\x0bchunked"), head("Transfer-Encoding : chunked"), head("Transfer-Encoding:"),
    head("Content-Length : 5"), head(" Content-Length: 5"), head("X: a", " Transfer-Encoding: chunked"),
    head("X: a\x00b"), head("X\x00: a"), head("X: a\x01b"), head("X y: a"), head(": a"), head("X"), head("X: a\rb"),
    head("X: a\nTransfer-Encoding: chunked"), head("X: a\r\r\nY: b"), head("X: a\n\r\nGET / HTTP/1.1"), head("Host: b"),
    head(CHUNKED).replace(b"1.1", b"1.0", 1) + FIVE, head(LENGTH).replace(b"Host: a\r\n", b"") + PROMPT,
    head().replace(b"1.1", b"2.0"), head().replace(b"1.1", b"1.10"), head().replace(b" HTTP/1.1", b""),
    head(path="/ a"), head(path="/\x7f"), head(path=""), head(method="GE T"), head(method=""), b"\r\n\r\n\r\n" + HIDDEN,
    b"GET /health HTTP/1.1\nHost: a\n\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", head(path="http://a b/"),
    *(head(CHUNKED) + size + b"hello\r\n0\r\n\r\n" for size in (
        b"0x5\r\n", b"-5\r\n", b"+5\r\n", b" 5\r\n", b"5 5\r\n", b"\r\n", b"g\r\n", b"5\n", b"5;a\n", b"5_0\r\n",
        b"5\r", b"0" * 30 + b"5\r\n", b"5,\r\n", b"\xd9\xa5\r\n",
    )),
    *(head(CHUNKED) + b"5\r\nhello" + end + b"\r\n\r\n" for end in (b"o\r\n0", b"0", b"\n0")),
])  # fmt: skip
def test_what_two_readers_may_read_differently_is_refused_and_nothing_behind_it_is_read(serving, data):
    engine, server = serving
    before = len(engine.started)
    with connect(server) as connection:
        connection.sendall(data + HIDDEN)
        answer = rest(connection)
    assert answer.count(b"HTTP/1.1 ") == 1 and status_of(answer) == (505 if b"HTTP/2.0" in data else 400), answer
    assert code_of(answer) == "bad_http" and b'"version":' not in answer
    assert len(engine.started) == before


BODY = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PROMPT), PROMPT)


@pytest.mark.parametrize("data", [
    head(CHUNKED) + BODY, head("transfer-encoding:CHUNKED") + BODY, head("Transfer-Encoding:   chunked  ") + BODY,
    head(CHUNKED) + BODY.upper().replace(PROMPT.upper(), PROMPT), head(CHUNKED) + BODY.replace(b"\r\n{", b";a=b\r\n{"),
    head(CHUNKED) + b"00" + BODY, head(CHUNKED) + BODY[:-2] + b"X: a\r\n\r\n", head("content-length:16") + PROMPT,
    head("Content-Length: 0016") + PROMPT, head(LENGTH, "X: ", "Y:", "Z: \t a \xe4") + PROMPT,
    head(LENGTH, *(["X: a"] * 500)) + PROMPT,
])  # fmt: skip
def test_what_is_merely_odd_is_read_to_its_end(server, data):
    assert len(PROMPT) == 16
    with connect(server) as connection:
        connection.sendall(data + HIDDEN)
        answer = rest(connection)
        assert answer.count(b"HTTP/1.1 200 ") == 2 and b'{"version":' in answer, answer


def test_the_head_is_checked_by_its_bytes():
    check_head(head(LENGTH), 1000)
    with pytest.raises(BadHead, match="longer than 30"):
        check_head(head(LENGTH), 30)
    for lines, said in ((["Host: b"], "more than one Host"), (["X: a", " b"], "folded"), (["X: a\nb"], "CR LF")):
        with pytest.raises(BadHead, match=said):
            check_head(head(*lines), 1000)


# Many


def test_beyond_the_limit_there_is_a_503_and_health_is_answered(caplog):
    limits = ConnectionLimits(max_connections=4)
    engine = MockEngine(lambda *_: [PromptInfo(), HANG])
    with live(engine, connections=limits) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            busy = stack.enter_context(connect(server))
            busy.sendall(head(LENGTH) + PROMPT)
        assert eventually(lambda: len(engine.started) == 4)
        for _ in range(5):
            response = httpx.post(server.url + TEXT, json={"prompt": "hi"})
            assert response.status_code == 503 and response.json()["error"]["code"] == "too_many_connections"
            assert int(response.headers["retry-after"]) >= 1 and response.headers["connection"] == "close"
            assert httpx.get(server.url + "/health").status_code == 200
        assert not engine.aborted, "nobody who is served gives way"
        assert [r.levelno for r in caplog.records if "max-connections" in r.getMessage()] == [logging.WARNING]
        busy.close()
        assert eventually(lambda: len(engine.aborted) == 1)
        assert "coterie:connections_refused_total 10.0" in httpx.get(server.url + "/metrics").text
        response = None
        with contextlib.suppress(httpx.ReadTimeout):  # there is a place again: this one is taken and hangs
            response = httpx.post(server.url + TEXT, json={"prompt": "hi"}, timeout=0.5)
        assert response is None and len(engine.started) == 5


@pytest.mark.parametrize("beginning", [b"", b"POST / HT", head(method="GET", path="/health")])
def test_connections_that_rest_give_way(beginning, monkeypatch):
    monkeypatch.setattr(acceptor, "PATIENCE", 0.2)
    with live(MockEngine(), connections=ConnectionLimits(max_connections=4)) as server, contextlib.ExitStack() as stack:
        resting = [stack.enter_context(connect(server)) for _ in range(4)]
        for connection in resting:
            connection.sendall(beginning)
        time.sleep(0.3)
        for _ in range(3):
            assert httpx.post(server.url + TEXT, json={"prompt": "hi"}).status_code == 200
        assert rest(resting[0]).count(b"HTTP/1.1 200") == beginning.startswith(b"GET")


def test_more_than_the_spares_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(acceptor, "SPARES", 3)
    monkeypatch.setattr(acceptor, "SPARE_SECONDS", 0.3)
    engine = MockEngine(lambda *_: [PromptInfo(), HANG])
    with live(engine, connections=ConnectionLimits(max_connections=2)) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(server)).sendall(head(LENGTH) + PROMPT)
        assert eventually(lambda: len(engine.started) == 2)
        silent = [stack.enter_context(connect(server)) for _ in range(3)]
        began = time.monotonic()
        assert rest(stack.enter_context(connect(server))) == b"" and time.monotonic() - began < 0.25
        assert [rest(connection) for connection in silent] == [b""] * 3, "spares do not wait for long either"
        assert httpx.get(server.url + "/health").status_code == 200


def test_without_file_descriptors_it_goes_on_with_one_warning(caplog):
    """All of this process's are taken, so the one that a client uses is the last."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with live(MockEngine()) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        port = int(server.url.rsplit(":", 1)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/proc/self/fd")) + 60), hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(6):
                os.close(taken.pop())
                with socket.socket() as client:
                    taken += fill()
                    client.settimeout(10)
                    client.connect(("127.0.0.1", port))
                    assert rest(client) == b""
                    time.sleep(0.05)  # the server takes its reserve again
                taken += fill()
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert httpx.get(server.url + "/health").status_code == 200
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.exc_info for record in said] == [None] and os.strerror(errno.EMFILE) in said[0].getMessage()


def fill() -> list[int]:
    """Take the file descriptors that are left."""
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


@pytest.mark.parametrize("soft, hard, set_to, allowed", [
    (1024, 4096, 1184, 1024), (4096, 4096, None, 1024), (1024, 1100, 1100, 940), (64, 64, 64, 1),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1024), (256, resource.RLIM_INFINITY, 1184, 1024),
])  # fmt: skip
def test_open_files_are_made_to_suffice_or_the_limit_is_lowered(soft, hard, set_to, allowed, monkeypatch, caplog):
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: made[-1] if made else (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: made.append(pair))
    assert acceptor.allow_files(1024) == allowed
    assert made == ([] if set_to is None else [(set_to, hard)])
    assert bool(caplog.records) == (allowed < 1024)


def test_what_clients_do_wrong_is_no_line_in_the_log(server, caplog):
    for data in (b"\x16\x03\x01" * 100, b"GET\r\n\r\n", head(CHUNKED) + b"zz\r\n", head(CHUNKED, path="/nothing"), b""):
        for extra in (b"", b"zz\r\n\r\n"):
            with connect(server) as connection:
                connection.sendall(data)
                time.sleep(0.02)
                with contextlib.suppress(OSError):
                    connection.sendall(extra)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert httpx.get(server.url + "/health").status_code == 200
    assert not caplog.records


def test_a_server_with_half_open_connections_ends_at_once():
    with live(MockEngine()) as server, contextlib.ExitStack() as stack:
        for data in (b"", b"GET / HT", head(CHUNKED, path="/no"), b"GET / HTTP/1.1\r\n\r\n", head(path="/no")):
            stack.enter_context(connect(server)).sendall(data)
        time.sleep(0.1)
        began = time.monotonic()
        server.stop()
        server.join()
        assert time.monotonic() - began < 5 and server.error is None


def test_a_tls_handshake_that_is_not_made_ends_too(tmp_path):
    trustme = pytest.importorskip("trustme")
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
    access = Access(tls=TlsConfig(certfile=str(tmp_path / "pem")))
    with live(MockEngine(), access=access, connections=SMALL) as server:
        for data in (b"", b"\x16\x03", b"GET / HTTP/1.1\r\n"):
            with connect(server) as connection:
                connection.sendall(data)
                began = time.monotonic()
                assert b"HTTP" not in rest(connection) and time.monotonic() - began < SOON + 5
        assert httpx.get(server.url + "/health", verify=False).status_code == 200
        assert eventually(lambda: server.server._http.servers[0].num_open == 0)
