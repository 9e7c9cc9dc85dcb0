"""What a row's answer takes for granted without being noisier for it: said beside the answer, not fitted.

A percentile that is answered by the mean, a CPU of which only the family is known, an answer's length that is not said,
weights that do not fit the devices. Not here: what widens an answer (`questions`, `derived`).
"""

from __future__ import annotations

import re

from coterie.planner.calibrate import family_of
from coterie.planner.data import Row
from coterie.planner.layout import WEIGHT_BYTES
from coterie.planner.named import device_of, host_of, is_guessed_host, model_of, weight_name
from coterie.planner.phrases import setup

_ROOM = 0.97
"""Share of the devices' memory that weights alone may take before an answer says that they do not fit."""


def remarks(row: Row) -> tuple[str, ...]:
    """In the order of what is said. Raises SpecError as the answer does."""
    found = []
    if row.quantity in ("tpot", "ttft", "e2e", "speed"):
        text = f"{row.metric} {row.unit}"
        named = re.search(r"(?<![a-z0-9])(p\d{2}(?:\.\d+)?|median|max)(?![a-z0-9])", text, re.I)
        if named:
            found.append(f"the mean, not the {named[1].lower()}")
    family = family_of(row)
    if family == "served":
        found += _served(row)
    elif family == "host":
        name = setup(row).hosts[0][1]
        if is_guessed_host(name):
            spec, cores = host_of(name, False)
            found.append(f"a socket of {cores} cores and {spec.memory_gbps:.0f} GB/s")
    return tuple(found)


def _served(row: Row) -> list[str]:
    said, found = setup(row), []
    if said.osl is None and row.quantity not in ("prefill", "ttft"):
        found.append("1024 answer tokens")
    _, spec, _ = model_of(row.model)
    hw = device_of(said.accelerators[0][1])
    held = spec.num_parameters * WEIGHT_BYTES[weight_name(said.experts or "fp8")]
    for pool in dict.fromkeys((said.prefill, said.decode)):
        room = _ROOM * hw.memory_bytes * (pool.devices if pool else 0)
        if pool and held > room:
            found.append(f"weights of {held / 1e9:.0f} GB on {pool.devices} x {hw.memory_gb:.0f} GB: they do not fit")
    return found
