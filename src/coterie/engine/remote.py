"""Ranks on several machines, as `torchrun` starts them: one process for each rank, all with the same command.

The process of rank 0 is the front end and starts rank 0 beside itself. Every other one supervises its rank: it connects
to the front end, hands the connection to a child that is the rank, and starts another when that is lost, so that
torchrun, which would restart all for one, never sees a rank end. The front end is found through torchrun's own store;
a token from there keeps strangers out. Bytes are not encrypted, neither here nor between ranks: use a network of yours.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from coterie.engine.wire import Wire
from coterie.spec.errors import CoterieError

FIND_SECONDS = 300.0
"""Within which all machines must have started."""
GREET_SECONDS = 10.0
MOST_LIVES = 4
"""Children of a supervisor that end badly before it gives up."""
_KEY = "coterie/front-end"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class World:
    """What torchrun tells a process. `agent_store`: torchrun serves the store at (host, port); else rank 0 must."""

    rank: int
    size: int
    local_size: int
    host: str
    port: int
    agent_store: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> World | None:
        """From the variables that torchrun sets; None for a process that it did not start."""
        if not all(name in environment for name in _NAMES):
            return None
        rank, size, _, local_size, host, port = (environment[name] for name in _NAMES)
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(int(rank), int(size), int(local_size), host, int(port), agent)

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size


class Join(msgspec.Struct, frozen=True, tag="join"):
    """First words of a rank's connection: who it is, how many share its machine, where its model files are."""

    rank: int
    local_size: int
    model_path: str
    token: str


class RemoteChild:
    """A rank's process on another machine, as far as it can be had: killed by closing its connection, which ends it."""

    pid = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._killed = False

    def kill(self) -> None:
        """Cut the connection: a rank without its front end ends."""
        self._killed = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            _log.debug("the connection of a rank had ended already")

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status is not known: 0, as the connection has ended."""
        return 0

    def poll(self) -> int | None:
        """0 once it was killed."""
        return 0 if self._killed else None


class FrontDoor:
    """Where the front end waits for ranks of other processes. `incoming`: the type of their messages."""

    def __init__(self, world: World, incoming: Any) -> None:
        """Listen and make it known. Raises CoterieError if that cannot be."""
        self._incoming, self._token = incoming, secrets.token_hex(16)
        self._came: dict[int, SimpleQueue[tuple[Join, socket.socket, Wire[Any]]]] = {
            rank: SimpleQueue() for rank in range(1, world.size)
        }
        try:
            self._listener = socket.create_server((world.host, 0))
        except OSError as error:
            raise CoterieError(f"cannot listen for ranks on {world.host}: {error.strerror or error}") from error
        port = self._listener.getsockname()[1]
        self._store = _store(world)
        self._store.set(_KEY, json.dumps([world.host, port, self._token]))
        threading.Thread(target=self._accept, name="coterie-front-door", daemon=True).start()

    def take(self, rank: int, seconds: float = FIND_SECONDS) -> tuple[Join, Wire[Any], RemoteChild]:
        """The next connection of a rank. Raises CoterieError if none comes in time."""
        try:
            join, connection, wire = self._came[rank].get(timeout=seconds)
        except Empty:
            raise CoterieError(f"rank {rank} did not connect within {seconds:g} s") from None
        return join, wire, RemoteChild(connection)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(GREET_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire: Wire[Any] = Wire(connection, self._incoming)
        join = next(wire.receive(), None)
        if not isinstance(join, Join) or not hmac.compare_digest(join.token, self._token):
            _log.warning("a connection that is no rank's was closed")
            wire.close()
            return
        if join.rank not in self._came:
            _log.warning("a connection of rank %d, which there is not, was closed", join.rank)
            wire.close()
            return
        connection.settimeout(None)
        self._came[join.rank].put((join, connection, wire))


def supervise(world: World, model_path: str) -> None:
    """Run a rank that is not the first until the front end is done. Raises CoterieError if it cannot stay alive."""
    host, port, token = json.loads(_store(world).get(_KEY))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())  # the front end drains, then all ends
    for life in range(MOST_LIVES):
        time.sleep(min(life, 3))
        try:
            connection = socket.create_connection((host, port), GREET_SECONDS)
        except OSError as error:
            if life:
                return
            raise CoterieError(f"rank {world.rank} cannot reach the front end at {host}:{port}: {error}") from error
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Wire(connection, Join).send(Join(world.rank, world.local_size, model_path, token))
        command = [sys.executable, "-m", "coterie.engine.process", str(connection.fileno())]
        child = subprocess.Popen(command, pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL)
        connection.close()
        code = child.wait()
        if code == 0 or stopping.is_set():
            return
        _log.error("rank %d ended with status %d", world.rank, code)
    raise CoterieError(f"rank {world.rank} ended {MOST_LIVES} times; giving up")


def _store(world: World) -> Any:
    """torchrun's store, or one in its place."""
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise CoterieError("several ranks need torch: pip install 'coterie[torch]'") from error
    serves = world.rank == 0 and not world.agent_store
    patience = timedelta(seconds=FIND_SECONDS)
    try:
        return TCPStore(world.host, world.port, is_master=serves, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:
        raise CoterieError(f"cannot reach torchrun's store at {world.host}:{world.port}: {error}") from error


def is_orphan(parent: int) -> bool:
    """Whether the process that started this one has ended."""
    return os.getppid() != parent
