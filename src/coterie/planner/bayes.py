"""A hierarchical fit of few parameters on few measurements: Gauss-Newton on log values with Gaussian priors.

Every case has a form, log value = f(z), where z are logarithms of multipliers of prior parameters (0: the prior). z of
a case is a sum of deviations, one for each level of grouping that the case belongs to (all, engine, model class, ...),
each with its own prior width, so a group with no measurement falls back on those above it and its interval widens.
A smooth residual is shared by cases of one class with near features. In covariance form, solved with one factorisation
of n x n (kriging with a linearised trend; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2.7). Heavy
tails: weights of a Student t with 4 degrees of freedom. Not here: what the forms are (`planner/served.py`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Form = Callable[[Vector], float]
_STEP = 0.03
_FREEDOM = 4.0


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement or question. form: z [K] to the log of the value. labels: its group at each level, "" for none.
    features: coordinates of the smooth residual, in length scales. noise: standard deviation of the log value."""

    name: str
    form: Form
    labels: tuple[str, ...]
    features: tuple[float, ...]
    noise: float
    log_value: float = math.nan


@dataclass(frozen=True, slots=True)
class Prior:
    """widths [levels, K]: standard deviations of the deviations at each level. residual: (level, sd over noise) pairs
    of the smooth residual among cases with the same label at that level."""

    names: tuple[str, ...]
    levels: tuple[str, ...]
    widths: tuple[tuple[float, ...], ...]
    residual: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Linear:
    """A measurement as the fit left it: `target` is the observed log value less f(z) - jacobian z, so that the solution
    is linear in it; weight: how much it counts, 1 as a Gaussian would."""

    name: str
    labels: tuple[str, ...]
    features: tuple[float, ...]
    noise: float
    weight: float
    jacobian: tuple[float, ...]
    target: float


@dataclass(frozen=True, slots=True)
class Answer:
    """log value, standard deviation without noise, and z [K]."""

    mean: float
    spread: float
    z: Vector


class Fit:
    """The solution for measurements that are linearised; `fit` makes it from cases. Without any it is the prior."""

    def __init__(self, prior: Prior, rows: Sequence[Linear]):
        self.prior, self.rows = prior, tuple(rows)
        self._widths = np.array(prior.widths)
        count = len(self.rows)
        self._labels = np.array([row.labels for row in self.rows], dtype=object).reshape(count, len(prior.levels))
        self._features = np.array([row.features for row in self.rows]).reshape(count, -1 if count else 1)
        self._jacobian = np.array([row.jacobian for row in self.rows]).reshape(count, len(prior.names))
        self._noise = np.array([row.noise for row in self.rows])
        trend, smooth = self._covariance(self._labels, self._features, self._jacobian, self._noise)
        weight = np.array([row.weight for row in self.rows])
        self._inverse = np.linalg.inv(trend + smooth + np.diag(self._noise**2 / weight)) if count else np.zeros((0, 0))
        self.dual = self._inverse @ np.array([row.target for row in self.rows])

    def _covariance(
        self, labels: NDArray[np.object_], features: Vector, jacobian: Vector, noise: Vector
    ) -> tuple[Vector, Vector]:
        """Prior covariance [m, n] of given cases with those of the fit: of the trend and of the smooth residual."""
        trend = np.zeros((len(labels), len(self.rows)))
        smooth = np.zeros_like(trend)
        if not self.rows:
            return trend, smooth
        distance = ((features[:, None, :] - self._features[None, :, :]) ** 2).sum(-1)
        near = noise[:, None] * self._noise[None, :] * np.exp(-distance / 2)
        for level, widths in enumerate(self._widths):
            same = (labels[:, None, level] == self._labels[None, :, level]) & (labels[:, None, level] != "")
            trend += same * ((jacobian * widths**2) @ self._jacobian.T)
            for name, width in self.prior.residual:
                if name == self.prior.levels[level]:
                    smooth += same * width**2 * near
        return trend, smooth

    def _shared(self, labels: tuple[str, ...]) -> NDArray[np.bool_]:
        """[levels, n]: whether a case of the fit is of the same group."""
        own = np.array(labels, dtype=object)[:, None]
        return np.asarray((own == self._labels.T) & np.array([[label != ""] for label in labels]), dtype=bool)

    def z_of(self, labels: tuple[str, ...]) -> Vector:
        """Posterior mean of z [K] for a case with such labels."""
        weight = (self._shared(labels)[:, :, None] * self._widths[:, None, :] ** 2).sum(0)
        return np.asarray((weight * self._jacobian).T @ self.dual)

    def answer(self, case: Case) -> Answer:
        """What the fit says of a case, whether it has seen it or not."""
        z = self.z_of(case.labels)
        value, slopes = slope(case.form, z)
        known = np.array([label != "" for label in case.labels])
        variance = float((slopes**2 * (self._widths[known] ** 2).sum(0)).sum())
        for name, width in self.prior.residual:
            variance += (width * case.noise) ** 2 if case.labels[self.prior.levels.index(name)] else 0.0
        labels = np.array([case.labels], dtype=object)
        features = np.array([case.features]).reshape(1, -1)
        trend, smooth = self._covariance(labels, features, slopes[None, :], np.array([case.noise]))
        cross = (trend + smooth)[0]
        variance -= float(cross @ self._inverse @ cross)
        return Answer(value + float(smooth[0] @ self.dual), math.sqrt(max(variance, 1e-8)), z)

    def noise_share(self) -> Vector:
        """[n]: what the fit leaves to noise of each measurement, in standard deviations of the noise."""
        weight = np.array([row.weight for row in self.rows])
        return np.asarray(self._noise / weight * self.dual)

    def members(self, labels: tuple[str, ...]) -> dict[str, int]:
        """How many measurements of the fit share the label of each level."""
        return dict(zip(self.prior.levels, (int(count) for count in self._shared(labels).sum(1)), strict=True))

    def without(self, names: Collection[str]) -> Fit:
        """The solution for all other measurements, with the linearisation of this one."""
        return Fit(self.prior, [row for row in self.rows if row.name not in names])


def fit(cases: Sequence[Case], prior: Prior, *, rounds: int = 8, start: Fit | None = None) -> Fit:
    """Linearise at the solution, solve, reweight, and again; from the prior or from another fit's solution."""
    solution = start or Fit(prior, ())
    weights = {row.name: row.weight for row in solution.rows}
    points = {case.name: solution.z_of(case.labels) for case in cases}
    for number in range(rounds):
        rows = []
        for case in cases:
            value, slopes = slope(case.form, points[case.name])
            target = case.log_value - value + float(slopes @ points[case.name])
            weight = weights.get(case.name, 1.0)
            rows.append(Linear(case.name, case.labels, case.features, case.noise, weight, tuple(slopes), target))
        solution = Fit(prior, rows)
        if number == rounds - 1:
            break
        for row, share in zip(rows, solution.noise_share(), strict=True):
            weights[row.name] = (_FREEDOM + 1) / (_FREEDOM + float(share) ** 2)
        for case in cases:
            step = solution.z_of(case.labels) - points[case.name]
            points[case.name] = points[case.name] + np.clip(step, -1.0, 1.0)
    return solution


def slope(form: Form, z: Vector) -> tuple[float, Vector]:
    """Value and forward differences of a form at z [K]."""
    value = form(z)
    slopes = np.empty(len(z))
    for index in range(len(z)):
        moved = z.copy()
        moved[index] += _STEP
        slopes[index] = (form(moved) - value) / _STEP
    return value, slopes
