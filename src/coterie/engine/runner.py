"""ModelRunner: one batch through the model and its cache, logits back to the host. Chooses nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.cache.streams import PagedCache
from coterie.kernels.api import Kernels
from coterie.kernels.batch import ForwardBatch
from coterie.model.overlap import drive, interleave
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
        prepared = [self._kernels.prepare(part) for part in parts]
        stages = [self.model.stages(part, self.cache.layers) for part in prepared]
        halves = drive(interleave(stages, self.timer.enter))
        if not len(batch.logit_rows):
            return np.zeros((0, self.model.spec.vocab_size), np.float32)
        wanted = [hidden[part.logit_rows] for hidden, part in zip(halves, prepared, strict=True)]
        logits = self.model.logits(wanted[0] if len(wanted) == 1 else self._kernels.concat(wanted))
        return np.asarray(self._kernels.to_host(logits), np.float32)
