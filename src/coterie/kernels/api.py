"""THE DEVICE DOOR: every heavy operation of the model, with shapes. Backends only compute.

A backend owns its arrays (`Array`: numpy float32 for native, torch tensors for reference) and its opaque weights
(`Bank`). Code in `model/` and `moe/` may apply `+ - * /`, `reshape`, basic and integer indexing and `.shape` to arrays;
all else is an op here. Communication, balancing and ordering live elsewhere.

Promise of a native op (DESIGN decision 10): an output row depends on its own input row only, in a fixed summation
order, whatever the batch and the number of threads.
Letters: T rows, H hidden, N heads, G key/value heads, D query/key width, V value width, E experts, K experts per token,
M expert rows (T * K without exchange), S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from coterie.kernels.batch import ForwardBatch
from coterie.spec.cache import CacheKind, CacheStream
from coterie.spec.model import AttentionSpec, MoESpec, RopeSpec
from coterie.spec.weights import MatrixSpec

Array = Any
"""A backend's activation array: numpy.ndarray (float32; uint16 holds the bits of bf16) or torch.Tensor."""

Bank = Any
"""A backend's opaque weight storage: `count` matrices of [rows, cols], or one vector."""

HostArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ExpertBanks:
    """gate_up (two segments) and down of some experts; `gate` [1, H] scales the shared ones' output by its sigmoid."""

    gate_up: Bank
    down: Bank
    gate: Bank | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A ForwardBatch in backend memory. `host` is the batch it came from; all arrays have the lengths given there.

    `ones_counts` [1] holds T: a dense feed-forward is an expert bank of one. `layout`: the backend's own form, if any.
    """

    host: ForwardBatch
    token_ids: Array
    positions: Array
    query_start: Array
    context_lens: Array
    logit_rows: Array
    block_tables: Array | None
    slot_mapping: Array | None
    ones_counts: Array
    layout: Any = None

    @property
    def num_tokens(self) -> int:
        return self.host.num_tokens


class Projection(NamedTuple):
    """A bank of one matrix and its bias."""

    weight: Bank
    bias: Array | None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """MLA's weights. `q_a` and `q_norm` are None where the query comes from one projection `q_b` of the input."""

    q_a: Projection | None
    q_norm: Array | None
    q_b: Projection
    kv_a: Projection
    kv_norm: Array
    w_uk: Bank
    w_uv: Bank
    o: Projection
    rope: Array


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """GQA's weights; `norms` are the per-head weights of q and k."""

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    norms: tuple[Array, Array] | None
    rope: Array


class LatentMaps(NamedTuple):
    """What turns projections into MLA's queries and cache rows; `norm` is that of the latent, `rope` a table."""

    w_uk: Bank
    norm: Array
    rope: Array


class BlockInput(NamedTuple):
    """What a pre-norm block reads: RMSNorm(residual + delta), of delta alone at the bottom of the model."""

    delta: Array
    residual: Array | None
    norm: Array
    eps: float


class Routed(NamedTuple):
    """Router's choice: expert_ids [T, K] (best first; ties: lower id), expert_weights [T, K] float32."""

    expert_ids: Array
    expert_weights: Array


class SortedRows(NamedTuple):
    """(token, k) pairs grouped by expert. `token` [M]: token row of each sorted row; `position` [T, K]: the sorted row
    of each pair; `counts` [E]: rows per expert. Stable: within an expert rows keep (token, k) order."""

    token: Array
    position: Array
    counts: Array


class Regrouped(NamedTuple):
    """Rows that arrived from several ranks, each sorted by local expert, re-sorted by expert: `order` [M] gathers them,
    `inverse` [M] undoes it, `counts` [E] rows per local expert. Within an expert: by source rank, then as sent."""

    order: Array
    inverse: Array
    counts: Array


