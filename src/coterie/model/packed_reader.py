"""Load a packed folder: units are read from disk straight into the memory of the banks and checked on the way.

Nothing is converted on the native backend; another one gets the dequantised values. A unit that differs from its
checksum is refused by the name of its bank and its expert. `packed_manifest` has checked everything else before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from coterie.kernels import _native
from coterie.kernels.api import Kernels
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.model.banks import RoleNeed, memory_needs
from coterie.model.load_report import LoadProgress, LoadReport
from coterie.model.packed_manifest import (
    VECTORS_NAME,
    Manifest,
    PackedGroup,
    check_manifest,
    check_quant,
    read_manifest,
)
from coterie.model.packed_panels import copy_panels, panel_cuts
from coterie.model.safetensors_io import LoadError
from coterie.model.shard import MTP_PREFIX, ExpertShard
from coterie.spec.model import ModelSpec
from coterie.spec.weights import BF16, F32, QuantPlan

CACHED = 0.5
"""From this share of the files on, what the page cache holds is worth going through it."""


class Way(NamedTuple):
    """How to read; `reason` is a line of the report."""

    direct: bool
    reason: str


def choose_way(folder: Path, manifest: Manifest, available: int) -> Way:
    """Through the page cache if it holds the files, or can keep them beside the weights for the next start; else past
    it, which is faster than filling it and pushes nothing out."""
    sizes = dict(manifest.files)
    total = max(1, sum(sizes.values()))
    held = sum(size * _native.cached_fraction(str(folder / name)) for name, size in sizes.items()) / total
    if held >= CACHED:
        return Way(False, f"read through the page cache, which held {100 * held:.0f} % of the files")
    if 2 * total <= available:
        return Way(False, "read through the page cache, so that the next start finds the files there")
    return Way(True, "read past the page cache, which could not keep the files beside the weights")


class PackedReader:
    """One packed folder, checked against a model. `load` may be called once for each backend."""

    def __init__(
        self, folder: Path, spec: ModelSpec, quant: QuantPlan, dtype: str, shard: ExpertShard | None = None
    ) -> None:
        self.folder, self._shard = folder, shard
        self._held = None if shard is None else shard.held
        self.manifest: Manifest = read_manifest(folder)
        layout = check_manifest(self.manifest, folder, spec)
        check_quant(self.manifest, quant, dtype, layout)
        formats = {key: matrix.spec.format for key, matrix in self.manifest.matrices().items()}
        self.needs: tuple[RoleNeed, ...] = memory_needs(layout if shard is None else shard.needed(layout), formats)
        self._cuts = {} if shard is None else panel_cuts(self.manifest, shard.columns)

    def load(
        self, kernels: Kernels, progress: Callable[[LoadProgress], None] | None
    ) -> tuple[dict[str, Any], LoadReport]:
        """Banks and vectors by key, and the report."""
        began = time.perf_counter()
        weights: dict[str, Any] = {} if self._held is None else dict(self._held)
        how = choose_way(self.folder, self.manifest, int(psutil.virtual_memory().available))
        groups = [(group, units) for group in self.manifest.groups if (units := self._units(group))]
        total = self.manifest.nbytes
        if self._shard is not None:
            total = sum(len(units) * group.unit_bytes for group, units in groups)
        done = checked = 0
        for group, units in groups:
            weights.update(self._group(group, units, kernels, direct=how.direct))
            done += len(units) * group.unit_bytes
            checked += len(units)
            if progress is not None:
                rate = done / max(time.perf_counter() - began, 1e-9)
                progress(LoadProgress(done, total, rate, (total - done) / rate, group.name))
        if self._held is None:
            weights.update(self._vectors(kernels))
        seconds = time.perf_counter() - began
        source = f"packed from {self.manifest.source}; CRC-32C of {checked} units checked"
        notes = (source, how.reason, *self.manifest.notes)
        report = LoadReport(
            files=(*(name for name, _ in self.manifest.files), VECTORS_NAME),
            tensors=len(weights),
            nbytes=total,
            seconds=seconds,
            read_seconds=seconds if isinstance(kernels, NativeKernels) else 0.0,
            conversions=(),
            skipped=(),
            notes=notes,
            mtp_present=self.manifest.mtp and self._shard is None,
        )
        return weights, report

    def _units(self, group: PackedGroup) -> tuple[tuple[int, int], ...]:
        """(place here, unit of the file) of what is to be read of a group."""
        whole = tuple((unit, unit) for unit in range(group.count))
        if self._shard is None:
            return whole
        if group.name in self._shard.experts:
            row = self._shard.experts[group.name]
            return tuple((slot, expert) for slot, expert in enumerate(row) if expert >= 0)
        if (kept := self._shard.columns.matrices.get(group.name)) is not None and self._held is None:
            return tuple(enumerate(range(*kept)))
        return () if self._held is not None or group.name.startswith(MTP_PREFIX) else whole

    def _group(
        self, group: PackedGroup, units: tuple[tuple[int, int], ...], kernels: Kernels, *, direct: bool
    ) -> dict[str, Any]:
        keys = [matrix.key for matrix in group.matrices]
        cuts = [self._cuts.get(matrix.key) for matrix in group.matrices]
        specs = [matrix.spec if cut is None else cut.kept for matrix, cut in zip(group.matrices, cuts, strict=True)]
        count = self._count(group)
        is_native = isinstance(kernels, NativeKernels)
        native = kernels if isinstance(kernels, NativeKernels) else NativeKernels(machine().threads)
        if is_native and self._held is not None:
            held = tuple(self._held[key] for key in keys)
        else:
            held = native.allocate(count, *specs)
        path = self.folder / group.file
        if any(cuts):
            whole = native.allocate(group.count, *(matrix.spec for matrix in group.matrices))
            read_units(native, whole[0], path, group, direct=direct)
            copy_panels(native.units(whole[0]), native.units(held[0]), group, cuts)
        elif units == tuple((unit, unit) for unit in range(group.count)):
            read_units(native, held[0], path, group, direct=direct)
        else:
            read_some_units(native, held[0], path, group, units)
        if is_native:
            return dict(zip(keys, held, strict=True))
        wide = [replace(spec, format=spec.format if spec.format == BF16 else F32) for spec in specs]
        banks = kernels.allocate(count, *wide) if self._held is None else tuple(self._held[key] for key in keys)
        for source, target in zip(held, banks, strict=True):
            for index, _ in units:
                kernels.fill(target, index, 0, native.read(source, index))
        return dict(zip(keys, banks, strict=True))

    def _count(self, group: PackedGroup) -> int:
        """Matrices that a group's banks have here."""
        if self._shard is not None and group.name in self._shard.experts:
            return len(self._shard.experts[group.name])
        if self._shard is not None and group.name in self._shard.columns.matrices:
            first, end = self._shard.columns.matrices[group.name]
            return end - first
        return group.count

    def _vectors(self, kernels: Kernels) -> dict[str, Any]:
        vectors = self.manifest.vectors
        raw = np.fromfile(self.folder / VECTORS_NAME, np.uint8)
        if raw.nbytes != vectors.nbytes or f"{_native.crc32c(raw):08x}" != vectors.crc32c:
            raise LoadError(f"{self.folder / VECTORS_NAME} is damaged: its checksum differs; copy the folder again")
        found, at = {}, 0
        values = raw.view("<f4")
        for key, size in vectors.sizes:
            if self._shard is None or not key.startswith(MTP_PREFIX):
                first, end = (0, size) if self._shard is None else self._shard.columns.vectors.get(key, (0, size))
                found[key] = kernels.vector(values[at + first : at + end])
            at += size
        return found


