"""http_path.py: a short run measures something for every number of streams, and what comes back is what was said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "http_path.py"


@pytest.mark.parametrize("endpoint", ["chat", "text"])
def test_a_short_run(endpoint: str) -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "0.3", "--rounds", "1", "--streams", "1,3", "--json"]
    command += ["--endpoint", endpoint]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    shots = json.loads(result.stdout)
    assert [shot["streams"] for shot in shots] == [1, 3]
    assert all(shot["events"] > 30 and shot["received"] > 200 * shot["events"] for shot in shots)
    assert all(shot["rate"] == pytest.approx(shot["events"] / shot["seconds"]) for shot in shots)
