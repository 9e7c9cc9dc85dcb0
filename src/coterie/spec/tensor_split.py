"""TensorSplit: which heads and which output columns of dense products a rank of a tensor-parallel group computes.

A group's ranks answer the same requests together. Products are cut by outputs only and their pieces gathered, so that
every value is the one that a single rank computes. Heads are divided evenly; columns in panels of `PANEL`, and what
has fewer panels than there are ranks is computed whole by each. MLA's latent cache is on every rank, of GQA's caches a
rank has the key heads that its query heads read. Pure arithmetic; who moves the pieces: `comm.tensor_group`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from coterie.spec.errors import SpecError
from coterie.spec.model import AttentionSpec, ModelSpec
from coterie.spec.weights import PANEL

Range = tuple[int, int]
"""First and end."""


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """One rank's part of a group of `size` ranks."""

    rank: int = 0
    size: int = 1

    def heads(self, count: int) -> Range:
        """This rank's of `count` query heads."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def key_heads(self, count: int) -> Range:
        """The key heads that this rank's query heads read; several ranks may read one."""
        first = self.rank * count // self.size
        return first, first + max(1, count // self.size)

    def columns(self, width: int) -> Range:
        """This rank's of `width` output columns: all of them where they are too few to be cut."""
        return self.all_columns(width)[self.rank]

    def all_columns(self, width: int) -> tuple[Range, ...]:
        """The columns of each rank of the group; none has more than the first."""
        panels = -(-width // PANEL)
        if panels < self.size:
            return ((0, width),) * self.size
        bounds = [min(width, PANEL * -(-panels * rank // self.size)) for rank in range(self.size + 1)]
        return tuple(pairwise(bounds))

    def rows(self, count: int) -> tuple[Range, ...]:
        """`count` rows divided over the ranks; a rank may have none."""
        bounds = [rank * count // self.size for rank in range(self.size + 1)]
        return tuple(pairwise(bounds))

    def attention(self, spec: AttentionSpec) -> AttentionSpec:
        """The attention that this rank computes, and the streams that it caches."""
        if spec.kind == "mla":
            heads = spec.num_heads // self.size
            return replace(spec, num_heads=heads, num_kv_heads=heads)
        first, end = self.key_heads(spec.num_kv_heads)
        return replace(spec, num_heads=spec.num_heads // self.size, num_kv_heads=end - first)

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The model with this rank's attention; everything else keeps its full width."""
        if self.size == 1:
            return spec
        layers = tuple(replace(layer, attention=self.attention(layer.attention)) for layer in spec.layers)
        return replace(spec, layers=layers)


UNDIVIDED = TensorSplit()
"""A rank that shares with no other."""


def check_tensor_split(spec: ModelSpec, size: int) -> None:
    """Raise SpecError, with the sizes that are possible, if a group of `size` ranks cannot share the model's heads."""
    if _divides(spec, size):
        return
    most = max(layer.attention.num_heads for layer in spec.layers)
    valid = [str(number) for number in range(1, most + 1) if _divides(spec, number)]
    heads = sorted({_heads(layer.attention) for layer in spec.layers})
    raise SpecError(
        f"tp {size} does not divide the attention heads of this model ({' or '.join(heads)}); tp can be "
        f"{', '.join(valid)}"
    )


def _divides(spec: ModelSpec, size: int) -> bool:
    return all(_shares(layer.attention, size) for layer in spec.layers)


def _shares(spec: AttentionSpec, size: int) -> bool:
    if spec.num_heads % size:
        return False
    return spec.kind == "mla" or spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0


def _heads(spec: AttentionSpec) -> str:
    return f"{spec.num_heads}" if spec.kind == "mla" else f"{spec.num_heads} over {spec.num_kv_heads} of keys"
