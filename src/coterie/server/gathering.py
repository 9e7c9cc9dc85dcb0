"""Whole answers: a Generation's events gathered as they come, so that its end has little left to do.

A gatherer does its work in steps that are small for the event loop (`server.turns`). Not here: what an answer holds
(the gatherers in `server.chat`, `server.completions` and `server.responses`), streams (`server.streaming`).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from coterie.server.generation import Event, Generation
from coterie.server.streaming import Tally
from coterie.server.turns import Turn


class Gatherer:
    """Gathers one request's events. A subclass says what becomes of them."""

    def __init__(self, prompt_tokens: int) -> None:
        self.tally = Tally(prompt_tokens)

    def take(self, event: Event) -> Iterator[int]:
        """Take an event in small steps; each gives the bytes of JSON that it made."""
        raise NotImplementedError

    def answer(self) -> Struct:
        """The whole answer, once all events were taken."""
        raise NotImplementedError


async def gathered(generation: Generation, gatherer: Gatherer) -> Struct:
    """The answer of a run, once it has ended. Others have their turns meanwhile."""
    turn = Turn()
    while (events := await generation.next_events()) is not None:
        for event in events:
            gatherer.tally.add(event)
            for made in gatherer.take(event):
                if turn.spend(made):
                    await turn.give()
    return gatherer.answer()
