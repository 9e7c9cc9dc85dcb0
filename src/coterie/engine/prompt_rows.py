"""PromptRows: what a request wanted to know of its own prompt, gathered chunk by chunk.

Log-probabilities are reduced at once, so memory grows with the prompt, not with prompt times vocabulary; whole logits
rows are kept only for a request that asked for them. Rows are filed by position: a recompute never counts twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.engine.messages import TokenLogprob
from coterie.engine.request import Request
from coterie.engine.sampler import prompt_logprobs

Rows = NDArray[np.float32]


class PromptRows:
    """Of one request. `next_position` is the first prompt position whose row has not come yet."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        self._prompt = request.prompt_token_ids
        self._top = request.params.prompt_logprobs
        self._logits = np.zeros((len(self._prompt), vocab_size), np.float32) if request.want_logits else None
        self._entries: list[list[TokenLogprob] | None] = [None]
        self.next_position = 0

    def add(self, start: int, rows: Rows) -> None:
        """Take the rows of positions start, start + 1, ...; those known already and those past the prompt are left."""
        skip = self.next_position - start
        assert skip >= 0, "a prompt row was left out"
        rows = rows[skip : len(self._prompt) - start]
        if self._logits is not None:
            self._logits[self.next_position : self.next_position + len(rows)] = rows
        if self._top is not None:
            targets = self._prompt[self.next_position + 1 : self.next_position + 1 + len(rows)]
            self._entries += prompt_logprobs(rows[: len(targets)], targets, self._top)
        self.next_position += len(rows)

    @property
    def logprobs(self) -> list[list[TokenLogprob] | None] | None:
        """One entry per prompt token: the token first, then the best; None for the first token."""
        return None if self._top is None else self._entries

    @property
    def logits(self) -> bytes | None:
        """float32 [len(prompt), vocab], row-major."""
        return None if self._logits is None else self._logits.tobytes()
