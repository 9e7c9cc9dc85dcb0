"""Fills backend banks and vectors from rows of checkpoint tensors, by the parts of the name table.

The loader and the dummy weights both write through it, so that what a tensor's rows mean is said once. Not here:
where the rows come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.kernels.api import HostArray, Kernels
from coterie.model.names import BankSpec, TensorEntry, WeightLayout
from coterie.spec.weights import MatrixSpec, WeightFormat


def must_be_whole(entry: TensorEntry) -> bool:
    """Whether all rows must come in one piece: a bank is filled by rows, so a transposed part needs them all."""
    return any(part.transpose for part in entry.parts)


class BankFiller:
    """Allocates each bank when its first rows come; `formats` says how each is stored. `weights` is the result."""

    def __init__(self, kernels: Kernels, layout: WeightLayout, formats: Mapping[str, WeightFormat]) -> None:
        self.kernels, self.layout, self.formats = kernels, layout, formats
        self.weights: dict[str, Any] = {}

    def put(self, entry: TensorEntry, row: int, values: HostArray) -> None:
        """Write `values` [n, cols], rows from `row` on of the tensor's matrix shape, wherever they belong.

        The values are copied: they may be a view of a buffer that is used again.
        """
        for part in entry.parts:
            if part.bank in self.layout.vectors:
                self.weights[part.bank] = self.kernels.vector(np.array(values, np.float32).reshape(-1))
                continue
            begin, end = part.rows or (0, row + len(values))
            first, last = max(begin, row), min(end, row + len(values))
            if first >= last:
                continue
            block = values[first - row : last - row]
            if part.cols is not None:
                block = block[:, part.cols[0] : part.cols[1]]
            at = part.at + first - begin
            if part.transpose:
                block, at = block.T, part.at
            self.kernels.fill(self._bank(part.bank), part.index, at, np.require(block, np.float32, ["C", "A"]))

    def _bank(self, key: str) -> Any:
        if key not in self.weights:
            keys = unit_keys(self.layout, key)
            specs = [matrix_spec(self.layout.banks[name], self.formats[name]) for name in keys]
            banks = self.kernels.allocate(self.layout.banks[key].count, *specs)
            self.weights.update(zip(keys, banks, strict=True))
        return self.weights[key]


def unit_keys(layout: WeightLayout, key: str) -> list[str]:
    """The banks that are allocated together with `key`, itself among them, in the order of the layout."""
    unit = layout.banks[key].unit
    return [name for name, size in layout.banks.items() if size.unit == unit] if unit else [key]


def matrix_spec(size: BankSpec, format: WeightFormat) -> MatrixSpec:
    """The packed matrix of a bank."""
    return MatrixSpec(size.rows, size.cols, format, size.segments)
