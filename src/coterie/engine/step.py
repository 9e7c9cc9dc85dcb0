"""Step: a schedule in the making, the scheduler's notes while it gives out one step's tokens. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from coterie.engine.request import Request


@dataclass(slots=True)
class Step:
    """`tokens` and `rows` are what nobody has; `tokens_left` and `rows_left` how many of them the class `rank`, whose
    turn it is, may still take. `lends`: classes have had what is their own, now they may take more. `now`: seconds on
    the clock of arrival times.

    deferred: waiting requests that wait on, for pages that another is computing just now. refused: no room for them.
    """

    now: float
    tokens: int
    rows: int
    rank: int = 0
    lends: bool = False
    tokens_left: int = 0
    rows_left: int = 0
    grants: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    deferred: set[Request] = field(default_factory=set)
    refused: set[Request] = field(default_factory=set)

    def begin_turn(self, rank: int, tokens: int, rows: int) -> None:
        """Let a class take up to so many tokens and rows."""
        self.rank, self.tokens_left, self.rows_left = rank, min(tokens, self.tokens), min(rows, self.rows)

    def grant(self, request: Request, count: int) -> None:
        """Give a request so many tokens more."""
        self._take(request.rank, count, 0 if request in self.grants else 1)
        self.grants[request] = self.grants.get(request, 0) + count

    def revoke(self, request: Request) -> None:
        """Take back all that a request was given."""
        if request in self.grants:
            self._take(request.rank, -self.grants.pop(request), -1)

    def _take(self, rank: int, tokens: int, rows: int) -> None:
        self.tokens -= tokens
        self.rows -= rows
        if rank == self.rank:
            self.tokens_left -= tokens
            self.rows_left -= rows

    def served(self, num_classes: int) -> list[tuple[int, int]]:
        """(prompt tokens, decoded tokens) given to each class."""
        served = [(0, 0)] * num_classes
        for request, count in self.grants.items():
            prompt, decoded = served[request.rank]
            decodes = request.num_uncomputed_tokens == 1
            served[request.rank] = (prompt, decoded + 1) if decodes else (prompt + count, decoded)
        return served
