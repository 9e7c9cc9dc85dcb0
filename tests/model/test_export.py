"""Export against the loader (nothing is lost, bit for bit) and against the official reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import FakeKernels, hf_tensors, tiny_spec, write_folder

from coterie.model.dummy import dummy_weights
from coterie.model.export import ExportOptions, export_weights
from coterie.model.loader import LoadOptions, load_weights
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec


def round_trip(folder: Path, tensors: dict[str, torch.Tensor], dtype: str, spec: ModelSpec | None = None) -> Path:
    write_folder(folder / "in", tensors)
    kernels, spec = FakeKernels(), spec or tiny_spec()
    loaded = load_weights(folder / "in", spec, kernels)  # type: ignore[arg-type]
    export_weights(loaded.weights, spec, kernels, folder / "out", ExportOptions(dtype=dtype))  # type: ignore[arg-type]
    return folder / "out"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("q_lora_rank", [10, None])
@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_load_then_export_gives_the_same_bits(
    tmp_path: Path, stored: torch.dtype, dtype: str, q_lora_rank: int | None
) -> None:
    tensors = hf_tensors(stored, q_lora_rank=q_lora_rank)
    out = round_trip(tmp_path, tensors, dtype, tiny_spec(q_lora_rank=q_lora_rank))
    assert_same(load_file(out / "model.safetensors"), tensors)
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]


def test_a_float32_router_and_norm_survive_a_bfloat16_export(tmp_path: Path) -> None:
    tensors = hf_tensors(torch.bfloat16)
    tensors["model.layers.1.mlp.gate.weight"] = torch.randn(4, 24)
    tensors["model.norm.weight"] = torch.randn(24)
    assert_same(load_file(round_trip(tmp_path, tensors, "bfloat16") / "model.safetensors"), tensors)


def test_float32_weights_are_rounded_when_asked(tmp_path: Path) -> None:
    tensors = hf_tensors()
    found = load_file(round_trip(tmp_path, tensors, "bfloat16") / "model.safetensors")
    for name, tensor in tensors.items():
        narrow = tensor.ndim == 2 and not name.endswith("mlp.gate.weight")
        assert torch.equal(found[name], tensor.bfloat16() if narrow else tensor), name


def test_without_mtp_and_tied(tmp_path: Path) -> None:
    tensors = hf_tensors(mtp=False)
    del tensors["lm_head.weight"]
    out = round_trip(tmp_path, tensors, "float32", tiny_spec(tie_embeddings=True))
    assert_same(load_file(out / "model.safetensors"), tensors)


def test_shards_have_an_index_that_the_loader_follows(tmp_path: Path) -> None:
    kernels, spec = FakeKernels(), tiny_spec()
    made = dummy_weights(spec, kernels, LoadOptions(dtype="float32")).weights  # type: ignore[arg-type]
    report = export_weights(made, spec, kernels, tmp_path, ExportOptions(dtype="float32", max_shard_bytes=16_000))  # type: ignore[arg-type]
    assert len(report.files) > 2 and sum((tmp_path / file).stat().st_size for file in report.files) == report.nbytes
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report.files) and len(index["weight_map"]) == report.tensors
    found: dict[str, torch.Tensor] = {}
    for file in report.files:
        part = load_file(tmp_path / file)
        assert sum(tensor.nbytes for tensor in part.values()) <= 16_000
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    again = load_weights(tmp_path, spec, kernels)  # type: ignore[arg-type]
    for key, value in made.items():
        one, two = getattr(value, "values", value), again.weights[key]
        assert one.tobytes() == getattr(two, "values", two).tobytes(), key


def test_an_occupied_folder_is_refused_unless_asked(tmp_path: Path) -> None:
    kernels, spec = FakeKernels(), tiny_spec()
    write_folder(tmp_path, hf_tensors(), 3)
    made = dummy_weights(spec, kernels).weights  # type: ignore[arg-type]
    with pytest.raises(CoterieError, match="already holds model-0000"):
        export_weights(made, spec, kernels, tmp_path, ExportOptions(dtype="float32"))  # type: ignore[arg-type]
    export_weights(made, spec, kernels, tmp_path, ExportOptions(dtype="float32", overwrite=True))  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_incomplete_weights_are_refused_before_anything_is_removed(tmp_path: Path) -> None:
    kernels, spec = FakeKernels(), tiny_spec()
    write_folder(tmp_path, hf_tensors())
    made = dummy_weights(spec, kernels).weights  # type: ignore[arg-type]
    del made["layers.1.ffn.down"]
    with pytest.raises(CoterieError, match=r"first 'layers\.1\.ffn\.down'"):
        export_weights(made, spec, kernels, tmp_path, ExportOptions(dtype="float32", overwrite=True))  # type: ignore[arg-type]
    assert (tmp_path / "model.safetensors").exists()
