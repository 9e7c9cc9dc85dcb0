"""Fills backend banks and vectors from rows of checkpoint tensors, by the parts of the name table.

Also says what banks need. The loader and the dummy weights both write through it, so that what a tensor's rows mean
is said once. Not here: where the rows come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.api import HostArray, Kernels
from coterie.model.dequant import to_float32
from coterie.model.formats.codes import CodeRows, convert, holds
from coterie.model.names import BankSpec, Part, Role, TensorEntry, WeightLayout
from coterie.spec.weights import MatrixSpec, WeightFormat, unit_bytes

Rows = NDArray[np.float32] | NDArray[np.uint16] | CodeRows
"""Values of rows: float32, bfloat16 as bits, or codes with their scales."""


def must_be_whole(entry: TensorEntry) -> bool:
    """Whether all rows must come in one piece: a bank is filled by rows, so a transposed part needs them all."""
    return any(part.transpose for part in entry.parts)


class BankFiller:
    """Allocates each bank when its first rows come; `formats` says how each is stored. `weights` is the result.

    `held`: banks that exist already.
    """

    def __init__(
        self,
        kernels: Kernels,
        layout: WeightLayout,
        formats: Mapping[str, WeightFormat],
        held: Mapping[str, Any] | None = None,
    ) -> None:
        self.kernels, self.layout, self.formats = kernels, layout, formats
        self.weights: dict[str, Any] = dict(held or {})

    def put(self, entry: TensorEntry, row: int, values: Rows) -> None:
        """Write `values` [n, cols], rows from `row` on of the tensor's matrix shape, wherever they belong.

        The values are copied: they may be a view of a buffer that is used again.
        """
        for part in entry.parts:
            if part.bank in self.layout.vectors:
                first, end = part.cols or (0, self.layout.vectors[part.bank])
                self.weights[part.bank] = self.kernels.vector(np.array(_floats(values)).reshape(-1)[first:end])
                continue
            bank = self._bank(part.bank)
            if (cut := cut_part(part, row, values)) is None:
                continue
            at, block = cut
            if isinstance(block, CodeRows):
                if holds(self.formats[part.bank], block.form):
                    same = convert(block, self.formats[part.bank])
                    self.kernels.fill_codes(bank, part.index, at, same.codes, same.scales, same.mins)
                    continue
                block = block.values()
            if block.dtype == np.uint16 and not self.formats[part.bank].is_scaled:
                self.kernels.fill_bf16(bank, part.index, at, np.require(block, np.uint16, ["C", "A"]))
            else:
                self.kernels.fill(bank, part.index, at, np.require(_floats(block), np.float32, ["C", "A"]))

    def error(self, part: Part, row: int, values: Rows) -> tuple[float, float]:
        """Sums of squares of what was lost in `put` of these rows to one part, and of the values."""
        if (cut := cut_part(part, row, values)) is None:
            return 0.0, 0.0
        at, block = cut
        wanted = np.require(_floats(block), np.float32, ["C", "A"])
        return self.kernels.measure(self.weights[part.bank], part.index, at, wanted)

    def _bank(self, key: str) -> Any:
        if key not in self.weights:
            keys = unit_keys(self.layout, key)
            specs = [matrix_spec(self.layout.banks[name], self.formats[name]) for name in keys]
            banks = self.kernels.allocate(self.layout.banks[key].count, *specs)
            self.weights.update(zip(keys, banks, strict=True))
        return self.weights[key]


def cut_part(part: Part, row: int, values: Rows) -> tuple[int, Rows] | None:
    """(first row in the bank, values) of those tensor rows that a part takes; None if it takes none of them."""
    begin, end = part.rows or (0, row + len(values))
    first, last = max(begin, row), min(end, row + len(values))
    if first >= last:
        return None
    block = values[first - row : last - row]
    if isinstance(block, CodeRows):
        if is_plain(part):
            return part.at + first - begin, block
        block = block.values()
    if part.cols is not None:
        block = block[:, part.cols[0] : part.cols[1]]
    return (part.at, block.T) if part.transpose else (part.at + first - begin, block)


def is_plain(part: Part) -> bool:
    """Whether a part takes rows as they are, so that codes keep their groups."""
    return part.cols is None and not part.transpose


def _floats(values: Rows) -> HostArray:
    if isinstance(values, CodeRows):
        return values.values()
    if values.dtype != np.uint16:
        return values.astype(np.float32, copy=False)
    return to_float32(np.ascontiguousarray(values).reshape(-1).view(np.uint8), "BF16").reshape(values.shape)


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """Memory of all banks of one role: their formats' labels, values and bytes, padding of units included."""

    role: Role
    label: str
    values: int
    nbytes: int


def memory_needs(layout: WeightLayout, formats: Mapping[str, WeightFormat]) -> tuple[RoleNeed, ...]:
    """What the banks of a layout take, by role, largest first."""
    labels: dict[Role, dict[str, int]] = {}
    values: dict[Role, int] = {}
    for key, size in layout.banks.items():
        keys = unit_keys(layout, key)
        specs = tuple(matrix_spec(layout.banks[name], formats[name]) for name in keys)
        nbytes = specs[keys.index(key)].nbytes
        if key == keys[-1]:
            nbytes = unit_bytes(specs) - sum(spec.nbytes for spec in specs[:-1])
        of_role = labels.setdefault(size.role, {})
        of_role[formats[key].label()] = of_role.get(formats[key].label(), 0) + nbytes * size.count
        values[size.role] = values.get(size.role, 0) + size.count * size.rows * size.cols
    needs = (RoleNeed(role, _label(of_role), values[role], sum(of_role.values())) for role, of_role in labels.items())
    return tuple(sorted(needs, key=lambda need: -need.nbytes))


def _label(sizes: Mapping[str, int]) -> str:
    """Formats by size; one that holds less than a thousandth is not worth a word."""
    total = sum(sizes.values())
    kept = sorted((label for label, size in sizes.items() if size * 1000 >= total), key=lambda label: -sizes[label])
    return " and ".join(kept)


def unit_keys(layout: WeightLayout, key: str) -> list[str]:
    """The banks that are allocated together with `key`, itself among them, in the order of the layout."""
    unit = layout.banks[key].unit
    return [name for name, size in layout.banks.items() if size.unit == unit] if unit else [key]


def matrix_spec(size: BankSpec, format: WeightFormat) -> MatrixSpec:
    """The packed matrix of a bank."""
    return MatrixSpec(size.rows, size.cols, format, size.segments)
