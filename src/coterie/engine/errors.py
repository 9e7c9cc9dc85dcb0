"""What the engine says at its door instead of accepting a request.

InvalidRequest is the caller's mistake (HTTP 400): it could never run here. EngineBusy asks to come back later (429 with
Retry-After). EngineDead means that the loop is gone (503). A failure *inside* a step is none of these: it ends its own
request with "error" (500).
"""

from __future__ import annotations

from coterie.spec.errors import CoterieError


class InvalidRequest(CoterieError):
    """A field of the request that cannot be honoured; `param` names the field, the message says what is possible."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class EngineBusy(CoterieError):
    """The queue is full; `retry_after` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(CoterieError):
    """The engine's loop has ended; nothing can be accepted until it is started again."""
