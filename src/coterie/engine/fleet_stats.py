"""Stats of several ranks as those of one engine. Gauges are of the ranks that live, counters of all that ever did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from coterie.engine.messages import ClassStats, GroupStats, Stats

_COUNTERS = (
    "num_preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "steps",
    "experts_moved",
)  # fmt: skip
_OF_ALL = ("move_cycles", "moves_failed")
"""Counters of what all ranks do together: each counts the same, and one that came later has missed some."""


class Totals:
    """What lost ranks had counted: totals never fall."""

    def __init__(self) -> None:
        self._lost: list[Stats] = []

    def lose(self, stats: Stats | None) -> None:
        """Keep a lost rank's last word."""
        if stats is not None:
            self._lost = [merged([*self._lost, stats], [])]

    def of(self, living: Sequence[Stats], group: GroupStats) -> Stats:
        """The engine's Stats."""
        return merged(living, self._lost, group)


def merged(living: Sequence[Stats], lost: Sequence[Stats], group: GroupStats | None = None) -> Stats:
    """Sums; of the share of the caches in use the mean, as they are of one size, and the longest step. Balancedness is
    the same on all ranks."""
    every = [*living, *lost]
    seconds: Counter[str] = Counter()
    for stats in every:
        seconds.update(stats.stage_seconds)
    return Stats(
        num_running=sum(stats.num_running for stats in living),
        num_waiting=sum(stats.num_waiting for stats in living),
        kv_usage=sum(stats.kv_usage for stats in living) / max(1, len(living)),
        num_free_blocks=sum(stats.num_free_blocks for stats in living),
        **{name: sum(getattr(stats, name) for stats in every) for name in _COUNTERS},
        **{name: max((getattr(stats, name) for stats in every), default=0) for name in _OF_ALL},
        stage_seconds=dict(seconds),
        prefill_rate=sum(stats.prefill_rate for stats in living),
        step_seconds=max((stats.step_seconds for stats in living), default=0.0),
        classes=_classes(living, lost),
        group=group,
        balancedness=next((stats.balancedness for stats in living if stats.balancedness), {}),
        hops=_hops(every),
    )


def _hops(every: Iterable[Stats]) -> dict[str, tuple[int, float]]:
    """Sums by class of hop."""
    sums: dict[str, tuple[int, float]] = {}
    for stats in every:
        for name, (sent, could) in stats.hops.items():
            before = sums.get(name, (0, 0.0))
            sums[name] = before[0] + sent, before[1] + could
    return sums


def _classes(living: Sequence[Stats], lost: Sequence[Stats]) -> tuple[ClassStats, ...]:
    names = dict.fromkeys(one.name for stats in (*living, *lost) for one in stats.classes)

    def every(name: str, some: Iterable[Stats]) -> list[ClassStats]:
        return [one for stats in some for one in stats.classes if one.name == name]

    result = []
    for name in names:
        now, ever = every(name, living), every(name, (*living, *lost))
        result.append(
            ClassStats(
                name,
                sum(one.num_running for one in now),
                sum(one.num_waiting for one in now),
                sum(one.prompt_tokens for one in ever),
                sum(one.decode_tokens for one in ever),
                sum(one.evictions for one in ever),
            )
        )
    return tuple(result)
