"""`coterie plan step` on devices of the table and on a hardware file; `plan calibrate` end to end (slow)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.main import run

H200 = ("DeepSeek-V3", "--hardware", "h200", "-n", "8", "--tp", "8")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", "step", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_operations_add_up_to_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *H200, "--batch", "64")
    for part in ("decode", "prefill"):
        total = sum(op["seconds"]["value"] for op in found[part]["ops"])
        assert total == pytest.approx(found[part]["seconds"]["value"])
    assert found["tpot"]["p10"] < found["tpot"]["value"] < found["tpot"]["p90"]
    assert found["limits"]["b_cap"]["value"] > 0


def test_skew_overlap_and_drafts_are_heard(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ("DeepSeek-V3", "--hardware", "h200", "-n", "32", "--batch", "4096")
    plain = answer(capsys, *wide)["tpot"]["value"]
    assert answer(capsys, *wide, "--overlap")["tpot"]["value"] < plain
    assert answer(capsys, *wide, "--skew", "zipf:0.6")["tpot"]["value"] > plain
    few = answer(capsys, *H200, "--draft", "1")["tpot"]["value"]
    assert few < answer(capsys, *H200)["tpot"]["value"]


def test_people_get_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "step", *H200, "--batch", "8"]) == 0
    text = capsys.readouterr().out
    for words in ("routed experts", "waits for", "time per token", "prefill takes", "B_cap", "EXTRAPOLATED"):
        assert words in text


def test_ranks_without_a_network_are_refused_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("kind: gpu\nbf16_tops: 900\nmemory_gb: 141\nmemory_gbps: 4800\n")
    assert run(["plan", "step", "DeepSeek-V3", "--hardware", str(path), "-n", "16"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1


def test_an_engine_with_measurements_narrows_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    def width(found: dict[str, Any]) -> float:
        return float(found["tpot"]["p90"] / found["tpot"]["value"])

    unknown, known = answer(capsys, *H200), answer(capsys, *H200, "--engine", "sglang")
    assert known["tpot"]["kind"] == "calibrated" and unknown["tpot"]["kind"] == "extrapolated"
    assert 1 < width(known) < width(unknown)
    assert known["prefill"]["seconds"]["p90"] / known["prefill"]["seconds"]["value"] > width(known)
    assert run(["plan", "step", *H200, "--engine", "no-engine"]) == 1
    message = capsys.readouterr().err
    assert "there are of" in message and "unknown" not in message


SERVER = "cpu:channels=12,mts=8800,cores=128,ghz=2.0,isa=amx,sockets=1"


def test_limits_are_those_of_its_own_step(capsys: pytest.CaptureFixture[str]) -> None:
    """B_SLO is the largest batch whose step keeps the time, by asking for that batch and one more."""
    lite = ("DeepSeek-V2-Lite", "--hardware", "8592+", "--weights", "int8", "--context", "1024")
    limits = answer(capsys, *lite, "--slo", "200")["limits"]
    most = round(limits["b_slo"]["value"])
    assert limits["b_slo"]["p10"] < most < limits["b_slo"]["p90"] and most > 4 and limits["binds"] == "latency"
    for batch, fits in ((most, True), (most + 1, False)):
        assert (answer(capsys, *lite, "--batch", str(batch))["tpot"]["value"] <= 0.2) is fits
    assert limits["alone"]["value"] == answer(capsys, *lite)["tpot"]["value"]
    assert run(["plan", "memory", *lite[:-2], "--isl", "1023", "--osl", "2", "--json"]) == 0
    assert limits["b_cap"] == json.loads(capsys.readouterr().out)["b_cap"]


def test_a_slow_device_is_told_how_slow(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "step", "DeepSeek-R1", "--hardware", "9654", "--memory-gb", "1500", "--slo", "5"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"B_SLO 0: one stream takes \d+ ms a token, more than 5 ms \(--slo\)", text)
    assert "no request is fast enough" not in text
    assert run(["plan", "step", "DeepSeek-R1", "--hardware", "6454s"]) == 0
    assert "B_cap 0" in capsys.readouterr().out


def test_the_papers_limits_say_on_a_cpu_that_they_read_every_expert(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in ((("DeepSeek-V2-Lite", "--slo", "2000"), 0), (("DeepSeek-V2-Lite", "--slo", "1"), 1)):
        assert run(["plan", "limits", *arguments, "--hardware", "8592+"]) == status
        found = capsys.readouterr()
        assert "the paper's form reads every expert" in found.out + found.err
    assert run(["plan", "limits", "DeepSeek-R1", "--hardware", "h200", "-n", "8"]) == 0
    assert "the paper's form" not in capsys.readouterr().out


def test_other_engines_on_cpus_are_the_fits_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-R1 on a Xeon 6980P: 7.01 and 7.52 tokens/s were measured of ik_llama.cpp with 8-bit weights."""
    r1 = ("DeepSeek-R1", "--weights", "int8", "--context", "64", "--hardware")
    found = answer(capsys, *r1, "6980p", "--engine", "ik_llama.cpp")
    assert found["tpot"]["p10"] < 1 / 7.25 < found["tpot"]["p90"] and "ik_llama.cpp on CPUs" in found["decode"]["how"]
    assert found["tpot"]["value"] == pytest.approx(1 / 7.25, rel=0.35)
    limits, ours = found["limits"], answer(capsys, *r1, "6980p")["limits"]
    assert limits["b_cap"] == ours["b_cap"] and limits["b_rp"]["value"] < ours["b_rp"]["value"] / 2  # no matrix units
    described = answer(capsys, *r1, SERVER, "--engine", "ik_llama.cpp")["tpot"]
    assert described["value"] == pytest.approx(found["tpot"]["value"], rel=0.3) and "EXTRAPOLATED" in described["flags"]
    two = answer(capsys, *r1, SERVER.replace("sockets=1", "sockets=2"), "--engine", "ik_llama.cpp")["tpot"]["value"]
    assert described["value"] / 2 < two < described["value"]
    for engine, words in (("no-engine", "there are of ik_llama.cpp"), ("ktransformers", "there are of ik_llama.cpp")):
        assert run(["plan", "step", *r1, "6980p", "--engine", engine]) == 1
        assert words in capsys.readouterr().err
    assert run(["plan", "step", *r1, "6980p", "-n", "2", "--engine", "llama.cpp"]) == 1
    assert "work as one" in capsys.readouterr().err
    assert run(["plan", "step", *r1, SERVER.replace("amx", "avx512"), "--engine", "sglang-cpu"]) == 1
    assert "AMX" in capsys.readouterr().err
    assert run(["plan", "search", *r1[:3], "--hardware", "6980p", "--engine", "llama.cpp"]) == 1
    assert "times are those of this engine" in capsys.readouterr().err


