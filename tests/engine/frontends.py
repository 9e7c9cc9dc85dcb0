"""What the tests of AsyncEngine share: one on a mock model, with a log of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mock_engine import greedy, make_core, make_engine

from coterie.engine.core import EngineCore
from coterie.engine.frontend import AsyncEngine
from coterie.engine.messages import Abort, SamplingParams, ToEngine
from coterie.observe.requests import RequestObserver, RequestSummary

PROMPT = list(b"The quick brown")
ANSWER = bytes(greedy(PROMPT, 40)).decode()
Body = Callable[[AsyncEngine], Awaitable[None]]


def params(max_tokens: int | None = 40, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **values)


class Log(RequestObserver):
    """Keeps every event."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.first: list[float] = []
        self.gaps: list[int] = []
        self.ended: list[RequestSummary] = []

    def queued(self, prompt_tokens: int) -> None:
        self.started.append(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def token_gap(self, seconds: float, num_tokens: int) -> None:
        self.gaps.append(num_tokens)

    def finished(self, summary: RequestSummary) -> None:
        self.ended.append(summary)


class Bench:
    """One engine on a thread: runs a coroutine with it, shuts it down, checks that nothing is left behind."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.log = Log()
        self.sent: list[ToEngine] = []

    def run(self, body: Body, core: EngineCore | None = None, **config: Any) -> EngineCore:
        core = core or make_core()

        async def main() -> None:
            engine = make_engine(self.folder, core, **config)
            engine.observer = self.log
            link = engine._link
            assert link is not None

            def send(message: ToEngine) -> None:
                self.sent.append(message)
                link.send(message)

            engine.connect(type(link)(send, link.join, link.kill))
            try:
                await asyncio.wait_for(body(engine), 30)
            finally:
                await asyncio.wait_for(engine.shutdown(drain=True), 30)

        asyncio.run(main())
        assert core.scheduler.pool.usage == 0 and not core.has_work
        core.check_integrity()
        assert len(self.log.started) == len(self.log.ended)
        assert len(self.log.first) == sum(summary.first_token is not None for summary in self.log.ended)
        return core

    @property
    def aborts(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Abort)]
