"""LLM: the engine for Python programs, in this process and on the caller's thread.

`generate` steps the engine itself until its requests are done; `stream` does the same from a worker thread. Both may be
used at once: whoever wants news takes the next step for all. No server, no event loop of its own, no chat templates.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from coterie.engine.admission import Door
from coterie.engine.build import ModelSource, Progress, build_engine
from coterie.engine.config import EngineConfig, engine_config
from coterie.engine.core import EngineCore
from coterie.engine.errors import InvalidRequest
from coterie.engine.messages import SamplingParams, Stats
from coterie.engine.output import RequestOutput
from coterie.engine.tracker import News, TrackedRequest, Tracker, collect
from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import CoterieError
from coterie.spec.parallel import ExchangeDtype
from coterie.spec.weights import DenseChoice, ExpertsChoice

Prompt = str | Sequence[int]


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig and of its weight formats, as keyword arguments of LLM."""

    backend: Literal["native", "reference"]
    dtype: Literal["auto", "float32", "bfloat16"]
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"]
    load_format: Literal["auto", "dummy"]
    max_model_len: int | None
    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    page_size: int
    kv_cache_tokens: int | None
    mem_fraction_static: float
    enable_prefix_caching: bool
    threads: int | None
    isa: Literal["auto", "generic", "avx2", "avx512", "amx"]
    seed: int
    strict: bool
    experts: ExpertsChoice
    attention: DenseChoice
    head: DenseChoice
    group: Literal[16, 32, 64, 128]
    exchange_dtype: ExchangeDtype


