"""Multi-token prediction: one extra decoder block that predicts a token further ahead (DeepSeek-V3, section 2.2).

    h' = W_e RMSNorm(Emb(t_{i+1})) + W_h RMSNorm(h_i);   out = RMSNorm(Layer(h'))
`h_i` is the main model's state *after* its final norm; a further depth reads the previous block's output. Embedding and
head are the main model's. Training uses this now; speculative decoding will.
"""

from __future__ import annotations

from collections.abc import Generator

from coterie.comm.transport import Handle
from coterie.kernels.api import Array, Prepared
from coterie.model.attention import LayerCache
from coterie.model.transformer import LayerBuilder, Transformer, Weights


class MTPBlock:
    """The prediction block of one depth, on top of `main`."""

    def __init__(self, main: Transformer, weights: Weights, depth: int, max_positions: int | None = None) -> None:
        spec, runtime = main.spec, main.runtime
        key = f"mtp.{depth}"
        builder = LayerBuilder(spec, weights, runtime, max_positions or spec.max_positions)
        self.main = main
        self.enorm: Array = weights[f"{key}.enorm"]
        self.hnorm: Array = weights[f"{key}.hnorm"]
        self.e_proj = weights[f"{key}.e_proj"]
        self.h_proj = weights[f"{key}.h_proj"]
        self.layer = builder.layer(f"{key}.layer", len(spec.layers) + depth, spec.mtp_layers[depth])
        self.norm: Array = weights[f"{key}.norm"]

    def stages(
        self, hidden: Array, next_tokens: Array, batch: Prepared, cache: LayerCache | None = None
    ) -> Generator[Handle, None, Array]:
        """States [T, H] and the token after each [T] -> states [T, H] for `main.logits`."""
        kernels, eps = self.main.runtime.kernels, self.main.spec.norm_eps
        embedded = kernels.norm(kernels.embed(self.main.embedding, next_tokens), self.enorm, eps)
        state = kernels.norm(hidden, self.hnorm, eps)
        mixed = kernels.linear(embedded, self.e_proj) + kernels.linear(state, self.h_proj)
        delta, residual = yield from self.layer.stages(mixed, None, batch, cache or {})
        out, _ = kernels.add_norm(delta, residual, self.norm, eps)
        return out
