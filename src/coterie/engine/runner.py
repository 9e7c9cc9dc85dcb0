"""ModelRunner: one batch through the model and its cache, logits back to the host. Chooses nothing.

With several ranks each call enters every exchange of the step exactly once, even if the rank's own batch cannot be
prepared; where that has become impossible it raises Desynchronised, and the peers must be told.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.cache.streams import PagedCache
from coterie.comm.transport import RankLost, TransportError
from coterie.engine.errors import Desynchronised
from coterie.kernels.api import Array, Kernels, Prepared
from coterie.kernels.batch import ForwardBatch
from coterie.model.overlap import Stages, drive, interleave
from coterie.model.transformer import Transformer
from coterie.observe.stages import StageTimer


class ModelRunner:
    """The model of one rank and its paged cache. `timer` is the model's own; the engine adds its stages to it."""

    def __init__(self, model: Transformer, cache: PagedCache, kernels: Kernels) -> None:
        self.model, self.cache, self._kernels = model, cache, kernels
        self.timer: StageTimer = model.runtime.timer

    def run(self, batch: ForwardBatch, *, micro_batches: int = 1) -> NDArray[np.float32]:
        """Compute a batch, writing its cache rows; float32 logits [M, vocab] of its `logit_rows`.

        micro_batches 2: its halves take turns, each computing while the other's rows travel; the same bits.
        """
        parts = (batch,) if micro_batches == 1 else batch.split(batch.num_tokens // 2)
        try:
            prepared = [self._kernels.prepare(part) for part in parts]
        except Exception:
            if self.is_in_lockstep:
                nothing = [self._kernels.prepare(batch.split(0)[0]) for _ in parts]
                self._forward(nothing)
            raise
        halves = self._forward(prepared)
        if not len(batch.logit_rows):
            return np.zeros((0, self.model.spec.vocab_size), np.float32)
        wanted = [hidden[part.logit_rows] for hidden, part in zip(halves, prepared, strict=True)]
        rows = wanted[0] if len(wanted) == 1 else self._kernels.concat(wanted)
        logits = self._together(self.model.head_stages(rows))
        return np.asarray(self._kernels.to_host(logits), np.float32)

    @property
    def is_in_lockstep(self) -> bool:
        """Whether other ranks take part in every step."""
        return self.model.runtime.transport.size > 1

    def _forward(self, parts: list[Prepared]) -> list[Array]:
        """Final hidden states of each micro-batch."""
        stages = [self.model.stages(part, self.cache.layers) for part in parts]
        halves: list[Array] = self._together(interleave(stages, self.timer.enter))
        return halves

    def _together(self, stages: Stages) -> Any:
        """Run stages in which other ranks may take part."""
        try:
            return drive(stages)
        except Exception as error:
            if not self.is_in_lockstep:
                raise
            own = not isinstance(error, TransportError)
            missing = error.missing if isinstance(error, RankLost) else ()
            raise Desynchronised(f"{type(error).__name__}: {error}", own=own, missing=missing) from error
