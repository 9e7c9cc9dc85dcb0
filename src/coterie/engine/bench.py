"""Bench: speed of the engine that serves, in steps of its core, set against this machine's limits measured meanwhile.

No second forward: random prompts with a fixed seed go through scheduler, model and sampler; end tokens are ignored.
Prefill: `batch` prompts together, from adding them to the first token of the last. Decode: `batch` streams with
`context` tokens in the cache, a stretch of steps at a time. Memory's bandwidth is read before and after every stretch
and set against that stretch alone, as a host's slow phase slows both. Greedy; the prefix cache is off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.engine.build import ModelFiles, build_engine
from coterie.engine.config import EngineConfig
from coterie.engine.limits import Limits, Rate, measure_limits
from coterie.engine.messages import Add, SamplingParams
from coterie.engine.resolve import pages_for
from coterie.engine.runner import ModelRunner
from coterie.engine.traffic import Need, Traffic, Work
from coterie.kernels.batch import ForwardBatch
from coterie.spec.errors import CoterieError

WARM_STEPS = 2
Progress = Callable[[str], None]
LoadHook = Callable[[int, int], None] | None
"""Told of bytes loaded and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to measure. `prompts`: prompts computed together in prefill; `batch`: streams that decode together."""

    prompt_len: int
    context: int
    decode_len: int
    batch: int
    prompts: int = 1
    rounds: int = 3
    seed: int = 0

    def fill_steps(self, budget: int) -> int:
        """Steps after which every stream has its context, at most: those that have it decode meanwhile."""
        return -(-self.batch * self.context // max(1, budget - self.batch)) + self.batch

    def longest(self, budget: int) -> int:
        """Longest sequence, in tokens."""
        decoded = self.context + self.fill_steps(budget) + WARM_STEPS + self.rounds * self.decode_len
        return max(self.prompt_len, decoded) + 2


@dataclass(frozen=True, slots=True)
class Stretch:
    """Measured steps. `tokens`: counted as output (decode) or input (prefill). `bandwidth`: bytes a second that the
    same threads read just before and after."""

    seconds: float
    tokens: int
    bandwidth: float
    need: Need
    work: Work
    stage_seconds: Mapping[str, float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: its stretches, and the limits read between them. Fractions are medians over the rounds."""

    case: Case
    threads: int
    prefill: tuple[Stretch, ...]
    decode: tuple[Stretch, ...]
    limits: Limits

    @property
    def decode_rate(self) -> float:
        """Tokens a second of all streams."""
        return statistics.median(stretch.rate for stretch in self.decode)

    @property
    def prefill_rate(self) -> float:
        return statistics.median(stretch.rate for stretch in self.prefill)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that these threads read, median of all readings between the stretches."""
        rate = self.limits.find("read", self.threads)
        assert rate is not None
        return rate.median

    def bandwidth_fraction(self, stretches: tuple[Stretch, ...]) -> float:
        """Needed bytes a second, over the bandwidth of the same moment."""
        return statistics.median(stretch.need.nbytes / stretch.seconds / stretch.bandwidth for stretch in stretches)

    def matrix_fraction(self, stretches: tuple[Stretch, ...]) -> float:
        """Least time of the operations on the machine's fastest units, over the time taken."""
        return statistics.median(
            stretch.need.matrix_seconds(self.limits, self.threads) / stretch.seconds for stretch in stretches
        )

    def floor_fraction(self, stretches: tuple[Stretch, ...]) -> float:
        """The longer of both least times, over the time taken."""
        return max(self.bandwidth_fraction(stretches), self.matrix_fraction(stretches))


