"""Run the server: bind the port first, answer /health while the model loads, serve, drain on SIGTERM or SIGINT.

The port is bound before anything is loaded, so that a port in use is one error line and not a minute's wait. Not here:
routes (`server.app`), command line flags, how an engine is made (`launch` is handed in).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from coterie.engine.messages import Stats
from coterie.server.acceptor import Acceptor, allow_files
from coterie.server.app import create_app
from coterie.server.config import LOOPBACK_HOSTS, ConnectionLimits, ServerConfig
from coterie.server.reload import Reloader
from coterie.server.state import ServerState
from coterie.server.tls import check_files, uvicorn_options
from coterie.spec.errors import CoterieError

if TYPE_CHECKING:
    from coterie.engine.frontend import AsyncEngine
    from coterie.observe.requests import RequestObserver

logger = logging.getLogger("coterie.server")

Launch = Callable[["RequestObserver"], "AsyncEngine"]
"""Makes the engine; called on a thread of its own, and told who observes its requests."""

Relaunch = Callable[[str, "RequestObserver"], "AsyncEngine"]
"""Likewise for the model in a folder or file, to exchange the model that is served."""

_LAST_WORDS_SECONDS = 2.0
"""Time for error events to reach clients when running requests are ended."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    launch: Launch,
    config: ServerConfig,
    on_ready: Callable[[str], None] | None = None,
    relaunch: Relaunch | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. `on_ready` gets the base URL once the model is loaded.

    Raises CoterieError if a TLS file is bad, the port cannot be bound or the model cannot be loaded. A second signal,
    or one while the model loads, stops at once.
    """
    if config.access.tls is not None:
        check_files(config.access.tls)
    limits = config.connections
    limits = replace(limits, max_connections=allow_files(limits.max_connections))
    config = replace(config, connections=limits)
    listener = bind(config.host, config.port)
    try:
        asyncio.run(Server(config, listener, relaunch).run(launch, on_ready))
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises CoterieError that says what to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CoterieError(f"cannot listen on host {host!r}: {error.strerror or error}; change --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        message = f"cannot listen on {host}:{port}: {reason}; choose another --port, or 0 for a free one"
        raise CoterieError(message) from error
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The base URL of a listening socket; a wildcard address is shown as loopback, where one can connect."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end the process before the engine is shut down, and with
    our way to take connections."""

    limits: ConnectionLimits
    on_refused: Callable[[], object]
    servers: list[Acceptor]  # type: ignore[assignment]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        self.servers = [Acceptor(self.limits, self.config, self.server_state, self.on_refused)]
        for acceptor, listener in zip(self.servers, sockets or [], strict=True):
            acceptor.start(listener)
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `Server`."""
        yield


class Server:
    """One run of the server on a bound socket."""

    def __init__(self, config: ServerConfig, listener: socket.socket, relaunch: Relaunch | None = None) -> None:
        self.state = ServerState(config)
        if config.access.admin is not None and relaunch is not None:
            observer = self.state.metrics
            self.state.reloader = Reloader(
                self.state, lambda path: _launched(lambda: relaunch(path, observer)), config.access.admin.folders
            )
        self._config = config
        self._listener = listener
        self._http = _Uvicorn(
            uvicorn.Config(
                create_app(self.state),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                log_level="error",  # of requests: what clients do wrong is answered, not logged
                timeout_keep_alive=config.connections.keep_alive_seconds,  # type: ignore[arg-type]
                timeout_graceful_shutdown=round(config.shutdown_seconds + 2 * _LAST_WORDS_SECONDS) + 1,
                **uvicorn_options(config.access.tls),
            )
        )
        self._http.limits = config.connections
        self._http.on_refused = self.state.metrics.connection_refused
        self._stopping = asyncio.Event()
        self._engine: AsyncEngine | None = None  # before it serves; then the state has it

    async def run(self, launch: Launch, on_ready: Callable[[str], None] | None) -> None:
        """Serve until `stop`, whatever happens inside."""
        config = self._config
        if config.host not in LOOPBACK_HOSTS and not config.access.api_keys:
            logger.warning("listening on %s without an API key: anyone who reaches it can use it", config.host)
        self._handle_signals()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        loading = asyncio.create_task(self._load(launch, on_ready))
        logging_stats = asyncio.create_task(self._log_stats())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is None:
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(serving)
            if loading.done():
                loading.result()
        finally:
            for task in (loading, logging_stats, stopping):
                task.cancel()
            await asyncio.gather(loading, logging_stats, stopping, return_exceptions=True)
            if self.state.reloader is not None:
                await self.state.reloader.close()
            for engine in (self._engine, None if self.state.loaded is None else self.state.loaded.engine):
                if engine is not None:
                    await engine.shutdown(drain=False)

    def stop(self) -> None:
        """Begin to shut down; the second call does not wait for running requests."""
        if self._stopping.is_set():
            self._http.force_exit = True
            self.state.stop_all("the server was stopped")
        self._stopping.set()

    async def _load(self, launch: Launch, on_ready: Callable[[str], None] | None) -> None:
        engine = await _launched(lambda: launch(self.state.metrics))
        self._engine = engine
        while not engine.is_ready():
            if not engine.is_alive():
                raise CoterieError("the engine ended while it was loading")
            await asyncio.sleep(0.02)
        self.state.set_engine(engine)
        self._engine = None
        if on_ready is not None:
            on_ready(url_of(self._listener, "http" if self._config.access.tls is None else "https"))

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Answer new requests with 503, let running ones finish for a while, then end them with an error; then close.

        The port stays open meanwhile: a client that is told to come back knows more than one that finds nobody.
        """
        self.state.phase = "draining"
        if count := self.state.num_running:
            seconds = self._config.shutdown_seconds
            logger.info("stopping: %d requests may run on for %g s; a second signal ends them at once", count, seconds)
        idle = asyncio.create_task(self._until_idle())
        await asyncio.wait({serving, idle}, timeout=self._config.shutdown_seconds, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if self.state.is_busy:
            logger.warning("%d requests still run after the shutdown timeout; ended", self.state.num_running)
            self.state.stop_all("the server is shutting down")
        self._http.should_exit = True
        await serving

    async def _until_idle(self) -> None:
        while self.state.is_busy:
            await asyncio.sleep(0.02)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        # Off the main thread (tests, embedding) signals cannot be had; there `stop` is called instead.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            for number in _SIGNALS:
                loop.add_signal_handler(number, self.stop)

    async def _log_stats(self) -> None:
        """A line about throughput every `stats_log_seconds`, only while something runs."""
        interval = self._config.stats_log_seconds
        if interval <= 0:
            return
        before: Stats | None = None
        at = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            model = self.state.loaded
            now, stats = time.monotonic(), None if model is None else model.engine.stats()
            if stats is not None and (line := stats_line(before, stats, now - at)):
                logger.info(line)
            before, at = stats, now


def _launched(launch: Callable[[], AsyncEngine]) -> asyncio.Future[AsyncEngine]:
    """Load on a daemon thread: stopping the server does not wait for it, and an engine nobody wants is shut down."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[AsyncEngine] = loop.create_future()

    def deliver(engine: AsyncEngine | None, error: Exception | None) -> None:
        if future.cancelled():
            if engine is not None:
                threading.Thread(target=discard, args=(engine,), daemon=True).start()
        elif engine is not None:
            future.set_result(engine)
        else:
            future.set_exception(error or CoterieError("the engine could not be launched"))

    def discard(engine: AsyncEngine) -> None:
        asyncio.run(engine.shutdown(drain=False))

    def body() -> None:
        engine, failure = None, None
        try:
            engine = launch()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, engine, failure)
        except RuntimeError:  # the loop is closed: the server has ended meanwhile
            if engine is not None:
                discard(engine)

    threading.Thread(target=body, name="coterie-load", daemon=True).start()
    return future


def stats_line(before: Stats | None, now: Stats, seconds: float) -> str | None:
    """What the engine did in the last `seconds`, None if it did nothing."""
    prompt = now.prompt_tokens - (0 if before is None else before.prompt_tokens)
    generated = now.generation_tokens - (0 if before is None else before.generation_tokens)
    if not (prompt or generated or now.num_running or now.num_waiting):
        return None
    queries = now.prefix_queries - (0 if before is None else before.prefix_queries)
    hits = now.prefix_hits - (0 if before is None else before.prefix_hits)
    return (
        f"running {now.num_running} | waiting {now.num_waiting} | KV {now.kv_usage:.1%} | "
        f"prompt {prompt / seconds:.1f} tok/s | generation {generated / seconds:.1f} tok/s | "
        f"prefix hits {hits / queries if queries else 0:.0%}"
    )
