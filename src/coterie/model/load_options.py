"""LoadOptions: how weights are loaded, as a value that the loader and the random weights share.

Not here: which model, the backend, and who watches or refuses a load; those are arguments of `load_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.model.load_plan import NO_QUANT, DtypeChoice
from coterie.model.shard import ExpertShard
from coterie.spec.weights import QuantPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """`dtype` "auto" narrows nothing: float32 and float16 checkpoints stay float32, bfloat16 and FP8 become bfloat16;
    random weights follow the config. `quant` goes before it where it says something.

    `load_format` "dummy": random weights from `seed`. `mtp`: with MTP blocks. `strict` refuses doubtful checkpoints
    (stray files, a tied head that differs, ...). `shard`: what this rank holds.
    """

    dtype: DtypeChoice = "auto"
    quant: QuantPlan = NO_QUANT
    load_format: Literal["auto", "dummy"] = "auto"
    mtp: bool = True
    seed: int = 0
    strict: bool = False
    shard: ExpertShard | None = None


AS_STORED = LoadOptions()
"""Everything that is stored, in the formats that lose nothing."""