class LLM:
    """A loaded model that generates. Use it as a context manager, or call `close`.

    `path`: a model folder (config.json, safetensors, tokenizer.json if there is one), a GGUF file, None for the shipped
    model; with load_format="dummy" a folder with only config.json, or the parsed config itself. Options are
    EngineConfig's fields and override `config`; `record_experts` counts what routers ask for. `load_lines`: what the
    loader has to say. Raises `CoterieError` for what cannot be run.
    """

    def __init__(
        self,
        path: ModelSource | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        record_experts: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config = engine_config(options, config)
        source = shipped_model_path() if path is None else path
        core, info = build_engine(source, self.config, progress, record_experts=record_experts)
        self.spec, self.tokenizer = info.files.spec, info.files.tokenizer
        self.max_model_len, self.report, self.load_lines = info.max_model_len, info.report, info.load_lines
        self._core: EngineCore | None = core
        self._lock = threading.Lock()
        self._tracker = Tracker(Door.of(info), self.tokenizer, seed=self.config.seed)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or many, each a text or token ids; outputs are in the order of the prompts.

        `params`: one for all, or one for each. A prompt that fails in the engine has finish_reason "error". Raises
        `InvalidRequest`, before anything runs, if any of them cannot be honoured.
        """
        many = _as_list(prompts)
        each = self._params_for(many, params)
        todo = [(prompt, self.encode(prompt), one) for prompt, one in zip(many, each, strict=True)]
        for _, ids, one in todo:
            self._tracker.door.check(ids, one)
        waiting, running = list(reversed(todo)), list[TrackedRequest]()
        done: list[tuple[TrackedRequest, str | None]] = []
        try:
            while waiting or running:
                while waiting and (not running or self._has_room(waiting[-1][2].n)):
                    prompt, ids, one = waiting.pop()
                    request = self._start(ids, one)
                    running.append(request)
                    done.append((request, prompt if isinstance(prompt, str) else None))
                self._advance(running[0])
                running = [request for request in running if not request.is_finished]
        finally:
            self._cancel(running)
        return [collect(request, request.news, text) for request, text in done]

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[News]:
        """News of one request: a PromptInfo, then ChoiceDeltas. Closing it aborts the request."""
        request = self._start(self.encode(prompt), params or SamplingParams())
        try:
            while request.news or not request.is_finished:
                if not request.news:
                    await asyncio.to_thread(self._advance, request)
                while request.news:
                    yield request.news.popleft()
        finally:
            self._cancel([request])

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """Logits of every position of a prompt: float32 [T, vocab]. Runs through the scheduler, in chunks like any."""
        ids = self.encode(prompt)
        request = self._start(ids, SamplingParams(max_tokens=0), want_logits=True)
        while not request.is_finished:
            self._advance(request)
        if request.logits is None:
            raise CoterieError(self._error(request))
        return np.frombuffer(request.logits, np.float32).reshape(len(ids), self.spec.vocab_size).copy()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a text as the tokenizer's files say, ids as they are."""
        if not _is_prompt(prompt):
            raise _no_prompt(prompt)
        if not isinstance(prompt, str):
            return [_plain(token) for token in prompt]
        if self.tokenizer is None:
            raise CoterieError("this model has no tokenizer.json, so text prompts cannot be read; give token ids")
        return self.tokenizer.encode(prompt)

    def stats(self) -> Stats:
        """The engine's gauges and counters."""
        return self._open_core().stats()

    def stage_seconds(self) -> dict[str, float]:
        """Seconds spent in each stage of the steps so far."""
        return self.stats().stage_seconds

    def expert_counts(self) -> NDArray[np.int64]:
        """Tokens that each expert of each MoE layer has computed so far [L, E]; needs `record_experts`."""
        load = self._open_core().runner.model.runtime.load
        if load is None:
            raise CoterieError("experts are not counted: make the LLM with record_experts=True, and of a MoE model")
        return load.read()

    def check_integrity(self) -> None:
        """Raise AssertionError if the engine's books do not add up."""
        self._open_core().check_integrity()

    def close(self) -> None:
        """Give up model and cache. Idempotent."""
        self._core = None
        self._tracker.door.grammars.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open_core(self) -> EngineCore:
        if self._core is None:
            raise CoterieError("this LLM is closed; make a new one")
        return self._core

    def _params_for(self, prompts: list[Prompt], params: Any) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise CoterieError(f"{len(params)} SamplingParams for {len(prompts)} prompts; give one, or one each")
        return list(params)

    def _has_room(self, count: int) -> bool:
        return self._tracker.num_sequences + count <= self._tracker.door.max_sequences

    def _start(self, ids: list[int], params: SamplingParams, *, want_logits: bool = False) -> TrackedRequest:
        core = self._open_core()
        with self._lock:
            request, adds = self._tracker.admit(ids, params, want_logits=want_logits)
            for add in adds:
                core.add(add)
        return request

    def _advance(self, request: TrackedRequest) -> None:
        """Take one step for everybody, unless somebody else's step has ended this request already."""
        core = self._open_core()
        with self._lock:
            if request.is_finished:
                return
            for output in core.step():
                abort = self._tracker.feed(output)
                if abort is not None:
                    core.abort(abort.request_id)
            assert core.has_work or request.is_finished, "a request was forgotten"

    def _cancel(self, requests: Iterable[TrackedRequest]) -> None:
        with self._lock:
            for request in requests:
                for abort in self._tracker.cancel(request):
                    if self._core is not None:
                        self._core.abort(abort.request_id)

    @staticmethod
    def _error(request: TrackedRequest) -> str:
        errors = [getattr(news, "error", None) for news in request.news]
        return next((error for error in errors if error), "the engine gave no logits")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many. A sequence of integers is one prompt."""
    if not _is_prompt(prompts):
        raise _no_prompt(prompts)
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_prompt(value: object) -> bool:
    """Bytes are a sequence of integers, but nobody who hands them over means token ids."""
    return isinstance(value, str | Sequence | np.ndarray) and not isinstance(value, bytes | bytearray)


def _no_prompt(value: object) -> InvalidRequest:
    return InvalidRequest("prompt", f"a prompt is a text or a sequence of token ids, not {type(value).__name__}")


def _plain(token: Any) -> Any:
    """numpy's integers as Python's; anything else is left for the door to refuse."""
    return int(token) if isinstance(token, np.integer) else token
