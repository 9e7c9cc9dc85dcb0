"""THE TRANSPORT DOOR: collectives between ranks on host memory, what can go wrong in them, and what callers check.

An exchange returns a `Handle`; the caller yields it (a stage generator waits nowhere else) and then takes its result.
Every rank of a group enters the same exchanges in the same order. A receiver knows its counts: it took them from an
`all_gather` before, because a payload whose two sides disagree on sizes ends processes in some backends. Rows are numpy
arrays of any type and travel as bytes. `comm.local` is N ranks in one process, `comm.torch_dist` is processes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import CoterieError

Int64 = NDArray[np.int64]
Counts = Sequence[int] | NDArray[np.integer[Any]]


class TransportError(CoterieError):
    """An exchange that cannot complete. The group is of no further use; a new generation has to be made."""


class RankLost(TransportError):
    """Some ranks did not answer. `missing` are their numbers in the group; empty if this rank itself is cut off."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class Aborted(TransportError):
    """`abort` was called while an exchange was awaited."""


class CountMismatch(TransportError):
    """Two ranks disagree on how much one sends to the other; nothing of the payload was sent."""


class Handle(Protocol):
    """A pending exchange."""

    @property
    def begun_ns(self) -> int:
        """When it was posted (monotonic clock)."""

    @property
    def ended_ns(self) -> int:
        """When it was complete; 0 until then, and not later than the end of `wait` once that has returned."""

    @property
    def carries_rows(self) -> bool:
        """Whether it is a payload, which takes its time, and not a word between the ranks."""

    def ready(self) -> bool:
        """Whether `result` may be called: always true where it can block, so that every rank goes the same way."""

    def wait(self) -> None:
        """Block until it is complete. Raises `TransportError`."""

    def result(self) -> Any:
        """What arrived, waited for; valid once. Raises `TransportError`."""


class Transport(Protocol):
    """One rank's view of its group. `bytes_to` [size] counts what was sent to each rank since creation.

    `stamp_ends`: handles are to note when an exchange was complete, not when somebody had waited for it.
    """

    rank: int
    size: int
    bytes_to: Int64
    stamp_ends: bool

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for other ranks now, in this group or in one of its parts; any thread may ask."""

    def all_gather(self, values: Int64) -> Handle:
        """Equal vectors [n] of all ranks -> int64 [size, n]."""

    def all_to_all_v(
        self, rows: NDArray[Any], sent: Counts, received: Counts, out: NDArray[Any] | None = None
    ) -> Handle:
        """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1 ... -> rows by source rank.

        `out` (contiguous, the same row shape and type, exactly sum(received) rows) receives them if given. `rows` must
        not change before the result is taken.
        """

    def subgroup(self, name: str, ranks: Sequence[int]) -> Transport:
        """The group of some ranks, this one among them, numbered in the order given; its members call with one name,
        in one order; a second call of one name makes another group."""

    def set_timeout(self, seconds: float) -> None:
        """How long later exchanges may take: long to load and warm up, short to serve."""

    def abort(self) -> None:
        """End every exchange that is awaited (from another thread too) with `Aborted`, and refuse new ones."""


def check_counts(
    transport: Transport, rows: NDArray[Any], sent: Counts, received: Counts
) -> tuple[list[int], list[int]]:
    """Both counts as lists, after refusing what is wrong on this side of an `all_to_all_v`."""
    size, rank = transport.size, transport.rank
    to, came = np.asarray(sent, np.int64).tolist(), np.asarray(received, np.int64).tolist()
    if len(to) != size or len(came) != size:
        raise CountMismatch(f"{len(to)} counts to send and {len(came)} to receive for {size} ranks")
    if min(to) < 0 or min(came) < 0 or sum(to) != len(rows):
        raise CountMismatch(f"rank {rank} has {len(rows)} rows, and its counts {to} sum to {sum(to)}")
    if to[rank] != came[rank]:
        raise CountMismatch(f"rank {rank} sends itself {to[rank]} rows and expects {came[rank]}")
    return to, came


def result_array(rows: NDArray[Any], total: int, out: NDArray[Any] | None) -> NDArray[Any]:
    """Where `total` rows like `rows` are received: `out` if it fits, a new array if none is given."""
    shape = (total, *rows.shape[1:])
    if out is None:
        return np.empty(shape, rows.dtype)
    if out.shape != shape or out.dtype != rows.dtype or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, not a contiguous {rows.dtype} {list(shape)}")
    return out


def as_bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of contiguous rows [n, bytes of a row], not a copy."""
    if not rows.flags.c_contiguous:
        raise ValueError("an exchange takes contiguous rows")
    width = rows.itemsize * math.prod(rows.shape[1:])
    return rows.reshape(-1).view(np.uint8).reshape(len(rows), width)


def check_agreement(transport: Transport, what: str, value: str) -> None:
    """Wait until all ranks have said their value; raise `TransportError` that names the ranks that differ from rank 0.

    Meant for start-up: versions, model and placement digests, capacities.
    """
    own = np.frombuffer(hashlib.sha256(value.encode()).digest()[:8], np.int64)
    said = transport.all_gather(own).result()[:, 0]
    different = [str(rank) for rank in range(transport.size) if said[rank] != said[0]]
    if different:
        raise TransportError(
            f"ranks differ in {what}: rank {', '.join(different)} from rank 0 (rank {transport.rank} has {value})"
        )