class Kernels(Protocol):
    """One backend. Constructed with its own options (threads, ISA, dtype); holds no model."""

    name: str

    # ---- weights and tables, at load -----------------------------------------------------------------------------
    def allocate(self, count: int, *matrices: MatrixSpec) -> tuple[Bank, ...]:
        """One bank of `count` matrices for each spec, to multiply as y = x @ W.T; zero until filled. Banks allocated
        together share units: matrix i of each makes one contiguous range (an expert's gate_up and down)."""

    def fill(self, bank: Bank, index: int, row: int, values: HostArray) -> None:
        """Write `values` [n, cols] into matrix `index` from row `row` on, rounded or quantised to the bank's format."""

    def fill_bf16(self, bank: Bank, index: int, row: int, bits: NDArray[np.uint16]) -> None:
        """The same for bf16 bits [n, cols] and an f32 or bf16 bank; exact."""

    def fill_codes(
        self, bank: Bank, index: int, row: int, codes: NDArray[np.uint8], scales: HostArray, mins: HostArray | None
    ) -> None:
        """The same for codes [n, cols] of the bank's format (nibbles one to a byte), scales and (affine kinds) mins
        [n, groups]; exact if the bank's scale type holds the scales."""

    def read(self, bank: Bank, index: int) -> HostArray:
        """Matrix `index` of a bank as float32 [rows, cols], dequantised (tests, export)."""

    def measure(self, bank: Bank, index: int, row: int, values: HostArray) -> tuple[float, float]:
        """How far the rows from `row` on lie from `values` [n, cols]: sums of squares of the differences and of the
        values, in float64."""

    def vector(self, values: HostArray) -> Array:
        """A float32 vector (norm weight, bias, correction bias) in backend memory."""

    def rope_table(self, rope: RopeSpec, max_positions: int) -> Array:
        """cos and sin of every position: float32 [max_positions, 2, dim/2], from `spec.rope.cos_sin`."""

    def allocate_cache(self, num_slots: int, stream: CacheStream, kind: CacheKind) -> Array:
        """Storage of one cache stream, zeroed: `num_slots` opaque rows of `stream.row_bytes(kind)` bytes."""

    # ---- one step ------------------------------------------------------------------------------------------------
    def prepare(self, batch: ForwardBatch) -> Prepared:
        """Move a batch to backend memory."""

    def to_host(self, array: Array) -> NDArray[Any]:
        """An array as numpy; the only place where values are read on the host."""

    def from_host(self, array: NDArray[Any]) -> Array:
        """Rows or integers that came from another rank, in backend memory; uint16 are bf16 rows."""

    def embed(self, table: Bank, token_ids: Array) -> Array:
        """Rows of a [vocab, H] bank: [T, H]."""

    def norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNorm over the last axis: x / sqrt(mean(x^2) + eps) * weight. [T, H] -> [T, H]."""

    def add_norm(self, delta: Array, residual: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """(norm(residual + delta), residual + delta)."""

    def linear(self, x: Array, weight: Bank, bias: Array | None = None) -> Array:
        """x @ W.T (+ bias): [T, cols] -> [T, rows]. The bank holds one matrix."""

    def head_linear(self, x: Array, weight: Bank) -> Array:
        """One matrix per head: [T, N, cols] -> [T, N, rows]."""

    def mla_inputs(
        self, query: Array, kv: Array, maps: LatentMaps, positions: Array, spec: AttentionSpec
    ) -> tuple[Array, Array]:
        """Absorbed MLA. query [T, N*(nope+rope)], kv [T, R+rope] -> query [T, N, R+rope], cache rows [T, R+rope].

        The query's nope part of each head goes through `maps.w_uk` (N matrices [R, nope]), its rope part is rotated and
        follows; the row is RMSNorm(kv[:R]) (eps `spec.latent_norm_eps`) then the rotated kv[R:].
        """

    def gqa_inputs(
        self,
        query: Array,
        key: Array,
        norms: tuple[Array, Array] | None,
        table: Array,
        positions: Array,
        spec: AttentionSpec,
    ) -> tuple[Array, Array]:
        """query [T, N*D], key [T, G*D]: per-head RMSNorm if `norms` (weights of q and k), then rope on the first
        `spec.rope.dim` channels of each head -> query [T, N, D], key rows [T, G*D]."""

    def cache_write(self, cache: Array, rows: Array, batch: Prepared, stream: CacheStream) -> None:
        """Store rows [T, stream.width] at `batch.slot_mapping`, rounded to the cache's kind. int8: each head's groups
        of `SCALE_GROUP` channels as the nearest multiples (halves to even) of a 127th of their largest magnitude; a
        group with a NaN or an infinity reads as NaN."""

    def attend(self, query: Array, keys: Array, values: Array | None, batch: Prepared, spec: AttentionSpec) -> Array:
        """Causal attention: query [T, N, D] -> [T, N, V].

        With a cache `keys` and `values` are cache streams read through `batch.block_tables`; without one
        (`batch.block_tables is None`) they are the step's own rows [T, width] and each sequence sees only itself.
        `values is None` (MLA): the value is the first `spec.kv_lora_rank` channels of the key row and G = 1.
        Query head n reads key head n // (N/G). A query sees positions <= its own. Scores in float32.
        """

    def route(self, x: Array, gate: Bank, bias: Array | None, spec: MoESpec) -> Routed:
        """Router of `MoESpec`: float32 logits from float32 weights [E, H], selection, weights."""

    def sort_by_expert(self, expert_ids: Array, num_experts: int) -> SortedRows:
        """Group the T*K (token, k) pairs by expert, stably."""

    def gather(self, x: Array, order: SortedRows) -> Array:
        """Token rows in expert order: x[order.token], [T, H] -> [M, H]."""

    def regroup(self, received: NDArray[np.integer]) -> Regrouped:
        """Order for rows that arrived from R ranks with `received` [R, E] rows per (source, local expert)."""

    def concat(self, parts: list[Array]) -> Array:
        """Arrays end to end along the first axis."""

    def experts(self, rows: Array, counts: Array, gate_up: Bank, down: Bank) -> Array:
        """rows [M, H] (or as `NarrowRows.pack_rows` leaves them) sorted by expert, counts [E] -> [M, H]:
        down(silu(gate x) * up x) of each row's expert, unweighted. gate_up: E matrices [2I, H] in two segments, gate
        first; down: E matrices [H, I]."""

    def gated(self, x: Array, gate_up: Bank) -> Array:
        """silu(gate x) * up x of a bank of one matrix: [T, H] -> [T, I], what `experts` multiplies by `down`."""

    def narrow(self, rows: Array, take: NDArray[np.int64], out: NDArray[np.uint16]) -> None:
        """rows[take] to the nearest bf16 (ties to even), as bits on the host: [M, H], [n] -> out [n, H]."""

    def combine(
        self, rows: Array, position: Array, weights: Array, shared: Array | None, *, rounded: bool = False
    ) -> Array:
        """sum_k weights[t, k] * rows[position[t, k]] in k order (+ shared): [M, H] -> [T, H]. rows: float32, read as
        `narrow` would round them if `rounded`; or bf16 rows that came from other ranks."""

    def sigmoid_scale(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate), gate [T, 1]: Qwen2-MoE's shared-expert gate."""

    def head(self, x: Array, weight: Bank) -> Array:
        """Logits: [M, H] -> float32 [M, vocab]."""


