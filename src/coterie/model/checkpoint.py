"""What a folder of safetensors files (or a GGUF file) holds: which files count, and where each tensor is read from.

Headers only, no tensor data. An index decides; without one `model.safetensors`, else all shards. Everything wrong is
collected as `Problem`s, so that one error can name them together; things that are ignored are noted. What the tensors
mean is `load_plan`'s matter.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coterie.model.gguf import open_gguf
from coterie.model.gguf_file import find_gguf
from coterie.model.safetensors_io import Header, LoadError, StoredTensor, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors")
_FOREIGN = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")

ProblemKind = Literal["file", "name", "missing", "unclaimed", "shape", "format"]
_CAUSES: dict[ProblemKind, str] = {
    "file": "an interrupted download; download the folder again",
    "name": "files of two checkpoints in one folder; keep one",
    "shape": "a config.json that does not belong to these weights",
    "format": "a storage format that is not supported; convert the checkpoint to bfloat16 or DeepSeek FP8",
    "missing": "an incomplete checkpoint, or a config.json that does not belong to these weights",
    "unclaimed": "a model variant that is not supported, or a config.json that does not belong to these weights",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding that stops the load."""

    kind: ProblemKind
    text: str


def refuse(source: Path, problems: list[Problem], shown: int = 8) -> None:
    """Raise one `LoadError` for all problems, if any: the count, the first few and the likely cause."""
    if not problems:
        return
    cause = next(text for kind, text in _CAUSES.items() if any(problem.kind == kind for problem in problems))
    lines = [f"  - {problem.text}" for problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"  - and {len(problems) - shown} more")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    message = f"cannot load {source}: {count}, found before anything was loaded\n" + "\n".join(lines)
    raise LoadError(f"{message}\nlikely cause: {cause}", tuple(problem.text for problem in problems))


@dataclass(slots=True)
class Checkpoint:
    """Tensors by name in reading order, the files they come from, and what was found on the way.

    `lost`: names whose file is absent or unreadable; `some_lost`: an unreadable file whose names are unknown.
    `notes` are harmless, `doubts` are errors when the user asked for strictness.
    """

    source: Path
    files: list[Path] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    unlisted: dict[str, StoredTensor] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    some_lost: bool = False
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def open_checkpoint(path: Path) -> Checkpoint:
    """Find and check the headers of a folder (or of one file). Raises only if there is nothing to look at."""
    checkpoint = Checkpoint(path)
    if find_gguf(path):
        model = open_gguf(path, with_tokenizer=False)
        checkpoint.files, checkpoint.tensors = list(model.files), dict(model.tensors)
        checkpoint.notes.extend(model.notes)
        return checkpoint
    if path.is_file():
        _without_index(checkpoint, [path])
        return checkpoint
    if not path.is_dir():
        raise LoadError(f"{path} does not exist: give a model folder, a .safetensors or a .gguf file")
    index = path / INDEX_NAME
    found = sorted(path.glob("*.safetensors"))
    if not index.exists():
        others = sorted(path.glob("*.safetensors.index.json"))
        if len(others) > 1:
            raise LoadError(f"{path} has {len(others)} index files and none is {INDEX_NAME}: keep one")
        index = others[0] if others else index
    if index.exists():
        _with_index(checkpoint, index, found)
    elif (path / SINGLE_NAME).exists():
        _note_strays(checkpoint, [file for file in found if file.name != SINGLE_NAME], f"{SINGLE_NAME} was used")
        _without_index(checkpoint, [path / SINGLE_NAME])
    elif found:
        _without_index(checkpoint, found)
    else:
        raise LoadError(_nothing_found(path))
    return checkpoint


def _nothing_found(path: Path) -> str:
    foreign = [file.name for pattern in _FOREIGN for file in sorted(path.glob(pattern))]
    if foreign:
        return (
            f"{path} has no .safetensors files; {foreign[0]} is not read (only safetensors is): convert the checkpoint"
        )
    return f"{path} has no .safetensors files: give the folder that holds config.json and the weights"


