"""RequestObserver: the events of a request's life, told by the front end. The base class ignores them all.

One request is one event of each kind, whatever n is: `first_token` at most once, `finished` exactly once for each
`queued`. Seconds, never milliseconds. Not a metric by itself: the server hands in a subclass that publishes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """A finished request. Tokens are those of `usage`: the prompt once, completions without tokens past a stop string.

    `reason` of several choices: error before abort before length before stop. `first_token`: seconds from arrival to
    the first token of any choice, None if none came. `queue` and `prefill`: seconds from arrival to the first computed
    chunk of the choice that answered first, and from there to its first news; both None if there were none.
    `service_class`: None without classes; `deadline`: seconds that the class's first token may take.
    """

    reason: Reason
    num_choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    first_token: float | None
    queue: float | None = None
    prefill: float | None = None
    service_class: str | None = None
    deadline: float = float("inf")


class RequestObserver:
    """Told by the thread that reads the engine's news; a method must not block."""

    def queued(self, prompt_tokens: int) -> None:
        """A valid request was handed to the engine."""

    def refused(self, service_class: str) -> None:
        """A valid request of a class found no place and was told to come back later. Without classes nobody says so."""

    def first_token(self, seconds: float) -> None:
        """The first token of any choice came, this long after arrival."""

    def token_gap(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` further tokens of one choice came together, this long after the one before."""

    def finished(self, summary: RequestSummary) -> None:
        """The request ended, in whatever way."""
