"""Columns of packed matrices for a rank of a tensor-parallel group: whole panels of 32 outputs, copied as they are.

A packed matrix is its panels end to end, segment after segment, so a range of outputs that begins and ends at panels is
a range of bytes. The checksum of a unit is that of all its bytes, so units are read whole and their panels copied.
Not here: which outputs a rank has (`columns`), reading and checking (`packed_reader`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.model.columns import ColumnCuts
from coterie.model.packed_manifest import Manifest, PackedGroup
from coterie.model.safetensors_io import LoadError
from coterie.spec.tensor_split import Range
from coterie.spec.weights import PANEL, MatrixSpec


@dataclass(frozen=True, slots=True)
class PanelCut:
    """`rows` of each segment of `whole` make `kept`."""

    rows: Range
    whole: MatrixSpec
    kept: MatrixSpec


def panel_cuts(manifest: Manifest, columns: ColumnCuts) -> dict[str, PanelCut]:
    """The cut of each bank that is cut. Raises LoadError for one that would part a panel."""
    cuts = {}
    for key, rows in columns.rows.items():
        if (matrix := manifest.matrices().get(key)) is None:
            continue
        whole = matrix.spec
        segment = whole.rows // whole.segments
        if rows[0] % PANEL or (rows[1] % PANEL and rows[1] != segment):
            raise LoadError(
                f"a packed folder is divided between ranks in panels of {PANEL} outputs, and outputs {rows[0]} to "
                f"{rows[1]} of {key} are not whole panels: use the original checkpoint with the same formats, another "
                "tp, or tp 1"
            )
        cuts[key] = PanelCut(rows, whole, replace(whole, rows=(rows[1] - rows[0]) * whole.segments))
    return cuts


def copy_panels(source: Any, target: Any, group: PackedGroup, cuts: Sequence[PanelCut | None]) -> None:
    """Copy what is kept of each matrix from units [count, bytes] to smaller ones."""
    read = written = 0
    for matrix, cut in zip(group.matrices, cuts, strict=True):
        whole = matrix.spec
        kept = whole if cut is None else cut.kept
        panel = whole.nbytes // whole.panels
        first = 0 if cut is None else cut.rows[0] // PANEL
        per, own = whole.panels // whole.segments, kept.panels // kept.segments
        for segment in range(whole.segments):
            begin, at = read + (segment * per + first) * panel, written + segment * own * panel
            target[:, at : at + own * panel] = source[:, begin : begin + own * panel]
        read, written = read + whole.nbytes, written + kept.nbytes
