"""select: the one place where a backend, its ISA level and its threads are chosen, each choice with its reason.

Degradation is allowed, silence is not: the report lists every choice, the engine prints it. Importing this file imports
no torch; `reference` does when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.kernels.api import Kernels
from coterie.kernels.machine import Machine, machine
from coterie.kernels.native import NativeKernels
from coterie.spec.errors import CoterieError

Backend = Literal["native", "reference"]
ActivationDtype = Literal["float32", "float64"]
MAX_THREADS = 1024
"""What the native kernels accept."""

_KNOWN_LEVELS = ("generic", "avx2", "avx512", "amx")


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a report: what was chosen, its value, why."""

    what: str
    value: str
    reason: str


def select(
    backend: str = "native", *, threads: int | None = None, isa: str = "auto", dtype: str = "float32"
) -> tuple[Kernels, list[Choice]]:
    """Make a backend and say how it was chosen.

    `threads` None: what the machine allows. `isa`: "auto" or a level to force (native only). `dtype`: of activations,
    float64 only on `reference`. Raises CoterieError for what this machine or installation cannot do.
    """
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise CoterieError(
            f"threads={threads}: give 1 to {MAX_THREADS}, or leave it out to use what the machine allows"
        )
    if dtype not in ("float32", "float64"):
        raise CoterieError(f"activation dtype {dtype!r} is unknown; choose float32 or float64")
    if backend == "native":
        return _native(machine(), threads, isa, dtype)
    if backend == "reference":
        return _reference(threads, isa, "float64" if dtype == "float64" else "float32")
    raise CoterieError(f"backend {backend!r} is unknown; choose native or reference")


def _native(facts: Machine, threads: int | None, isa: str, dtype: str) -> tuple[Kernels, list[Choice]]:
    if dtype != "float32":
        raise CoterieError(f"backend 'native' computes in float32, not {dtype}; use backend 'reference' for float64")
    level = choose_isa(facts, isa)
    count = choose_thread_count(facts, threads)
    kernels = NativeKernels(int(count.value), level.value)
    return kernels, [Choice("backend", "native", "C++ on numpy arrays, the default"), level, count]


def choose_isa(facts: Machine, isa: str) -> Choice:
    """The level asked for, or the best of this machine. Raises CoterieError if the machine lacks it."""
    levels = ", ".join(facts.isa_levels)
    if isa == "auto":
        reason = f"best of {levels} on this {facts.arch} processor"
        reason += "".join(f"; {level} is left out: {why}" for level, why in facts.refused_levels)
        return Choice("isa", facts.isa_levels[-1], reason)
    if isa in facts.isa_levels:
        return Choice("isa", isa, "asked for")
    known = "is not available on this processor" if isa in _KNOWN_LEVELS else "is unknown"
    known = {level: f"is left out: {why}" for level, why in facts.refused_levels}.get(isa, known)
    raise CoterieError(f"isa {isa!r} {known}; choose auto or one of {levels}")


def choose_thread_count(facts: Machine, threads: int | None) -> Choice:
    """The number asked for, or the machine's."""
    if threads is None:
        return Choice("threads", str(facts.threads), facts.threads_reason)
    if threads > facts.threads:
        reason = f"asked for; more than this machine's {facts.threads} ({facts.threads_reason}), expect it to be slower"
        return Choice("threads", str(threads), reason)
    return Choice("threads", str(threads), "asked for")


def _reference(threads: int | None, isa: str, dtype: ActivationDtype) -> tuple[Kernels, list[Choice]]:
    if isa != "auto":
        raise CoterieError(f"isa={isa!r} is a choice of backend 'native'; with 'reference' leave it at auto")
    try:
        import torch

        from coterie.kernels.reference import ReferenceKernels
    except ImportError as error:
        raise CoterieError(
            f"backend 'reference' needs torch, which cannot be imported ({error}); "
            "install it with: pip install 'coterie[torch]', or use backend 'native'"
        ) from error
    if threads is not None:
        torch.set_num_threads(threads)
    report = [
        Choice("backend", "reference", "asked for"),
        Choice("threads", str(torch.get_num_threads()), "torch's own choice" if threads is None else "asked for"),
        Choice("activations", dtype, "asked for" if dtype == "float64" else "the default"),
    ]
    return ReferenceKernels(dtype), report
