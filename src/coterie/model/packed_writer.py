"""Write a packed folder: quantise a checkpoint bank by bank, and go on where an interrupted run ended.

The model is cut into jobs: the banks that share tensors (`kv_b_proj` fills two). One job's banks are in memory at a
time. After each job its units are on disk and a line in the journal says so; the manifest comes last, under its name
only when complete. The bytes do not depend on interruptions, threads or the ISA level.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coterie import __version__
from coterie.kernels import _native
from coterie.kernels.native import NativeKernels
from coterie.model.banks import matrix_spec, unit_keys
from coterie.model.checkpoint import open_checkpoint
from coterie.model.load_plan import DtypeChoice, LoadPlan, PlannedTensor, make_plan
from coterie.model.loader import TensorLoad
from coterie.model.packed_manifest import (
    JOURNAL_NAME,
    LAYOUT_ID,
    MANIFEST_NAME,
    VECTORS_NAME,
    VERSION,
    Manifest,
    PackedGroup,
    PackedMatrix,
    PackedVectors,
    hex_checksums,
    is_packed_folder,
)
from coterie.model.packed_side import write_side_files
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.weights import QuantPlan, unit_bytes

Losses = dict[tuple[str, int], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """`quant` and `dtype` as in loading; a weight file ends before it would exceed `max_file_bytes`.

    The banks of one job must fit into `available_memory`.
    """

    quant: QuantPlan
    dtype: DtypeChoice = "auto"
    max_file_bytes: int = 4 << 30
    available_memory: int = 1 << 62
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class PackReport:
    """`jobs`: steps in all; `reused`: those of an earlier run that were kept."""

    manifest: Manifest
    seconds: float
    jobs: int
    reused: int
    source_bytes: int


@dataclass(frozen=True, slots=True)
class _Job:
    """Groups of banks (each by its keys) that some tensors fill together; no groups: the vectors."""

    groups: tuple[tuple[str, ...], ...]
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        sides = {side.name: side.nbytes for item in self.tensors for side in item.sides}
        return sum(item.tensor.nbytes for item in self.tensors) + sum(sides.values())


def pack(
    source: Path,
    spec: ModelSpec,
    kernels: NativeKernels,
    out: Path,
    options: PackOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PackReport:
    """Quantise the checkpoint `source` into the folder `out`; `progress(bytes done, bytes in all)` counts the source's.

    config.json and the tokenizer are copied. Raises `CoterieError` for a folder that is not
    empty, a disk that is too small, and whatever loading would refuse.
    """
    began = time.perf_counter()
    if is_packed_folder(source):
        raise CoterieError(f"{source} is packed already: give the original checkpoint")
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, spec, options.dtype, mtp=True, quant=options.quant)
    jobs = _jobs(plan)
    sizes = [_Sizes.of(plan, job) for job in jobs]
    _check_memory(sizes, options.available_memory)
    writer = _Writer(out, options, _fingerprint(plan, options), sizes)
    reused = writer.resume()
    total, done = sum(job.nbytes for job in jobs), sum(job.nbytes for job in jobs[:reused])
    vectors: dict[str, Any] = {}
    for job in jobs[reused:]:
        progress(done, total)
        base = done
        load = TensorLoad(
            replace(plan, tensors=job.tensors, comparisons=()),
            spec,
            kernels,
            lambda news, base=base: progress(base + news.bytes_done, total),  # type: ignore[misc]
            sampled=1,
        )
        load.run()
        if job.groups:
            writer.write([_group(plan, keys, load, kernels) for keys in job.groups])
        else:
            vectors = load.filler.weights
        done += job.nbytes
    manifest = Manifest(
        layout=LAYOUT_ID,
        version=VERSION,
        writer=f"coterie {__version__}",
        source=source.resolve().name,
        quant=options.quant,
        kind="f32" if plan.kind == "f32" else "bf16",
        mtp=plan.mtp_present,
        files=writer.files(),
        groups=tuple(writer.groups),
        vectors=writer.write_vectors({key: vectors[key] for key in plan.layout.vectors}),
        notes=(*plan.notes, *plan.doubts),
    )
    write_side_files(source, out)
    writer.finish(manifest)
    return PackReport(manifest, time.perf_counter() - began, len(jobs), reused, total)


def _check_memory(sizes: list[_Sizes], available: int) -> None:
    largest = max(sum(size.groups) for size in sizes)
    if largest > available:
        raise CoterieError(
            f"the largest layer needs {largest / 1e9:.2f} GB at once, {available / 1e9:.2f} GB of memory "
            "can be had; a narrower format of the experts needs less"
        )


def _jobs(plan: LoadPlan) -> list[_Job]:
    """Groups in the order of the layout, joined where a tensor fills several; the vectors come last."""
    first: dict[str, str] = {}  # of each bank, the first bank of its job
    for key in plan.layout.banks:
        first[key] = first.get(unit_keys(plan.layout, key)[0], key)
    for item in plan.tensors:
        roots = {first[part.bank] for part in item.entry.parts if part.bank in first}
        if len(roots) > 1:
            keep = next(key for key in plan.layout.banks if key in roots)
            first = {key: keep if root in roots else root for key, root in first.items()}
    groups: dict[str, dict[tuple[str, ...], None]] = {}
    for key, root in first.items():
        groups.setdefault(root, {})[tuple(unit_keys(plan.layout, key))] = None
    tensors: dict[str, list[PlannedTensor]] = {}
    for item in plan.tensors:
        if item.entry.parts:
            tensors.setdefault(first.get(item.entry.parts[0].bank, ""), []).append(item)
    jobs = [_Job(tuple(keys), tuple(tensors.get(root, ()))) for root, keys in groups.items()]
    return [*jobs, _Job((), tuple(tensors.get("", ())))]


def _fingerprint(plan: LoadPlan, options: PackOptions) -> str:
    """What decides the bytes: an interrupted run is continued only by the same."""
    files = sorted({item.tensor.path for item in plan.tensors})
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    what = (VERSION, stats, options.quant, options.dtype, options.max_file_bytes, sorted(plan.bank_formats.items()))
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _NewGroup:
    """A quantised group that is not on disk yet. `units` [count, bytes]."""

    matrices: tuple[PackedMatrix, ...]
    units: NDArray[np.uint8]


def _group(plan: LoadPlan, keys: tuple[str, ...], load: TensorLoad, kernels: NativeKernels) -> _NewGroup:
    matrices = []
    for key in keys:
        size, form = plan.layout.banks[key], plan.bank_formats[key]
        error, worst, worst_error = _loss(load.losses, key)
        matrices.append(
            PackedMatrix(
                key, size.rows, size.cols, size.segments, form.kind, form.group, form.scale, form.table,
                error, worst, worst_error,
            )
        )  # fmt: skip
    return _NewGroup(tuple(matrices), kernels.units(load.filler.weights[keys[0]]))


def _loss(losses: Losses, key: str) -> tuple[float, int, float]:
    """Relative error of a bank, and its worst matrix."""
    found = {index: pair for (bank, index), pair in losses.items() if bank == key}
    total = sum(pair[1] for pair in found.values())
    if total <= 0:
        return 0.0, 0, 0.0
    each = {index: (pair[0] / pair[1]) ** 0.5 if pair[1] > 0 else 0.0 for index, pair in sorted(found.items())}
    worst = max(each, key=lambda index: each[index])
    return (sum(pair[0] for pair in found.values()) / total) ** 0.5, worst, each[worst]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of each group of a job."""

    groups: tuple[int, ...]

    @classmethod
    def of(cls, plan: LoadPlan, job: _Job) -> _Sizes:
        layout = plan.layout
        return cls(
            tuple(
                layout.banks[keys[0]].count
                * unit_bytes(tuple(matrix_spec(layout.banks[key], plan.bank_formats[key]) for key in keys))
                for keys in job.groups
            )
        )


