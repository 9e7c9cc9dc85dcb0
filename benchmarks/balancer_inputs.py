"""Seeded expert loads to judge a balancer by, and EPLB's published algorithm, re-stated for comparison only.

Loads are in token-assignments of 8192 tokens x top-8: no expert can have more than one in eight of all, so raw weights
become inclusion probabilities p = min(1, c w) that sum to 8. The EPLB part follows its description (balanced packing,
greedy replication, hierarchical or global); it knows no current placement and splits a load equally among copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]
TOKENS, TOP_K, EXPERTS, GROUPS = 8192, 8, 256, 8

README = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    np.float64,
)
FLASHLB = np.array([[600, 560, 120, 120, 20, 10, 10, 10]], np.float64)


def assignments(weights: Loads, tokens: int = TOKENS, top_k: int = TOP_K) -> Loads:
    """Raw weights [L, E] -> expected assignments: inclusion probabilities capped at one, times tokens."""
    probability = np.zeros_like(weights)
    capped = np.zeros(weights.shape, bool)
    while True:
        room = top_k - capped.sum(1, keepdims=True)
        free = np.where(capped, 0, weights)
        probability = np.where(capped, 1.0, room * free / free.sum(1, keepdims=True))
        over = probability > 1
        if not over.any():
            return probability * tokens
        capped |= over


def zipf(layers: int, exponent: float, rng: np.random.Generator) -> Loads:
    weights = 1 / np.arange(1, EXPERTS + 1) ** exponent
    return np.stack([weights[rng.permutation(EXPERTS)] for _ in range(layers)])


def skewed(layers: int, low: float, high: float, rng: np.random.Generator) -> Loads:
    sigma = rng.uniform(low, high, (layers, 1))
    groups = rng.normal(0, 0.3, (layers, GROUPS)).repeat(EXPERTS // GROUPS, 1)
    return np.exp(rng.normal(0, 1, (layers, EXPERTS)) * sigma + groups)


def hotgroup(layers: int, rng: np.random.Generator) -> Loads:
    weights = np.full((layers, EXPERTS), 0.15)
    for row in weights:
        row[rng.integers(GROUPS) * (EXPERTS // GROUPS) + rng.permutation(EXPERTS // GROUPS)[:8]] = 3.0
    return weights


def max9(layers: int, rng: np.random.Generator) -> Loads:
    weights = rng.uniform(0.5, 1.5, (layers, EXPERTS)) * 1e-3
    for row in weights:
        row[rng.permutation(EXPERTS)[:9]] = rng.uniform(0.95, 1.05, 9)
    return weights


def two(layers: int, rng: np.random.Generator) -> Loads:
    weights = np.ones((layers, EXPERTS))
    for row in weights:
        row[rng.permutation(EXPERTS)[: EXPERTS * 2 // 5]] = 2.01
    return weights * rng.uniform(0.97, 1.03, weights.shape)


def inputs(layers: int, seed: int = 0) -> dict[str, Loads]:
    """Every input by name, each from its own generator, so that one more changes none of the others."""
    makers: dict[str, Callable[[np.random.Generator], Loads]] = {
        f"zipf {exponent:.1f}": lambda rng, exponent=exponent: zipf(layers, exponent, rng)  # type: ignore[misc]
        for exponent in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
    }
    makers["layerskew"] = lambda rng: skewed(layers, 0.3, 1.1, rng)
    makers["real"] = lambda rng: skewed(layers, 0.6, 1.4, rng)
    makers["hotgroup"] = lambda rng: hotgroup(layers, rng)
    makers["max9"] = lambda rng: max9(layers, rng)
    makers["two"] = lambda rng: two(layers, rng)
    return {name: assignments(make(np.random.default_rng([seed, n]))) for n, (name, make) in enumerate(makers.items())}


def drift(layers: int, windows: int, rho: float, seed: int = 0) -> Loads:
    """Loads [windows, L, E]: an AR(1) process of log-loads (sigma 0.8), each window seen with noise 0.15."""
    rng = np.random.default_rng([seed, round(rho * 100)])
    state = rng.normal(0, 0.8, (layers, EXPERTS))
    series = []
    for _ in range(windows):
        series.append(assignments(np.exp(state + rng.normal(0, 0.15, state.shape))))
        state = rho * state + np.sqrt(1 - rho**2) * rng.normal(0, 0.8, state.shape)
    return np.stack(series)


def noisy(loads: Loads, seed: int = 0) -> Loads:
    """What a batch brings where `loads` was planned."""
    return loads * np.exp(np.random.default_rng([seed, 77]).normal(0, 0.25, loads.shape))


def routed_tokens(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """Expert ids [T, K] of group-limited routing: the best 4 of 8 groups of a token, then its top 8 among them.

    A token leans to some groups (affinity), experts are as unequally popular as in `real`.
    """
    shape = np.random.default_rng([seed, 5])
    popularity = shape.normal(0, 0.8, EXPERTS) + shape.normal(0, 0.3, GROUPS).repeat(EXPERTS // GROUPS)
    rng = np.random.default_rng([seed, 6, tokens])
    affinity = rng.normal(0, 1.0, (tokens, GROUPS)).repeat(EXPERTS // GROUPS, 1)
    score = popularity + affinity + rng.gumbel(0, 1.0, (tokens, EXPERTS))
    by_group = np.sort(score.reshape(tokens, GROUPS, -1), -1)[..., -2:].sum(-1)
    allowed = by_group >= np.sort(by_group, 1)[:, GROUPS // 2, None]
    score = np.where(allowed.repeat(EXPERTS // GROUPS, 1), score, -np.inf)
    return np.argsort(-score, 1, kind="stable")[:, :TOP_K]


def eplb(loads: Loads, num_slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int64]:
    """EPLB's placement [L, S]: hierarchical where the nodes divide the groups, else global."""
    if groups % nodes:
        groups = nodes = 1
    return np.stack([_eplb_layer(row, num_slots, groups, nodes, ranks) for row in loads])


def _eplb_layer(load: Loads, num_slots: int, groups: int, nodes: int, ranks: int) -> NDArray[np.int64]:
    members = np.arange(len(load)).reshape(groups, -1)
    result = []
    for chosen in _pack(load[members].sum(1), nodes):
        experts = members[chosen].ravel()
        copies = np.ones(len(experts), np.int64)
        slots = list(range(len(experts)))
        for _ in range(num_slots // nodes - len(experts)):
            hottest = int(np.argmax(load[experts] / copies))
            copies[hottest] += 1
            slots.append(hottest)
        each = (load[experts] / copies)[slots]
        result += [experts[slots[item]] for pack in _pack(each, ranks // nodes) for item in pack]
    return np.array(result)


def _pack(weights: Loads, packs: int) -> list[list[int]]:
    """Heaviest first, each into the lightest pack that has room; every pack ends with equally many."""
    room = len(weights) // packs
    content: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in np.argsort(-weights, kind="stable"):
        pack = min((pack for pack in range(packs) if len(content[pack]) < room), key=total.__getitem__)
        content[pack].append(int(item))
        total[pack] += float(weights[item])
    return content