@pytest.mark.slow
def test_calibrate_writes_a_file_that_step_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    assert run(["plan", "calibrate", "--out", str(path), "--rounds", "1", "--disk", str(tmp_path)]) == 0
    assert str(path) in capsys.readouterr().out
    found = answer(capsys, "DeepSeek-V2-Lite", "--hardware", str(path), "--weights", "int8", "--batch", "4")
    assert found["tpot"]["kind"] == "calibrated" and 1e-4 < found["tpot"]["value"] < 100


def test_calibrate_says_where_it_cannot_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", "calibrate", "--out", str(tmp_path / "none" / "x.yaml"), "--rounds", "1"]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_what_was_not_measured_is_never_surer_than_what_was(capsys: pytest.CaptureFixture[str]) -> None:
    """Half-widths of R1 on H200: of an engine with measurements, of none in particular, of a wide layout."""

    def width(*arguments: str) -> tuple[float, list[str]]:
        tpot = answer(capsys, "DeepSeek-R1", "--hardware", "h200", "--batch", "64", *arguments)["tpot"]
        return (tpot["p90"] / tpot["p10"]) ** 0.5, tpot["flags"]

    fitted, none = width("-n", "8", "--engine", "sglang"), width("-n", "8")
    wide, new = width("-n", "32", "--engine", "sglang"), width("-n", "8", "--engine", "vllm", "--hardware", "b300")
    assert fitted[1] == [] and none[1] == ["EXTRAPOLATED", "UNCALIBRATED"] and wide[1] == ["EXTRAPOLATED"]
    assert fitted[0] < 1.35 <= min(none[0], wide[0]) and fitted[0] < new[0]
