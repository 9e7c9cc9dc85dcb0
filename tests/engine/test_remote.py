"""What torchrun says of a process, and the door at which ranks of other machines come in."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace
from typing import Any

import click
import pytest

from coterie.cli.parallel import parallel_config
from coterie.engine import remote
from coterie.engine.process import FromChild
from coterie.engine.remote import FrontDoor, Join, World
from coterie.engine.wire import Wire
from coterie.spec.errors import CoterieError

WORLD = World(0, 4, 2, "127.0.0.1", 1, agent_store=True)
SAID = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
VALUES = {
    "tp": 1, "dp": None, "ep": None, "nodes": 1, "redundant_experts": 12, "restart_ranks": True, "overlap": "auto",
    "rebalance_steps": 0, "rebalance_moves": 2, "rebalance_rate": 64.0,
}  # fmt: skip


def test_the_world_is_torchruns() -> None:
    assert World.of({}) is None and World.of({"RANK": "1"}) is None
    world = World.of(SAID)
    assert world == World(3, 4, 2, "10.0.0.1", 29500, agent_store=True) and world.num_nodes == 2
    layout = parallel_config(VALUES, world)
    assert (layout.num_ranks, layout.nodes, layout.redundant_experts) == (4, 2, 12)
    with pytest.raises(click.UsageError, match="torchrun has started 4 for --ep, not 3"):
        parallel_config(VALUES | {"ep": 3}, world)


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
