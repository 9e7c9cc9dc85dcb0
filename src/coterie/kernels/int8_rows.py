"""Rows of an int8 cache in torch: the same bytes as the native backend writes, for `reference` alone.

A row is the codes of all heads, then their float32 scales, then the exact channels in bf16. See `Kernels.cache_write`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.spec.cache import SCALE_GROUP, CacheStream

SMALLEST = 1e-30
"""A group below is stored as zeros: its scale would be no normal float32."""


def pack_rows(rows: Tensor, stream: CacheStream) -> Tensor:
    """[T, width] -> uint8 [T, row bytes]."""
    rows = rows.float()
    exact = rows[:, stream.width - stream.exact :].bfloat16().contiguous()
    heads = rows[:, : stream.width - stream.exact].reshape(len(rows), stream.heads, stream.head_width)
    room = stream.head_scales * SCALE_GROUP - stream.head_width
    groups = pad(heads, (0, room)).reshape(len(rows), stream.heads, stream.head_scales, SCALE_GROUP)
    top = groups.abs().amax(-1)
    finite = groups.isfinite().all(-1)
    used = finite & (top >= SMALLEST)
    scales = torch.where(used, top / 127, torch.where(finite, 0.0, torch.nan))
    codes = torch.where(used[..., None], groups / scales[..., None], 0.0).round().to(torch.int8)
    codes = codes.flatten(-2)[..., : stream.head_width].contiguous()
    parts = (codes, scales.contiguous(), exact)
    return torch.cat([part.flatten(1).view(torch.uint8) for part in parts], 1)


def unpack_rows(packed: Tensor, stream: CacheStream) -> Tensor:
    """uint8 [T, row bytes] -> float32 [T, width]."""
    heads, scales = stream.heads, stream.head_scales
    ends = heads * stream.head_width
    scales_end = ends + 4 * heads * scales
    codes = _read(packed[:, :ends], torch.int8).reshape(len(packed), heads, stream.head_width)
    factors = _read(packed[:, ends:scales_end], torch.float32).reshape(len(packed), heads, scales)
    values = codes.float() * factors.repeat_interleave(SCALE_GROUP, 2)[..., : stream.head_width]
    exact = _read(packed[:, scales_end:], torch.bfloat16).reshape(len(packed), stream.exact)
    return torch.cat([values.reshape(len(packed), ends), exact.float()], 1)


def _read(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, flat; copied, because wider numbers must be aligned."""
    return part.clone(memory_format=torch.contiguous_format).reshape(-1).view(dtype)
