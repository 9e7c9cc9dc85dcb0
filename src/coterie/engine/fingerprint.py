"""Fingerprint: what must be the same on all ranks of an engine, and who differs in what.

Code: the version and every file of the package. Model: the description and each weight file's size and both of its
ends, so that another fine-tune of the same shape is seen without reading it all. Options: those that decide results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

import coterie
from coterie.engine.build import EngineInfo
from coterie.spec.errors import CoterieError

_END_BYTES = 1 << 16
_WEIGHTS = (".safetensors", ".bin", ".gguf")


class Fingerprint(msgspec.Struct, frozen=True):
    """Digests; `version` is for people."""

    version: str
    code: str
    model: str
    options: str


def fingerprint(info: EngineInfo) -> Fingerprint:
    """Of a loaded rank."""
    isa = [choice.value for choice in info.report if choice.what == "isa"]
    options = f"{replace(info.config, threads=None)} {info.max_model_len} {info.service} {isa}"
    return Fingerprint(coterie.__version__, _code(), _model(info), _digest([options.encode()]))


def check_alike(marks: Mapping[int, Fingerprint]) -> None:
    """Raise CoterieError that says which rank differs from the lowest one, and in what."""
    first = min(marks)
    for rank, mark in sorted(marks.items()):
        for name in ("code", "model", "options"):
            ours, theirs = getattr(marks[first], name), getattr(mark, name)
            if ours != theirs:
                versions = f" (versions {marks[first].version} and {mark.version})" if name == "code" else ""
                raise CoterieError(
                    f"rank {rank} differs from rank {first} in {name}{versions}: {theirs} and {ours}; all ranks need "
                    "the same version of coterie, the same model files and the same flags"
                )


@cache
def _code() -> str:
    root = Path(coterie.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
    return _digest(part for path in files for part in (str(path.relative_to(root)).encode(), path.read_bytes()))


def _model(info: EngineInfo) -> str:
    path = info.files.folder
    parts = [repr(info.files.spec).encode()]
    if path is not None:
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
        parts += [part for file in files for part in _ends(file)]
    return _digest(parts)


def _ends(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        return [path.name.encode(), str(size).encode(), head, file.read(_END_BYTES)]


def _digest(parts: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
