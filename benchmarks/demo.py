"""Figures of the shipped model on this machine: start-up, prompt and decode speed, beside transformers.

    python benchmarks/demo.py [--model DIR] [--rounds 5]

Ours (native, bf16 weights) and the peer (transformers on torch, the same bf16 folder, its defaults) run the same random
prompts, interleaved round by round; medians and their ratio are printed. Start-up is the time from starting `coterie
serve` to the first 200 of /ready, a fresh process each time. Run it on a quiet machine; it needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from coterie import LLM, SamplingParams
from coterie.kernels.machine import machine
from coterie.model.shipped import shipped_model_path

PROMPT_TOKENS, DECODE_TOKENS = 512, 64


def start_up_seconds(model: Path) -> float:
    """Seconds from the command to a ready server on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "coterie", "serve", str(model), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - begin < 60:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                    return time.perf_counter() - begin
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.01)
        raise TimeoutError("the server was not ready within 60 s")
    finally:
        server.terminate()
        server.wait(30)


class Ours:
    """The native engine."""

    def __init__(self, model: Path) -> None:
        self.llm = LLM(model)
        self.vocab = self.llm.spec.vocab_size

    def generate(self, prompts: list[list[int]], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)


class Transformers:
    """The peer: greedy `generate` of the same folder, prompts of equal length in one batch."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> None:
        ids = self.torch.tensor(prompts)
        with self.torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
            )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + max_tokens


def measure(engine: Ours | Transformers, rng: np.random.Generator, vocab: int) -> dict[str, float]:
    """One round: tokens per second of prompts, of one stream and of eight. Prompts are random, so nothing is cached."""

    def rate(streams: int, length: int, max_tokens: int, counted: int) -> float:
        prompts = rng.integers(10, vocab, (streams, length)).tolist()
        begin = time.perf_counter()
        engine.generate(prompts, max_tokens)
        return streams * counted / (time.perf_counter() - begin)

    return {
        f"prompt, 4 x {PROMPT_TOKENS} tokens": rate(4, PROMPT_TOKENS, 1, PROMPT_TOKENS),
        "decode, 1 stream": rate(1, 16, DECODE_TOKENS, DECODE_TOKENS),
        "decode, 8 streams": rate(8, 16, DECODE_TOKENS, DECODE_TOKENS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or Path(shipped_model_path())
    print(f"machine: {cpu_model()}, {machine()}")
    starts = [start_up_seconds(model) for _ in range(arguments.rounds)]
    print(f"start-up to ready: median {statistics.median(starts):.2f} s ({min(starts):.2f} .. {max(starts):.2f})")
    ours, peer = Ours(model), Transformers(model)
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(arguments.rounds + 1):  # the first round warms up
        rates = [measure(engine, np.random.default_rng(number), ours.vocab) for engine in (ours, peer)]
        rounds.append((rates[0], rates[1]))
    print(f"{'tokens per second, medians of ' + str(arguments.rounds):36s} {'ours':>9s} {'peer':>9s} {'ratio':>6s}")
    for name in rounds[0][0]:
        a, b = (statistics.median(pair[side][name] for pair in rounds[1:]) for side in (0, 1))
        print(f"{name:36s} {a:9.0f} {b:9.0f} {a / b:6.1f}")


def cpu_model() -> str:
    """The processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
