"""Quantising while loading: the shipped model in every format, against the reference backend with the same formats.

The reference holds the dequantised weights and multiplies float32 rows, so what is left between the two is the int8
rounding of activations.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from coterie import LLM
from coterie.engine import build
from coterie.engine.config import EngineConfig
from coterie.engine.report import activation_error
from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError
from coterie.spec.weights import QuantPlan

PROMPT = list(range(30, 62))
SMALL: Any = {"threads": 1, "max_model_len": 128}
FORMATS = [
    ({"experts": "bf16", "attention": "bf16", "head": "bf16"}, {"bf16"}),
    ({"experts": "fp8"}, {"fp8 g128"}),
    ({"experts": "int8", "group": 16, "attention": "int8", "head": "int8"}, {"int8 g16"}),
    ({"experts": "int4", "group": 128}, {"int4 g128"}),
    ({"experts": "mxfp4", "group": 64}, {"mxfp4 g32"}),
]


def lines(llm: LLM) -> dict[str, str]:
    return {choice.what: choice.value for choice in llm.report}


def test_the_first_line_names_what_the_weights_are_kept_in() -> None:
    """Kinds by their bytes, the most first; not the kind of the cache."""
    with LLM(experts="int4", attention="int4", head="int4", **SMALL) as llm:
        found = lines(llm)
        assert found["weights"].startswith("int4 g32"), found["weights"]
        others = {value for what, value in found.items() if what.startswith("weights of ")}
        assert set(found["weights"].split(", ")) == others


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    with LLM(**SMALL) as llm:
        assert lines(llm)["activations"] == ("bfloat16" if lines(llm)["isa"].startswith("amx") else "float32")
        return llm.logits(PROMPT)


@pytest.mark.parametrize(("options", "labels"), FORMATS, ids=[str(options["experts"]) for options, _ in FORMATS])
def test_every_format_serves(options: Any, labels: set[str], plain: np.ndarray) -> None:
    pytest.importorskip("torch")
    with LLM(**SMALL, **options) as native, LLM(backend="reference", **SMALL, **options) as reference:
        assert {lines(native)["weights of experts"]} == labels
        assert lines(native)["weights of attention"] == ("int8 g16" if options.get("attention") == "int8" else "bf16")
        assert lines(native)["weights of embedding"] == "bf16"
        integer = options["experts"] in ("int8", "int4", "mxfp4")
        logits = native.logits(PROMPT)
        tiles = lines(native)["isa"].startswith("amx")  # bf16 weights meet rows rounded to bf16
        assert relative(logits, reference.logits(PROMPT)) < (0.03 if integer or tiles else 1e-3)
        assert relative(logits, plain) < 0.5
        assert lines(native)["activations"] == (
            "int8 per token and group of weights" if integer else "bfloat16" if tiles else "float32"
        )


def test_a_tied_head_becomes_an_int8_copy() -> None:
    with LLM(**SMALL, head="int8") as llm:
        assert llm.spec.tie_embeddings and lines(llm)["weights of head"] == "int8 g128"
        weights = llm._open_core().runner.model.weights
        assert weights["head"].kind == "int8" and weights["embed"].kind == "bf16"


def test_the_load_report_says_what_was_rounded() -> None:
    core, info = build.build_engine(shipped_model_path(), EngineConfig(quant=QuantPlan("int4"), **SMALL))
    assert core is not None
    (line,) = (line for line in info.load_lines if "int4 g32" in line)
    found = re.fullmatch(r"\d+ tensors BF16 -> int4 g32: rounded, relative error (0\.\d+)", line)
    assert found is not None and 0.03 < float(found[1]) < 0.15
    assert any("BF16 -> bf16: exact" in line for line in info.load_lines)


@pytest.mark.parametrize("isa", machine().isa_levels)
def test_the_error_of_activations_is_that_of_eight_bits(isa: str) -> None:
    """Half a step of 1/127 of the largest of 128 normal values, uniformly spread."""
    error = activation_error(NativeKernels(1, isa))
    rows = np.random.default_rng(1).standard_normal((1000, 128))
    step = np.abs(rows).max(1) / 127
    assert error == pytest.approx(float(np.sqrt((step**2 / 12).mean())), rel=0.1)


def test_too_little_memory_is_refused_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_memory", lambda: 2_000_000)
    monkeypatch.setattr(NativeKernels, "allocate", lambda *_: pytest.fail("allocated"))
    for options in ({}, {"experts": "int8"}, {"load_format": "dummy"}):
        with pytest.raises(CoterieError) as caught:
            LLM(**SMALL, **options)  # type: ignore[arg-type]
        text = str(caught.value)
        assert all(word in text for word in ("experts", "attention", "embedding", "cache of 128 tokens", "2.00 MB"))


def test_outputs_of_experts_in_bfloat16_on_one_rank() -> None:
    """The option rounds on one rank too: other bits, nearly the same logits on both backends, a line in the report."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(**SMALL, experts="int8", exchange_dtype=dtype) as llm:  # type: ignore[arg-type]
            assert lines(llm)["exchange_dtype"] == dtype and llm.config.quant.experts == "int8"
            found[dtype] = llm.logits(PROMPT)
    difference = relative(found["bfloat16"], found["float32"])
    assert 0 < difference < 0.02, difference
    pytest.importorskip("torch")
    with LLM(backend="reference", **SMALL, experts="int8", exchange_dtype="bfloat16") as llm:
        assert relative(found["bfloat16"], llm.logits(PROMPT)) < 0.03
