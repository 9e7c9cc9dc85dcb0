"""WeightFormat, MatrixSpec, QuantPlan: how weights are held in memory, as values, and the bytes that follow from them.

Few kinds hold every checkpoint format (docs/design.md, decision 5). `f32`, `bf16` and `fp8` (e4m3 codes, one scale per
output and group) multiply float activations. The integer kinds multiply int8 activations exactly; their codes are
unsigned: `int8` w = s * (u - 128), `code4` w = s * table[u], `affine4` and `affine8` w = s * u - m.
Not here: packing (kernels), which tensor fills which bank (`model/names.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["f32", "bf16", "fp8", "int8", "code4", "affine4", "affine8"]
ScaleType = Literal["f32", "f16", "bf16", "e8m0"]

PANEL = 32
"""Outputs that are packed side by side; the unit in which work is split."""
ALIGNMENT = 64
UNIT_ALIGNMENT = 4096
"""Start of each unit (one expert) in memory and on disk."""

GROUPS = (0, 16, 32, 64, 128)
INT4_TABLE = tuple(range(-8, 8))
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1 values doubled, so that the scale is half the format's."""
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_INTEGER: tuple[WeightKind, ...] = ("int8", "code4", "affine4", "affine8")
_COLUMN_STEP: dict[WeightKind, int] = {"f32": 1, "bf16": 32, "fp8": 64}
_SCALE_BYTES: dict[ScaleType, int] = {"f32": 4, "f16": 2, "bf16": 2, "e8m0": 1}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`group`: inputs that share a scale, 0 for the whole row. `table`: the 16 int8 values of `code4`."""

    kind: WeightKind
    group: int = 0
    scale: ScaleType = "f32"
    table: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"weight group {self.group} is not one of {GROUPS} (0: the whole row)")
        if self.kind == "code4" and (len(self.table) != 16 or not all(-128 <= value <= 127 for value in self.table)):
            raise ValueError(f"code4 needs a table of 16 int8 values, not {self.table}")
        if self.kind != "code4" and self.table:
            raise ValueError(f"weight kind {self.kind} has no table")

    @property
    def is_integer(self) -> bool:
        """Whether products run on int8 activations."""
        return self.kind in _INTEGER

    @property
    def is_affine(self) -> bool:
        return self.kind in ("affine4", "affine8")

    @property
    def is_scaled(self) -> bool:
        return self.kind not in ("f32", "bf16")

    def label(self) -> str:
        """A short name for people: `int4 g32`, `int8 row`, `bf16`."""
        names = {INT4_TABLE: "int4", MXFP4_TABLE: "mxfp4", IQ4_TABLE: "iq4"}
        name = names.get(self.table, "code4") if self.kind == "code4" else self.kind
        return f"{name} {f'g{self.group}' if self.group else 'row'}" if self.is_scaled else name


F32 = WeightFormat("f32")
BF16 = WeightFormat("bf16")
FP8 = WeightFormat("fp8", 128)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """One matrix [rows, cols] of a bank. `segments`: equal runs of rows that each start a panel (gate and up: 2)."""

    rows: int
    cols: int
    format: WeightFormat
    segments: int = 1

    @property
    def groups(self) -> int:
        """Scales per output."""
        return -(-self.cols // self.format.group) if self.format.group else 1

    @property
    def panels(self) -> int:
        return self.segments * -(-(self.rows // self.segments) // PANEL)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix: panels of codes, scales, mins, each panel aligned."""
        kind = self.format.kind
        step = _COLUMN_STEP.get(kind, 64)
        cols = -(-self.cols // step) * step
        half_bytes = {"f32": 8, "bf16": 4, "code4": 1, "affine4": 1}.get(kind, 2)
        panel = PANEL * cols * half_bytes // 2
        if self.format.is_scaled:
            panel += PANEL * self.groups * _SCALE_BYTES[self.format.scale] * (2 if self.format.is_affine else 1)
        return self.panels * -(-panel // ALIGNMENT) * ALIGNMENT


def unit_bytes(matrices: tuple[MatrixSpec, ...]) -> int:
    """Bytes of one unit: the matrices of one expert end to end, padded to `UNIT_ALIGNMENT`."""
    return -(-sum(matrix.nbytes for matrix in matrices) // UNIT_ALIGNMENT) * UNIT_ALIGNMENT


ExpertsChoice = Literal["auto", "bf16", "fp8", "int8", "int4", "mxfp4"]
DenseChoice = Literal["auto", "bf16", "int8", "int4"]
GroupChoice = Literal["auto", 16, 32, 64, 128]

OWN_GROUPS = {"int8": 128, "int4": 32}
"""Inputs that share a scale if nothing else is asked for. Codes of 8 bits lose next to nothing in groups of 128, which
products read and scale faster (docs/quantization.md)."""


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """What a user asks for. `experts`: every feed-forward (routed, shared, dense); `attention`: its projections;
    `auto` keeps what the checkpoint holds. Router, norms, biases and the embedding are never quantised. `group`: inputs
    that share a scale in int8 and int4; auto is `OWN_GROUPS`."""

    experts: ExpertsChoice = "auto"
    attention: DenseChoice = "auto"
    head: DenseChoice = "auto"
    group: GroupChoice = "auto"

    def format(self, choice: ExpertsChoice | DenseChoice) -> WeightFormat | None:
        """The format of a choice; None for auto. Scales of int4 and int8 are f16, of mxfp4 powers of two."""
        group = OWN_GROUPS.get(choice, 0) if self.group == "auto" else self.group
        formats = {
            "bf16": BF16,
            "fp8": FP8,
            "int8": WeightFormat("int8", group, "f16"),
            "int4": WeightFormat("code4", group, "f16", INT4_TABLE),
            "mxfp4": WeightFormat("code4", 32, "e8m0", MXFP4_TABLE),
        }
        return formats.get(choice)
