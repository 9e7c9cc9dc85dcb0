"""Travel: what a row is on its way to the experts of other ranks and back, in one MoE layer.

It goes as the expert kernel reads it (int8 codes and scales for integer weights, bf16 where a level rounds to that,
else float32): narrowed once by its sender, so that nothing is rounded twice and no bit changes. It comes back as
float32, or as bf16; then one rank rounds in the same place, in the sum over a token's experts. Not here: which row
goes where (`comm.rows`), exchanges (`moe.forms`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.comm.buffers import Bytes, take_rows
from coterie.comm.transport import Int64
from coterie.kernels.api import Array, Bank, Kernels, NarrowRows


class Travel:
    """`gate_up`: the experts' first matrices, whose kind says how a row goes; None: as float32. `rounded`: outputs are
    summed as bf16 values, wherever they were computed."""

    def __init__(self, kernels: Kernels, gate_up: Bank | None = None, *, rounded: bool = False) -> None:
        self.kernels, self.rounded, self._gate_up = kernels, rounded, gate_up
        self._narrow: NarrowRows | None = None
        if gate_up is not None and isinstance(kernels, NarrowRows) and kernels.row_bytes(gate_up):
            self._narrow = kernels
        self._back_type: np.dtype[Any] = np.dtype(np.uint16 if rounded else np.float32)

    def out_bytes(self, hidden: int) -> int:
        """Of a row on its way out; a multiple of four."""
        return 4 * hidden if self._narrow is None else self._narrow.row_bytes(self._gate_up)

    def back_bytes(self, hidden: int) -> int:
        """Of an output on its way back."""
        return hidden * self._back_type.itemsize

    def write(self, x: Array, packed: Bytes) -> None:
        """Rows x [T, H] into the first bytes of packed rows [T, width]."""
        if self._narrow is not None:
            self._narrow.pack_rows(x, self._gate_up, packed)
            return
        packed.view(np.float32)[:, : x.shape[1]] = self.kernels.to_host(x)

    def read(self, words: NDArray[np.uint32]) -> Array:
        """Rows as they came [N, bytes / 4], contiguous -> rows for the expert kernel."""
        return self.kernels.from_host(words.view(np.float32 if self._narrow is None else np.uint8))

    def back_rows(self, buffer: Bytes, count: int, hidden: int) -> NDArray[Any]:
        """The first `count` outputs [count, H] of a buffer."""
        return buffer[: count * self.back_bytes(hidden)].view(self._back_type).reshape(count, hidden)

    def send_back(self, outputs: Array, order: Int64, out: NDArray[Any]) -> NDArray[Any]:
        """outputs[order] as they go back, into `out`."""
        if not self.rounded:
            return take_rows(self.kernels.to_host(outputs), order, out)
        self.kernels.narrow(outputs, order, out)
        return out
