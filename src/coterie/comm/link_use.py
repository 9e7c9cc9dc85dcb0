"""LinkUse: what a rank's payloads carried over each class of hop, beside what the links could have carried meanwhile.

A class is in use while at least one payload with bytes for it is under way; then the link could carry its rate, as it
was probed when all ranks sent at once. Sums since the start, so that they add up over ranks and windows. Small words
between ranks are not counted, and nothing is decided here (`comm.live`).
"""

from __future__ import annotations

from coterie.comm.mesh import HOPS

CLASSES = HOPS[:2]
"""Of what a rank tells apart while it serves; racks are other nodes."""


class LinkUse:
    """`rates`: bytes per second of this rank by class; 0 where they are not known, and then nothing is said of use.
    `sent`, `could`: bytes since the start by class."""

    def __init__(self) -> None:
        self.rates = [0.0] * len(CLASSES)
        self.sent = [0] * len(CLASSES)
        self.could = [0.0] * len(CLASSES)
        self._until = [0] * len(CLASSES)

    def carried(self, nbytes: tuple[int, int], begun_ns: int, ended_ns: int) -> None:
        """Note a payload's bytes by class, from posting to completion (monotonic clock). Payloads that are under way
        together share the link's time."""
        for hop, count in enumerate(nbytes):
            if not count:
                continue
            self.sent[hop] += count
            fresh = ended_ns - max(begun_ns, self._until[hop])
            self._until[hop] = max(self._until[hop], ended_ns)
            self.could[hop] += max(fresh, 0) / 1e9 * self.rates[hop]

    def by_class(self) -> dict[str, tuple[int, float]]:
        """Bytes sent and bytes that could have been, by class, where there were any."""
        return {name: (self.sent[hop], self.could[hop]) for hop, name in enumerate(CLASSES) if self.sent[hop]}
