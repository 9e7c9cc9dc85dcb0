"""coterie.json: what a packed folder holds and where. The values, their JSON, and every check that needs no weights.

A packed folder holds the banks of a model as the kernels keep them: units (one expert, or one matrix) back to back in
`weights-*.bin`, each on 4 KiB, and `vectors.bin` with all float32 vectors. Nothing in a manifest is believed: types and
ranges by msgspec, names, sizes and offsets here. docs/quantization.md has the layout byte by byte.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coterie.model.banks import matrix_spec, unit_keys
from coterie.model.checkpoint import Problem, refuse
from coterie.model.names import WeightLayout, own_head, weight_layout
from coterie.model.safetensors_io import LoadError
from coterie.spec.model import ModelSpec
from coterie.spec.weights import UNIT_ALIGNMENT, MatrixSpec, QuantPlan, ScaleType, WeightFormat, WeightKind, unit_bytes

LAYOUT_ID = "coterie-packed"
VERSION = 1
MANIFEST_NAME = "coterie.json"
JOURNAL_NAME = "coterie.journal"
VECTORS_NAME = "vectors.bin"
MAX_MANIFEST_BYTES = 256 << 20

_FILE = re.compile(r"weights-\d{5}\.bin")

Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Error = Annotated[float, Meta(ge=0.0)]


class PackedMatrix(Struct, frozen=True, forbid_unknown_fields=True):
    """One bank of a group: a `MatrixSpec`, flat. `error`: root of squared error over squared values of the whole bank,
    0 if exact; `worst`: the matrix with the largest error of its own, `worst_error`."""

    key: str
    rows: Count
    cols: Count
    segments: Count
    kind: WeightKind
    group: int
    scale: ScaleType
    table: tuple[int, ...] = ()
    error: Error = 0.0
    worst: Bytes = 0
    worst_error: Error = 0.0

    @property
    def spec(self) -> MatrixSpec:
        """The packed matrix. Raises ValueError for a format that is none."""
        form = WeightFormat(self.kind, self.group, self.scale, self.table)
        return MatrixSpec(self.rows, self.cols, form, self.segments)


class PackedGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Banks whose matrices share units: `count` units of `unit_bytes` at `offset` of `file`. `crc32c`: 8 hexadecimal
    digits a unit."""

    matrices: Annotated[tuple[PackedMatrix, ...], Meta(min_length=1)]
    count: Count
    unit_bytes: Bytes
    file: str
    offset: Bytes
    crc32c: str

    @property
    def nbytes(self) -> int:
        return self.count * self.unit_bytes

    @property
    def name(self) -> str:
        """What the group is for people: `layers.3.ffn`, or its only bank."""
        keys = [matrix.key for matrix in self.matrices]
        return keys[0] if len(keys) == 1 else keys[0].rpartition(".")[0]

    def checksums(self) -> NDArray[np.uint32]:
        return np.frombuffer(bytes.fromhex(self.crc32c), ">u4").astype(np.uint32)


class PackedVectors(Struct, frozen=True, forbid_unknown_fields=True):
    """`vectors.bin`: float32 vectors end to end, (key, values) in order."""

    sizes: tuple[tuple[str, Count], ...]
    nbytes: Bytes
    crc32c: str


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """`files`: names and bytes of the weight files. `kind`: of the cache, as `LoadPlan.kind`. `mtp`: it has blocks."""

    layout: str
    version: int
    writer: str
    source: str
    quant: QuantPlan
    kind: Literal["f32", "bf16"]
    mtp: bool
    files: tuple[tuple[str, Bytes], ...]
    groups: tuple[PackedGroup, ...]
    vectors: PackedVectors
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.files) + self.vectors.nbytes

    def matrices(self) -> dict[str, PackedMatrix]:
        return {matrix.key: matrix for group in self.groups for matrix in group.matrices}


class _Identity(Struct, frozen=True):
    layout: str
    version: int


def hex_checksums(values: NDArray[np.uint32]) -> str:
    """Checksums as a manifest spells them."""
    return values.astype(">u4").tobytes().hex()


def is_packed_folder(path: Path) -> bool:
    """Whether a folder is (or was going to be) one of ours."""
    return (path / MANIFEST_NAME).is_file() or (path / JOURNAL_NAME).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read coterie.json: identity first, then every field. Raises `LoadError` with what is wrong with it."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise LoadError(
            f"{folder} is an unfinished conversion ({JOURNAL_NAME}, no {MANIFEST_NAME}): run `coterie quantize` again"
        )
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise LoadError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: no manifest")
        raw = path.read_bytes()
        identity = msgspec.json.decode(raw, type=_Identity)
        if identity.layout != LAYOUT_ID or identity.version != VERSION:
            raise LoadError(
                f"{path} has the layout {identity.layout!r:.60} version {identity.version}; this version of coterie "
                f"reads {LAYOUT_ID!r} version {VERSION}: use the version that wrote it, or quantise the original again"
            )
        return msgspec.json.decode(raw, type=Manifest)
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LoadError(f"{path} is damaged: {error}") from error