class BenchEngine:
    """An engine made for measuring: its cache holds the largest of `cases`, its steps are tallied."""

    def __init__(self, files: ModelFiles, config: EngineConfig, cases: list[Case], load: LoadHook) -> None:
        self.memory = PeakMemory()
        begin = time.perf_counter()
        core, info = build_engine(files, fit_config(config, cases), load, record_experts=True)
        self.load_seconds = time.perf_counter() - begin
        self.core, self.info = core, info
        self.runner = TallyRunner(core.runner)
        core.runner = self.runner
        self.traffic = Traffic(self.runner.model, self.runner.cache)
        self.threads = int(next(choice.value for choice in info.report if choice.what == "threads"))
        self._serial = 0
        self._readings: list[Limits] = []
        begin = time.perf_counter()
        self._prefill(np.random.default_rng(0).integers(0, core.vocab_size, (1, 1)))
        self.first_token_seconds = self.load_seconds + time.perf_counter() - begin

    def run(self, case: Case, tell: Progress) -> CaseResult:
        """Measure one case; `tell` hears what is being done."""
        random = np.random.default_rng(case.seed)
        self._readings = [self._limits(())]
        prefill = []
        for number in range(case.rounds + 1):
            tell(f"prefill, {case.prompts} x {case.prompt_len} tokens, round {number} of {case.rounds} (0 warms up)")
            prompts = random.integers(0, self.core.vocab_size, (case.prompts, case.prompt_len))
            prefill.append(self._stretch(partial(self._prefill, prompts), prompts.size))
        tell(f"filling {case.batch} x {case.context} tokens of context")
        self._fill(random.integers(0, self.core.vocab_size, (case.batch, case.context)))
        decode = []
        for number in range(case.rounds):
            tell(f"decode, batch {case.batch}, {case.decode_len} steps, round {number + 1} of {case.rounds}")
            decode.append(self._stretch(partial(self._steps, case.decode_len), case.batch * case.decode_len))
            assert decode[-1].work.tokens == decode[-1].tokens, "a stream ended or was preempted while it was measured"
        self._abort()
        self._readings.append(self._limits(()))
        return CaseResult(case, self.threads, tuple(prefill[1:]), tuple(decode), merge_limits(self._readings))

    def peak_rss(self) -> int:
        """Largest resident memory so far, the arrays of the probes left out where the system allows that."""
        return self.memory.peak()

    # The parts of a case

    def _limits(self, probes: tuple[str, ...]) -> Limits:
        """Readings of this machine: all that count here, or some. Not part of the engine's peak memory."""
        self.memory.pause()
        try:
            all_units = ("read", "f32", "int8", "amx_int8", "amx_bf16")
            return measure_limits(self.threads, rounds=3, probes=probes or all_units)
        finally:
            self.memory.resume()

    def _bandwidth(self) -> float:
        """A reading of the memory's bandwidth, kept for the limits."""
        self._readings.append(self._limits(("read",)))
        return self._readings[-1].rates[0].median

    def _stretch(self, body: Callable[[], None], tokens: int) -> Stretch:
        bandwidth = self._bandwidth()
        before, stages = self.runner.tally(), self.runner.timer.seconds()
        begin = time.perf_counter()
        body()
        seconds = time.perf_counter() - begin
        work = difference(self.runner.tally(), before)
        spent = {name: total - stages[name] for name, total in self.runner.timer.seconds().items()}
        bandwidth = (bandwidth + self._bandwidth()) / 2
        return Stretch(seconds, tokens, bandwidth, self.traffic.need(work), work, spent)

    def _prefill(self, prompts: NDArray[np.int64]) -> None:
        self._add(prompts, max_tokens=1)
        while self.core.has_work:
            self._step()

    def _fill(self, prompts: NDArray[np.int64]) -> None:
        """Start streams and step until each has its first token, then a little more."""
        waiting = set(self._add(prompts, max_tokens=None))
        while waiting:
            waiting -= self._step()
        self._steps(WARM_STEPS)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> set[str]:
        """One step; who said something. A failed request ends the measurement."""
        outputs = self.core.step()
        for output in outputs:
            if output.error is not None:
                raise CoterieError(f"the benchmark's request failed: {output.error}")
        return {output.request_id for output in outputs if output.token_ids}

    def _add(self, prompts: NDArray[np.int64], *, max_tokens: int | None) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        names = []
        for prompt in prompts.tolist():
            self._serial += 1
            names.append(f"bench-{self._serial}")
            self.core.add(Add(names[-1], prompt, params))
        return names

    def _abort(self) -> None:
        self.core.abort_all()
        while self.core.has_work:
            self.core.step()


class TallyRunner(ModelRunner):
    """A runner that counts what its batches ask for."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner.model, inner.cache, inner.model.runtime.kernels)
        self._work = Work(0, 0, 0, 0, 0)

    def run(self, batch: ForwardBatch, *, micro_batches: int = 1) -> NDArray[np.float32]:
        work = self._work
        self._work = Work(
            work.steps + 1,
            work.tokens + batch.num_tokens,
            work.logit_rows + len(batch.logit_rows),
            work.cached_rows + int(batch.context_lens.sum()),
            work.pairs + int(batch.positions.sum()) + batch.num_tokens,
        )
        return super().run(batch, micro_batches=micro_batches)

    def tally(self) -> Work:
        """Totals so far."""
        load = self.model.runtime.load
        return replace(self._work, hits=None if load is None else load.hits())


def difference(now: Work, before: Work) -> Work:
    """What was done between two tallies. A recorder that heard nothing of a stretch counts as none."""
    hits = None
    if now.hits is not None and before.hits is not None:
        hits = {layer: total - before.hits[layer] for layer, total in now.hits.items()}
    return Work(
        now.steps - before.steps,
        now.tokens - before.tokens,
        now.logit_rows - before.logit_rows,
        now.cached_rows - before.cached_rows,
        now.pairs - before.pairs,
        hits if hits and all(hits.values()) else None,
    )


def fit_config(config: EngineConfig, cases: list[Case]) -> EngineConfig:
    """The asked configuration with room for the cases. Raises `CoterieError` if it was asked for less."""
    longest = max(case.longest(config.chunked_prefill_size) for case in cases)
    streams = max(max(case.batch, case.prompts) for case in cases)
    room = streams * pages_for(longest, config.page_size) * config.page_size
    for name, given, needed in (
        ("max_model_len", config.max_model_len, longest),
        ("kv_cache_tokens", config.kv_cache_tokens, room),
    ):
        if given is not None and given < needed:
            raise CoterieError(f"{name} {given} is too small for this measurement, which needs {needed}; leave it out")
    return replace(
        config,
        max_model_len=config.max_model_len or longest,
        kv_cache_tokens=config.kv_cache_tokens or room,
        max_running_requests=max(config.max_running_requests, streams),
        enable_prefix_caching=False,
    )


def merge_limits(parts: list[Limits]) -> Limits:
    """All readings of each probe together."""
    values: dict[tuple[str, int], tuple[float, ...]] = {}
    for part in parts:
        for rate in part.rates:
            key = (rate.probe, rate.threads)
            values[key] = values.get(key, ()) + rate.values
    return Limits(parts[0].array_bytes, tuple(Rate(*key, found) for key, found in values.items()))


class PeakMemory:
    """Largest resident memory of this process, with pauses that do not count: the system's mark is set back after one.

    Where it cannot be set back, what comes after the first pause does not count at all.
    """

    def __init__(self) -> None:
        self._peak = 0
        self._usable = True

    def pause(self) -> None:
        self._peak = self.peak()

    def resume(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._usable = False

    def peak(self) -> int:
        return max(self._peak, high_water_mark()) if self._usable else self._peak


def high_water_mark() -> int:
    """The system's record of this process's largest resident memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
