"""StoredQuant: how a checkpoint's projections are quantised on disk, as `quantization_config` says it.

One `StoredScheme` a group of modules; `scheme_of` finds the one of a module by its name. Values only: the parser is
`spec/hf_quant.py`, the bytes are `model/formats/packed.py`'s, and which tensors are packed the file's names decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

StoredLayout = Literal["pack", "int8", "fp8", "mxfp4", "nvfp4", "awq", "gptq"]
"""pack: integers in 32-bit words along the input; int8, fp8: one byte a weight; mxfp4, nvfp4: two e2m1 a byte;
awq, gptq: words along the output or input of a transposed weight."""


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """`group`: inputs that share a scale, 0 for the whole row, -1 for the whole matrix; -2 while the parser finds
    `block` (rows, cols), which ends as a `Fp8BlockQuant`. `offset`: added to stored zero points (GPTQ's first form
    holds them less one). `targets`: as `scheme_of` reads."""

    layout: StoredLayout
    bits: int
    group: int
    symmetric: bool = True
    block: tuple[int, int] | None = None
    offset: int = 0
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True, slots=True)
class StoredQuant:
    """`ignored`: modules that are not quantised, exact names or regular expressions after `re:`."""

    method: str
    schemes: tuple[StoredScheme, ...]
    ignored: tuple[str, ...] = ()

    def scheme_of(self, *names: str) -> StoredScheme | None:
        """The scheme of a module, under any of its names (`model.layers.0.mlp.up_proj`); None if it is not quantised.

        A target that names the module or matches it wins over one that names the class, as in compressed-tensors.
        """
        if any(_matches(pattern, name) for pattern in self.ignored for name in names):
            return None
        for scheme in self.schemes:
            if any(_matches(target, name) for target in scheme.targets for name in names):
                return scheme
        return next((scheme for scheme in self.schemes if "Linear" in scheme.targets), None)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name
