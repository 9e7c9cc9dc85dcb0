"""The verbs with the real engine on a folder that holds a config.json (dummy weights) and a byte-level tokenizer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from coterie.cli.main import run

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0,
    "eos_token_id": None, "num_nextn_predict_layers": 0,
}  # fmt: skip
DUMMY = ["--load-format", "dummy", "--threads", "1"]
COMMAND = [sys.executable, "-m", "coterie"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bytes-model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(path / "tokenizer.json"))
    return str(path)


def generate(folder: str, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert run(["generate", folder, *DUMMY, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_is_the_same_in_chunks_and_from_text_or_ids(folder, capsys):
    whole = generate(folder, capsys, "--prompt", "hello, world", "--temperature", "0", "--max-tokens", "12")
    assert len(whole["prompt_ids"]) == 12
    assert len(whole["output_ids"]) == 12
    assert whole["finish_reason"] == "length"
    ids = ",".join(map(str, whole["prompt_ids"]))
    chunked = generate(folder, capsys, "--prompt-ids", ids, "--temperature", "0", "--max-tokens", "12",
                       "--chunked-prefill-size", "5", "--page-size", "4")  # fmt: skip
    assert chunked["output_ids"] == whole["output_ids"]
    assert chunked["text"] == whole["text"]
    stages = whole["timings"]["stage_seconds"]
    assert {"attention", "router", "dispatch", "experts", "combine", "head", "sample"} <= set(stages)
    assert stages["attention"] > 0
    assert stages["experts"] > 0


def test_generate_repeats_with_a_seed_and_stops_at_a_string(folder, capsys):
    flags = ["--prompt", "hello", "--seed", "7", "--max-tokens", "20"]
    first = generate(folder, capsys, *flags)
    assert generate(folder, capsys, *flags)["output_ids"] == first["output_ids"]
    stop = next(letter for letter in first["text"] if letter != "\ufffd")
    stopped = generate(folder, capsys, *flags, "--stop", stop)
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["text"] == first["text"].partition(stop)[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-ids", "1,999"], "999 at position 1"),
        (["--prompt-ids", "1", "--max-model-len", "100000"], "max_model_len 100000 is beyond the model's 512"),
        (["--prompt-ids", ",".join("1" * 600)], "600"),
    ],
)
def test_impossible_requests_are_one_line(folder, capsys, flags, said):
    assert run(["generate", folder, *DUMMY, *flags]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert "unexpected" not in error
    assert error.count("\n") == 1


def test_missing_weights_are_one_line(folder, capsys):
    assert run(["generate", folder, "--prompt-ids", "1"]) == 1
    assert "has no .safetensors files" in capsys.readouterr().err


def test_unknown_family_is_refused_by_name(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert run(["serve", str(tmp_path), "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "model_type 'gpt2' is unknown" in error
    assert error.count("\n") == 1


def test_chat_in_this_process_answers_each_piped_line(folder):
    flags = ["--max-tokens", "6", "--temperature", "0"]
    result = subprocess.run(
        [*COMMAND, "chat", folder, *DUMMY, *flags], input="hello\n/reset\nhello\n", capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("6 out · TTFT") == 2
    halves = result.stdout.rstrip("\n")
    middle = len(halves) // 2
    assert halves[:middle] == halves[middle + 1 :]


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[tuple[str, list[str]]]:
    """A running `coterie serve` with a key: its base URL and what it printed when it was ready."""
    process = subprocess.Popen(
        [*COMMAND, "serve", folder, *DUMMY, "--port", "0", "--api-key", "secret", "--alias", "bytes"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(7)]
    if not lines[0]:
        raise AssertionError(process.communicate(timeout=60)[1])
    yield lines[0].split()[1], lines
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_ready_text_holds_lines_that_work(server):
    base, lines = server
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", base)
    assert "bytes" in lines[0]
    python = "".join(lines[4:7]).replace("YOUR_KEY", "secret")
    assert python.count("\n") == 3
    result = subprocess.run([sys.executable, "-c", python], capture_output=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 1
    assert "secret" not in "".join(lines)
    shell = lines[2].replace("curl", "curl -sS --fail").replace("YOUR_KEY", "secret")
    answer = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 40


def test_chat_talks_with_a_running_server(server):
    base, _ = server
    flags = ["--url", base, "--api-key", "secret", "--max-tokens", "5"]
    result = subprocess.run(
        [*COMMAND, "chat", *flags], input="hello\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "· 5 out · TTFT" in result.stderr
    refused = subprocess.run(
        [*COMMAND, "chat", "--url", base], input="hello\n", capture_output=True, text=True, timeout=120, check=False,
        env={name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"},
    )  # fmt: skip
    assert refused.returncode == 1
    assert "answered 401" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_port_in_use_is_one_line(server, folder, capsys):
    port = server[0].rpartition(":")[2].removesuffix("/v1")
    assert run(["serve", folder, *DUMMY, "--port", port]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "--port" in error
    assert error.count("\n") == 1


def test_key_file_is_read_and_not_mixed_with_the_flag(server, folder, tmp_path, capsys):
    empty = tmp_path / "key"
    empty.write_text("\n")
    assert run(["serve", folder, *DUMMY, "--port", "0", "--api-key-file", str(empty)]) == 1
    assert "is empty" in capsys.readouterr().err
    assert run(["serve", folder, *DUMMY, "--api-key", "a", "--api-key-file", str(empty)]) == 2
    assert "not both" in capsys.readouterr().err


def test_server_asks_for_its_key(server):
    request = urllib.request.Request(server[0] + "/models")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30)