def check_manifest(manifest: Manifest, folder: Path, spec: ModelSpec) -> WeightLayout:
    """Compare a manifest with its files and with the model; returns the layout of the model's banks.

    Raises one `LoadError` that names everything wrong.
    """
    layout = weight_layout(spec, mtp=manifest.mtp)
    held = manifest.matrices()
    if spec.tie_embeddings and "head" in held:
        own_head(layout)
    problems = [*_file_problems(manifest, folder)]
    keys = [matrix.key for group in manifest.groups for matrix in group.matrices]
    if len(keys) != len(held):
        problems.append(Problem("file", f"{MANIFEST_NAME} lists a bank twice"))
    problems += [Problem("missing", f"bank {key!r} is missing") for key in layout.banks if key not in held]
    foreign = sorted(held.keys() - layout.banks)
    problems += [Problem("unclaimed", f"bank {key!r} belongs to no part of the model") for key in foreign]
    vectors = dict(manifest.vectors.sizes)
    if vectors != layout.vectors or len(vectors) != len(manifest.vectors.sizes):
        problems.append(Problem("shape", "the vectors are not those of the model that config.json describes"))
    sizes = dict(manifest.files)
    for group in manifest.groups:
        problems += [Problem("file", f"{group.name}: {text}") for text in _group_problems(group, layout, sizes)]
    problems += [Problem("file", text) for text in _overlaps(manifest)]
    refuse(folder, problems)
    return layout


def _file_problems(manifest: Manifest, folder: Path) -> list[Problem]:
    problems = []
    files = [*manifest.files, (VECTORS_NAME, manifest.vectors.nbytes)]
    if len(dict(files)) != len(files):
        problems.append(Problem("file", f"{MANIFEST_NAME} lists a file twice"))
    if manifest.vectors.nbytes != 4 * sum(size for _, size in manifest.vectors.sizes):
        problems.append(Problem("file", f"{VECTORS_NAME} cannot hold its vectors in {manifest.vectors.nbytes} bytes"))
    for name, size in files:
        if not _FILE.fullmatch(name) and name != VECTORS_NAME:
            problems.append(Problem("file", f"{name!r:.80} is no name of a weight file"))
            continue
        path = folder / name
        there = path.stat().st_size if path.is_file() else -1
        if there < 0:
            problems.append(Problem("file", f"{name} is missing"))
        elif there != size:
            what = f"is truncated: {there} of {size} bytes" if there < size else f"has {there - size} bytes too many"
            short = [group for group in manifest.groups if group.file == name and _end(group) > there]
            problems.append(Problem("file", f"{name} {what}{_lost(short[0], there) if short else ''}"))
    return problems


def _end(group: PackedGroup) -> int:
    return group.offset + group.nbytes


def _lost(group: PackedGroup, size: int) -> str:
    """The first unit that a short file lacks."""
    if not group.unit_bytes:
        return ""
    return f"; lost from {group.name}[{max(0, size - group.offset) // group.unit_bytes}] on"


def _group_problems(group: PackedGroup, layout: WeightLayout, sizes: dict[str, int]) -> list[str]:
    keys = [matrix.key for matrix in group.matrices]
    if any(key not in layout.banks for key in keys):
        return []  # said already
    if keys != unit_keys(layout, keys[0]):
        return [f"its units hold {keys}, the model's {unit_keys(layout, keys[0])}"]
    try:
        specs = tuple(matrix.spec for matrix in group.matrices)
    except ValueError as error:
        return [str(error)]
    for key, found in zip(keys, specs, strict=True):
        size = layout.banks[key]
        wanted = matrix_spec(size, found.format)
        if (found, group.count) != (wanted, size.count):
            shape = f"{group.count} matrices of {[found.rows, found.cols]} in {found.segments} segments"
            wanted_shape = f"{size.count} of {[size.rows, size.cols]} in {size.segments}"
            return [f"{key} has {shape}, config.json implies {wanted_shape}"]
    if group.unit_bytes != unit_bytes(specs):
        return [f"units of {group.unit_bytes} bytes, its matrices need {unit_bytes(specs)}"]
    if len(group.crc32c) != 8 * group.count or not re.fullmatch("[0-9a-f]*", group.crc32c):
        return [f"crc32c is not {8 * group.count} hexadecimal digits"]
    if group.offset % UNIT_ALIGNMENT or group.file not in sizes or _end(group) > sizes[group.file]:
        return [f"bytes {group.offset} to {_end(group)} of {group.file!r:.80} are not in the files, or not aligned"]
    return []


def _overlaps(manifest: Manifest) -> list[str]:
    ordered = sorted(manifest.groups, key=lambda group: (group.file, group.offset))
    return [f"{b.name} overlaps {a.name}" for a, b in pairwise(ordered) if a.file == b.file and _end(a) > b.offset]


def check_quant(manifest: Manifest, quant: QuantPlan, dtype: str, layout: WeightLayout) -> None:
    """Refuse formats that were asked for and are not those of the folder: packed weights are not converted again. A
    group counts only if it was asked for."""
    asked = {"experts": quant.experts, "attention": quant.attention, "head": quant.head}
    for key, matrix in manifest.matrices().items():
        role = layout.banks[key].role
        wanted = quant.format(asked.get(role, "auto"))
        held = matrix.spec.format
        if wanted is not None and quant.group == "auto" and wanted.kind == held.kind:
            wanted = replace(wanted, group=held.group)
        if wanted is not None and wanted != held:
            raise LoadError(
                f"the folder holds {role} as {held.label()}, asked was {wanted.label()}: leave it out, "
                "or quantise the original again"
            )
    if dtype != "auto" and {"float32": "f32", "bfloat16": "bf16"}[dtype] != manifest.kind:
        raise LoadError(f"the folder holds {manifest.kind} where it is not quantised; leave out dtype {dtype}")
