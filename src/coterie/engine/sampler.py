"""Sampler: one token from each row of logits, and log-probabilities. numpy only; knows no batch, no cache, no text.

A row's result depends on that row, its request and one uniform number: a function of (seed, sample index, token index),
so a retry, a preemption or another batch continues the same stream. Order of work on a row, as users of vLLM know it:
  grammar mask -> logit_bias -> min_tokens masks stops -> repetition, presence, frequency penalties -> temperature
  -> min_p -> top_k -> top_p -> draw
Log-probabilities are those of the row as the model gave it. All ties go to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from coterie.engine.grammar import GrammarError, Matcher
from coterie.engine.messages import SamplingParams, TokenLogprob
from coterie.engine.request import Request
from coterie.engine.sampling_params import GREEDY_TEMPERATURE

Row = NDArray[np.float32]
Ids = NDArray[np.intp]

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot spell."""
_FIRST_NUCLEUS = 256


class BadRow(ValueError):
    """Logits from which no token can be taken."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Per row: the token (-1 if the row is bad), its log-probabilities if asked for, and what was wrong."""

    token_ids: list[int]
    logprobs: list[list[TokenLogprob] | None]
    errors: list[str | None]


class Sampler:
    """Chooses tokens. `num_generated_ids`: ids from here on only pad the vocabulary and are never chosen."""

    def __init__(self, eos_token_ids: Sequence[int] = (), num_generated_ids: int | None = None) -> None:
        self._eos = tuple(eos_token_ids)
        self._limit = num_generated_ids
        self._histories: WeakKeyDictionary[Request, _History] = WeakKeyDictionary()
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()

    def constrain(self, request: Request, matcher: Matcher) -> None:
        """Let a request with a grammar, before its first token, have only tokens that `matcher` allows."""
        self._matchers[request] = matcher

    def sample(self, logits: NDArray[np.float32], requests: Sequence[Request]) -> SampledTokens:
        """Choose the next token of each request from its row of `logits` [n, vocab], which is left as it is."""
        logits = logits[:, : self._limit]
        result = SampledTokens([], [], [])
        best = logits.argmax(axis=1) if len(requests) else ()  # the first of equals; a NaN counts as the largest
        for row, request, greedy in zip(logits, requests, best, strict=True):
            token, logprobs, error = -1, None, None
            try:
                if not math.isfinite(row[greedy]):
                    raise BadRow(f"the model gave {row[greedy]} as a logit")
                token = int(greedy) if self._takes_argmax(request) else self._choose(row, request)
                if request.params.logprobs is not None:
                    logprobs = token_logprobs(row, token, request.params.logprobs)
            except Exception as fault:  # whatever it is, it is this request's, and the others go on
                token, error = -1, str(fault) if isinstance(fault, BadRow | GrammarError) else repr(fault)
            result.token_ids.append(token)
            result.logprobs.append(logprobs)
            result.errors.append(error)
        return result

    def _takes_argmax(self, request: Request) -> bool:
        params = request.params
        return (
            params.temperature <= GREEDY_TEMPERATURE
            and params.grammar is None
            and not params.logit_bias
            and request.num_output_tokens >= params.min_tokens
            and not _has_penalties(params)
        )

    def _choose(self, row: Row, request: Request) -> int:
        params = request.params
        processed = self._process(row, request)
        if not math.isfinite(processed.max()):
            raise BadRow("every token is masked: the grammar, min_tokens and the stop tokens leave none to choose")
        if params.temperature <= GREEDY_TEMPERATURE:
            return int(processed.argmax())
        return draw(processed, params, uniform(request.seed, request.sample_index, request.num_output_tokens))

    def _process(self, row: Row, request: Request) -> Row:
        """Everything before the temperature, on a copy."""
        params, size = request.params, len(row)
        row = row.copy()
        if params.grammar is not None:
            matcher = self._matchers[request]
            matcher.advance(request.token_ids, request.num_prompt_tokens)
            row[~matcher.allowed()] = -np.inf
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
            row[ids[ids < size]] += values[ids < size]
        if request.num_output_tokens < params.min_tokens:
            stops = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos))
            row[[token for token in stops if token < size]] = -np.inf
        if _has_penalties(params):
            history = self._histories.get(request)
            if history is None:
                history = self._histories[request] = _History(request)
            history.catch_up(request)
            history.penalise(row, params)
        return row


