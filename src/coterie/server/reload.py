"""POST /v1/admin/reload: another model takes over without a lost request. Only with an admin key and allowed folders.

The new model is loaded beside the old one, which serves on meanwhile; so memory must hold both, and if the new one
cannot be loaded nothing has changed. Then requests go to the new model, those that the old one has begun end there, and
only then is it given up. With `drain` the old one ends its requests and is given up first, new ones are told to come
back, and if the new one cannot be loaded none serves. One reload at a time. Not here: how a model is loaded (`relaunch`
is handed in).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.engine.build import open_model
from coterie.model.gguf_file import find_gguf
from coterie.server.answers import Reloaded
from coterie.server.errors import ApiError, Fault, bad_request, unavailable
from coterie.spec.errors import CoterieError

if TYPE_CHECKING:
    from coterie.engine.frontend import AsyncEngine
    from coterie.server.state import ServerState

logger = logging.getLogger("coterie.server")

_POLL_SECONDS = 0.05
Relaunch = Callable[[str], Awaitable["AsyncEngine"]]
"""Loads the model in a folder or file and starts its engine, without blocking the event loop. Raises CoterieError."""


class Reloader:
    """Owns the engines after the first. `folders`: whatever is to be loaded must lie within one of them."""

    def __init__(self, state: ServerState, relaunch: Relaunch, folders: tuple[str, ...]) -> None:
        self._state, self._relaunch = state, relaunch
        self._folders = tuple(Path(folder).expanduser().resolve() for folder in folders)
        self._busy = False
        self._retiring: asyncio.Task[None] | None = None

    async def reload(self, model: str, *, drain: bool = False) -> Reloaded:
        """Load a model and let it take over. Raises ApiError; then the model that served before still does, unless with
        `drain` the new one's weights could not be loaded."""
        path = self._checked(model)
        if self._busy or (self._retiring is not None and not self._retiring.done()):
            message = "another reload has not ended: its old model still answers requests; try again later"
            raise ApiError(Fault(409, message, code="reload_in_progress", retry_after=5))
        if self._state.phase != "no model":
            self._state.model()  # it may be loading, or shutting down
        self._busy = True
        try:
            started = time.monotonic()
            if drain or self._state.loaded is None:
                engine = await self._in_turn(path)
            else:
                engine = await self._beside(path, self._state.loaded.engine)
            current = self._state.model()
            seconds = time.monotonic() - started
            return Reloaded(model=current.name, max_model_len=engine.max_model_len, seconds=seconds)
        finally:
            self._busy = False

    async def _beside(self, path: Path, old: AsyncEngine) -> AsyncEngine:
        """Load while the old model serves, then change over."""
        logger.info("loading %s beside the model that serves", path)
        engine = await self._load(path, "the model before it still serves")
        logger.info("%s serves from now on; the model before it ends what it has begun", engine.model_name)
        self._retiring = asyncio.create_task(self._retire(old))
        return engine

    async def _in_turn(self, path: Path) -> AsyncEngine:
        """Give the old model up, then load. What shows without reading weights is refused before anything changes."""
        state = self._state
        try:
            await asyncio.to_thread(open_model, str(path))
        except CoterieError as error:
            raise _rejected(error, "nothing has changed") from error
        if state.phase == "draining":
            raise unavailable("the server is shutting down", retry_after=30, code="shutting_down")
        state.phase = "exchanging"
        try:
            await self._end_old(path)
            await asyncio.to_thread(gc.collect)  # engines are parts of cycles
            engine = await self._load(path, "the old model is gone and none serves: send another reload")
        finally:
            if state.phase == "exchanging":
                state.phase = "no model" if state.loaded is None else "ready"
        logger.info("%s serves from now on", engine.model_name)
        return engine

    async def _end_old(self, path: Path) -> None:
        """Wait until the old model has answered what it has begun, and let go of it."""
        served = self._state.loaded
        if served is None:
            return
        engine = served.engine
        logger.info("%s is to be exchanged for %s: it ends what it has begun", engine.model_name, path)
        while self._state.is_used(engine):
            await asyncio.sleep(_POLL_SECONDS)
        self._state.give_up(engine)
        await engine.shutdown(drain=False)

    async def close(self) -> None:
        """The server ends: nobody waits for old requests any more."""
        if self._retiring is not None:
            self._retiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._retiring

    async def _load(self, path: Path, otherwise: str) -> AsyncEngine:
        """The new engine, serving. Whatever goes wrong is an ApiError, and a half-started engine is ended."""
        try:
            engine = await self._relaunch(str(path))
        except CoterieError as error:
            raise _rejected(error, otherwise) from error
        try:
            self._state.set_engine(engine)
        except CoterieError as error:
            await engine.shutdown(drain=False)
            raise _rejected(error, otherwise) from error
        return engine

    async def _retire(self, engine: AsyncEngine) -> None:
        """End an engine once nobody uses it."""
        try:
            while self._state.is_used(engine):
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await engine.shutdown(drain=False)
        logger.info("%s has answered all its requests and is gone", engine.model_name)

    def _checked(self, model: str) -> Path:
        """Where the model lies; one answer for all that may not be loaded, so that nothing is learnt of the disk."""
        for folder in self._folders:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                path = (folder / model).resolve(strict=True)
                if path.is_relative_to(folder) and ((path / "config.json").is_file() or find_gguf(path)):
                    return path
        message = f"model: {model[:200]!r} is no model within the folders that --admin-model-dir allows"
        raise ApiError(Fault(403, message, param="model", code="model_not_allowed"))


def _rejected(error: CoterieError, otherwise: str) -> ApiError:
    return bad_request(f"model: {error}; {otherwise}", "model", "model_rejected")
