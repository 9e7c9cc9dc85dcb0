"""Traffic: the bytes that a stretch of steps had to read and the operations it had to do, from what is really held.

Bytes are those of the banks as they lie in memory (codes, scales and padding of whatever kind), once a step: all
matrices that every token multiplies, and of routed experts those that the step's tokens chose. Added to that: the cache
rows of each sequence, once a step. Not counted: norm weights, biases, embedding rows, activations. Operations: two a
multiply-add of every product that a row needs, attention absorbed for MLA. This file measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coterie.cache.streams import PagedCache
from coterie.engine.limits import Limits
from coterie.model.names import own_head, weight_layout
from coterie.model.transformer import Transformer
from coterie.spec.model import ModelSpec, MoESpec

Role = Literal["token", "routed", "head", "embedding"]


@dataclass(frozen=True, slots=True)
class HeldBank:
    """One bank. `layer`: that of routed experts. `products`: multiply-adds of a row with one of its matrices."""

    key: str
    role: Role
    kind: str
    nbytes: int
    count: int
    products: int
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of steps. `tokens`: rows computed; `logit_rows`: of them, through the head.

    `hits`: by layer, experts with any row summed over the steps; None: not recorded, so expected from even routing.
    `cached_rows`: cache rows read, each sequence's context summed over the steps. `pairs`: (query, key) pairs.
    """

    steps: int
    tokens: int
    logit_rows: int
    cached_rows: int
    pairs: int
    hits: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a stretch must cost: bytes read, and operations by weight kind (attention under `attention`)."""

    nbytes: float
    operations: Mapping[str, float]

    def matrix_seconds(self, limits: Limits, threads: int) -> float:
        """Least time for the operations, each kind on its fastest unit; attention counts as bf16."""
        kinds = {kind: "bf16" if kind == "attention" else kind for kind in self.operations}
        return sum(count / limits.matrix_peak(kinds[kind], threads) for kind, count in self.operations.items())


class Traffic:
    """Everything one model holds on this rank."""

    def __init__(self, model: Transformer, cache: PagedCache) -> None:
        self.spec = model.spec
        self.banks = held_banks(model.spec, model.weights)
        self.cache_bytes_per_token = sum(
            memory_of(stream) // len(stream) for streams in cache.layers for stream in streams.values()
        )
        self.cache_bytes = sum(memory_of(stream) for streams in cache.layers for stream in streams.values())

    @property
    def weight_bytes(self) -> int:
        """All matrices, embedding included."""
        return sum(bank.nbytes for bank in self.banks)

    def kinds(self) -> dict[str, int]:
        """Bytes by weight kind."""
        found: dict[str, int] = {}
        for bank in self.banks:
            found[bank.kind] = found.get(bank.kind, 0) + bank.nbytes
        return found

    def need(self, work: Work) -> Need:
        """Bytes and operations of a stretch."""
        nbytes = float(work.cached_rows * self.cache_bytes_per_token)
        operations: dict[str, float] = {"attention": 2.0 * work.pairs * attention_products(self.spec)}
        for bank in self.banks:
            uses = self._uses(bank, work)
            nbytes += uses.matrices * bank.nbytes / bank.count
            operations[bank.kind] = operations.get(bank.kind, 0.0) + 2.0 * uses.rows * bank.products
        return Need(nbytes, operations)

    def _uses(self, bank: HeldBank, work: Work) -> _Uses:
        if bank.role == "head":
            return _Uses(bank.count * min(work.steps, work.logit_rows), work.logit_rows)
        if bank.role == "token":
            return _Uses(bank.count * work.steps, work.tokens * bank.count)
        if bank.role == "embedding":
            return _Uses(0, 0)
        ffn = self.spec.layers[bank.layer].ffn
        assert isinstance(ffn, MoESpec)
        rows = work.tokens * ffn.top_k
        if work.hits is not None:
            return _Uses(work.hits.get(bank.layer, 0), rows)
        return _Uses(work.steps * expected_hits(ffn, work.tokens / max(1, work.steps)), rows)


@dataclass(frozen=True, slots=True)
class _Uses:
    """Matrices read, and rows multiplied by one matrix."""

    matrices: float
    rows: float


def expected_hits(moe: MoESpec, tokens: float) -> float:
    """Experts that `tokens` tokens choose together if all are alike and tokens independent."""
    return moe.num_experts * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens)


def attention_products(spec: ModelSpec) -> int:
    """Multiply-adds of one (query, key) pair over all layers: score and value."""
    total = 0
    for layer in spec.layers:
        attention = layer.attention
        latent = attention.latent_width + attention.kv_lora_rank
        total += attention.num_heads * (
            latent if attention.kind == "mla" else attention.qk_head_dim + attention.v_head_dim
        )
    return total


def held_banks(spec: ModelSpec, weights: Mapping[str, Any]) -> list[HeldBank]:
    """The main model's banks with their roles; a tied embedding is the head, another one costs no product."""
    routed = {f"layers.{index}.ffn.{end}": index for index, _ in spec.moe_layers() for end in ("gate_up", "down")}
    roles: dict[str, Role] = {"embed": "embedding", **dict.fromkeys(routed, "routed")}
    roles["head" if "head" in weights else "embed"] = "head"
    found = []
    layout = weight_layout(spec, mtp=False)
    if spec.tie_embeddings and "head" in weights:
        own_head(layout)
    for key, size in layout.banks.items():
        bank, layer = weights[key], routed.get(key, -1)
        products = size.rows * size.cols
        found.append(HeldBank(key, roles.get(key, "token"), bank.kind, memory_of(bank), size.count, products, layer))
    return found


def memory_of(bank: Any) -> int:
    """Bytes of a bank or cache stream of either backend."""
    return int(bank.nbytes if hasattr(bank, "nbytes") else bank.values.nbytes)
