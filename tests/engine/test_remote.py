"""What torchrun says of a process, the door at which ranks of other machines come in, and their supervisors."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from coterie.cli.parallel import parallel_config
from coterie.cli.serve import serve
from coterie.engine import remote
from coterie.engine.process import FromChild
from coterie.engine.remote import FrontDoor, Join, RemoteChild, World
from coterie.engine.wire import Wire
from coterie.spec.errors import CoterieError

WORLD = World(0, 4, 2, "127.0.0.1", 1, agent_store=True)
SAID = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
VALUES = {
    "tp": 1, "dp": None, "ep": None, "nodes": 1, "redundant_experts": 12, "restart_ranks": True, "overlap": "auto",
    "rebalance_steps": 0, "rebalance_moves": 2, "rebalance_rate": 64.0, "stall_seconds": 30.0,
}  # fmt: skip


def test_the_world_is_torchruns() -> None:
    assert World.of({}) is None and World.of({"RANK": "1"}) is None
    world = World.of(SAID)
    assert world == World(3, 4, 2, "10.0.0.1", 29500, agent_store=True) and world.num_nodes == 2
    layout = parallel_config(VALUES, world)
    assert (layout.num_ranks, layout.nodes, layout.redundant_experts) == (4, 2, 12)
    with pytest.raises(click.UsageError, match="torchrun has started 4 for --ep, not 3"):
        parallel_config(VALUES | {"ep": 3}, world)


def test_a_model_is_not_exchanged_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors end when the first model is drained, so the ranks of another would be waited for in vain."""
    key = tmp_path / "key"
    key.write_text("a-secret-of-the-operator")
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(serve, ["--admin-key-file", str(key), "--admin-model-dir", str(tmp_path)])
    assert done.exit_code == 2 and "under torchrun the model cannot be exchanged" in done.output


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> tuple[FrontDoor, tuple[str, int], str]:
    said: dict[str, str] = {}
    monkeypatch.setattr(remote, "_store", lambda world: SimpleNamespace(set=said.__setitem__))
    front = FrontDoor(WORLD, FromChild)
    host, port, token = json.loads(said["coterie/front-end"])
    return front, (host, port), token


def come(address: tuple[str, int], message: Any) -> socket.socket:
    connection = socket.create_connection(address, 5)
    Wire(connection, Join).send(message)
    return connection


def test_ranks_come_in_and_strangers_do_not(door: Any) -> None:
    front, address, token = door
    for stranger in (Join(1, 2, "m", "guess"), Join(9, 2, "m", token)):
        connection = come(address, stranger)
        assert connection.recv(1) == b"", "closed"
    with pytest.raises(CoterieError, match=r"rank 1 did not connect within 0\.1 s"):
        front.take(1, 0.1)
    first = come(address, Join(2, 2, "/models/m", token))
    join, wire, child = front.take(2, 5)
    assert (join.rank, join.local_size, join.model_path) == (2, 2, "/models/m") and child.poll() is None
    wire.send(Join(0, 0, "", ""))
    assert first.recv(4)
    child.kill()
    deadline = time.monotonic() + 5
    while first.recv(4096):
        assert time.monotonic() < deadline
    assert child.poll() == 0


def test_a_connection_that_has_ended_is_passed_over(door: Any) -> None:
    """A rank that lost its cable while nobody waited for it comes again; its first connection is of no use."""
    front, address, token = door
    come(address, Join(3, 2, "old", token)).close()
    come_again = come(address, Join(3, 2, "new", token))
    join, _, _ = front.take(3, 5)
    assert join.model_path == "new"
    come_again.close()
    with pytest.raises(CoterieError, match="rank 3 did not connect"):
        front.take(3, 0.2)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def child_with(connection: socket.socket, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], pass_fds=[connection.fileno()])


def test_a_supervisor_sees_its_rank_end(pair: Any) -> None:
    child = child_with(pair[0], "raise SystemExit(3)")
    assert remote._attend(child, pair[0]) == (3, False)


def test_a_hung_rank_whose_connection_ends_is_killed(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not read what it was sent, so the end lies behind unread bytes."""
    monkeypatch.setattr(remote, "GO_SECONDS", 0.1)
    child = child_with(pair[0], "import time; time.sleep(600)")
    child.send_signal(signal.SIGSTOP)
    pair[1].sendall(b"unread")
    threading.Timer(0.2, RemoteChild(pair[1]).kill).start()
    assert remote._attend(child, pair[0]) == (-signal.SIGKILL, True)


def test_the_front_end_is_looked_for_while_it_is_out_of_reach_and_not_once_it_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[float] = []
    answers: list[OSError] = [OSError(113, "No route to host"), TimeoutError("timed out"), ConnectionRefusedError()]

    def connect(address: Any, timeout: float) -> socket.socket:
        tries.append(timeout)
        raise answers[len(tries) - 1]

    monkeypatch.setattr(remote, "socket", SimpleNamespace(create_connection=connect))
    stopping = SimpleNamespace(is_set=lambda: False, wait=lambda seconds: None)
    assert remote._reach(WORLD, ("10.0.0.1", 1), 60.0, stopping) is None and len(tries) == 3
    for patience in (0.0, -1.0):  # at the start, and after so long
        tries.clear()
        with pytest.raises(CoterieError, match=r"rank 0 cannot reach the front end at 10\.0\.0\.1:1: .*No route"):
            remote._reach(WORLD, ("10.0.0.1", 1), patience, stopping)
    stopped = SimpleNamespace(is_set=lambda: True)
    assert remote._reach(WORLD, ("10.0.0.1", 1), 60.0, stopped) is None
