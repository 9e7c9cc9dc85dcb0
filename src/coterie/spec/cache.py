"""CacheStream: what a layer keeps per token, and how many bytes a row of it takes in each kind of cache.

Pure arithmetic: `plan` and `serve` count with it, both backends lay out their rows by it. No arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheKind = Literal["f32", "bf16", "int8"]
"""int8: codes with one float32 scale per head and `SCALE_GROUP` channels; a stream's exact channels stay bf16."""

SCALE_GROUP = 64


@dataclass(frozen=True, slots=True)
class CacheStream:
    """What one layer keeps per token (or per sequence). MLA's latent is one `append` stream, one row a token.

    A row is `heads` heads of equal width, then `exact` channels that int8 leaves alone (MLA's rope part).
    """

    name: str
    kind: Literal["append", "ring", "state"]
    width: int
    tokens_per_row: int = 1
    span: int = 0
    owner_layer: int | None = None
    heads: int = 1
    exact: int = 0

    @property
    def head_width(self) -> int:
        return (self.width - self.exact) // self.heads

    @property
    def head_scales(self) -> int:
        """Scales of one head's int8 codes."""
        return -(-self.head_width // SCALE_GROUP)

    def row_bytes(self, kind: CacheKind) -> int:
        """Bytes of one row as the backends store it."""
        if kind != "int8":
            return self.width * (4 if kind == "f32" else 2)
        return self.heads * (self.head_width + 4 * self.head_scales) + 2 * self.exact

    def fp8_row_bytes(self, *, scaled: bool) -> int:
        """Bytes of one row in FP8, a format that is planned only: a byte a value; `scaled` has a float32 per head and
        128 channels, and exact channels of 16 bits (FlashMLA's row of 656 B)."""
        if not scaled:
            return self.width
        return self.heads * (self.head_width + 4 * -(-self.head_width // 128)) + 2 * self.exact
