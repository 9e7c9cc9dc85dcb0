"""Acceptor: takes connections off the listening socket, no more at once than the limits allow, and never stops.

Beyond the limit the connection that has rested longest gives way. If none does, the new one is a *spare*: it is asked
what it wants and told 503, unless it asks for the server's health. Of those there are few; further ones are closed. For
the case that no file descriptor is left, one is kept in reserve, to take the next connection and close it. Log lines
about all this are rare.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState as UvicornState

from coterie.server.config import ConnectionLimits
from coterie.server.connection import Connection
from coterie.server.errors import error_response, unavailable
from coterie.server.limits import OPEN_PATHS

logger = logging.getLogger("coterie.server")

SPARES = 32
"""Connections beyond the limit, for answers of one request."""
SPARE_SECONDS = 2.0
"""How long they may take to ask."""
PATIENCE = 1.0
"""Seconds that a connection may rest before it must give way; a request that is under way is there sooner."""
OTHER_FILES = 128
"""Descriptors that are left to everything else."""
_AT_ONCE = 64
_PAUSE = 0.2
_SAY_AGAIN = 60.0
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """One listening socket's. `on_refused` is told of each connection for which there was no room: told 503, closed, or
    answered about health only."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        state: UvicornState,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        self.limits = limits
        self._on_refused = on_refused
        self._config, self._state = config, state
        self._spare_app = _only_health(config.loaded_app)
        self._connections: set[Connection] = set()
        self._spares: set[Connection] = set()
        self._resting: dict[Connection, float] = {}  # since when; who has rested longest is the first
        self._arriving: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._reserve: int | None = None
        self._say = _Rarely()

    def start(self, listener: socket.socket) -> None:
        """Take connections from now on."""
        self._listener = listener
        self._keep_reserve()
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Take no more."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener = None
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        for task in self._arriving:
            task.cancel()

    async def wait_closed(self) -> None:
        """For uvicorn, which waits for its servers."""

    # The keeper's part

    def rests(self, connection: Connection) -> None:
        """It waits for a request from now on."""
        self._resting.setdefault(connection, time.monotonic())

    def works(self, connection: Connection) -> None:
        """It has one."""
        self._resting.pop(connection, None)

    def leaves(self, connection: Connection) -> None:
        """It is closed."""
        self._resting.pop(connection, None)
        self._connections.discard(connection)
        self._spares.discard(connection)

    # Taking connections

    @property
    def num_open(self) -> int:
        """Connections, those in their TLS handshake included, spares not."""
        return len(self._connections) - len(self._spares)

    def _accept(self) -> None:
        """The socket is readable."""
        for _ in range(_AT_ONCE):
            if self._listener is None:
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._out_of_files(error)
                return
            accepted.setblocking(False)
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        if self.num_open < self.limits.max_connections or self._make_room():
            connection = Connection(self, self._config, self._state)
        else:
            self._on_refused()
            self._say(f"{self.limits.max_connections} connections are open, more are refused (--max-connections)")
            if len(self._spares) >= SPARES:
                accepted.close()
                return
            connection = Connection(self, self._config, self._state, self._spare_app, SPARE_SECONDS)
            self._spares.add(connection)
        self._connections.add(connection)
        task = self._loop.create_task(self._arrive(accepted, connection))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _arrive(self, accepted: socket.socket, connection: Connection) -> None:
        """Give it a transport, with TLS after the handshake."""
        context = self._config.ssl
        seconds = None if context is None else self.limits.max_header_seconds
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=None if context is None else _PAUSE,
            )
        except (OSError, asyncio.CancelledError) as error:  # of TLS too
            logger.debug("a connection ended before it began: %r", error)
            self.leaves(connection)
            accepted.close()

    def _make_room(self) -> bool:
        """Close the connection that has rested longest; False if none has for a while."""
        for connection, since in self._resting.items():
            if time.monotonic() - since < PATIENCE:
                return False
            if connection not in self._spares:
                del self._resting[connection]
                self._connections.discard(connection)
                connection.end()
                return True
        return False

    # File descriptors

    def _out_of_files(self, error: OSError) -> None:
        """Free one or two descriptors and pause."""
        self._say(f"no connection can be taken: {error.strerror}; raise the limit of open files (ulimit -n)")
        self._make_room()
        if self._reserve is not None and self._listener is not None:
            os.close(self._reserve)
            self._reserve = None
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
                self._on_refused()
        self._keep_reserve()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_PAUSE, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            self._keep_reserve()
            self._loop.add_reader(self._listener, self._accept)

    def _keep_reserve(self) -> None:
        if self._reserve is None:
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY)


class _Rarely:
    """Logs a warning of each kind once a minute."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def __call__(self, message: str) -> None:
        now = time.monotonic()
        if now - self._said.get(message, -_SAY_AGAIN) >= _SAY_AGAIN:
            self._said[message] = now
            logger.warning(message)


def _only_health(app: ASGIApp) -> ASGIApp:
    """The application for load balancers and orchestrators; a 503 for everybody else."""
    error = unavailable("the server has as many connections as it takes; try again later", 5, "too_many_connections")
    answer = error_response(error, {"Connection": "close"})

    async def spare(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] in OPEN_PATHS else answer)(scope, receive, send)

    return spare


def allow_files(connections: int) -> int:
    """Let the process open files for so many connections; returns how many the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARES + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = max(1, soft - SPARES - OTHER_FILES)
    logger.warning("--max-connections %d is lowered to %d: the system allows %d open files", connections, allowed, soft)
    return allowed
