"""Pure data and arithmetic: what a model, a machine and a deployment are. No torch, no I/O but JSON."""

from coterie.spec.cache import CacheStream
from coterie.spec.errors import SpecError
from coterie.spec.model import (
    AttentionSpec,
    DenseSpec,
    Fp8BlockQuant,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
)
from coterie.spec.placement import ExpertPlacement

__all__ = [
    "AttentionSpec",
    "CacheStream",
    "DenseSpec",
    "ExpertPlacement",
    "Fp8BlockQuant",
    "LayerSpec",
    "MoESpec",
    "ModelSpec",
    "RopeSpec",
    "SpecError",
]