def _note_strays(checkpoint: Checkpoint, strays: list[Path], because: str) -> None:
    if strays:
        names = ", ".join(file.name for file in strays[:3]) + (", ..." if len(strays) > 3 else "")
        checkpoint.doubts.append(f"ignored {len(strays)} other safetensors file(s) ({names}): {because}")


def _headers(checkpoint: Checkpoint, files: list[Path]) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for file in files:
        try:
            headers[file.name] = read_header(file)
        except LoadError as error:
            checkpoint.problems.append(Problem("file", str(error)))
        else:
            checkpoint.files.append(file)
    return headers


def _without_index(checkpoint: Checkpoint, files: list[Path]) -> None:
    numbered: dict[tuple[str, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            numbered.setdefault((match["stem"], match["count"]), set()).add(int(match["number"]))
    for (stem, count), numbers in numbered.items():
        absent = (
            [number for number in range(1, int(count) + 1) if number not in numbers] if int(count) < 100_000 else []
        )
        for number in absent:
            name = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
            checkpoint.problems.append(
                Problem("file", f"{name} is missing ({len(numbers)} of {int(count)} shards are here)")
            )
            checkpoint.some_lost = True
    headers = _headers(checkpoint, files)
    checkpoint.some_lost |= len(headers) < len(files)
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in checkpoint.tensors:
                both = f"{checkpoint.tensors[name].path.name} and {header.path.name}"
                text = f"{name!r} is in {both}, and no index says which counts"
                checkpoint.problems.append(Problem("name", text))
            else:
                checkpoint.tensors[name] = tensor


def _with_index(checkpoint: Checkpoint, index: Path, found: list[Path]) -> None:
    weight_map = _read_index(index)
    folder = index.parent
    listed = sorted(set(weight_map.values()))
    present = [name for name in listed if (folder / name).is_file()]
    for name in listed:
        if name not in present:
            text = f"{name} is missing, but {index.name} names it ({len(present)} of {len(listed)} shards are here)"
            checkpoint.problems.append(Problem("file", text))
    headers = _headers(checkpoint, [folder / name for name in present])
    absent_from: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if name not in headers:
            checkpoint.lost.add(tensor)
        elif tensor not in headers[name].tensors:
            checkpoint.lost.add(tensor)
            absent_from.setdefault(name, []).append(tensor)
    for name, tensors in absent_from.items():
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        text = f"{name} lacks {tensors[0]!r}{more}, which {index.name} places there: a stale index or shard"
        checkpoint.problems.append(Problem("file", text))
    superseded = 0
    for name, header in headers.items():
        for tensor, stored in header.tensors.items():
            if weight_map.get(tensor) == name:
                checkpoint.tensors[tensor] = stored
            elif tensor in weight_map:
                superseded += 1
            else:
                checkpoint.unlisted[tensor] = stored
    if superseded:
        checkpoint.doubts.append(f"{superseded} tensor(s) are in two files: the index chose which counts")
    if checkpoint.unlisted:
        checkpoint.doubts.append(f"ignored {len(checkpoint.unlisted)} tensor(s) that the index does not list")
    _note_strays(checkpoint, [file for file in found if file.name not in listed], f"{index.name} does not name them")


def _read_index(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise LoadError(f"{index.name} is larger than {MAX_INDEX_BYTES} bytes: not an index")
        fields: Any = json.loads(index.read_text("utf-8"))
    except OSError as error:
        raise LoadError(f"cannot read {index.name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{index.name} is not valid JSON ({error}): interrupted download?") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index.name} has no weight_map that maps tensor names to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or "\0" in name:
            raise LoadError(
                f"{index.name} places {tensor!r} in {name!r}: only plain file names of the same folder are read"
            )
    return weight_map
