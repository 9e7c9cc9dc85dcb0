"""Read the header of GGUF files: metadata and where each tensor lies, with every count and offset checked.

Own reader, because nothing in a file may be believed before it is compared with the file's size: a damaged length must
end in one line, not in an allocation. Versions 2 and 3, little-endian. What the metadata mean is `gguf_config`'s
matter, blocks are `formats/ggml`'s. File: magic, version, tensor and metadata counts, metadata, tensor table, data.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from coterie.model.formats.ggml import TYPES
from coterie.model.safetensors_io import LoadError, StoredTensor

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 1 << 30
MAX_STRING_BYTES = 64 << 20
MAX_ITEMS = 1 << 24
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 20
_MAX_NAME_BYTES = 1024
_MAX_DIMENSIONS = 4
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file's checked header: metadata as Python values (arrays as lists), tensors under their own names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Header:
    """Reads values one after the other, each bounded by what is left of the file and of the header's limit."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.at = 0

    def bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise LoadError(
                f"{self.path.name}: {what} needs {count} bytes at byte {self.at}, but the file has {self.size}: "
                "truncated or damaged"
            )
        if self.at + count > MAX_HEADER_BYTES:
            raise LoadError(f"{self.path.name}: the header is larger than {MAX_HEADER_BYTES >> 20} MiB: damaged")
        data = self.file.read(count)
        if len(data) < count:
            raise LoadError(f"{self.path.name} shrank while its header was read")
        self.at += count
        return data

    def number(self, form: str, what: str) -> Any:
        return struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form), what))[0]

    def count(self, form: str, limit: int, what: str) -> int:
        value = int(self.number(form, what))
        if value > limit:
            raise LoadError(f"{self.path.name}: {what} is {value}, more than {limit}: not a GGUF file, or damaged")
        return value

    def string(self, limit: int, what: str) -> str:
        return self.bytes(self.count("Q", limit, f"length of {what}"), what).decode("utf-8", "replace")

    def strings(self, count: int, what: str) -> list[str]:
        """Many strings: a vocabulary has a quarter of a million, so this loop does only what it must."""
        result: list[str] = []
        read, at, end = self.file.read, self.at, min(self.size, MAX_HEADER_BYTES)
        for _ in range(count):
            prefix = read(8)
            length = int.from_bytes(prefix, "little")
            at += 8 + length
            if len(prefix) < 8 or at > end:
                raise LoadError(f"{self.path.name}: {what} goes past the end: truncated or damaged")
            result.append(read(length).decode("utf-8", "replace"))
        self.at = at
        return result

    def value(self, kind: int, what: str) -> Any:
        """A metadata value of a type number."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES, what)
        if kind != _ARRAY:
            raise LoadError(f"{self.path.name}: {what} has the unknown value type {kind}: damaged")
        item = self.number("I", what)
        count = self.count("Q", MAX_ITEMS, f"number of items of {what}")
        if item in _SCALARS:
            form = np.dtype(_SCALARS[item]).newbyteorder("<")
            return np.frombuffer(self.bytes(count * form.itemsize, what), form).tolist()
        if item != _STRING:
            raise LoadError(f"{self.path.name}: {what} is an array of value type {item}, which is not read")
        return self.strings(count, what)


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of one file. `LoadError` names the file and what is wrong; `OSError` never escapes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _read(_Header(file, path, size))
    except OSError as error:
        raise LoadError(f"cannot read {path.name}: {error.strerror or error}") from error


def _read(header: _Header) -> GgufFile:
    name = header.path.name
    magic = header.bytes(min(4, header.size), "magic")
    if magic != MAGIC:
        lfs = "a Git LFS pointer, not the weights: run `git lfs pull` in its folder" if magic == b"vers" else ""
        raise LoadError(f"{name} is {lfs or f'not a GGUF file: it begins with {magic!r}'}")
    version = header.number("I", "version")
    if version not in (2, 3):
        swapped = "a big-endian file" if version and version & 0xFFFF == 0 else f"version {version}"
        raise LoadError(f"{name} is {swapped}; GGUF versions 2 and 3, little-endian, are read: convert it again")
    tensors = header.count("Q", MAX_TENSORS, "number of tensors")
    entries = header.count("Q", MAX_METADATA, "number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = header.string(_MAX_NAME_BYTES, "a metadata key")
        if key in metadata:
            raise LoadError(f"{name}: metadata key {key!r} appears twice: damaged")
        metadata[key] = header.value(header.number("I", key), key)
    infos = [_tensor_info(header) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise LoadError(f"{name}: general.alignment is {alignment!r}, not a power of two: damaged")
    start = -(-header.at // alignment) * alignment
    return GgufFile(header.path, metadata, _place(header, infos, start, alignment))


_Info = tuple[str, tuple[int, ...], int, int]


def _tensor_info(header: _Header) -> _Info:
    """(name, sizes with the slowest first, type number, offset in the data)."""
    name = header.string(_MAX_NAME_BYTES, "a tensor name")
    what = f"tensor {name!r}"
    rank = header.count("I", _MAX_DIMENSIONS, f"rank of {what}")
    sizes = tuple(int(header.number("Q", what)) for _ in range(rank))
    return name, sizes[::-1], header.number("I", what), header.number("Q", what)


def _place(header: _Header, infos: list[_Info], start: int, alignment: int) -> dict[str, StoredTensor]:
    """Tensors in file order, each inside the file and none over another."""
    file = header.path.name
    tensors: dict[str, StoredTensor] = {}
    end = start
    for name, shape, number, offset in sorted(infos, key=lambda info: info[3]):
        where = f"{file}: tensor {name!r}"
        block = TYPES.get(number)
        if block is None:
            label = f"{_REMOVED[number]}, which llama.cpp has removed" if number in _REMOVED else f"number {number}"
            raise LoadError(
                f"{where} has type {label}: only llama.cpp's own types are read (those of ik_llama.cpp are not); "
                "take the same model as Q4_K, IQ4_XS or Q8_0"
            )
        if not shape or 0 in shape or shape[-1] % block.values:
            raise LoadError(f"{where} has sizes {list(shape)}: {block.name} comes in rows of {block.values}: damaged")
        nbytes = prod(shape) // block.values * block.nbytes
        if offset % alignment or start + offset < end:
            raise LoadError(f"{where} lies at offset {offset}, unaligned or over the tensor before it: damaged")
        end = start + offset + nbytes
        if end > header.size:
            raise LoadError(f"{file} is truncated: {header.size} of at least {end} bytes: interrupted download?")
        if name in tensors:
            raise LoadError(f"{where} appears twice: damaged")
        tensors[name] = StoredTensor(name, block.name, shape, header.path, start + offset, nbytes)
    return tensors


def local_path(name: str | Path) -> Path:
    """A model's folder or file by its name. Raises `LoadError` for a URL, whose slashes a Path would lose."""
    if "://" in str(name):
        raise LoadError(
            f"{name} is a URL and models are not fetched; give a folder with config.json and safetensors files or a "
            "GGUF file on this machine"
        )
    return Path(name).expanduser()


def find_gguf(path: Path) -> list[Path]:
    """The GGUF files of a model: of a file (with the other parts if it is one part of a split), or of a folder.

    Empty if a folder has none, or has a config.json (then it is a Hugging Face folder). `LoadError` if it is not clear
    which is meant, or a part is missing.
    """
    if path.is_file():
        return _parts(path) if path.suffix == ".gguf" else []
    if not path.is_dir() or (path / "config.json").exists():
        return []
    found = sorted(path.glob("*.gguf"))
    models = {match["stem"] if (match := _SPLIT.fullmatch(file.name)) else file.name for file in found}
    if len(models) > 1:
        raise LoadError(f"{path} holds {len(models)} GGUF models ({', '.join(sorted(models)[:3])}): name the file")
    return _parts(found[0]) if found else []


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    absent = [name for name in names if not (path.parent / name).is_file()]
    if absent or not names:
        raise LoadError(f"{path.name} is one of {count} parts, and {len(absent)} are missing, first {absent[:1]}")
    return [path.with_name(name) for name in names]
