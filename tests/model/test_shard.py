"""A rank's share of the weights: byte for byte what a full load gives the same experts, from every kind of source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import gguf_tensors, metadata_of, write_gguf
from tensor_ranks import family

from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.dequant import to_float32
from coterie.model.loader import LoadError, LoadOptions, load_weights
from coterie.model.packed_writer import PackOptions, pack
from coterie.model.safetensors_io import read_header
from coterie.model.shard import ExpertShard
from coterie.model.shipped import shipped_model_path
from coterie.spec.model import ModelSpec
from coterie.spec.placement import ExpertPlacement
from coterie.spec.tensor_split import TensorSplit
from coterie.spec.weights import QuantPlan

SOURCE = Path(shipped_model_path())
SPEC = ModelSpec.from_hf(SOURCE)
INT8 = QuantPlan("int8", "int8", "int8")
PLACEMENT = ExpertPlacement.linear(5, 32, 3, num_slots=36)
"""Not a divisor of the experts, with copies of some."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path | None, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sources")
    pack(SOURCE, SPEC, NativeKernels(1), folder / "packed", PackOptions(quant=INT8))
    config = json.loads((SOURCE / "config.json").read_text())
    tensors = {}
    for name, stored in read_header(SOURCE / "model.safetensors").tensors.items():
        raw = np.fromfile(stored.path, np.uint8, stored.nbytes, offset=stored.start)
        if not name.startswith("model.layers.6."):  # the MTP block, which the helper does not know
            tensors[name] = to_float32(raw, stored.dtype).reshape(stored.shape)
    named = gguf_tensors(tensors, config, "deepseek2")
    types = {"gate_exps": "Q8_0", "up_exps": "Q8_0"}
    write_gguf(folder / "model.gguf", "deepseek2", metadata_of(config, "deepseek2"), named, types)
    return {
        "safetensors": (SOURCE, {}),
        "quantised": (SOURCE, {"quant": INT8}),
        "packed": (folder / "packed", {}),
        "gguf": (folder / "model.gguf", {}),
        "dummy": (None, {"load_format": "dummy", "quant": QuantPlan("int4"), "seed": 3}),
    }


