"""build_engine: from a model folder and an EngineConfig to an EngineCore, with a report of everything that was chosen.

The one place where spec, kernels, weights, cache, scheduler and sampler meet. Reads files, starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.cache.block_pool import BlockPool
from coterie.cache.streams import PagedCache
from coterie.comm.local import LocalTransport
from coterie.comm.tensor_group import TensorGroup
from coterie.engine.classes import ClassTable
from coterie.engine.config import NO_CLASSES, EngineConfig, ServiceConfig
from coterie.engine.core import EngineCore
from coterie.engine.grammar import Grammars
from coterie.engine.memory import available_memory
from coterie.engine.rebalance import Units
from coterie.engine.report import attention_choice, exchange_choice, weight_choices
from coterie.engine.resolve import Resolved, check_config, check_weights_fit, resolve
from coterie.engine.runner import ModelRunner
from coterie.engine.sampler import Sampler
from coterie.engine.scheduler import Scheduler, SchedulerLimits
from coterie.engine.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from coterie.kernels.api import Kernels
from coterie.kernels.select import Choice, select
from coterie.model.banks import RoleNeed
from coterie.model.gguf import open_gguf
from coterie.model.gguf_file import find_gguf, local_path
from coterie.model.load_report import LoadProgress
from coterie.model.loader import LoadedWeights, LoadOptions, load_weights
from coterie.model.shard import ExpertShard
from coterie.model.transformer import Runtime, Transformer
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec
from coterie.spec.tensor_split import UNDIVIDED, TensorSplit

Progress = Callable[[int, int], None]
"""Told of bytes loaded and bytes in all."""

ModelSource = str | Path | Mapping[str, Any] | ModelSpec
"""A folder, a GGUF file, a parsed config.json, or a spec; the latter two have no weights and no tokenizer."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model is before its weights are loaded. `folder`: a folder or a GGUF file; None: a config alone."""

    spec: ModelSpec
    folder: Path | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_generated_ids(self) -> int:
        """Ids from here on only pad the embedding: the tokenizer has no token for them, so they are never chosen."""
        end = self.spec.vocab_size
        while self.tokenizer is not None and end > 1 and not self.tokenizer.has_id(end - 1):
            end -= 1
        return end

    def grammars(self) -> Grammars | None:
        """A compiler of grammars for what the model generates; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return Grammars(self.tokenizer, self.eos_token_ids, self.num_generated_ids)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know of an engine. `load_lines`: the loader's report. `service`: its service classes.

    `num_ranks`: those that have requests; each of them runs up to `max_running_requests`.
    """

    files: ModelFiles
    config: EngineConfig
    max_model_len: int
    report: tuple[Choice, ...]
    load_lines: tuple[str, ...] = ()
    service: ServiceConfig = NO_CLASSES
    num_ranks: int = 1


