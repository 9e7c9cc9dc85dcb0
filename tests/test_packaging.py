"""What the wheel holds and asks for. Looks at the newest wheel in dist/, which `make test` builds first."""

from __future__ import annotations

import re
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "src" / "coterie" / "data" / "demo"
CORE_LIMIT = 25 * 1024 * 1024


@pytest.fixture(scope="module")
def wheel():
    found = sorted((ROOT / "dist").glob("coterie-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("no wheel in dist/; make wheel builds one")
    with zipfile.ZipFile(found[-1]) as archive:
        yield archive


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def requirements(wheel: zipfile.ZipFile, extra: str | None) -> set[str]:
    """Names that are required without an extra (None) or by one."""
    found = set()
    for line in metadata(wheel).get_all("Requires-Dist", []):
        marker = re.search(r"extra\s*==\s*['\"](\w+)['\"]", line)
        if (marker.group(1) if marker else None) == extra:
            found.add(re.split(r"[^\w.-]", line.strip())[0].lower())
    return found


def test_wheel_holds_every_module_and_the_kernels(wheel):
    names = set(wheel.namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "coterie").rglob("*.py")}
    assert sources - names == set()
    kernels = [name for name in names if name.startswith("coterie/kernels/") and name.endswith(".so")]
    assert len(kernels) >= 1
    assert "coterie/py.typed" in names


def test_wheel_holds_nothing_that_is_not_run(wheel):
    code, data = {".py", ".pyi", ".typed", ".so"}, {".csv", ".json", ".jinja", ".safetensors", ".toml"}
    allowed = code | data | {".md", ".txt", ".png", ".svg", ".html", ".js"}
    for name in wheel.namelist():
        top = name.split("/")[0]
        assert top == "coterie" or top.endswith(".dist-info"), name
        if top == "coterie":
            assert Path(name).suffix in allowed, name
            assert "__pycache__" not in name
            assert not Path(name).name.startswith("test_")


def test_wheel_is_small_and_holds_the_demo_model_as_it_lies_in_the_tree(wheel):
    assert sum(info.compress_size for info in wheel.infolist()) < CORE_LIMIT
    prefix = "coterie/data/demo/"
    shipped = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
    in_tree = {path.relative_to(DEMO).as_posix() for path in DEMO.rglob("*") if path.is_file()}
    assert shipped == in_tree
    if shipped:
        assert {"config.json", "tokenizer.json"} <= shipped
        assert any(name.endswith(".safetensors") for name in shipped)


def test_core_asks_for_no_torch_and_extras_bound_it(wheel):
    core = requirements(wheel, None)
    assert core & {"torch", "transformers", "matplotlib", "pytest", "scipy", "pandas"} == set()
    assert {"numpy", "msgspec", "tokenizers", "safetensors", "click", "rich", "uvicorn", "jinja2"} <= core
    for extra in ("torch", "train", "dev"):
        assert "torch" in requirements(wheel, extra)
    lines = [line for line in metadata(wheel).get_all("Requires-Dist", []) if line.startswith("torch")]
    assert all("<2.14" in line for line in lines)


def test_licence_and_command_are_declared(wheel):
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "coterie=coterie.cli.main:main" in wheel.read(name).decode().replace(" ", "")


def test_dependency_page_names_every_dependency(wheel):
    page = (ROOT / "docs" / "dependencies.md").read_text()
    named = set.union(*(requirements(wheel, extra) for extra in (None, "torch", "train", "dev")))
    assert {name for name in named if not re.search(rf"\b{re.escape(name)}\b", page)} == set()