KINDS = ("safetensors", "quantised", "packed", "gguf", "dummy")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_the_bytes_of_a_full_load(kind: str, sources: dict[str, Any]) -> None:
    path, options = sources[kind]
    kernels = NativeKernels(1)
    full = load_weights(path, SPEC, kernels, LoadOptions(**options))
    for rank in range(PLACEMENT.num_ranks):
        shard = ExpertShard.of(PLACEMENT, SPEC, rank)
        asked: list[int] = []
        own = load_weights(
            path,
            SPEC,
            kernels,
            LoadOptions(shard=shard, **options),
            admit=lambda needs, to=asked: to.append(sum(n.nbytes for n in needs)),
        )
        assert (
            own.weights.keys() == {key for key in full.weights if not key.startswith("mtp.")} and own.kind == full.kind
        )
        for key, bank in own.weights.items():
            unit, _, end = key.rpartition(".")
            if isinstance(bank, np.ndarray):
                np.testing.assert_array_equal(bank, full.weights[key])
            elif unit in shard.experts and end in ("gate_up", "down"):
                rows = shard.experts[unit]
                assert bank.count == len(rows) == 12
                np.testing.assert_array_equal(kernels.units(bank), kernels.units(full.weights[key])[list(rows)])
            else:
                np.testing.assert_array_equal(kernels.units(bank), kernels.units(full.weights[key]))
        experts = [sum(n.nbytes for n in needs if n.role == "experts") for needs in (own.needs, full.needs)]
        assert experts[0] < 0.6 * experts[1] and asked == [sum(n.nbytes for n in own.needs)]


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_loaded_into_banks_that_exist(kind: str, sources: dict[str, Any]) -> None:
    """What a rank must do that takes over a lost rank's experts."""
    path, options = sources[kind]
    kernels = NativeKernels(1)
    before = ExpertShard.of(PLACEMENT, SPEC, 0)
    held = load_weights(path, SPEC, kernels, LoadOptions(shard=before, **options)).weights
    after = ExpertShard(
        {
            unit: (*row[:2], 31, *row[3:5], 30 if unit == "layers.2.ffn" else row[5], *row[6:])
            for unit, row in before.experts.items()
        }
    )
    change = after.since(before, held)
    assert change.num_experts == 6
    news = load_weights(path, SPEC, kernels, LoadOptions(shard=change, **options))
    if kind != "gguf":  # its stacks are so small here that each is one piece
        assert news.report.nbytes < 0.2 * sum(need.nbytes for need in news.needs), "only what is new is read"
    for key, bank in held.items():
        assert news.weights[key] is bank
    wanted = load_weights(path, SPEC, kernels, LoadOptions(shard=after, **options)).weights
    for key, bank in held.items():
        if not isinstance(bank, np.ndarray):
            np.testing.assert_array_equal(kernels.units(bank), kernels.units(wanted[key]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_a_tensor_group_holds_its_columns(kind: str, sources: dict[str, Any]) -> None:
    """Rows of a full load, and nothing else of what is cut; two groups of two ranks."""
    path, options = sources[kind]
    kernels = NativeKernels(1)
    full = load_weights(path, SPEC, kernels, LoadOptions(mtp=False, **options))
    placement, needs = ExpertPlacement.linear(5, 32, 4), set()
    for rank in (1, 2):
        shard = ExpertShard.of(placement, SPEC, rank, TensorSplit(rank % 2, 2))
        own = load_weights(path, SPEC, kernels, LoadOptions(shard=shard, **options))
        cuts, seen = shard.columns, 0
        for key, bank in own.weights.items():
            whole = full.weights[key]
            if key in cuts.rows:
                first, end = cuts.rows[key]
                segments = 2 if key.endswith("gate_up") else 1
                values = kernels.read(whole, 0).reshape(segments, -1, whole.cols)[:, first:end]
                assert bank.rows == segments * (end - first) < whole.rows
                np.testing.assert_array_equal(kernels.read(bank, 0).reshape(values.shape), values)
                seen += 1
            elif key in cuts.matrices:
                first, end = cuts.matrices[key]
                assert bank.count == whole.count // 2
                np.testing.assert_array_equal(kernels.units(bank), kernels.units(whole)[first:end])
                seen += 1
        assert seen == len(cuts.matrices) + len(cuts.rows.keys() & full.weights.keys())
        for role in ("attention", "experts"):
            mine, all_of_it = (sum(n.nbytes for n in needs if n.role == role) for needs in (own.needs, full.needs))
            assert mine < 0.75 * all_of_it
        needs.add(own.needs)
    assert len(needs) == 1, "caches of the ranks of a group must be of one size"


def test_biases_are_cut_with_their_columns() -> None:
    spec = family("gqa all biases")
    kernels, options = NativeKernels(1), {"load_format": "dummy", "seed": 2}
    full = load_weights(None, spec, kernels, LoadOptions(**options)).weights
    shard = ExpertShard.of(ExpertPlacement.linear(2, 8, 2), spec, 1, TensorSplit(1, 2))
    own = load_weights(None, spec, kernels, LoadOptions(shard=shard, **options)).weights
    key = "layers.1.attention"
    np.testing.assert_array_equal(own[f"{key}.q.bias"], full[f"{key}.q.bias"][36:])
    np.testing.assert_array_equal(own[f"{key}.o.bias"], full[f"{key}.o.bias"][96:])
    np.testing.assert_array_equal(own[f"{key}.k.bias"], full[f"{key}.k.bias"])


def test_packed_columns_that_part_a_panel_are_refused(sources: dict[str, Any]) -> None:
    """48 rows of a head are one and a half panels: eight ranks with a head each cannot share such a folder."""
    path, _ = sources["packed"]
    shard = ExpertShard.of(ExpertPlacement.linear(5, 32, 8), SPEC, 1, TensorSplit(1, 8))
    with pytest.raises(LoadError, match=r"outputs 48 to 96 of layers.0.attention.q are not whole panels: use the ori"):
        load_weights(path, SPEC, NativeKernels(1), LoadOptions(shard=shard))


def test_the_reference_backend_takes_a_share_of_a_packed_folder(sources: dict[str, Any]) -> None:
    path, _ = sources["packed"]
    kernels = ReferenceKernels()
    full = load_weights(path, SPEC, kernels).weights
    own = load_weights(path, SPEC, kernels, LoadOptions(shard=ExpertShard.of(PLACEMENT, SPEC, 2))).weights
    key = "layers.3.ffn.down"
    for slot, expert in enumerate(PLACEMENT.slot_to_expert[2, 24:].tolist()):
        np.testing.assert_array_equal(kernels.read(own[key], slot), kernels.read(full[key], expert))


def test_a_damaged_unit_is_named(sources: dict[str, Any], tmp_path: Path) -> None:
    path, _ = sources["packed"]
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((tmp_path / "coterie.json").read_text())
    group = next(g for g in manifest["groups"] if g["matrices"][0]["key"] == "layers.2.ffn.gate_up")
    with open(tmp_path / group["file"], "r+b") as file:
        file.seek(group["offset"] + 17 * group["unit_bytes"] + 5)
        file.write(b"\x7f\x00\x7f")
    load_weights(tmp_path, SPEC, NativeKernels(1), LoadOptions(shard=ExpertShard.of(PLACEMENT, SPEC, 0)))
    with pytest.raises(LoadError, match=r"layers.2.ffn\[17\].*is damaged"):
        load_weights(tmp_path, SPEC, NativeKernels(1), LoadOptions(shard=ExpertShard.of(PLACEMENT, SPEC, 1)))
