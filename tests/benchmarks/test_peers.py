"""peers.py: processes take turns, failures stay in their cell, tables say what was measured; and a real small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from make_checkpoint import Cut, make_checkpoint
from peer_process import Fleet, Peer, PeerError
from peer_report import Report
from peers import Case, Entrant, Results, entrants, why_absent

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "die":
        os._exit(3)
    if request["op"] == "sleep":
        time.sleep(60)
    if request["op"] == "fail":
        print(json.dumps({"error": "it is broken"}), flush=True)
    else:
        print(json.dumps({"rss": request.get("rss", 100), "pid": os.getpid(), **request}), flush=True)
"""


def peer(tmp_path: Path, name: str, memory: int = 100) -> Peer:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return Peer(name, [sys.executable, str(path)], {"op": "load", "rss": memory}, memory, tmp_path / f"{name}.log")


def state(pid: int) -> str:
    """The process's state letter, once it has settled; "" if it is gone."""
    time.sleep(0.05)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_only_the_one_that_is_asked_runs_and_memory_bounds_them(tmp_path: Path) -> None:
    fleet = Fleet(250)
    for name in "abc":
        fleet.add(peer(tmp_path, name))
    first = fleet.ask("a", {"op": "x"}, 30)["pid"]
    second = fleet.ask("b", {"op": "x"}, 30)["pid"]
    assert (state(first), state(second)) == ("T", "T")
    assert fleet.ask("a", {"op": "x"}, 30)["pid"] == first
    fleet.ask("c", {"op": "x"}, 30)  # the third does not fit: b was asked longest ago
    assert set(fleet.running) == {"a", "c"}
    assert state(second) == ""
    assert fleet.fits(["a", "b"]) and not fleet.fits(["a", "b", "c"])
    fleet.end()
    assert state(first) == ""


def test_failures_name_their_cause_and_end_the_worker(tmp_path: Path) -> None:
    fleet = Fleet(1000)
    fleet.add(peer(tmp_path, "a"))
    fleet.add(peer(tmp_path, "big", memory=2000))
    for op, said in (("fail", "it is broken"), ("die", "ended with 3"), ("sleep", "took more than 0.5 s")):
        fleet.ask("a", {"op": "x"}, 30)
        with pytest.raises(PeerError, match=said):
            fleet.ask("a", {"op": op}, 0.5)
        assert not fleet.running
    with pytest.raises(PeerError, match="memory"):
        fleet.ask("big", {"op": "x"}, 30)


def shot(seconds: float, tokens: int = 10) -> dict:
    return {"seconds": seconds, "tokens": tokens, "rss": 1 << 30, "read": 10e9}


def test_tables_hold_medians_ratios_within_rounds_and_reasons(tmp_path: Path) -> None:
    folder = make_checkpoint("tiny-v2", tmp_path / "model", Cut())
    cases = [Case("decode", "decode", context=8, steps=10), Case("prefill", "prefill", length=10)]
    entrants = [Entrant("ours", "coterie", 8, {}), Entrant("theirs", "llama", 8, {})]
    data = {"settings": {"model": "m", "threads": 2}, "absent": {"vllm": "not installed"}, "shots": {}, "loads": {},
            "limits": {}}  # fmt: skip
    for number in range(4):
        data["limits"][str(number)] = {"read": 10e9, "f32": 1e11, "int8": 4e11}
        slow = 1.0 + number  # a host that slows down: the ratio stays 2
        data["shots"][f"{number}/decode/ours"] = shot(slow)
        data["shots"][f"{number}/decode/theirs"] = shot(2 * slow)
    data["shots"]["0/prefill/theirs"] = {"error": "crashed", "read": 1.0}
    weights = {"always_bytes": 5e9, "expert_bytes": 0}
    data["loads"]["ours"] = {"load_s": 1.5, "first_token_s": 2.0, "rss": 1 << 29, **weights}
    report = Report(data, folder, entrants, cases)
    assert report.rounds == ["1", "2", "3"]
    assert report.ratio("decode", "ours", "theirs") == 2.0
    assert report.share(cases[0], entrants[0], "1", shot(5.0)) == pytest.approx(1.0, rel=0.01)
    text = report.markdown()
    assert "| decode | 3.33 (2.50..5.00)," in text
    assert "| prefill | - | failed |" in text
    assert "vllm did not run: not installed" in text
    assert "theirs, prefill: crashed" in text
    assert "| load | 1.50 s | - |" in text
    assert "| decode | 2.00 |" in text


def test_prefill_never_sees_a_prompt_again() -> None:
    decode, prefill = Case("d", "decode", context=64, steps=1), Case("p", "prefill", length=64)
    seeds = [prefill.request(number)["seed"] for number in range(5)]
    assert len(set(seeds)) == 5
    assert {decode.request(number)["seed"] for number in range(5)} == {0}
    assert 0 not in seeds


def test_results_survive_and_belong_to_their_settings(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, {"model": "a"}).put("shots", "0/x/y", {"seconds": 1})
    assert Results(path, {"model": "a"}).get("shots", "0/x/y") == {"seconds": 1}
    assert Results(path, {"model": "b"}).get("shots", "0/x/y") is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_beside_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(FOLDER / "peers.py"), str(tmp_path), "--quick", "--rounds", "1", "--threads", "2",
               "--entrants", "coterie-bf16,transformers"]  # fmt: skip
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "coterie-bf16 : transformers" in result.stdout
    assert "failed" not in result.stdout
    assert (tmp_path / "peers-tiny-v2.png").stat().st_size > 1000
    data = json.loads((tmp_path / "peers-tiny-v2.json").read_text())
    assert len(data["shots"]) == 2 * 3 * 2  # rounds, cases, entrants
    again = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    assert again.stdout == result.stdout  # nothing is measured twice


def test_this_build_has_every_option_of_our_entrants() -> None:
    for entrant in entrants(2):
        if entrant.engine == "coterie":
            assert why_absent(entrant, sys.executable) is None
    unknown = Entrant("ours", "coterie", 8, {"experts": "int8", "elephants": 3})
    assert why_absent(unknown, sys.executable) == "this build has no elephants"
