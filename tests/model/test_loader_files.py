"""The loader against folders that are not whole: missing, truncated, stray and doubled files, and bad indexes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loading import Tensors, check_every_value, load, refused
from safetensors.torch import save, save_file
from tiny_checkpoints import (
    FakeKernels,
    hf_tensors,
    tiny_spec,
    write_folder,
    write_index,
)

from coterie.model.loader import LoadError, load_weights


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, Tensors, dict[str, str]]:
    tensors = hf_tensors()
    return tmp_path, tensors, write_folder(tmp_path, tensors, 3)


Sharded = tuple[Path, Tensors, dict[str, str]]
SECOND = "model-00002-of-00003.safetensors"


def test_a_missing_shard(sharded: Sharded) -> None:
    folder, _, _ = sharded
    (folder / SECOND).unlink()
    error = refused(folder)
    assert len(error.problems) == 1 and f"{SECOND} is missing" in str(error) and "2 of 3 shards" in str(error)
    assert "interrupted download" in str(error)


def test_a_missing_shard_without_an_index(sharded: Sharded) -> None:
    folder, _, _ = sharded
    (folder / SECOND).unlink()
    (folder / "model.safetensors.index.json").unlink()
    error = refused(folder)
    assert len(error.problems) == 1 and f"{SECOND} is missing" in str(error) and "interrupted download" in str(error)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard(sharded: Sharded, keep: int, index: bool) -> None:
    folder, _, _ = sharded
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(content[:keep])
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    error = refused(folder)
    assert len(error.problems) == 1 and SECOND in str(error) and "interrupted download" in str(error)


def test_a_stray_file_beside_an_index_is_ignored(sharded: Sharded) -> None:
    folder, tensors, _ = sharded
    save_file({name: value + 1 for name, value in tensors.items()}, folder / "model.safetensors")
    loaded, kernels = load(folder)
    check_every_value(loaded, kernels, tensors)
    assert any("model.safetensors" in note and "ignored" in note for note in loaded.report.notes)
    assert "model.safetensors" not in loaded.report.files
    assert "ignored 1 other" in str(refused(folder, strict=True))


def test_the_index_names_a_file_that_lacks_the_tensor(sharded: Sharded) -> None:
    folder, _, weight_map = sharded
    write_index(folder, {**weight_map, "lm_head.weight": SECOND})
    error = refused(folder)
    (problem,) = error.problems
    assert problem.startswith(f"{SECOND} lacks 'lm_head.weight'") and "stale index" in problem


def test_the_index_decides_between_two_files(sharded: Sharded) -> None:
    folder, tensors, weight_map = sharded
    newer = tensors["model.norm.weight"] + 1
    save_file({"model.norm.weight": newer}, folder / "overlay.safetensors")
    write_index(folder, {**weight_map, "model.norm.weight": "overlay.safetensors"})
    loaded, _ = load(folder)
    np.testing.assert_array_equal(loaded.weights["norm"], newer.numpy())
    assert any("1 tensor(s) are in two files" in note for note in loaded.report.notes)


def test_a_duplicate_without_an_index_is_an_error(sharded: Sharded) -> None:
    folder, tensors, _ = sharded
    (folder / "model.safetensors.index.json").unlink()
    loaded, kernels = load(folder)
    check_every_value(loaded, kernels, tensors)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "extra.safetensors")
    assert "'model.norm.weight' is in extra.safetensors and model-0000" in str(refused(folder))


def test_a_tensor_that_the_index_does_not_list(sharded: Sharded) -> None:
    folder, _, weight_map = sharded
    del weight_map["model.norm.weight"]
    write_index(folder, weight_map)
    (problem,) = refused(folder).problems
    assert "'model.norm.weight' is missing from the index, though model-0000" in problem


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "only plain file names"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "only plain file names"),
        ('{"weight_map": {"a": 3}}', "only plain file names"),
    ],
)
def test_a_bad_index(sharded: Sharded, content: str, says: str) -> None:
    folder, _, _ = sharded
    (folder / "model.safetensors.index.json").write_text(content)
    assert says in str(refused(folder))


def test_nothing_to_load(tmp_path: Path) -> None:
    assert "does not exist" in str(refused(tmp_path / "nowhere"))
    assert "no .safetensors files: give the folder" in str(refused(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin is not read" in str(refused(tmp_path))
    with pytest.raises(LoadError, match="no weights were given"):
        load_weights(None, tiny_spec(), FakeKernels())  # type: ignore[arg-type]


def test_a_single_file_can_be_given(tmp_path: Path) -> None:
    tensors = hf_tensors()
    (tmp_path / "weights.safetensors").write_bytes(save(tensors))
    loaded, kernels = load(tmp_path / "weights.safetensors")
    check_every_value(loaded, kernels, tensors)
