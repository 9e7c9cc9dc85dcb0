"""What the engine says at its door instead of accepting a request.

InvalidRequest is the caller's mistake (HTTP 400): it could never run here. EngineBusy asks to come back later (429 with
Retry-After). EngineDead means that the loop is gone (503). A failure *inside* a step is none of these: it ends its own
request with "error" (500). EngineRecovering: a rank was lost and others are taking over (503 with Retry-After).
Desynchronised never leaves the engine.
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


class EngineRecovering(CoterieError):
    """Nothing new is taken until the ranks that are left, or a restarted one, serve again."""

    def __init__(self, message: str, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Desynchronised(CoterieError):
    """This rank left a step in the middle of its exchanges, in which its peers are: all need a new generation.

    `own`: it was this rank's fault; else a peer was lost, or the group was given up.
    """

    def __init__(self, message: str, *, own: bool, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.own, self.missing = own, missing
