"""Read safetensors files: a strict header check and a stream of row pieces in file order. Writes them too.

Own reader, because a memory map reads page by page (minutes on a network disk) and keeps no account of the time: here
neighbouring tensors share one large sequential read, and the next one is announced to the kernel. Nothing is unpickled,
no value is interpreted (see `dequant`), and a file is trusted only after every offset in its header has been checked.
File: u64 header length, JSON {name: {dtype, shape, data_offsets}}, then the data without holes.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.spec.errors import CoterieError

MAX_HEADER_BYTES = 100_000_000
READ_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
"""Small enough that a piece and its float32 form stay in a core's cache between decoding and packing."""
GAP_BYTES = 1 << 20
"""Unwanted bytes between two wanted tensors are read through up to this many: cheaper than a second read."""

_LIMIT = 1 << 62
_MAX_DIMENSIONS = 16
BITS_OF_DTYPE = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

RawBytes = NDArray[np.uint8]


class LoadError(CoterieError):
    """Weights that cannot be loaded. `problems` holds every finding, the message the first few."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of one file: `start` is its absolute position in bytes.

    `pair_rows`: the file stores the two halves of each run of so many rows interleaved (`gguf_names`); 0: it does not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int
    pair_rows: int = 0

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, cols) with all leading dimensions flattened; a vector is one row."""
        return (prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in file order."""

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of one file; `LoadError` names the file and what is wrong, `OSError` never escapes."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = _read_up_to(file, 8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise LoadError(
                    f"{path.name} holds {len(prefix)} bytes, too few for a safetensors file: interrupted download?"
                )
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise LoadError(f"{path.name} {_why_no_header(prefix, length, size)}")
            raw = _read_up_to(file, length)
    except OSError as error:
        raise LoadError(f"cannot read {path.name}: {error.strerror or error}") from error
    if len(raw) < length:
        raise LoadError(f"{path.name} shrank while its header was read")
    fields = _parse(path, raw)
    metadata = _metadata(path, fields.pop("__metadata__", {}))
    found = [_entry(path, 8 + length, name, value) for name, value in fields.items()]
    found.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _check_extents(path, found, 8 + length, size)
    return Header(path, {tensor.name: tensor for tensor in found}, metadata)


def _read_up_to(file: FileIO, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _why_no_header(prefix: bytes, length: int, size: int) -> str:
    if prefix == b"version ":
        return "is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
    if length > MAX_HEADER_BYTES:
        return f"claims a header of {length} bytes (limit {MAX_HEADER_BYTES}): not a safetensors file, or damaged"
    return f"ends inside its header ({size} of at least {length + 8} bytes): interrupted download?"


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            keys = Counter(key for key, _ in pairs)
            raise ValueError(f"key {keys.most_common(1)[0][0]!r} appears twice")
        return fields

    try:
        fields = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise LoadError(
            f"{path.name}: the header is not valid JSON ({error}): not a safetensors file, or damaged"
        ) from error
    if not isinstance(fields, dict):
        raise LoadError(f"{path.name}: the header is not a JSON object: not a safetensors file, or damaged")
    return fields


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise LoadError(f"{path.name}: __metadata__ must map strings to strings")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _entry(path: Path, data_start: int, name: str, value: Any) -> StoredTensor:
    where = f"{path.name}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise LoadError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_OF_DTYPE:
        raise LoadError(f"{where} has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise LoadError(f"{where} has a shape that is not a list of up to {_MAX_DIMENSIONS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)) or offsets[0] > offsets[1]:
        raise LoadError(f"{where} has data_offsets that are not [begin, end] with begin <= end")
    bits, nbytes = prod(shape) * BITS_OF_DTYPE[dtype], offsets[1] - offsets[0]
    if bits != nbytes * 8:
        raise LoadError(f"{where} spans {nbytes} bytes, but its shape and dtype {dtype} need another number")
    return StoredTensor(name, dtype, tuple(shape), path, data_start + offsets[0], nbytes)


def _check_extents(path: Path, tensors: Sequence[StoredTensor], start: int, size: int) -> None:
    at = start
    for tensor in tensors:
        if tensor.start != at:
            what = "overlaps the tensor before it" if tensor.start < at else "leaves a hole before it"
            raise LoadError(f"{path.name}: tensor {tensor.name!r} {what}")
        at += tensor.nbytes
    if at > size:
        raise LoadError(f"{path.name} is truncated: {size} of {at} bytes: interrupted download?")
    if at < size:
        raise LoadError(f"{path.name} has {size - at} bytes after its last tensor: damaged, or two writers at once")


# ---- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row, row + rows) of a tensor's matrix shape, at [start, start + nbytes) of its file."""

    tensor: StoredTensor
    row: int
    rows: int
    start: int
    nbytes: int

    @property
    def is_last(self) -> bool:
        return self.row + self.rows == self.tensor.matrix_shape[0]


def split_rows(tensor: StoredTensor, *, whole: bool = False) -> list[Piece]:
    """Pieces of whole rows (of whole runs of `pair_rows`), about `PIECE_BYTES` each; `whole` asks for one. None if
    empty."""
    if not tensor.nbytes:
        return []
    rows, _ = tensor.matrix_shape
    if whole or tensor.nbytes % rows:
        return [Piece(tensor, 0, rows, tensor.start, tensor.nbytes)]
    row_bytes = tensor.nbytes // rows
    run = tensor.pair_rows or 1
    step = max(run, PIECE_BYTES // row_bytes // run * run)
    return [
        Piece(tensor, row, min(step, rows - row), tensor.start + row * row_bytes, min(step, rows - row) * row_bytes)
        for row in range(0, rows, step)
    ]


@dataclass(slots=True)
class ReadStats:
    """What reading cost so far; the caller owns it and may look at any time."""

    bytes: int = 0
    reads: int = 0
    seconds: float = 0.0


def stream(pieces: Iterable[Piece], stats: ReadStats) -> Iterator[tuple[Piece, RawBytes]]:
    """Yield each piece with its bytes, in the order given (sort by file and start for sequential reads).

    The bytes are a view of a buffer that the next read overwrites: copy what must outlive the iteration.
    """
    window = np.empty(READ_BYTES, np.uint8)
    opened: FileIO | None = None
    try:
        groups = _group(pieces)
        for number, group in enumerate(groups):
            start, end = group[0].start, group[-1].start + group[-1].nbytes
            path = group[0].tensor.path
            if opened is None or opened.name != str(path):
                if opened is not None:
                    opened.close()
                opened = _open(path)
            buffer = window if end - start <= len(window) else np.empty(end - start, np.uint8)
            _read_into(opened, start, buffer[: end - start], stats)
            if number + 1 < len(groups) and groups[number + 1][0].tensor.path == path:
                _announce(opened, groups[number + 1])
            for piece in group:
                offset = piece.start - start
                yield piece, buffer[offset : offset + piece.nbytes]
    finally:
        if opened is not None:
            opened.close()


def _group(pieces: Iterable[Piece]) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    for piece in pieces:
        last = groups[-1] if groups else None
        if last is not None and last[0].tensor.path == piece.tensor.path:
            gap = piece.start - (last[-1].start + last[-1].nbytes)
            if 0 <= gap <= GAP_BYTES and piece.start + piece.nbytes - last[0].start <= READ_BYTES:
                last.append(piece)
                continue
        groups.append([piece])
    return groups


def _open(path: Path) -> FileIO:
    try:
        file = FileIO(str(path))
    except OSError as error:
        raise LoadError(f"cannot read {path.name}: {error.strerror or error}") from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def _announce(file: FileIO, group: Sequence[Piece]) -> None:
    """Let the kernel fetch the next read while this one is converted: one read ahead, so it always fits."""
    if hasattr(os, "posix_fadvise"):
        start = group[0].start
        length = min(group[-1].start + group[-1].nbytes - start, READ_BYTES)
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)


def _read_into(file: FileIO, start: int, target: RawBytes, stats: ReadStats) -> None:
    began = time.perf_counter()
    done = 0
    try:
        file.seek(start)
        while done < len(target):
            count = file.readinto(target[done:].data)
            stats.reads += 1
            if not count:
                raise LoadError(
                    f"{Path(str(file.name)).name} ended early at byte {start + done}: it changed while being read"
                )
            done += count
    except OSError as error:
        raise LoadError(f"cannot read {Path(str(file.name)).name}: {error.strerror or error}") from error
    finally:
        stats.bytes += done
        stats.seconds += time.perf_counter() - began


# ---- writing ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: `data()` gives its values, any array of the right number of bytes, when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS_OF_DTYPE[self.dtype] // 8


def write_file(path: Path, tensors: Iterable[NewTensor], metadata: dict[str, str]) -> int:
    """Write one file, one tensor in memory at a time; it appears under its name only when complete. Returns its size.

    Wider dtypes come first, so that every tensor is aligned.
    """
    ordered = sorted(tensors, key=lambda tensor: (-BITS_OF_DTYPE[tensor.dtype], tensor.dtype))
    fields: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for tensor in ordered:
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in ordered:
            values = np.ascontiguousarray(tensor.data())
            if values.nbytes != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {values.nbytes} bytes given, {tensor.nbytes} declared")
            file.write(values.reshape(-1).view(np.uint8).data)
    os.replace(partial, path)
    return 8 + len(header) + at
