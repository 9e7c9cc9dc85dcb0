"""PagedCache: the paged storage of every layer's cache streams. Only bytes; which page belongs to whom is BlockPool's.

One buffer per (layer, stream) of `num_blocks * page_size` rows; a slot is block * page_size + offset, the same in every
layer. The bytes per token are `ModelSpec.cache_bytes_per_token` exactly.
"""

from __future__ import annotations

from typing import Any

from coterie.kernels.api import Kernels
from coterie.spec.cache import CacheKind
from coterie.spec.model import ModelSpec


class PagedCache:
    """Streams of all decoder layers. `layers[i]` maps a stream's name to its buffer."""

    def __init__(self, spec: ModelSpec, num_blocks: int, page_size: int, kind: CacheKind, kernels: Kernels) -> None:
        self.layers: list[dict[str, Any]] = [
            {
                stream.name: kernels.allocate_cache(num_blocks * page_size, stream, kind)
                for stream in layer.attention.cache_streams
            }
            for layer in spec.layers
        ]
