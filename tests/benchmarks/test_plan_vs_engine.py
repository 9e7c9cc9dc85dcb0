"""plan_vs_engine.py: predictions beside what the engine takes, at the file's rates and at the moment's."""

from __future__ import annotations

import sys
from pathlib import Path

import plan_vs_engine as benchmark
import pytest

from coterie.planner.measured import Constants, Measured, Share
from coterie.planner.measured_file import file_text
from coterie.spec.hardware import HardwareSpec

HW = HardwareSpec(name="x", kind="cpu", bf16_tops=0.1, int8_tops=0.4, memory_gb=8, memory_gbps=10, measured=True)
MEASURED = Measured(
    1, "any", ((8e6, 20.0), (4e8, 10.0)),
    tuple(Share(form, 64, 1, 1, 0.5) for form in ("bf16", "int8", "mla")),
    Constants(step=1e-4, dense_layer=1e-5, moe_layer=1e-5, stream=1e-5, value=0, row=0, logit=0),
)  # fmt: skip


def test_rates_of_a_moment_scale_bytes_products_and_constants() -> None:
    machine = benchmark.Machine(HW, MEASURED)
    now = machine.now((5e9, 0.05e12, 0.3e12))
    factor = 5e9 / MEASURED.read_rate(benchmark.SETS[1])
    assert [rate for _, rate in now.measured.reads] == pytest.approx([20 * factor, 10 * factor])
    assert (now.hardware.bf16_tops, now.hardware.int8_tops) == (0.05, 0.3)
    assert now.measured.constants.step == pytest.approx(2e-4)


def test_errors_are_summed_up_by_phase_and_case() -> None:
    made = [benchmark.Result("a", phase, 1, 1, 1.0, planned, 1.5, 1.0) for phase, planned in
            (("decode", 1.1), ("decode", 0.8), ("prefill", 2.0))]  # fmt: skip
    lines = {(line[0], line[1]): line[2:] for line in benchmark.summary(made)}
    assert lines["decode", "all"] == ["2", "15 %", "20 %", "50 %", "50 %"]
    assert lines["prefill", "a"] == ["1", "100 %", "100 %", "50 %", "50 %"]


def test_every_form_of_weights_is_a_case() -> None:
    found = {case.name: case for case in benchmark.cases(2)}
    assert list(found) == list(benchmark.CASES)
    quant = found["v2-lite-int4"].config.quant
    assert (quant.experts, quant.attention, quant.head) == ("int4", "int4", "bf16")
    assert found["v2-lite-int4"].form == "int4" and len(found["v2-lite-int4"].files.spec.layers) == 2


def test_the_shipped_model_runs_beside_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(file_text(HW, MEASURED))
    monkeypatch.setattr(benchmark, "DECODE", ((2, 16),))
    monkeypatch.setattr(benchmark, "PREFILL", (32,))
    monkeypatch.setattr(benchmark, "STEPS", 3)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    monkeypatch.setattr(benchmark.Comparison, "rates", lambda self: (1e10, 1e11, 4e11))
    monkeypatch.setattr(sys, "argv", ["plan_vs_engine.py", "--hardware", str(path), "--cases", "demo"])
    benchmark.main()
    out = capsys.readouterr().out
    assert "| demo | prefill | 1 | 32 |" in out and "| demo | decode | 2 | 17 |" in out
