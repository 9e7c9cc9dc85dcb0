"""`coterie bench serve`: flags as vLLM users write them, the report's keys, files, and each mistake in one line."""

from __future__ import annotations

import json
import sys

import pytest
from timed_server import TimedServer, raw, timetable, whole

from coterie.cli.main import run

FAST = timetable([0.02, 0.01, 0.01], prompt=12)
SMALL = ["--num-prompts", "4", "--num-warmups", "0", "--random-input-len", "12", "--random-output-len", "3"]


def bench(server: TimedServer, *flags: str) -> int:
    return run(["bench", "serve", server.url, *SMALL, *flags])


def test_json_has_the_keys_that_vllm_users_know(capsys):
    with TimedServer(FAST) as server:
        flags = ["--request-rate", "100", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99.9",
                 "--goodput", "ttft:5000", "tpot:500", "--json"]  # fmt: skip
        assert bench(server, *flags) == 0
    report = json.loads(capsys.readouterr().out)
    for key in ("mean_ttft_ms", "p50_tpot_ms", "p99.9_ttft_ms", "request_throughput", "output_throughput",
                "total_token_throughput", "max_concurrent_requests", "duration", "date", "model_id"):  # fmt: skip
        assert key in report
    assert "p99.9_itl_ms" not in report
    assert (report["completed"], report["failed"], report["good_requests"]) == (4, 0, 4)
    assert (report["total_input_tokens"], report["total_output_tokens"], report["request_rate"]) == (48, 12, 100.0)
    assert report["goodput_goals_ms"] == {"ttft": 5000.0, "tpot": 500.0}
    assert [seen.body["max_tokens"] for seen in server.seen] == [3] * 4
    assert all(isinstance(seen.body["prompt"], str) for seen in server.seen)


def test_table_files_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with TimedServer(FAST, whole("503 Busy", b'{"error": {"message": "loading"}}'), FAST) as server:
        flags = ["--max-concurrency", "1", "--save-detailed", "--result-dir", str(tmp_path),
                 "--result-filename", "r.json", "--plot", str(tmp_path / "r.png"), "--goodput", "e2el:999"]  # fmt: skip
        assert bench(server, *flags) == 0
    out = capsys.readouterr().out
    for said in ("3 of 4 requests answered", "1 failed", "failed: 1 x HTTP 503: loading", "time to first token", "p99",
                 "goodput at e2el:999", "worst gap between news"):  # fmt: skip
        assert said in out
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["errors"] == [None, "HTTP 503", None, None]
    assert saved["output_lens"] == [3, 0, 3, 3]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_chat_and_extra_fields(capsys):
    with TimedServer(FAST) as server:
        flags = ["--backend", "openai-chat", "--ignore-eos", "--temperature", "0", "--extra-body", '{"top_k": 1}',
                 "--header", "X-Team=a", "--model", "own"]  # fmt: skip
        assert bench(server, *flags) == 0
    body = server.seen[0].body
    assert (body["ignore_eos"], body["temperature"], body["top_k"], body["model"]) == (True, 0.0, 1, "own")
    assert body["messages"][0]["role"] == "user"
    assert server.seen[0].headers["x-team"] == "a"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--goodput", "speed:3"], 2, "is not one of ttft, tpot, e2el"),
        (["--goodput", "ttft"], 2, "--goodput"),
        (["--request-rate", "0"], 2, "--request-rate"),
        (["--request-rate", "nan"], 2, "not a rate"),
        (["--percentile-metrics", "ttft,foo"], 2, "is not a list of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], 2, "is not a list of percentiles"),
        (["--extra-body", "[1]"], 2, "--extra-body is not a JSON object"),
        (["--header", "X"], 2, "is not a header"),
        (["--base-url", "http://127.0.0.1:2"], 2, "two URLs"),
        (["--dataset-name", "custom"], 1, "needs --dataset-path"),
        (["--dataset-path", "nowhere.txt"], 1, "cannot read the text nowhere.txt"),
        (["--tokenizer", "nowhere"], 1, "is not a tokenizer"),
        (["--backend", "openai-chat", "--dataset-name", "random"], 1, "token ids cannot be sent as a chat"),
    ],
)
def test_mistakes_are_one_line(flags, code, said, capsys):
    with TimedServer(FAST) as server:
        assert bench(server, *flags) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error
    assert not server.seen


def test_no_server_and_no_answers(capsys):
    with TimedServer(raw(b"")) as server:
        assert bench(server) == 1
        assert "no request succeeded (cut" in capsys.readouterr().err
    assert bench(server) == 1
    assert "no server answers at" in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused_before_the_load(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with TimedServer(FAST) as server:
        assert bench(server, "--plot", "r.png") == 1
    assert "this needs matplotlib, which is not installed: pip install 'coterie[plot]'" in capsys.readouterr().err
    assert not server.seen
