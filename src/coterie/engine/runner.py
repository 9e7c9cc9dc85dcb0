"""ModelRunner: one batch through the model and its cache, logits back to the host. Chooses nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.cache.streams import PagedCache
from coterie.kernels.api import Kernels
from coterie.kernels.batch import ForwardBatch
from coterie.model.overlap import drive
from coterie.model.transformer import Transformer
from coterie.observe.stages import StageTimer


class ModelRunner:
    """The model of one rank and its paged cache. `timer` is the model's own; the engine adds its stages to it."""

    def __init__(self, model: Transformer, cache: PagedCache, kernels: Kernels) -> None:
        self.model, self.cache, self._kernels = model, cache, kernels
        self.timer: StageTimer = model.runtime.timer

    def run(self, batch: ForwardBatch) -> NDArray[np.float32]:
        """Compute a batch, writing its cache rows; float32 logits [M, vocab] of its `logit_rows`."""
        prepared = self._kernels.prepare(batch)
        hidden = drive(self.model.stages(prepared, self.cache.layers))
        if not len(batch.logit_rows):
            return np.zeros((0, self.model.spec.vocab_size), np.float32)
        logits = self.model.logits(hidden[prepared.logit_rows])
        return np.asarray(self._kernels.to_host(logits), np.float32)
