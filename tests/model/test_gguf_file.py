"""GGUF headers: what a damaged or foreign file is told, and that nothing but a `LoadError` comes of any damage."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from coterie.model.checkpoint import open_checkpoint
from coterie.model.gguf import open_gguf
from coterie.model.gguf_file import find_gguf, read_gguf
from coterie.model.safetensors_io import LoadError

LLAMA = {
    "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 32, "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2, "llama.rope.dimension_count": 16,
}  # fmt: skip


def write(path: Path, **changes: object) -> Path:
    """A whole one-layer llama; `changes` adds or replaces metadata (`__` for a dot) or drops it with None."""
    writer = gguf.GGUFWriter(path, str(changes.pop("architecture", "llama")))
    extra = {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in {**LLAMA, **extra}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, shape in TENSORS.items():
        writer.add_tensor(name, np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TENSORS = {
    "token_embd.weight": (48, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (32, 32),
    "blk.0.attn_v.weight": (32, 32), "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_gate.weight": (32, 32),
    "blk.0.ffn_up.weight": (32, 32), "blk.0.ffn_down.weight": (32, 32),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf").read_bytes()


def test_a_whole_file_is_read(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    file = read_gguf(path)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == TENSORS
    reader = gguf.GGUFReader(path)
    assert {t.name: int(t.data_offset) for t in reader.tensors} == {n: t.start for n, t in file.tensors.items()}
    config = open_gguf(path).config
    assert config["vocab_size"] == 48 and config["tie_word_embeddings"] and config["rms_norm_eps"] == 1e-5


def test_truncation_anywhere_is_one_clear_error(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    for length in [*range(0, 1800, 13), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError, match=r"model\.gguf") as caught:
            read_gguf(path)
        assert "\n" not in str(caught.value)


def test_flipped_bytes_never_escape_or_allocate(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(1)
    header = whole[:1500]
    tracemalloc.start()
    refused = 0
    for _ in range(1500):
        data = bytearray(header)
        for at in rng.integers(0, len(header), 1 + int(rng.integers(3))):
            data[at] = int(rng.integers(256))
        path.write_bytes(bytes(data) + whole[1500:])
        try:
            open_gguf(path)
        except LoadError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 500
    assert peak < 8 << 20


def patched(tmp_path: Path, whole: bytes, at: int, form: str, value: int) -> Path:
    data = bytearray(whole)
    struct.pack_into(form, data, at, value)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize(
    ("at", "form", "value", "said"),
    [
        (0, "<I", 0x12345678, "not a GGUF file"),
        (0, "4s", b"vers", "Git LFS pointer"),
        (4, "<I", 1, "version 1; GGUF versions 2 and 3"),
        (4, "<I", 0x03000000, "big-endian"),
        (8, "<Q", 1 << 60, "number of tensors is"),
        (16, "<Q", 1 << 40, "number of metadata entries is"),
        (16, "<Q", 60000, "."),
        (24, "<Q", 1 << 62, "length of a metadata key is"),
        (24, "<Q", 1 << 10, "."),
    ],
)
def test_absurd_header_fields(tmp_path: Path, whole: bytes, at: int, form: str, value: int, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        read_gguf(patched(tmp_path, whole, at, form, value))


def tensor_field(whole: bytes, name: str) -> int:
    """Where the tensor table's entry of `name` says its rank."""
    return whole.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize(
    ("offset", "form", "value", "said"),
    [
        (0, "<I", 9, "rank of tensor 'blk.0.attn_q.weight' is 9"),
        (4, "<Q", 1 << 50, "truncated"),
        (4, "<Q", 0, "has sizes"),
        (20, "<I", 139, "has type number 139: only llama.cpp's own types"),
        (20, "<I", 31, "Q4_0_4_4, which llama.cpp has removed"),
        (20, "<I", 12, "comes in rows of 256"),
        (24, "<Q", 1 << 40, "truncated"),
        (24, "<Q", 3, "unaligned"),
        (24, "<Q", 0, "over the tensor before it"),
    ],
)
def test_absurd_tensor_entries(tmp_path: Path, whole: bytes, offset: int, form: str, value: int, said: str) -> None:
    at = tensor_field(whole, "blk.0.attn_q.weight") + offset
    with pytest.raises(LoadError, match=said):
        read_gguf(patched(tmp_path, whole, at, form, value))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "mamba"}, "'mamba' is not read from GGUF; supported are deepseek2, llama, qwen2"),
        ({"llama.attention.sliding_window": 32}, "sliding-window attention is not supported"),
        ({"llama.brand_new": 1}, "llama.brand_new may alter the mathematics"),
        ({"llama.block_count": "one"}, "is 'one', not a whole number"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.feed_forward_length": [32, 64]}, "differs from layer to layer"),
        ({"llama.rope.dimension_count": 8}, "is not the head's width 16"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope', which is not supported"),
        ({"general.alignment": 3}, "not a power of two"),
        ({"split.count": 4}, "is one part of 4"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not read from GGUF"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.pre None is no splitting rule"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores does not fit"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, changes: dict, said: str) -> None:
    path = write(tmp_path / "model.gguf", **changes)
    with pytest.raises(LoadError, match=said):
        open_gguf(path)


def test_layers_that_agree_are_one_value(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", **{"llama.feed_forward_length": [32, 32]})
    assert open_gguf(path).config["intermediate_size"] == 32


def test_which_file_of_a_folder(tmp_path: Path, whole: bytes) -> None:
    assert find_gguf(tmp_path) == []
    (tmp_path / "a.gguf").write_bytes(whole)
    assert find_gguf(tmp_path) == [tmp_path / "a.gguf"]
    assert set(open_checkpoint(tmp_path).tensors) >= {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    (tmp_path / "b.gguf").write_bytes(whole)
    with pytest.raises(LoadError, match="holds 2 GGUF models"):
        find_gguf(tmp_path)
    assert find_gguf(tmp_path / "b.gguf") == [tmp_path / "b.gguf"]
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) == []
