"""Ranks on several machines, as `torchrun` starts them: one process for each rank, all with the same command.

The process of rank 0 is the front end and starts rank 0 beside itself. Every other one supervises its rank: it connects
to the front end, shares the connection with a child that is the rank, kills a child whose connection has ended and
starts another, so that torchrun, which would restart all for one, never sees a rank end. A connection over a cable that
is out ends by itself. The front end is found through torchrun's own store; a token from there keeps strangers out.
Bytes are not encrypted, neither here nor between ranks: use a network of yours.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import select
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
AWAY_SECONDS = 3600.0
"""How long a rank that was lost and its front end look for each other again, as when a cable is out."""
GREET_SECONDS = 10.0
SILENT_SECONDS = 8.0
"""After which a connection whose other end acknowledges nothing has ended. Later than the front end's beats."""
GO_SECONDS = 2.0
"""In which a child ends by itself once its connection has; then it is killed."""
MOST_LIVES = 4
"""Children of a supervisor that end by themselves within `CALM_SECONDS` each before it gives up."""
CALM_SECONDS = 300.0
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
    """A rank's process on another machine, as far as it can be had: its supervisor ends it with its connection."""

    pid = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._killed = False

    def kill(self) -> None:
        """Cut the connection."""
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
        """The next connection of a rank that is still there. Raises CoterieError if none comes in time."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                join, connection, wire = self._came[rank].get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise CoterieError(f"rank {rank} did not connect within {seconds:g} s") from None
            if not _has_ended(connection):
                return join, wire, RemoteChild(connection)
            wire.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(GREET_SECONDS)
        _prepare(connection)
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
    connection = _reach(world, (host, port), 0.0, stopping)
    bad = 0
    while connection is not None:
        _prepare(connection)
        Wire(connection, Join).send(Join(world.rank, world.local_size, model_path, token))
        command = [sys.executable, "-m", "coterie.engine.process", str(connection.fileno())]
        child = subprocess.Popen(command, pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL)
        born = time.monotonic()
        code, was_cut_off = _attend(child, connection)
        connection.close()
        if code == 0 or stopping.is_set():
            return
        how = "its connection had ended" if was_cut_off else "by itself"
        _log.error("rank %d ended with status %d, %s", world.rank, code, how)
        if not was_cut_off:
            bad = bad + 1 if time.monotonic() - born < CALM_SECONDS else 1
        if bad == MOST_LIVES:
            raise CoterieError(f"rank {world.rank} ended {MOST_LIVES} times; giving up")
        time.sleep(min(bad, 3))
        connection = _reach(world, (host, port), AWAY_SECONDS, stopping)


def _reach(world: World, address: tuple[str, int], seconds: float, stopping: threading.Event) -> socket.socket | None:
    """Connect to the front end, which may be out of reach for some seconds; None when it or this process is done.

    Raises CoterieError if it cannot be reached; one that refuses has ended, which is an error only for 0 seconds.
    """
    deadline, told = time.monotonic() + seconds, False
    while not stopping.is_set():
        try:
            connection = socket.create_connection(address, GREET_SECONDS)
        except OSError as error:
            if seconds and isinstance(error, ConnectionRefusedError):
                return None
            if time.monotonic() >= deadline:
                where = f"{address[0]}:{address[1]}"
                raise CoterieError(f"rank {world.rank} cannot reach the front end at {where}: {error}") from error
            if not told:
                _log.error("rank %d looks for the front end: %s", world.rank, error)
            told = True
            stopping.wait(1.0)
        else:
            connection.settimeout(None)
            return connection
    return None


def _attend(child: subprocess.Popen[bytes], connection: socket.socket) -> tuple[int, bool]:
    """Wait for the end of a child; returns its status, and whether its connection ended first.

    Without its front end a child ends, unless it hangs: then it is killed.
    """
    process = os.pidfd_open(child.pid)
    try:
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.register(process, select.POLLIN)
        was_cut_off = connection.fileno() in dict(poll.poll())
    finally:
        os.close(process)
    if was_cut_off:
        try:
            child.wait(GO_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.wait(), was_cut_off


def _prepare(connection: socket.socket) -> None:
    """Let small messages go at once, and let the connection end if the other machine is out of reach."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, int(SILENT_SECONDS) - 2),
        (socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other end has gone."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


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
