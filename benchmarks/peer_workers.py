"""One engine in a process of its own, asked for one measurement at a time: the far end of `peers.py`.

    python benchmarks/peer_workers.py ENGINE        (ENGINE: coterie, llama, transformers, vllm)

Requests are JSON lines on stdin, answers JSON lines on stdout; whatever an engine prints goes to stderr. Every engine
has the same three methods. `load`: to the first token, and the bytes of its weights. `prefill`: seconds of a new random
prompt up to its first token. `decode`: seconds of `steps` greedy steps of `batch` streams that have `context` tokens in
the cache; filling it is not timed. This file must run in a peer's environment, so it imports nothing of ours on top.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from worker_loop import answer_requests

WARM_STEPS = 2
SLACK = 96
"""Positions past the context: room for the steps of a measurement, and for streams that start early."""


def rss() -> int:
    """Largest resident memory of this process and its children now, in bytes."""
    total = 0
    for pid in [os.getpid(), *children(os.getpid())]:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def children(pid: int) -> list[int]:
    """Direct children of every thread of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


class Coterie:
    """Ours: the engine core, in this thread. `config`: options as LLM takes them."""

    def __init__(self, model: str, config: dict[str, Any], longest: int, streams: int) -> None:
        from coterie.engine.build import build_engine
        from coterie.engine.config import engine_config

        pages = -(-(longest + SLACK) // 64) * 64
        settings = {
            "max_model_len": longest + SLACK, "kv_cache_tokens": pages * (streams + 1), "max_running_requests": 64,
            **config,
        }  # fmt: skip
        self.core, self.info = build_engine(model, engine_config(settings))
        self.vocab = self.core.vocab_size
        self._serial = 0

    def weights(self) -> dict[str, float]:
        from coterie.engine.traffic import Traffic

        traffic = Traffic(self.core.runner.model, self.core.runner.cache)
        sums = {"token": 0, "head": 0, "routed": 0, "embedding": 0}
        for bank in traffic.banks:
            sums[bank.role] += bank.nbytes
        return {"always_bytes": sums["token"] + sums["head"], "expert_bytes": sums["routed"],
                "cache_bytes_per_token": traffic.cache_bytes_per_token}  # fmt: skip

    def prefill(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        self._add(prompt, 1)
        while self.core.has_work:
            self._step()
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        waiting = {self._add(prompt, SLACK) for prompt in prompts}
        while waiting:
            waiting -= self._step()
        for _ in range(WARM_STEPS):
            self._step()
        begin = time.perf_counter()
        for _ in range(steps):
            assert len(self._step()) == len(prompts), "a stream ended while it was measured"
        seconds = time.perf_counter() - begin
        self.core.abort_all()
        while self.core.has_work:
            self.core.step()
        return seconds

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from coterie.engine.messages import Add, SamplingParams

        self._serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add(Add(str(self._serial), prompt, params))
        return str(self._serial)

    def _step(self) -> set[str]:
        outputs = self.core.step()
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise RuntimeError(errors[0])
        return {output.request_id for output in outputs if output.token_ids}


class Llama:
    """llama.cpp by the C interface of llama-cpp-python; argmax is the only sampler. `config`: threads, ubatch."""

    def __init__(self, model: str, config: dict[str, Any], longest: int, streams: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = config.get("use_mmap", True)
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}; run it with llama-cpp-python's log on to see why")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = (longest + SLACK) * streams if streams > 1 else longest + SLACK
        context.n_seq_max, context.kv_unified = streams, True
        context.n_batch = context.n_ubatch = config.get("ubatch", 512)
        context.n_threads = context.n_threads_batch = config["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.chunk = int(context.n_batch)
        self.path = model
        self._kept: list[list[int]] = []

    def weights(self) -> dict[str, float]:
        from gguf import GGUFReader

        reader = GGUFReader(self.path)
        always = experts = 0
        for tensor in reader.tensors:
            if tensor.name == "token_embd.weight":
                continue
            if "_exps." in tensor.name:
                experts += int(tensor.n_bytes)
            else:
                always += int(tensor.n_bytes)
        return {"always_bytes": always, "expert_bytes": experts}

    def prefill(self, prompt: list[int]) -> float:
        self._kept = []
        self.api.llama_memory_clear(self.memory, True)
        begin = time.perf_counter()
        self._feed(prompt, 0)
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        length = len(prompts[0])
        if self._kept != prompts:
            self.api.llama_memory_clear(self.memory, True)
            for stream, prompt in enumerate(prompts):
                self._feed(prompt, stream)
            self._kept = prompts
        for stream in range(len(prompts)):
            self.api.llama_memory_seq_rm(self.memory, stream, length, -1)
        tokens = [prompt[-1] for prompt in prompts]
        for step in range(WARM_STEPS):
            tokens = self._together(tokens, length + step)
        begin = time.perf_counter()
        for step in range(steps):
            tokens = self._together(tokens, length + WARM_STEPS + step)
        return time.perf_counter() - begin

    def _feed(self, prompt: list[int], stream: int) -> int:
        """A whole prompt in chunks; the best token after it."""
        for start in range(0, len(prompt), self.chunk):
            part = prompt[start : start + self.chunk]
            rows = [(token, start + i, stream, start + i + 1 == len(prompt)) for i, token in enumerate(part)]
            best = self._run(rows)
        return best[-1]

    def _together(self, tokens: list[int], position: int) -> list[int]:
        """One token of every stream."""
        return self._run([(token, position, stream, True) for stream, token in enumerate(tokens)])

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One batch of (token, position, stream, wants logits); the best token of each row that wants."""
        batch = self.api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, stream, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        status = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        best = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = self.api.llama_get_logits_ith(self.context, i)
                best.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return best


class Transformers:
    """transformers on torch, greedy, with its own cache. `config`: dtype, threads, experts implementation."""

    def __init__(self, model: str, config: dict[str, Any], longest: int, streams: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(config["threads"])
        extra = {"experts_implementation": config["experts"]} if "experts" in config else {}
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, config["dtype"]), **extra).eval()
        self.vocab = self.model.config.vocab_size
        self._kept: tuple[list[list[int]], Any] | None = None

    def weights(self) -> dict[str, float]:
        always = experts = 0
        for name, value in self.model.named_parameters():
            if ".experts." in name:
                experts += value.nbytes
            elif "embed_tokens" not in name:
                always += value.nbytes
        return {"always_bytes": always, "expert_bytes": experts}

    def prefill(self, prompt: list[int]) -> float:
        self._kept = None
        begin = time.perf_counter()
        self._forward(self.torch.tensor([prompt]), None)
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        length = len(prompts[0])
        if self._kept is None or self._kept[0] != prompts:
            self._kept = None
            gc.collect()
            self._kept = (prompts, self._forward(self.torch.tensor(prompts), None)[1])
        cache = self._kept[1]
        extra = cache.get_seq_length() - length
        if extra > 0:
            cache.crop(-extra)
        tokens = self.torch.tensor([prompt[-1:] for prompt in prompts])
        for _ in range(WARM_STEPS):
            tokens, cache = self._forward(tokens, cache)
        begin = time.perf_counter()
        for _ in range(steps):
            tokens, cache = self._forward(tokens, cache)
        return time.perf_counter() - begin

    def _forward(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        with self.torch.no_grad():
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1), out.past_key_values


class Vllm:
    """vllm's engine in this process (no engine process, no compilation). `config`: dtype, threads."""

    def __init__(self, model: str, config: dict[str, Any], longest: int, streams: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{config['threads'] - 1}",
        }  # fmt: skip
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        llm = LLM(model, dtype=config["dtype"], enforce_eager=True, max_model_len=longest + SLACK,
                  max_num_seqs=max(16, streams), skip_tokenizer_init=True)  # fmt: skip
        self.engine = llm.llm_engine
        self.vocab = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        self._serial = 0

    def weights(self) -> dict[str, float]:
        return {}

    def prefill(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        self._add(prompt, 1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - begin

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        names = [self._add(prompt, SLACK) for prompt in prompts]
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        for _ in range(WARM_STEPS):
            self.engine.step()
        begin = time.perf_counter()
        for _ in range(steps):
            assert len(self.engine.step()) == len(prompts), "a stream ended while it was measured"
        seconds = time.perf_counter() - begin
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return seconds

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._serial += 1
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self._serial), {"prompt_token_ids": prompt}, params)
        return str(self._serial)


ENGINES = {"coterie": Coterie, "llama": Llama, "transformers": Transformers, "vllm": Vllm}


class Worker:
    """Turns requests into calls; random prompts come from the request's seed, so that every engine gets the same."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine: Any = None

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        self.engine = ENGINES[self.name](
            request["model"], request["config"], request["longest"], request["streams"]
        )
        loaded = time.perf_counter() - begin
        self.engine.prefill([5])
        first = time.perf_counter() - begin
        peak = rss()
        return {"load_s": loaded, "first_token_s": first, "rss": peak, **self.engine.weights()}

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = self._prompts(request, 1, request["length"])[0]
        return {"seconds": self.engine.prefill(prompt), "tokens": len(prompt), "rss": rss()}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        prompts = self._prompts(request, request["batch"], request["context"])
        seconds = self.engine.decode(prompts, request["steps"])
        return {"seconds": seconds, "tokens": request["steps"] * request["batch"], "rss": rss()}

    def _prompts(self, request: dict[str, Any], count: int, length: int) -> list[list[int]]:
        random = np.random.default_rng([request["seed"], count, length])
        return random.integers(5, self.engine.vocab, (count, length)).tolist()


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))  # transformers would take kernels.py for another
    answer_requests(lambda: Worker(sys.argv[1]))
