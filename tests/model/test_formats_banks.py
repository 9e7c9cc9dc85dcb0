"""Codes of every format in banks of both backends: what is read back is what the file's blocks mean, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gguf_files import tame_raw

from coterie.kernels.api import Kernels
from coterie.kernels.native import NativeKernels
from coterie.kernels.reference import ReferenceKernels
from coterie.model.banks import BankFiller
from coterie.model.dequant import BlockScale, dequantize_rows, fp8_codes
from coterie.model.formats.codes import CodeRows, common_format
from coterie.model.formats.ggml import DECODERS, decode
from coterie.model.names import BankSpec, Part, TensorEntry, WeightLayout
from coterie.spec.model import Fp8BlockQuant
from coterie.spec.weights import BF16, F32, FP8, WeightFormat

ROWS = 40
BACKENDS: dict[str, Callable[[], Kernels]] = {"native": lambda: NativeKernels(2), "reference": ReferenceKernels}


def tame_blocks(name: str, seed: int, rows: int = ROWS) -> CodeRows:
    """Random codes with scales of ordinary size."""
    return decode(tame_raw(name, rows, 2, np.random.default_rng(seed)).reshape(-1), name, rows)


Parts = dict[str, tuple[TensorEntry, CodeRows]]


def filled(kernels: Kernels, form: WeightFormat, parts: Parts, size: BankSpec) -> np.ndarray:
    """A bank that pieces of tensors fill, read back."""
    layout = WeightLayout({"bank": size}, {}, {name: entry for name, (entry, _) in parts.items()})
    filler = BankFiller(kernels, layout, {"bank": form})
    for entry, rows in parts.values():
        for first in range(0, len(rows), 7):
            filler.put(entry, first, rows[first : first + 7])
    return np.stack([kernels.read(filler.weights["bank"], index) for index in range(size.count)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_type_in_its_own_bank(name: str, backend: str) -> None:
    rows = tame_blocks(name, 1)
    shape = (ROWS, rows.codes.shape[1])
    whole = {"w": (TensorEntry(shape, (Part("bank"),)), rows)}
    held = filled(BACKENDS[backend](), rows.form, whole, BankSpec(1, *shape))
    np.testing.assert_array_equal(held[0], rows.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", [("Q4_0", "Q8_0"), ("IQ4_XS", "Q6_K"), ("Q4_K", "Q5_K"), ("Q5_0", "Q8_0")])
def test_gate_and_up_of_two_types(pair: tuple[str, str], backend: str) -> None:
    gate, up = (tame_blocks(name, seed) for seed, name in enumerate(pair))
    cols = min(gate.codes.shape[1], up.codes.shape[1])
    gate, up = (cut(rows, cols) for rows in (gate, up))
    form = common_format({gate.form, up.form})
    assert form is not None
    parts = {
        "gate": (TensorEntry((ROWS, cols), (Part("bank"),)), gate),
        "up": (TensorEntry((ROWS, cols), (Part("bank", at=ROWS),)), up),
    }
    held = filled(BACKENDS[backend](), form, parts, BankSpec(1, 2 * ROWS, cols, segments=2))
    np.testing.assert_array_equal(held[0], np.concatenate([gate.values(), up.values()]))


def cut(rows: CodeRows, cols: int) -> CodeRows:
    """The first columns."""
    groups = cols // rows.form.group
    mins = None if rows.mins is None else rows.mins[:, :groups]
    return CodeRows(rows.form, rows.codes[:, :cols], rows.scales[:, :groups], mins)


@pytest.mark.parametrize("form", [F32, BF16])
def test_codes_in_a_wide_bank_become_floats(form: WeightFormat) -> None:
    rows = tame_blocks("Q4_K", 3)
    shape = (ROWS, rows.codes.shape[1])
    held = filled(NativeKernels(1), form, {"w": (TensorEntry(shape, (Part("bank"),)), rows)}, BankSpec(1, *shape))[0]
    assert np.abs(held - rows.values()).max() <= (0 if form == F32 else np.abs(rows.values()).max() / 256)


def test_experts_of_a_stack_go_to_their_matrices() -> None:
    rows = tame_blocks("Q6_K", 4)
    cols = rows.codes.shape[1]
    entry = TensorEntry((4, ROWS // 4, cols), tuple(Part("bank", e, rows=(e * 10, e * 10 + 10)) for e in range(4)))
    held = filled(NativeKernels(1), rows.form, {"w": (entry, rows)}, BankSpec(4, ROWS // 4, cols))
    np.testing.assert_array_equal(held.reshape(ROWS, cols), rows.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_blocks_are_exact_in_an_fp8_bank(backend: str) -> None:
    """`--experts fp8` keeps DeepSeek's codes: a block scale becomes one scale a row and group of 128."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (200, 300), dtype=np.uint8)
    codes[(codes & 127) == 127] = 0
    scale = BlockScale(rng.random((2, 3)).astype(np.float32), Fp8BlockQuant(128, 128))
    rows = fp8_codes(codes, 0, scale)
    assert rows is not None and rows.form == FP8
    np.testing.assert_array_equal(rows.values(), dequantize_rows(codes, 0, scale))
    part = fp8_codes(codes[120:140], 120, scale)
    assert part is not None
    np.testing.assert_array_equal(part.values(), dequantize_rows(codes[120:140], 120, scale))
    whole = {"w": (TensorEntry((200, 300), (Part("bank"),)), rows)}
    held = filled(BACKENDS[backend](), FP8, whole, BankSpec(1, 200, 300))
    np.testing.assert_array_equal(held[0], rows.values())
    assert fp8_codes(codes, 0, BlockScale(np.ones((2, 6), np.float32), Fp8BlockQuant(128, 50))) is None
