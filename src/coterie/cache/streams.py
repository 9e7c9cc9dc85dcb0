"""PagedCache: the paged storage of every layer's cache streams. Only bytes; which page belongs to whom is BlockPool's.

One buffer per (layer, stream) of [num_blocks * page_size, width]; a slot is block * page_size + offset, the same in
every layer. The bytes per token are `ModelSpec.kv_bytes_per_token` exactly (for f32: at 4 bytes).
"""

from __future__ import annotations

from typing import Any

from coterie.kernels.api import CacheKind, Kernels
from coterie.spec.model import ModelSpec

BYTES_PER_VALUE: dict[CacheKind, int] = {"f32": 4, "bf16": 2}


class PagedCache:
    """Streams of all decoder layers. `layers[i]` maps a stream's name to its buffer."""

    def __init__(self, spec: ModelSpec, num_blocks: int, page_size: int, kind: CacheKind, kernels: Kernels) -> None:
        self.layers: list[dict[str, Any]] = [
            {
                stream.name: kernels.allocate_cache(num_blocks * page_size, stream.width, kind)
                for stream in layer.attention.cache_streams
            }
            for layer in spec.layers
        ]
