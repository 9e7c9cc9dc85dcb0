"""Bug reports A6, B3, E1, H2, J1 at the command: what `serve` says and opens at its start, what one line refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_real_engine import CONFIG, DUMMY

from coterie.cli.main import run
from coterie.engine.build import build_engine
from coterie.engine.config import EngineConfig

SAYS_NOTHING = {"new_router_trick": None, "mystery": False, "empty_list": []}
UNKNOWN = "empty_list, mystery, new_router_trick"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | SAYS_NOTHING | {"eos_token_id": 1}))
    return str(tmp_path)


def test_what_serve_says_and_opens(folder: str) -> None:
    command = [sys.executable, "-m", "coterie", "serve", folder, "--load-format", "dummy", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise AssertionError(process.communicate(timeout=60)[1])
        connections = psutil.Process(process.pid).net_connections(kind="inet")
        listening = [tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN]
        assert listening == [("127.0.0.1", int(ready.split()[1].rpartition(":")[2].removesuffix("/v1")))]
        assert len(connections) == 1, "nothing else is open, neither inwards nor outwards"
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    lines = [line.split(" ", 3)[-1] for line in said.splitlines()]
    (threads,) = [line for line in lines if line.startswith("threads: ")]
    assert any(word in threads for word in ("cores", "quota", "affinity")), threads
    assert f"unknown config fields: {UNKNOWN} (null, false or empty; strict refuses them)" in lines
    for what in ("backend: native", "weights: f32", "max_model_len: 512", "kv_cache_tokens: ", "ignored config fields"):
        assert any(line.startswith(what) for line in lines), f"serve does not say {what}"
    assert any("tensors" in line for line in lines), "the loader's report is shown"


def test_a_config_with_unknown_fields_that_say_nothing_is_told_and_strict_refuses(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {"load_format": "dummy", "threads": 1}
    _, info = build_engine(folder, EngineConfig(**config))
    (found,) = [choice for choice in info.report if choice.what == "unknown config fields"]
    assert found.value == UNKNOWN
    assert run(["serve", folder, *DUMMY, "--port", "0", "--strict"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "new_router_trick=None" in error


@pytest.mark.parametrize("verb", [["generate", "--prompt-ids", "1"], ["serve", "--port", "0"]], ids=lambda v: v[0])
@pytest.mark.parametrize("case", ["trick", "missing shard"])
def test_what_cannot_be_right_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str], case: str
) -> None:
    trick = {"new_router_trick": True} if case == "trick" else {}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | trick))
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run([verb[0], str(tmp_path), *verb[1:], "--threads", "1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "unexpected" not in error
    assert ("new_router_trick=True" if trick else "model-00001-of-00001.safetensors is missing") in error


@pytest.mark.parametrize(("flag", "value"), [
    ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "2.1"), ("--top-p", "nan"),
    ("--min-p", "nan"), ("--repetition-penalty", "nan"),
])  # fmt: skip
def test_e1_a_number_that_is_none_is_one_line(
    folder: str, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert run(["generate", folder, *DUMMY, "--prompt-ids", "1,2", flag, value]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert flag[2:].replace("-", "_") in error.replace("-", "_") and "unexpected" not in error


def test_e1_top_p_zero_is_the_top_token(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for flags in (["--temperature", "0"], ["--top-p", "0", "--seed", "4"], ["--top-k", "1"], ["--min-p", "1"]):
        asked = ["--prompt-ids", "1,2", "-n", "9", "--json", "--ignore-eos", *flags]
        assert run(["generate", folder, *DUMMY, *asked]) == 0
        answers.append(json.loads(capsys.readouterr().out)["output_ids"])
    assert answers[1:] == [answers[0]] * 3