class _Writer:
    """The files of one packed folder in the making. `groups`: those on disk."""

    def __init__(self, out: Path, options: PackOptions, fingerprint: str, sizes: list[_Sizes]) -> None:
        self.out, self.options, self.fingerprint, self.sizes = out, options, fingerprint, sizes
        self.groups: list[PackedGroup] = []
        self.number, self.at = 1, 0

    # ---- beginning ---------------------------------------------------------------------------------------------------
    def resume(self) -> int:
        """Make the folder ready; returns how many jobs an interrupted run has left whole."""
        self.out.mkdir(parents=True, exist_ok=True)
        journal = self.out / JOURNAL_NAME
        kept: list[list[PackedGroup]] = []
        if self.options.overwrite:
            for path in [*self._weight_files(), journal, self.out / MANIFEST_NAME, self.out / VECTORS_NAME]:
                path.unlink(missing_ok=True)
        elif journal.is_file():
            kept = self._kept(journal)
        elif any(self.out.iterdir()):
            raise CoterieError(f"{self.out} is not empty: give a new folder, or --overwrite to replace a packed model")
        self.groups = [group for job in kept for group in job]
        if self.groups:
            last = self.groups[-1]
            self.number, self.at = int(last.file[8:13]), last.offset + last.nbytes
        for path in self._weight_files():
            if not self.groups or path.name > self.groups[-1].file:
                path.unlink()
            elif path.name == self.groups[-1].file:
                os.truncate(path, self.at)
        needed = sum(size for job in self.sizes[len(kept) :] for size in job.groups)
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise CoterieError(f"{self.out} needs {needed / 1e9:.2f} GB more, the disk has {free / 1e9:.2f} GB free")
        lines = [self.fingerprint.encode(), *(msgspec.json.encode(job) for job in kept)]
        partial = self.out / f"{JOURNAL_NAME}.partial"
        partial.write_bytes(b"".join(line + b"\n" for line in lines))
        os.replace(partial, journal)
        return len(kept)

    def _weight_files(self) -> list[Path]:
        return sorted(self.out.glob("weights-*.bin"))

    def _kept(self, journal: Path) -> list[list[PackedGroup]]:
        """Jobs of the journal whose units are whole on disk, up to the first that is not."""
        first, *lines = journal.read_bytes().split(b"\n")
        if first.decode(errors="replace") != self.fingerprint:
            raise CoterieError(
                f"{self.out} holds an interrupted conversion with other options or another source: "
                "give --overwrite to begin again, or another folder"
            )
        kept: list[list[PackedGroup]] = []
        for line in lines:
            try:
                job = msgspec.json.decode(line, type=list[PackedGroup])
            except msgspec.DecodeError:
                break
            if not all(self._is_whole(group) for group in job):
                break
            kept.append(job)
        return kept

    def _is_whole(self, group: PackedGroup) -> bool:
        path = self.out / group.file
        for unit, checksum in enumerate(group.checksums()):
            try:
                at = group.offset + unit * group.unit_bytes
                raw = np.fromfile(path, np.uint8, count=group.unit_bytes, offset=at)
            except OSError:
                return False
            if len(raw) != group.unit_bytes or _native.crc32c(raw) != checksum:
                return False
        return True

    # ---- writing -----------------------------------------------------------------------------------------------------
    def write(self, groups: list[_NewGroup]) -> None:
        """Append a job's units, then book it in the journal."""
        written = [self._append(group) for group in groups]
        self.groups += written
        with open(self.out / JOURNAL_NAME, "ab") as journal:
            journal.write(msgspec.json.encode(written) + b"\n")
            journal.flush()
            os.fsync(journal.fileno())

    def _append(self, group: _NewGroup) -> PackedGroup:
        if self.at and self.at + group.units.nbytes > self.options.max_file_bytes:
            self.number, self.at = self.number + 1, 0
        name, offset = f"weights-{self.number:05d}.bin", self.at
        checksums = np.array([_native.crc32c(unit) for unit in group.units], np.uint32)
        with open(self.out / name, "ab") as file:
            file.truncate(offset)
            file.write(group.units.data)
            file.flush()
            os.fsync(file.fileno())
        self.at += group.units.nbytes
        count, size = group.units.shape
        return PackedGroup(group.matrices, count, size, name, offset, hex_checksums(checksums))

    def write_vectors(self, vectors: dict[str, NDArray[np.float32]]) -> PackedVectors:
        raw = np.concatenate([*vectors.values(), np.zeros(0, np.float32)]).astype("<f4").view(np.uint8)
        (self.out / VECTORS_NAME).write_bytes(raw.tobytes())
        sizes = tuple((key, len(values)) for key, values in vectors.items())
        return PackedVectors(sizes, raw.nbytes, f"{_native.crc32c(raw):08x}")

    def files(self) -> tuple[tuple[str, int], ...]:
        ends: dict[str, int] = {}
        for group in self.groups:
            ends[group.file] = max(ends.get(group.file, 0), group.offset + group.nbytes)
        return tuple(ends.items())

    def finish(self, manifest: Manifest) -> None:
        """Give the folder its manifest in one step, and take the journal away."""
        partial = self.out / f"{MANIFEST_NAME}.partial"
        with open(partial, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.out / MANIFEST_NAME)
        (self.out / JOURNAL_NAME).unlink()


def errors(manifest: Manifest) -> Iterator[PackedMatrix]:
    """The banks that were rounded, worst first."""
    rounded = [matrix for matrix in manifest.matrices().values() if matrix.error > 0]
    yield from sorted(rounded, key=lambda matrix: -matrix.worst_error)
