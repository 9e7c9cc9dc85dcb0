"""The benchmark scripts are no package: their folder is put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