def open_model(source: ModelSource, *, strict: bool = False) -> ModelFiles:
    """Read a model's description and tokenizer. Raises `CoterieError` for a folder that is none."""
    if isinstance(source, ModelSpec):
        return ModelFiles(source, None, None, source.eos_token_ids)
    if isinstance(source, Mapping):
        spec = ModelSpec.from_hf(source, strict=strict)
        return ModelFiles(spec, None, None, spec.eos_token_ids)
    folder = local_path(source)
    if find_gguf(folder):
        model = open_gguf(folder)
        spec = ModelSpec.from_hf(model.config, strict=strict)
        tokenizer = None if model.tokenizer is None else Tokenizer(model.tokenizer)
        return ModelFiles(spec, folder, tokenizer, eos_token_ids(None, spec.eos_token_ids, tokenizer, spec.vocab_size))
    if not (folder / "config.json").is_file():
        raise CoterieError(f"{folder} is not a model folder: it has no config.json and no GGUF file")
    spec = ModelSpec.from_hf(folder, strict=strict)
    tokenizer = load_tokenizer(folder)
    eos = eos_token_ids(folder, spec.eos_token_ids, tokenizer, spec.vocab_size)
    return ModelFiles(spec, folder, tokenizer, eos)


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several ranks holds and may take: its experts, bytes of memory for weights and cache, how many
    experts may be on their way to it at once (`rebalance`), its place in a tensor-parallel group."""

    experts: ExpertShard
    memory: int
    most_moves: int = 0
    split: TensorSplit = UNDIVIDED


def build_engine(
    source: ModelSource | ModelFiles,
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    record_experts: bool = False,
    service: ServiceConfig = NO_CLASSES,
    share: Share | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Load a model and make its engine. Raises `CoterieError` for whatever cannot be run, with the numbers.

    `record_experts` counts the rows of each expert in `core.runner.model.runtime.load`. With a `share` the engine can
    compute nothing before it joins its group (`engine.rank`).
    """
    files = source if isinstance(source, ModelFiles) else open_model(source, strict=config.strict)
    spec = files.spec
    check_config(spec, config)
    kernels, chosen = select(config.backend, threads=config.threads, isa=config.isa)
    loaded = load_share(files, config, kernels, progress, share)
    left = available_memory()
    if share is not None:  # the other ranks of this machine load meanwhile
        left = min(left, share.memory - sum(need.nbytes for need in loaded.needs))
        if share.most_moves:
            left -= Units.buffer_bytes(loaded.weights, spec, kernels, share.most_moves)
    split = UNDIVIDED if share is None else share.split
    resolved = resolve(split.local(spec), config, loaded.kind, left)
    load = _expert_load(spec, kernels) if record_experts else None
    timer, group = StageTimer(), None
    if split.size > 1:  # a stand-in, until the rank joins its own
        group = TensorGroup(LocalTransport.group(split.size)[split.rank], kernels, timer)
    runtime = Runtime(kernels, LocalTransport(), timer, load, group=group, exchange_dtype=config.exchange_dtype)
    runner = _runner(spec, loaded, resolved, config, runtime)
    limits = SchedulerLimits(
        token_budget=config.chunked_prefill_size,
        max_running=config.max_running_requests,
        max_queued=_queued(config, service),
        page_size=config.page_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(limits, BlockPool(resolved.num_blocks), files.eos_token_ids, ClassTable.of(service))
    sampler = Sampler(files.eos_token_ids, files.num_generated_ids)
    core = EngineCore(
        scheduler,
        runner,
        sampler,
        vocab_size=spec.vocab_size,
        max_model_len=resolved.max_model_len,
        grammars=files.grammars(),
    )
    products = (*attention_choice(kernels, resolved.cache_kind), *exchange_choice(spec, config))
    report = (*chosen, *weight_choices(loaded, config, kernels), *products, *resolved.report, *_notes(spec))
    return core, EngineInfo(files, config, resolved.max_model_len, report, tuple(loaded.report.lines()), service)


def _queued(config: EngineConfig, service: ServiceConfig) -> int:
    """Well above what the front end's door lets in, which decides; the engine hears of requests before it of ends."""
    caps = service.max_queued if service.enabled else (None,)
    return 2 * sum(config.max_running_requests + (cap or config.max_queued_requests) for cap in caps)


def load_share(
    files: ModelFiles,
    config: EngineConfig,
    kernels: Kernels,
    progress: Progress | None = None,
    share: Share | None = None,
) -> LoadedWeights:
    """Load a model's weights as `config` says, all of them or a rank's share. Raises `CoterieError`."""
    memory = available_memory() if share is None else share.memory
    spec = files.spec if share is None else share.split.local(files.spec)
    shard = None if share is None else share.experts.cut(files.spec, share.split)

    def tell(news: LoadProgress) -> None:
        if progress is not None:
            progress(news.bytes_done, news.bytes_total)

    options = LoadOptions(
        dtype=config.dtype,
        quant=config.quant,
        load_format=config.load_format,
        seed=config.seed,
        strict=config.strict,
        shard=shard,
    )

    def admit(needs: tuple[RoleNeed, ...]) -> None:
        check_weights_fit(needs, spec, config, memory)

    return load_weights(files.folder, files.spec, kernels, options, admit=admit, progress=tell)


def _runner(
    spec: ModelSpec, loaded: LoadedWeights, resolved: Resolved, config: EngineConfig, runtime: Runtime
) -> ModelRunner:
    model = Transformer(spec, loaded.weights, runtime, resolved.max_model_len)
    cache = PagedCache(model.spec, resolved.num_blocks, config.page_size, resolved.cache_kind, runtime.kernels)
    return ModelRunner(model, cache, runtime.kernels)


def _expert_load(spec: ModelSpec, kernels: Kernels) -> ExpertLoad | None:
    """A recorder for the layers that route, if there are any."""
    routed = list(spec.moe_layers())
    if not routed:
        return None
    return ExpertLoad([index for index, _ in routed], max(moe.num_experts for _, moe in routed), kernels.to_host)


def _notes(spec: ModelSpec) -> tuple[Choice, ...]:
    """What the config says that is not used: known to be harmless, or unheard of and saying nothing."""
    notes = (
        ("ignored config fields", spec.ignored_fields, "they cannot alter the mathematics"),
        ("unknown config fields", spec.unknown_fields, "null, false or empty; strict refuses them"),
    )
    return tuple(Choice(what, ", ".join(names), reason) for what, names, reason in notes if names)
