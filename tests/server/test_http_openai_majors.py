"""The client's previous major against the same server: langchain-openai and instructor still pin it.

`make test` puts it into its own folder of the environment; the tests of the current major are run again with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

PREVIOUS = Path(sys.prefix) / "openai-2"
TESTS = Path(__file__).with_name("test_http_openai_client.py")


def test_current_major_is_the_newest() -> None:
    assert int(openai.__version__.split(".")[0]) >= 3


@pytest.mark.slow
@pytest.mark.skipif(not PREVIOUS.exists(), reason="make test installs openai 2.x beside the environment")
def test_previous_major() -> None:
    environment = {**os.environ, "PYTHONPATH": str(PREVIOUS)}
    ask = [sys.executable, "-c", "import openai; print(openai.__version__)"]
    version = subprocess.run(ask, env=environment, capture_output=True, text=True)
    assert version.stdout.startswith("2."), version.stdout + version.stderr
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(TESTS)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
