"""What quantising costs in words: bits per byte of a text and greedy agreement, of one model before and after.

The text is cut into windows that do not overlap; of each, every token but the first is scored. Two engines need not be
in memory together: each is scored by itself and the scores are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.engine.llm import LLM
from coterie.spec.errors import CoterieError

WINDOW = 256
MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one engine on one text: nats of all scored tokens, how many, their bytes, the greedy token at each."""

    nats: float
    tokens: int
    nbytes: int
    greedy: NDArray[np.int64]

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(1, self.nbytes)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / max(1, self.tokens))


def score(llm: LLM, text: str, progress: Callable[[int, int], None] = lambda done, total: None) -> Scores:
    """Score the first `MOST_TOKENS` tokens of a text. `progress(tokens done, tokens in all)`."""
    if llm.tokenizer is None:
        raise CoterieError("a text cannot be scored: the model has no tokenizer")
    ids = llm.tokenizer.encode(text, add_special_tokens=False)[:MOST_TOKENS]
    window = min(WINDOW, llm.max_model_len)
    if len(ids) < 2:
        raise CoterieError("a text cannot be scored: it has fewer than two tokens")
    nats, nbytes, greedy = 0.0, 0, []
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window]
        if len(part) < 2:
            break
        logits = llm.logits(part)[:-1].astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        targets = np.array(part[1:])
        nats += float(np.log(np.exp(logits).sum(1)).sum() - logits[np.arange(len(targets)), targets].sum())
        nbytes += sum(len(llm.tokenizer.id_to_bytes(token)) for token in part[1:])
        greedy.append(logits.argmax(1))
        progress(min(len(ids), start + window), len(ids))
    found = np.concatenate(greedy)
    return Scores(nats, len(found), nbytes, found)


def agreement(before: Scores, after: Scores) -> float:
    """Share of positions with the same greedy token."""
    return float((before.greedy == after.greedy).mean())
