"""A siege: many connections that are silent, slow, wrong or gone, all at once, and the health endpoint answers in time.

Counts are bounded, all is on loopback, it ends by itself. How long an answer may take is generous: what is asserted is
that nothing waits for the besiegers, whose own limits are longer. At the end a request is served and the books add up.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from real_server import TEXT, Spy, long_folder, real_server, wait
from server_fakes import Live

from coterie.server.config import ConnectionLimits

LIMITS = ConnectionLimits(max_connections=40, max_header_seconds=30.0)
IN_TIME = 5.0
"""Seconds; a step of the tiny model takes a few milliseconds, a besieger is waited for at least thirty."""
BESIEGERS, VISITS = 8, 15

BAD_BODIES = [
    b"", b"{", b"[" * 5000, b'{"prompt": ' + b"[" * 90 + b"]" * 90 + b"}", b'{"prompt": "a", "n": 1000000}',
    b"\xff" * 100,
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": [99999999]}', b'{"prompt": "a", "max_tokens": -1}', b"null",
    b'{"prompt": "' + b"a" * 100_000 + b'"}', b'{"prompt": "a", "structured_outputs": {"regex": "("}}',
]  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Spy]]:
    folder = long_folder(Path(tmp_path_factory.mktemp("siege")))
    server = {"connections": LIMITS, "max_body_seconds": 30.0}
    with real_server(folder, server, kv_cache_tokens=16384, max_running_requests=8, max_queued_requests=16) as pair:
        yield pair


def post(body: bytes, length: int | None = None) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (TEXT.encode(), length or len(body), body)


def wrong(connection: socket.socket, chance: random.Random) -> None:
    """A body that is refused; sometimes the answer is not waited for."""
    connection.sendall(post(chance.choice(BAD_BODIES)))
    if chance.random() < 0.7:
        connection.recv(65536)


def gone(connection: socket.socket, chance: random.Random) -> None:
    """A long prompt whose client hangs up while it is computed or waits."""
    prompt = [chance.randrange(256) for _ in range(chance.choice([50, 2000, 6000]))]
    connection.sendall(post(json.dumps({"prompt": prompt, "max_tokens": 50, "stream": chance.random() < 0.5}).encode()))
    time.sleep(chance.choice([0.0, 0.01, 0.1]))


def garbage(connection: socket.socket, chance: random.Random) -> None:
    """What is no HTTP."""
    connection.settimeout(1)  # some of it might be the beginning of a head
    connection.sendall(chance.choice([bytes(chance.randbytes(2000)), b"GET\r\n\r\n", b"\r\n" * 100, b"A" * 200_000]))
    connection.recv(65536)


def short(connection: socket.socket, chance: random.Random) -> None:
    """Half a body, then nobody."""
    connection.sendall(post(b'{"prompt": "', 5000))


def honest(connection: socket.socket, chance: random.Random) -> None:
    """A request like others; 200, or 429 or 503 as there are so many."""
    connection.sendall(post(b'{"prompt": "To be", "max_tokens": 3}'))
    answer = connection.recv(65536)
    assert not answer or answer.split(b" ", 2)[1] in (b"200", b"429", b"503"), answer


Deed = Callable[[socket.socket, random.Random], None]
DEEDS: list[Deed] = [wrong, wrong, gone, gone, garbage, short, honest]


def besiege(port: int, seed: int, failures: list[AssertionError]) -> None:
    chance = random.Random(seed)
    for _ in range(VISITS):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            if chance.random() < 0.5:  # a reset in place of a close
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            try:
                chance.choice(DEEDS)(connection, chance)
            except AssertionError as failure:
                failures.append(failure)


@contextlib.contextmanager
def silent(port: int, count: int, data: bytes) -> Iterator[None]:
    """Connections that stay open and say no more."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)).sendall(data)
        yield


@pytest.mark.parametrize("held", [b"", b"POST /v1/completions HT", post(b"{", 1000)], ids=["idle", "head", "body"])
def test_health_answers_in_time_throughout(bench: tuple[Live, Spy], held: bytes) -> None:
    """`held`: as many connections as are allowed are kept open, so that all else goes on at the edge."""
    server, spy = bench
    port, failures, times = int(server.url.rsplit(":", 1)[1]), list[AssertionError](), list[float]()
    threads = [threading.Thread(target=besiege, args=(port, seed, failures)) for seed in range(BESIEGERS)]
    with silent(port, LIMITS.max_connections, held):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError):
                # Beyond the spares a connection is closed at once, which is an answer in time too.
                assert httpx.get(server.url + "/health", timeout=IN_TIME).status_code == 200
            times.append(time.monotonic() - began)
            time.sleep(0.02)
        for thread in threads:
            thread.join()
    assert not failures and len(times) > 5 and max(times) < IN_TIME, (failures, max(times))
    wait(lambda: spy.is_quiet and not server.server.state.num_running)
    wait(lambda: server.server._http.servers[0].num_open == 0)
    spy.core.check_integrity()
    response = httpx.post(server.url + TEXT, json={"prompt": "To be", "max_tokens": 3})
    assert response.status_code == 200
    answers = httpx.get(server.url + "/metrics").text
    assert 'status="500"' not in answers and 'status="400"' in answers
