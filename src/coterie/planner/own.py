"""What this engine can deploy of what the planner can describe, and the command that starts it.

On CPUs a plan is for this engine, so a layout or a format that it lacks is refused here with what it has. Its rules for
ranks are `ParallelConfig`'s; formats are those of its weights and caches (`spec.weights`). Not here: other engines'
commands (`advice`), how good a layout is (`search`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coterie.planner.layout import CacheName, Layout, WeightName, stored_formats
from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec
from coterie.spec.model import ModelSpec
from coterie.spec.parallel import ParallelConfig

EXPERTS: Mapping[WeightName, str] = {"bf16": "bf16", "fp8": "fp8", "fp4": "mxfp4", "int8": "int8", "int4": "int4"}
ATTENTION: tuple[WeightName, ...] = ("bf16", "int8", "int4")
CACHE: Mapping[CacheName, str] = {"bf16": "bfloat16", "int8": "int8"}
MOVE_STEPS = 50
"""Steps between two looks at the load, for experts that are placed by it (docs/expert-parallel.md, While serving)."""


def parallel_of(layout: Layout, model: ModelSpec, hw: HardwareSpec) -> ParallelConfig:
    """The ranks of a layout. Raises SpecError for one that this engine cannot take: experts are spread over all ranks,
    whole; a dense model has one group."""
    routed = any(model.moe_layers())
    if routed and layout.moe_tp > 1:
        raise SpecError(
            f"this engine spreads experts whole over all ranks: ep {layout.ep} on {layout.devices} devices would cut "
            f"each over {layout.moe_tp}; leave --ep out"
        )
    nodes = layout.devices // hw.domain if layout.devices > hw.domain and layout.devices % hw.domain == 0 else 1
    parallel = ParallelConfig(
        tp=layout.tp, dp=layout.dp if layout.dp > 1 else None, ep=layout.devices if routed else None, nodes=nodes,
        redundant_experts=layout.redundant if routed and layout.devices > 1 else None,
    )  # fmt: skip
    parallel.placement(model)
    return parallel


def check_formats(layout: Layout, model: ModelSpec) -> None:
    """Raise SpecError for a format that this engine cannot hold."""
    attention, (stored, projections) = layout.attention or layout.weights, stored_formats(model)
    if attention not in ATTENTION and attention != (projections or stored):
        raise SpecError(
            f"this engine holds attention in {', '.join(ATTENTION)} or as the files have it, not in {attention}: give "
            "--attention one of these"
        )
    if layout.kv not in CACHE:
        raise SpecError(f"this engine's cache is in {' or '.join(CACHE)}, not in {layout.kv}: give --kv one of these")


def can_deploy(layout: Layout, model: ModelSpec, hw: HardwareSpec) -> bool:
    """Whether this engine can take a layout."""
    try:
        parallel_of(layout, model, hw)
        check_formats(layout, model)
    except SpecError:
        return False
    return True


def serve_command(layout: Layout, model: ModelSpec, hw: HardwareSpec, folder: str) -> list[str]:
    """The words that start an instance of a layout; sizes of batches and chunks are the caller's to add. Formats that
    the files hold are left to them. Several machines start it by torchrun. Raises SpecError as the checks do."""
    check_formats(layout, model)
    parallel, quant = parallel_of(layout, model, hw), model.quantization
    words = ["coterie", "serve", folder]
    if parallel.nodes > 1:
        words = ["torchrun", "--nnodes", str(parallel.nodes), "--nproc-per-node", str(hw.domain), "--node-rank", "RANK",
                 "--master-addr", "HOST", "--master-port", "29500", "-m", *words]  # fmt: skip
    if not parallel.is_single:
        if parallel.nodes == 1 and any(model.moe_layers()):
            words += ["--ep", str(layout.devices)]
        words += ["--tp", str(layout.tp)]
    if parallel.redundant_experts:
        words += ["--redundant-experts", str(parallel.redundant_experts)]
    stored, projections = stored_formats(model)
    attention = layout.attention or layout.weights
    if Path(folder).suffix == ".gguf" or (Path(folder) / "coterie.json").is_file():
        return [*words, "--kv-cache-dtype", CACHE[layout.kv], *_exchange(layout)]  # such files are run as they are
    if quant is None or layout.weights != stored:
        words += ["--experts", EXPERTS[layout.weights]]
    if quant is None or attention != (projections or stored):
        words += ["--attention", attention]
    words += ["--head", "bf16", "--kv-cache-dtype", CACHE[layout.kv]]
    return [*words, *_exchange(layout)]


def _exchange(layout: Layout) -> list[str]:
    return ["--exchange-dtype", "bfloat16"] if layout.exchange == "bfloat16" else []
