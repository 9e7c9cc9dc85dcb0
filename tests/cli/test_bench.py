"""`coterie bench`: reports have their keys and agree with each other, tables print, mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.cli.main import run

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": None,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
ASKED = (
    "decode_tok_s", "prefill_tok_s", "bandwidth_fraction", "matrix_fraction", "peak_rss_bytes", "load_s",
    "read_bandwidth_bytes_s",
)  # fmt: skip
SMALL = ["--load-format", "dummy", "--threads", "1", "--prompt-len", "24", "--context", "16", "--decode-len", "4",
         "--rounds", "2"]  # fmt: skip


@pytest.fixture(autouse=True)
def small_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engine.limits.array_bytes", lambda: 64 << 20)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run(["bench", *arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_latency_of_a_bare_config_has_every_key(config, capsys):
    found = report(capsys, "latency", str(config), *SMALL, "--batch", "3")
    assert all(isinstance(found[key], int | float) and found[key] > 0 for key in ASKED)
    assert found["peak_rss_bytes"] > found["weight_bytes"] + found["cache_bytes"]
    assert found["weight_kinds"].keys() == {"bf16", "f32"}
    assert sum(found["weight_kinds"].values()) == found["weight_bytes"]
    assert (found["batch"], found["prompts"], found["threads"]) == (3, 1, 1)
    assert len(found["decode"]["tok_s"]) == len(found["prefill"]["tok_s"]) == 2
    assert 2 <= found["decode"]["experts_hit_per_layer"] <= 6
    assert found["decode"]["context_rows_per_step"] > 3 * 16
    assert sum(found["decode"]["stage_s"].values()) <= found["decode"]["step_s"]
    assert found["decode"]["stage_s"]["attention"] > 0


def test_latency_of_a_folder_and_of_fewer_layers(config, capsys):
    whole = report(capsys, "latency", str(config.parent), *SMALL)
    cut = report(capsys, "latency", str(config.parent), *SMALL, "--layers", "2")
    assert (whole["num_layers"], cut["num_layers"]) == (3, 2)
    assert cut["decode"]["bytes_per_step"] < whole["decode"]["bytes_per_step"]
    assert whole["decode"]["experts_hit_per_layer"] == 2


def test_throughput_of_several_batches(config, capsys):
    found = report(capsys, "throughput", str(config), *SMALL, "--batches", "1,4")
    assert [case["batch"] for case in found["cases"]] == [case["prompts"] for case in found["cases"]] == [1, 4]
    assert all(case[key] > 0 for case in found["cases"] for key in ASKED if key in case)
    assert found["peak_rss_bytes"] > 0
    assert found["cases"][1]["decode"]["bytes_per_step"] > found["cases"][0]["decode"]["bytes_per_step"]


def test_tables(config, capsys):
    assert run(["bench", "throughput", str(config), *SMALL, "--batches", "1,2"]) == 0
    out = capsys.readouterr().out
    for word in ("prefill", "of memory", "attention", "head", "peak memory", "bf16", "1 threads"):
        assert word in out
    assert run(["bench", "limits", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "reading memory, huge pages" in out
    assert "GB/s" in out


def test_limits_as_json(capsys):
    found = report(capsys, "limits", "--rounds", "2", "--threads", "2")
    assert {(rate["probe"], rate["threads"]) for rate in found["rates"]} >= {("read", 1), ("read", 2), ("int8", 2)}
    assert all(rate["median"] > 0 and len(rate["values"]) == 2 for rate in found["rates"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["latency", "--layers", "2"], 1, "--load-format dummy"),
        (["latency", "--load-format", "dummy", "--layers", "99"], 1, "--layers 99: the model has"),
        (["latency", "nowhere"], 1, "there is no model folder"),
        (["latency", *SMALL, "--max-model-len", "20"], 1, "max_model_len 20 is too small"),
        (["latency", *SMALL, "--context", "100000"], 1, "positions"),
        (["throughput", "--batches", "1,x"], 2, "whole numbers above 0"),
        (["throughput", "--batches", "0"], 2, "whole numbers above 0"),
        (["throughput", "--batches", "1,\u00b2"], 2, "whole numbers above 0"),
        (["throughput", "--batches", "9" * 5000], 2, "whole numbers above 0"),
        (["limits", "--threads", "1025"], 2, "1025 is not in the range 1<=x<=1024"),
        (["latency", "--seed", "-1"], 2, "-1 is not in the range"),
        (["limits", "--threads", "0"], 2, "1<=x<=1024"),
        (["speed"], 2, "No such command 'speed'"),
    ],
)
def test_mistakes_are_one_line(arguments, code, said, capsys):
    assert run(["bench", *arguments]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_file_that_is_no_config_is_refused(tmp_path, capsys):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\x00\xff")
    assert run(["bench", "latency", str(path), *SMALL]) == 1
    assert "is not a config.json" in capsys.readouterr().err
