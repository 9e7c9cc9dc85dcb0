"""`coterie quantize`: the folder it writes runs like any other, what it says, and that every mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.cli.main import run
from coterie.model.packed_manifest import MANIFEST_NAME
from coterie.model.shipped import shipped_model_path

SOURCE = shipped_model_path()
PROMPT = ["--prompt", "To be, or not", "--temperature", "0", "--max-tokens", "12", "--json"]
FORMATS = ["--experts", "int8", "--attention", "int8", "--head", "int8", "--group", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "out"
    assert run(["quantize", SOURCE, str(out), *FORMATS]) == 0
    return out


def tokens(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[int]:
    assert run(["generate", *arguments, *PROMPT]) == 0
    found: list[int] = json.loads(capsys.readouterr().out)["output_ids"]
    return found


def test_the_folder_generates_as_quantised_while_loading(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokens([str(folder)], capsys) == tokens([SOURCE, *FORMATS], capsys)


def test_tables_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 8)
    assert run(["quantize", str(tmp_path / "out"), "--experts", "int4", "--text", str(text)]) == 0
    said = capsys.readouterr()
    lines = {line.split()[0]: line.split() for line in said.out.splitlines() if line.strip()}
    assert lines["ffn.down"][1:3] == ["int4", "g32"] and 0.02 < float(lines["ffn.down"][6]) < 0.15
    assert lines["embed"][1] == "bf16" and "exact" in lines["embed"]
    before, after = float(lines["demo"][1]), float(lines["out"][1])
    assert 0 < before < 8 and abs(after - before) < 0.3 and "same greedy token at" in said.out


@pytest.mark.parametrize(
    ("asked", "experts", "attention"),
    [([], "g32", "g128"), (["--group", "auto"], "g32", "g128"), (["--group", "64"], "g64", "g64")],
)
def test_groups_follow_the_format_unless_asked_for(
    asked: list[str], experts: str, attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", str(tmp_path / "out"), "--experts", "int4", "--attention", "int8", *asked]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["ffn.down"][1:3] == ["int4", experts]
    assert lines["attention.o"][1:3] == ["int8", attention]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "give the model and the folder to write"),
        (["a", "b", "c"], 2, "give the model and the folder to write"),
        (["/nowhere/model", "OUT"], 1, "there is no model /nowhere/model"),
        ([SOURCE, SOURCE], 1, "it is the source"),
        ([SOURCE, f"{SOURCE}/config.json"], 1, "it is a file"),
        ([SOURCE, "FULL"], 1, "is not empty"),
        ([SOURCE, "OUT", "--experts", "int3"], 2, "'int3' is not one of"),
        ([SOURCE, "OUT", "--group", "48"], 2, "'48' is not one of"),
        ([SOURCE, "OUT", "--text", "/nowhere"], 2, "does not exist"),
        (["PACKED", "OUT"], 1, "packed already"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear")
    places = {"OUT": str(tmp_path / "out"), "FULL": str(tmp_path / "full"), "PACKED": str(folder)}
    assert run(["quantize", *(places.get(argument, argument) for argument in arguments)]) == code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and says in said
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_a_damaged_folder_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = bytearray((folder / "weights-00001.bin").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "weights-00001.bin").write_bytes(raw)
    assert run(["generate", str(tmp_path), *PROMPT]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert "is damaged: its bytes differ from the checksum" in line
    (tmp_path / MANIFEST_NAME).write_text("{}")
    assert run(["generate", str(tmp_path), *PROMPT]) == 1
    assert run(["generate", str(folder), "--experts", "int4", *PROMPT]) == 1
    assert "asked was int4 g32: leave it out" in capsys.readouterr().err