class FusedKernels(Kernels, Protocol):
    """Optional members for attention, meaning what the ops above do in `model.attention`'s order, bit for bit."""

    def bind_attention(self, weights: LatentWeights | GroupedWeights, spec: AttentionSpec) -> Any:
        """Weights in the form that `attention_block` takes, checked once."""

    def attention_block(
        self, bound: Any, entry: BlockInput, batch: Prepared, cache: dict[str, Array]
    ) -> tuple[Array, Array]:
        """(attention(norm(residual + delta)), residual + delta); writes the step's rows to `cache` unless empty."""


@runtime_checkable
class NarrowRows(Protocol):
    """Optional members of a backend whose `experts` narrows the rows that it is given: it takes rows, too, that were
    narrowed before (by their sender), and gives the same bits."""

    def row_bytes(self, gate_up: Bank) -> int:
        """Of a row [H] as `experts` reads it for these weights, a multiple of four; 0 if it reads float32."""

    def pack_rows(self, x: Array, gate_up: Bank, out: NDArray[np.uint8]) -> None:
        """Narrow x [T, H] into the first `row_bytes` bytes of each row of host memory `out` [T, width]."""


@runtime_checkable
class FusedMoE(Protocol):
    """An optional member of a backend. Its meaning and its bits are those of `moe.layer`'s stages on one rank."""

    def moe(
        self, x: Array, routed: Routed, experts: ExpertBanks, shared: ExpertBanks | None, *, rounded: bool = False
    ) -> tuple[Array, Array]:
        """sort_by_expert, gather, experts, combine with the shared experts: [T, H] -> ([T, H], counts [E])."""
