"""TensorGroup: the exchanges of a tensor-parallel group. Each rank has some columns, heads or rows; all get the whole.

Every method is a generator that yields the handle it waits for, as a layer's stages do. All ranks of a group have the
same rows in the same step, so they enter the same exchanges, also where there are none. Values are moved, never added,
so nothing is rounded. Which columns are whose: `spec.tensor_split`; what is computed of them: `model`, `moe`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.comm.transport import Handle, Transport
from coterie.kernels.api import Array, Kernels
from coterie.observe.stages import StageTimer
from coterie.spec.tensor_split import Range, TensorSplit

Gathering = Generator[Handle, None, Array]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """One rank of a group; `stage` and `layer` say to whom its exchanges are charged."""

    transport: Transport
    kernels: Kernels
    timer: StageTimer
    stage: str = "other"
    layer: int = -1

    @property
    def split(self) -> TensorSplit:
        return TensorSplit(self.transport.rank, self.transport.size)

    def at(self, stage: str, layer: int) -> TensorGroup:
        """The same group for a stage of a layer."""
        return replace(self, stage=stage, layer=layer)

    def heads(self, block: Array) -> Gathering:
        """This rank's heads side by side [T, w] -> those of all [T, w * size]."""
        width = block.shape[1]
        return self._gather(block, tuple((rank * width, (rank + 1) * width) for rank in range(self.transport.size)))

    def columns(self, block: Array, width: int) -> Gathering:
        """This rank's columns [T, w] -> all [T, width]."""
        return self._gather(block, self.split.all_columns(width))

    def collect(self, block: Array, width: int) -> Gathering:
        """The same on the group's first rank; nothing of use on the others."""
        return self._gather(block, self.split.all_columns(width), first_only=True)

    def own_rows(self, x: Array) -> Array:
        """This rank's share of rows that all have."""
        first, end = self.split.rows(x.shape[0])[self.transport.rank]
        return x[first:end]

    def rows(self, block: Array, count: int) -> Gathering:
        """This rank's share of the rows [t, H] -> all [count, H]."""
        host, shares = self._host(block), self.split.rows(count)
        counts = [end - first for first, end in shares]
        arrived = yield from self._to_all(host, [n * host.shape[1] for n in counts])
        out = np.empty((count, host.shape[1]), host.dtype)
        for (first, end), piece in zip(shares, arrived, strict=True):
            out[first:end] = piece.reshape(end - first, host.shape[1])
        return self.kernels.from_host(out)

    def columns_of_own_rows(self, block: Array, width: int) -> Gathering:
        """This rank's columns of all rows [T, w] -> all columns of this rank's share of the rows [t, width]."""
        ranges, count = self.split.all_columns(width), block.shape[0]
        if block.shape[1] == width:
            return self.own_rows(block)
        host, rank = self._host(block), self.transport.rank
        shares = self.split.rows(count)
        own = shares[rank][1] - shares[rank][0]
        sent = [(end - first) * host.shape[1] for first, end in shares]
        pieces = yield from self._exchange(host.reshape(-1), sent, [own * (end - first) for first, end in ranges])
        return self._join(pieces, ranges, own)

    def _gather(self, block: Array, ranges: tuple[Range, ...], *, first_only: bool = False) -> Gathering:
        width, count, rank = ranges[-1][1], block.shape[0], self.transport.rank
        if block.shape[1] == width:
            return block
        host = self._host(block)
        if first_only:
            sent = [host.size if to == 0 else 0 for to in range(len(ranges))]
            received = [count * (end - first) if rank == 0 else 0 for first, end in ranges]
            pieces = yield from self._exchange(host.reshape(-1), sent, received)
            return self._join(pieces, ranges, count if rank == 0 else 0)
        pieces = yield from self._to_all(host, [count * (end - first) for first, end in ranges])
        return self._join(pieces, ranges, count)

    def _host(self, block: Array) -> NDArray[Any]:
        return np.ascontiguousarray(self.kernels.to_host(block))

    def _join(self, pieces: list[NDArray[Any]], ranges: tuple[Range, ...], count: int) -> Array:
        """Columns side by side, [count, width]."""
        out = np.empty((count, ranges[-1][1]), pieces[0].dtype)
        for (first, end), piece in zip(ranges, pieces, strict=True):
            out[:, first:end] = piece.reshape(count, end - first)
        return self.kernels.from_host(out)

    def _to_all(self, block: NDArray[Any], received: list[int]) -> Generator[Handle, None, list[NDArray[Any]]]:
        """One rank's values to every other, `received` from each -> the values of all; its own do not travel."""
        size, rank = self.transport.size, self.transport.rank
        sent = [block.size if to != rank else 0 for to in range(size)]
        received = [n if source != rank else 0 for source, n in enumerate(received)]
        pieces = yield from self._exchange(np.tile(block.reshape(-1), size - 1), sent, received)
        pieces[rank] = block
        return pieces

    def _exchange(
        self, values: NDArray[Any], sent: list[int], received: list[int]
    ) -> Generator[Handle, None, list[NDArray[Any]]]:
        """Values to each rank -> values from each."""
        handle = self.transport.all_to_all_v(values, sent, received)
        self.timer.lap(self.stage, self.layer)
        yield handle
        arrived = handle.result()
        self.timer.lap("wait", self.layer)
        self.timer.exchanged(self.stage, self.layer, handle.begun_ns, handle.ended_ns)
        pieces, at = [], 0
        for count in received:
            pieces.append(arrived[at : at + count])
            at += count
        return pieces
