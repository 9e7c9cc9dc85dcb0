"""`coterie plan`: its table of commands, light imports, and that mistakes are one line with near names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coterie.cli.main import run
from coterie.cli.plan import COMMANDS


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one error line of a plan command that must fail."""
    assert run(["plan", *arguments]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_every_command_of_the_table_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (_, text) in COMMANDS.items():
        assert run(["plan", name, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out and text.endswith(".")


def test_an_unknown_command_lists_the_possible_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert ", ".join(COMMANDS) in fails(capsys, "nope")


def test_devices_are_listed_without_torch_engine_or_kernels() -> None:
    code = (
        "import sys; from coterie.cli.main import run; status = run(['plan', 'devices', '--json']);"
        "heavy = {'torch', 'yaml', 'rich', 'coterie.engine', 'coterie.kernels', 'coterie.server', 'matplotlib'};"
        "sys.exit(status or ' '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert "DeepSeek-V3" in shown["models"]
    assert {"H100-SXM5-80GB", "GB200-NVL72"} <= {device["name"] for device in shown["devices"]}
