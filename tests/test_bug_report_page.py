"""docs/bug-reports.md names tests: each must exist, and each replay must be named. Nothing is imported or run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pairs_on_the_page() -> set[tuple[str, str]]:
    """(file, test) pairs of the page; a bare `::test` means the file named before it."""
    pairs, file = set(), ""
    for name, test in re.findall(r"`([\w/.]*)::(\w+)`", (ROOT / "docs" / "bug-reports.md").read_text(encoding="utf-8")):
        file = name or file
        pairs.add((file, test))
    return pairs


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    pairs = pairs_on_the_page()
    assert len(pairs) > 50
    missing = [f"{file}::{test}" for file, test in sorted(pairs) if test not in names_in(ROOT / file)]
    assert not missing


def test_every_replay_has_its_case_on_the_page() -> None:
    page = (ROOT / "docs" / "bug-reports.md").read_text(encoding="utf-8")
    cases = set(re.findall(r"^\| ([A-L]\d) ", page, re.MULTILINE))
    for file in sorted((ROOT / "tests").rglob("test_bug_reports_*.py")):
        for test in names_in(file):
            found = re.match(r"test_([a-l]\d)_", test)
            assert found is None or found[1].upper() in cases, f"{file.name}::{test}"


def test_every_complaint_about_expert_parallelism_has_a_source_and_a_test() -> None:
    page = (ROOT / "docs" / "bug-reports.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (EP\d+) .*$", page, re.MULTILINE)
    assert rows == [f"EP{number}" for number in range(1, 22)]
    for row in re.findall(r"^\| EP\d+ .*$", page, re.MULTILINE):
        case, tests, right = row.strip("| ").split(" | ")
        assert "https://github.com/" in case and re.search(r"`tests/[\w/]+\.py::\w+`", tests) and len(right) > 20, case
