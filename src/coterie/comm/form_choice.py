"""Which form the exchange takes: expected times first, measured ones where those are near each other.

At start the exact forms whose expected times (`comm.probe`) lie near the least exchange rows of random routing in
turns, and one that is clearly faster is taken; so do messages of fixed capacity against the sized form in short steps.
While serving `FormChoice` compares what the form in use takes with what the other took, which is looked at again now
and then, the more rarely the worse it was. Everything is decided from gathered numbers, so all ranks decide alike. How
rows are exchanged in a trial is `engine.form_trial`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.comm.exchange import Exchange, FormName, FormPolicy
from coterie.comm.live import Rates
from coterie.comm.mesh import Mesh
from coterie.comm.probe import Links, Traffic, choose, choose_short, exact_forms, expected_seconds, probe_links
from coterie.comm.transport import Handle, Int64, Transport
from coterie.kernels.select import Choice
from coterie.spec.placement import ExpertPlacement

NEAR = 1.5
"""Forms expected to take at most this many times the least are tried: each expectation may be off by a fifth."""
TRIAL_SECONDS, SHORT_SECONDS = 1.5, 0.3
"""What all timed rounds of a trial of long and of short steps may take together."""
TRIAL_BYTES = 32 << 20
"""That a rank may send in one exchange of a trial."""
LEAST_ROUNDS, MOST_ROUNDS, CLEAR = 3, 9, 0.75
"""Timed ones of each form. The least median counts if it was the least in this part of the rounds."""
PART = 16
"""Exchanges whose time is taken together; the best part counts: a rank that is late for other reasons slows others."""
CHANGED = 1.5
"""A form that takes so many times what it took, or less by that, has other links: what the others took is void."""
SMOOTHING = 0.5
RETRY_WINDOWS, MOST_RETRY_WINDOWS = 32, 512
"""Windows between two looks at a form that lost narrowly; one that took r times as long waits r^2 times as many."""

Trial = Callable[[Mesh, FormPolicy, int], Generator[Handle, None, float]]
"""Exchanges rows of random routing of so many tokens a rank by a policy; how many seconds that took on this rank."""


class FormChoice:
    """The form of later batches. A window of serving says more than the few rounds of trials, so the other form is
    looked at in the second one. Time is kept as a multiple of what the links at start let expect: batches may differ
    in size."""

    def __init__(self, mesh: Mesh, links: Links, traffic: Traffic) -> None:
        self.mesh, self.links, self.traffic = mesh, links, traffic
        none = replace(traffic, tokens=0)
        self._fixed = {form: expected_seconds(form, mesh, links, none) for form in exact_forms(mesh)}
        self._each = {form: expected_seconds(form, mesh, links, replace(traffic, tokens=1)) - fixed
                      for form, fixed in self._fixed.items()}  # fmt: skip
        self._known: dict[FormName, float] = {}
        self._waits, self._trying = 1, False
        self._pending: tuple[FormName, float] | None = None
        self._begin(None)

    def _begin(self, form: FormName | None) -> None:
        """Measure a form from here on."""
        self._form, self._parts = form, list[float]()
        self._seconds, self._number, self._tokens = 0.0, 0, 0.0
        self._all = (0, 0.0)

    def entered(self, form: FormName, pairs: Int64) -> None:
        self._pending = form, float(pairs.sum()) / (self.traffic.top_k * self.mesh.world.size)

    def heard(self, nanoseconds: int) -> None:
        pending, self._pending = self._pending, None
        if pending is None or (self._form is not None and pending[0] != self._form):
            return
        self._form = pending[0]
        self._seconds += nanoseconds / 1e9
        self._number += 1
        self._tokens += pending[1]
        if self._number == PART and self._form in self._fixed:
            self._parts.append(self._seconds / self._expected(self._form, (self._number, self._tokens)))
            self._all = self._all[0] + self._number, self._all[1] + self._tokens
            self._seconds, self._number, self._tokens = 0.0, 0, 0.0

    def _expected(self, form: FormName, size: tuple[int, float]) -> float:
        """Seconds of (exchanges, tokens in them) on the links as they were at start."""
        return size[0] * self._fixed[form] + size[1] * self._each[form]

    def conclude(self, rates: Rates, policy: FormPolicy) -> FormPolicy:
        form = policy.sized
        now = Links(self.links.latency, rates.inside or self.links.inside, rates.between or self.links.between)
        forms = near(self.mesh, now, self.traffic)
        if form not in forms or len(forms) == 1:
            self._known.clear()
            self._waits, self._trying = RETRY_WINDOWS, False
            return self._take(choose(self.mesh, now, self.traffic)[0].sized, policy)
        if self._form != form or not self._parts:
            return policy
        size, took = self._all, min(self._parts)
        before = self._known.get(form, took)
        changed = not 1 / CHANGED < took / before < CHANGED
        self._known = {} if changed else self._known
        self._known[form] = took if changed else before + SMOOTHING * (took - before)
        return self._take(self._next(form, forms, size, changed), policy)

    def _take(self, form: FormName, policy: FormPolicy) -> FormPolicy:
        self._begin(form)
        return replace(policy, sized=form)

    def _next(self, form: FormName, forms: Sequence[FormName], size: tuple[int, float], changed: bool) -> FormName:
        """The form of the next window; `size`: of what was measured in this one."""
        other = next(name for name in forms if name != form)
        costs = {name: self._known[name] * self._expected(name, size) for name in forms if name in self._known}
        best = min(costs, key=lambda name: costs[name])
        if self._trying and not changed:
            self._trying = False
            worse = max(costs.values()) / costs[best]
            self._waits = int(min(RETRY_WINDOWS * worse**2, MOST_RETRY_WINDOWS))
            return best
        self._waits -= 1
        self._trying = changed or self._waits <= 0
        return other if self._trying else best


def near(mesh: Mesh, links: Links, traffic: Traffic) -> list[FormName]:
    """The exact forms whose expected times are near the least."""
    seconds = {form: expected_seconds(form, mesh, links, traffic) for form in exact_forms(mesh)}
    return [form for form in seconds if seconds[form] <= NEAR * min(seconds.values())]


class Found(NamedTuple):
    """What trials have shown. `clear`: the best one was the faster one in most rounds too, and not by chance."""

    best: int
    clear: bool
    text: str


def settle(
    mesh: Mesh, links: Links, traffic: Traffic, trial: Trial
) -> Generator[Handle, None, tuple[FormPolicy, tuple[Choice, ...]]]:
    """The policy that is expected to be fastest, or that is clearly found so where several may be, and why."""
    policy, (choice, *rest) = choose(mesh, links, traffic)
    forms = near(mesh, links, traffic)
    if len(forms) > 1:
        most = max(1, min(traffic.tokens, TRIAL_BYTES // (traffic.out_bytes + traffic.top_k * traffic.back_bytes)))
        expected = sum(expected_seconds(form, mesh, links, replace(traffic, tokens=most)) for form in forms)
        warm = max(1, min(most // 4, int(most * TRIAL_SECONDS / 8 / expected)))
        tokens, rounds = yield from _rounds(mesh, trial, [FormPolicy(form) for form in forms], (warm, most))
        idle = np.array([expected_seconds(form, mesh, links, replace(traffic, tokens=0)) for form in forms])
        whole = idle + np.maximum(rounds - idle, 0) * (traffic.tokens / tokens)
        found = _found(forms, whole)
        best = forms[found.best] if found.clear else policy.sized
        few = "" if tokens == traffic.tokens else f" (from {tokens} tokens)"
        policy, choice = FormPolicy(best), Choice(choice.what, best, f"{choice.reason}; {found.text}{few}")
    if traffic.small:
        policy, short = choose_short(policy, mesh, links, traffic)
        tries, sizes = [FormPolicy(policy.sized), FormPolicy(policy.sized, traffic.small)], (traffic.small,) * 2
        names = [policy.sized, "fixed capacity"]
        _, rounds = yield from _rounds(mesh, trial, tries, sizes, SHORT_SECONDS)
        found = _found(names, rounds)
        policy = tries[found.best] if found.clear else policy
        rest = [Choice(short.what, names[policy.capacity > 0], f"{short.reason}; {found.text}")]
    return policy, (choice, *rest)


def _found(names: Sequence[str], rounds: NDArray[np.float64]) -> Found:
    """What rounds [n, policies] say."""
    median = np.median(rounds, axis=0)
    best = int(np.argmin(median))
    won = float((rounds.argmin(1) == best).mean())
    times = ", ".join(f"{name} {took * 1e3:.1f} ms" for name, took in zip(names, median.tolist(), strict=True))
    clear = won >= CLEAR
    return Found(best, clear, f"tried: {times}" + ("" if clear else ", which is too near to tell"))


def _rounds(
    mesh: Mesh, trial: Trial, policies: Sequence[FormPolicy], tokens: tuple[int, int], limit: float = TRIAL_SECONDS
) -> Generator[Handle, None, tuple[int, NDArray[np.float64]]]:
    """With how many tokens each policy was tried, and its seconds on the slowest rank [rounds, policies]. `tokens`: of
    the first rounds, and the most; fewer are taken if they would need more than `limit` seconds in all."""

    def once(count: int, turn: int = 0) -> Generator[Handle, None, NDArray[np.float64]]:
        own = np.zeros(len(policies))
        for index in range(len(policies))[:: -1 if turn % 2 else 1]:
            own[index] = yield from trial(mesh, policies[index], count)
        handle = mesh.world.all_gather(own.view(np.int64))
        yield handle
        slowest: NDArray[np.float64] = handle.result().view(np.float64).max(0)
        return slowest

    warm, most = tokens
    yield from once(warm)  # makes buffers
    fit = limit / float((yield from once(warm, 1)).sum()) * warm
    count = most if warm == most else max(1, min(most, int(fit / LEAST_ROUNDS)))
    if warm < count == most:  # else the links are so slow that growing buffers do not show
        yield from once(count)
    number, found = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(fit / count))), []
    for turn in range(number):
        found.append((yield from once(count, turn)))
    return count, np.array(found)


def open_exchange(
    world: Transport,
    placement: ExpertPlacement,
    traffic: Traffic,
    wanted: FormPolicy | None = None,
    trial: Trial | None = None,
) -> Generator[Handle, None, tuple[Exchange, tuple[Choice, ...]]]:
    """Make a rank's exchange in the form that was asked for, or in what is best (exact): by a probe of the links and,
    where that leaves it open, by trials; without `trial` serving alone tells."""
    rows = Choice("exchange rows", f"{traffic.out_bytes} B out, {traffic.back_bytes} B back",
                  "out as the experts' kernel reads them, back as exchange_dtype says")  # fmt: skip
    mesh = Mesh.of(world, placement.node_of_rank)
    if wanted is not None:
        return Exchange(mesh, placement, wanted), (Choice("exchange", wanted.sized, "asked for"), rows)
    links = yield from probe_links(mesh)
    if trial is None:
        policy, chosen = choose(mesh, links, traffic)
    else:
        policy, chosen = yield from settle(mesh, links, traffic, trial)
    chooser = FormChoice(mesh, links, traffic) if mesh.has_rails else None
    exchange = Exchange(mesh, placement, policy, chooser)
    exchange.links.rates = [links.inside, links.between]
    return exchange, (*chosen, rows)
