"""The header check on every kind of damage, large sequential reads, and the writer against the official reader."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.torch import save
from tiny_checkpoints import raw_file

from coterie.model.safetensors_io import (
    PIECE_BYTES,
    READ_BYTES,
    LoadError,
    NewTensor,
    ReadStats,
    read_header,
    split_rows,
    stream,
    write_file,
)

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]},
}


def changed(**fields: Any) -> dict[str, Any]:
    """GOOD with fields of tensor `b` changed."""
    return {**GOOD, "b": {**GOOD["b"], **fields}}


def write(folder: Path, content: bytes) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    return path


def test_reads_what_the_official_writer_wrote(tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(6.0).reshape(2, 3),
        "v": torch.ones(5, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
    }
    header = read_header(write(tmp_path, save(tensors, {"format": "pt"})))
    assert header.metadata == {"format": "pt"}
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "w": ("F32", (2, 3)),
        "v": ("BF16", (5,)),
        "none": ("F32", (0, 4)),
    }
    raw = {
        piece.tensor.name: bytes(data)
        for t in header.tensors.values()
        for piece, data in stream(split_rows(t), ReadStats())
    }
    assert raw == {"w": tensors["w"].numpy().tobytes(), "v": b"\x80\x3f" * 5}


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        (changed(dtype="F33"), 34, "unknown dtype"),
        (changed(dtype=["F32"]), 34, "unknown dtype"),
        (changed(shape=[6]), 34, "spans 10 bytes"),
        (changed(shape=[True] * 5), 34, "shape"),
        (changed(shape=[-5]), 34, "shape"),
        (changed(shape=[5.0]), 34, "shape"),
        (changed(shape=[10**30]), 34, "shape"),
        (changed(shape=[1] * 100), 34, "shape"),
        (changed(shape="5"), 34, "shape"),
        (changed(data_offsets=[24]), 34, "data_offsets"),
        (changed(data_offsets=[34, 24]), 34, "data_offsets"),
        (changed(data_offsets=[-10, 0]), 34, "data_offsets"),
        (changed(data_offsets=[23, 33]), 33, "overlaps"),
        (changed(data_offsets=[25, 35]), 35, "hole"),
        (changed(extra=1), 34, "exactly"),
        ({**GOOD, "b": 3}, 34, "exactly"),
        ({**GOOD, "__metadata__": {"format": 1}}, 34, "__metadata__"),
        ({**GOOD, "__metadata__": []}, 34, "__metadata__"),
        (GOOD, 33, "truncated: .* interrupted download"),
        (GOOD, 0, "truncated"),
        (GOOD, 35, "1 bytes after its last tensor"),
        ([], 0, "not a JSON object"),
        (b'{"a":', 0, "not valid JSON"),
        (b"\xff\xfe{}", 0, "not valid JSON"),
        (b"[" * 100_000, 0, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", 0, "not valid JSON"),
        (b'{"a": {"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "'dtype' appears twice"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}', 0, "'a' appears twice"),
    ],
)  # fmt: skip
def test_refuses_a_bad_header(tmp_path: Path, header: Any, size: int, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        read_header(write(tmp_path, raw_file(header, bytes(size))))


def test_the_unchanged_header_is_good(tmp_path: Path) -> None:
    assert set(read_header(write(tmp_path, raw_file(GOOD, bytes(34)))).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (b"\x10\0\0", "3 bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header of"),
        ((50).to_bytes(8, "little") + b"{}", "ends inside its header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    ],
)
def test_refuses_a_file_without_a_header(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(LoadError, match=says):
        read_header(write(tmp_path, content))


def test_an_unreadable_file_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot read x\.safetensors"):
        read_header(tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match="cannot read"):
        read_header(tmp_path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(raw_file(GOOD)) - 1), value=st.integers(0, 255), cut=st.integers(0, 40))
@example(position=0, value=0, cut=0)
@example(position=7, value=255, cut=0)
def test_no_mutated_byte_escapes_as_another_error(tmp_path: Path, position: int, value: int, cut: int) -> None:
    content = bytearray(raw_file(GOOD, bytes(34)))
    content[position] = value
    size = len(content) - cut
    path = write(tmp_path, bytes(content[:size]))
    try:
        header = read_header(path)
    except LoadError as error:
        str(error).encode()
        return
    spans = sorted((t.start, t.start + t.nbytes) for t in header.tensors.values())
    assert spans[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(spans))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
tensor_fields = (
    st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}) | json_values
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), tensor_fields, max_size=3))
def test_no_json_header_escapes_as_another_error(tmp_path: Path, header: dict[str, Any]) -> None:
    path = write(tmp_path, raw_file(json.dumps(header).encode(), bytes(4)))
    with pytest.raises(LoadError):  # four bytes of data that no such header accounts for
        read_header(path)


# ---- reading ---------------------------------------------------------------------------------------------------------
def test_small_tensors_share_one_read(tmp_path: Path) -> None:
    tensors = {f"t{number:03d}": torch.full((100, 7), float(number)) for number in range(200)}
    header = read_header(write(tmp_path, save(tensors)))
    stats = ReadStats()
    pieces = [piece for tensor in header.tensors.values() for piece in split_rows(tensor)]
    for piece, raw in stream(pieces, stats):
        assert (raw.view("<f4") == float(piece.tensor.name[1:])).all()
    assert stats.reads == 1 and stats.bytes == 200 * 100 * 7 * 4


def test_small_gaps_are_read_through_and_large_ones_skipped(tmp_path: Path) -> None:
    sizes = {"a": 1000, "b": 500_000, "c": 1000, "d": 3_000_000, "e": 1000}
    tensors = {name: torch.full((size,), ord(name), dtype=torch.uint8) for name, size in sizes.items()}
    header = read_header(write(tmp_path, save(tensors)))
    stats = ReadStats()
    pieces = [piece for name in "ace" for piece in split_rows(header.tensors[name])]
    assert [int(raw[0]) for _, raw in stream(pieces, stats)] == [ord("a"), ord("c"), ord("e")]
    assert (stats.reads, stats.bytes) == (2, 1000 + 500_000 + 1000 + 1000)


def test_large_tensors_come_in_whole_rows_by_large_reads(tmp_path: Path) -> None:
    rows, cols = 9001, 1000
    values = (torch.arange(rows * cols) % 251).to(torch.uint8).reshape(rows, cols)
    values = values.repeat(1, 3)
    header = read_header(write(tmp_path, save({"t": values})))
    pieces = split_rows(header.tensors["t"])
    assert all(piece.nbytes <= PIECE_BYTES and piece.nbytes == piece.rows * 3000 for piece in pieces)
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    stats = ReadStats()
    got = np.concatenate([raw.copy() for _, raw in stream(pieces, stats)])
    assert got.tobytes() == values.numpy().tobytes()
    assert stats.bytes == values.nbytes and stats.reads == -(
        -values.nbytes // (READ_BYTES // PIECE_BYTES * pieces[0].nbytes)
    )


def test_a_file_that_shrinks_while_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, save({"t": torch.zeros(1000)}))
    pieces = split_rows(read_header(path).tensors["t"])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(LoadError, match="ended early"):
        list(stream(pieces, ReadStats()))


# ---- writing ---------------------------------------------------------------------------------------------------------
def test_the_official_reader_reads_what_was_written(tmp_path: Path) -> None:
    half, full = np.arange(7, dtype=np.float16), np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = [NewTensor("half", "F16", (7,), lambda: half), NewTensor("full", "F32", (2, 3), lambda: full)]
    size = write_file(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    assert size == (tmp_path / "x.safetensors").stat().st_size
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["half"].tobytes() == half.tobytes() and loaded["full"].tobytes() == full.tobytes()
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "pt"} and list(header.tensors) == ["full", "half"]
    assert all(tensor.start % 4 == 0 for tensor in header.tensors.values())


def test_a_failed_write_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    def broken() -> np.ndarray:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        write_file(tmp_path / "x.safetensors", [NewTensor("t", "F32", (2,), broken)], {})
    assert not (tmp_path / "x.safetensors").exists()