class _History:
    """Which tokens a request has seen, kept up to date at the cost of its new tokens only.

    `new_ids`: generated ones that the prompt lacks, each once. `counts`: how often each was generated.
    """

    def __init__(self, request: Request) -> None:
        self._in_prompt = frozenset(request.prompt_token_ids)
        self.prompt_ids: Ids = np.fromiter(self._in_prompt, np.intp, len(self._in_prompt))
        self.new_ids: list[int] = []
        self.counts: dict[int, int] = {}
        self.num_counted = request.num_prompt_tokens

    def catch_up(self, request: Request) -> None:
        for token in request.token_ids[self.num_counted :]:
            if token not in self.counts and token not in self._in_prompt:
                self.new_ids.append(token)
            self.counts[token] = self.counts.get(token, 0) + 1
        self.num_counted = request.num_tokens

    def penalise(self, row: Row, params: SamplingParams) -> None:
        """Repetition reads prompt and output, presence and frequency the output only."""
        if params.repetition_penalty != 1.0:
            seen = np.concatenate([self.prompt_ids, np.asarray(self.new_ids, np.intp)])
            seen = seen[seen < len(row)]
            values, penalty = row[seen], np.float32(params.repetition_penalty)
            row[seen] = np.where(values > 0, values / penalty, values * penalty)
        ids = np.fromiter(self.counts.keys(), np.intp, len(self.counts))
        counts = np.fromiter(self.counts.values(), np.float32, len(self.counts))
        known = ids < len(row)
        row[ids[known]] -= np.float32(params.frequency_penalty) * counts[known] + np.float32(params.presence_penalty)


def uniform(seed: int, sample_index: int, token_index: int) -> float:
    """A number in [0, 1) that depends on its three arguments and on nothing else (Philox 4x64, 53 bits)."""
    key = np.array([seed % 2**64, sample_index], np.uint64)
    counter = np.array([token_index, 0, 0, 0], np.uint64)
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53


def draw(row: Row, params: SamplingParams, number: float) -> int:
    """Choose by the inverse of the distribution function, in order of token id, at `number` in [0, 1)."""
    with np.errstate(over="ignore"):  # a difference below the smallest float is a weight of zero
        weights = np.exp((row - row.max()) / np.float32(params.temperature))
    ids = candidates(row, weights, params)
    cumulative = np.cumsum(weights if ids is None else weights[ids], dtype=np.float64)
    total = cumulative[-1]
    place = min(int(np.searchsorted(cumulative, number * total, "right")), int(np.searchsorted(cumulative, total)))
    return place if ids is None else int(ids[place])


def candidates(row: Row, weights: Row, params: SamplingParams) -> Ids | None:
    """Ids in rising order that min_p, top_k and top_p leave; None for all. At least one, the most likely.

    row: logits, which give the order. weights: exp((row - max) / temperature), which give the shares.
    """
    ids: Ids | None = None
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights >= np.float32(params.min_p))
    if 0 < params.top_k < (len(row) if ids is None else len(ids)):
        ids = largest(row, params.top_k) if ids is None else ids[largest(row[ids], params.top_k)]
        ids.sort()
    if params.top_p < 1.0:
        kept = _nucleus(row, weights, params.top_p) if ids is None else _nucleus(row[ids], weights[ids], params.top_p)
        ids = kept if ids is None else ids[kept]
        ids.sort()
    return ids


def _nucleus(row: Row, weights: Row, top_p: float) -> Ids:
    """The fewest most likely places whose share of the weight reaches `top_p`. Sorts no more than it must."""
    target = top_p * weights.sum(dtype=np.float64)
    size = min(_FIRST_NUCLEUS, len(row))
    while True:
        order = largest(row, size)
        mass = np.cumsum(weights[order], dtype=np.float64)
        if mass[-1] >= target or size == len(row):
            return order[: int(np.searchsorted(mass, target, "left")) + 1]
        size = min(8 * size, len(row))


def largest(row: Row, count: int) -> Ids:
    """Places of the `count` largest values, the largest first, of equals the first place first."""
    if count >= len(row):
        return np.argsort(-row, kind="stable")
    if count < 1:
        return np.zeros(0, np.intp)
    bound = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > bound)
    ids = np.concatenate([above, np.flatnonzero(row == bound)[: count - len(above)]])
    return ids[np.argsort(-row[ids], kind="stable")]


def token_logprobs(row: Row, token: int, count: int) -> list[TokenLogprob]:
    """Log-probability and rank of `token` first, then the `count` most likely tokens (among which it may be again)."""
    top = row.max()
    if not math.isfinite(top):
        raise BadRow(f"the model gave {top} as a logit")
    with np.errstate(over="ignore"):
        normaliser = float(top) + math.log(np.exp(row - top).sum(dtype=np.float64))
    value = row[token]
    rank = 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token] == value))
    ranked = [(token, rank), *((int(best), place) for place, best in enumerate(largest(row, count), start=1))]
    return [TokenLogprob(best, max(float(row[best]) - normaliser, LOWEST_LOGPROB), place) for best, place in ranked]


def prompt_logprobs(rows: NDArray[np.float32], next_ids: Sequence[int], count: int) -> list[list[TokenLogprob]]:
    """Log-probabilities of the prompt tokens `next_ids`, each given by the row of the position before it."""
    return [token_logprobs(row, token, count) for row, token in zip(rows, next_ids, strict=True)]


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