def read_units(kernels: NativeKernels, bank: Any, path: Path, group: PackedGroup, *, direct: bool) -> None:
    """Read and check the units of a group into the memory that `bank` shares. `LoadError` names the first bad unit."""
    unit, code, differs = kernels.read_units(bank, path, group.offset, group.checksums(), direct=direct)
    if unit < 0:
        return
    raise _bad_unit(path, group, unit, code, differs=differs)


def read_some_units(
    kernels: NativeKernels, bank: Any, path: Path, group: PackedGroup, units: tuple[tuple[int, int], ...]
) -> None:
    """The same for (matrix of the bank, unit of the file) pairs, through the page cache, on the kernels' threads."""
    memory, checksums = kernels.units(bank), group.checksums()

    def read(pair: tuple[int, int]) -> None:
        slot, unit = pair
        target, at = memory[slot], group.offset + unit * group.unit_bytes
        done = 0
        try:
            while done < group.unit_bytes and (count := os.preadv(file, [target[done:].data], at + done)):
                done += count
        except OSError as error:
            raise _bad_unit(path, group, unit, error.errno or 0, differs=False) from error
        if done < group.unit_bytes or _native.crc32c(target) != checksums[unit]:
            raise _bad_unit(path, group, unit, 0, differs=done == group.unit_bytes)

    file = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(kernels.threads) as pool:
            list(pool.map(read, units))
    finally:
        os.close(file)


def _bad_unit(path: Path, group: PackedGroup, unit: int, code: int, *, differs: bool) -> LoadError:
    at = group.offset + unit * group.unit_bytes
    where = f"{group.name}[{unit}] ({path.name}, {group.unit_bytes} bytes from {at})"
    if differs:
        return LoadError(f"{where} is damaged: its bytes differ from the checksum; copy the folder again")
    reason = os.strerror(code) if code else "the file ended early: it changed while being read"
    return LoadError(f"cannot read {where}: {reason}")
