"""ep.py: networks of namespaces come up, are shaped, are always taken away; a run measures every form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ep import Shape
from ep_net import Layout, NetError, Network, sent_by

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ep.py"
FORMS = ("flat", "hierarchical", "fixed")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    try:
        with Network(Layout(1), "10.79.0"):
            pass
    except NetError as error:
        pytest.skip(f"no test network here: {error}")


def test_a_network_counts_bytes_and_goes_away() -> None:
    with Network(Layout(4, racks=2), "10.78.0") as network:
        assert namespaces().count(network.name) == 6
        network.limit(50)
        network.limit_racks(20)
        before = network.sent_bytes(3), network.rack_bytes(1)
        listen = "import socket; s = socket.create_server(('10.78.0.1', 99)); print(flush=True); s.accept()[0].recv(1)"
        send = "import socket; socket.create_connection(('10.78.0.1', 99), 10).sendall(b'x' * 1000)"
        server = subprocess.Popen(
            [*network.inside(network.host(0)), sys.executable, "-c", listen], stdout=subprocess.PIPE
        )
        assert server.stdout is not None and server.stdout.readline()
        subprocess.run([*network.inside(network.host(3)), sys.executable, "-c", send], check=True)
        assert server.wait(10) == 0
        assert network.sent_bytes(3) - before[0] >= 1000
        assert network.rack_bytes(1) - before[1] >= 1000
        network.cable(3, plugged=False)
        network.cable(3, plugged=True)
        network.limit(None)
    assert network.name not in namespaces()


def test_it_goes_away_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Network(Layout(2), "10.78.0") as network:
        raise ZeroDivisionError
    assert network.name not in namespaces()


def test_a_failure_while_it_comes_up_is_said_and_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(Layout(2), "10.78.0")
    monkeypatch.setattr(network, "_shape", lambda *given: (_ for _ in ()).throw(NetError("no tbf")))
    with pytest.raises(NetError, match="no tbf"), network:
        pass
    assert network.name not in namespaces()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NetError, match="ip and tc not found"), Network(Layout(1)):
        pass


def test_counters_and_shapes_are_read() -> None:
    table = "Inter-| x\n face | y\n    lo: 1 2 3 4 5 6 7 8 9 10\n  eth0: 11 2 3 4 5 6 7 8 99 10\n"
    assert sent_by(table, "eth0") == 99
    with pytest.raises(NetError, match="eth1"):
        sent_by(table, "eth1")
    assert Shape.parse("2x4").size == 8 and str(Shape.parse("2x2x2")) == "2 racks x 2 hosts x 2 ranks"


@pytest.mark.slow
def test_a_run_measures_every_form_and_leaves_nothing() -> None:
    pytest.importorskip("torch")
    before = namespaces()
    options = ["--shape", "2x1", "--mbit", "500", "--tokens", "16", "--hidden", "64", "--rounds", "1", "--follow"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tables = {"flat": 4, "hierarchical": 4, "flat-reduced": 2, "hierarchical-reduced": 2, "fixed capacity 8": 2}
    for form, number in tables.items():
        assert done.stdout.count(f"│ {form} ") == number, "long and short steps, with float32 rows and narrow ones"
    assert "equal to one rank's." in done.stdout
    assert namespaces() == before


@pytest.mark.slow
def test_choices_are_judged_against_the_fastest_form_of_the_same_run() -> None:
    pytest.importorskip("torch")
    options = ["--shape", "2x1", "--mbit", "500", "--tokens", "16", "--hidden", "64", "--rounds", "2", "--choices", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "│"]
    assert [(row[0], row[1]) for row in rows] == [
        (f"500 Mbit/s, {kind}", tokens) for kind in ("float32", "narrow") for tokens in ("16", "8")
    ]
    for row in rows:
        fastest = min((float(cell), name) for cell, name in zip(row[2:5], FORMS, strict=True) if cell)[1]
        for chosen, loss in ((row[5], row[6]), (row[7], row[8])):
            assert 0 <= float(loss.strip("%")) < (5 if chosen == f"2 x {fastest}" else 1000)
        assert float(row[9]) > 0, "trials took time"
