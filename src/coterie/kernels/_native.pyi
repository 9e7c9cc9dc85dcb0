"""Types of the C++ extension: see kernels/native/bindings.cpp. Arrays are C-contiguous numpy arrays, outputs last."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def isa_levels() -> list[str]: ...
def probe_kinds() -> list[str]: ...
def sort_by_expert(ids: Array, token: Array, position: Array, counts: Array) -> None: ...

def crc32c(bytes: Array) -> int: ...
def crc32c_table(bytes: Array) -> int: ...
def allocate(count: int, matrices: list[Matrix]) -> list[Bank]: ...

class Format:
    def __init__(self, kind: str, group: int, scale: str, table: list[int]) -> None: ...

class Matrix:
    def __init__(self, rows: int, cols: int, segments: int, format: Format) -> None: ...
    @property
    def nbytes(self) -> int: ...

class SharedExperts:
    def __init__(self, gate_up: Bank, down: Bank, gate: Bank | None) -> None: ...

class Bank:
    @property
    def count(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def segments(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def kind(self) -> str: ...
    def units(self) -> Array: ...
    @property
    def nbytes(self) -> int: ...

class AttentionShape:
    def __init__(
        self,
        *,
        heads: int,
        groups: int,
        key_dim: int,
        value_dim: int,
        nope: int,
        rank: int,
        rope_dim: int,
        interleaved: bool,
        scale: float,
        eps: float,
    ) -> None: ...

class RouteShape:
    def __init__(
        self,
        *,
        top_k: int,
        groups: int,
        topk_groups: int,
        sigmoid: bool,
        top2_sum: bool,
        normalize: bool,
        scale: bool,
        norm_epsilon: float,
        scaling: float,
    ) -> None: ...

class RopeInputs:
    def __init__(self, table: Array, positions: Array) -> None: ...

class Layout:
    def __init__(
        self, query_start: Array, positions: Array, blocks: Array | None, page_size: int, slots: Array | None = None
    ) -> None: ...

class Linear:
    def __init__(self, bank: Bank, bias: Array | None) -> None: ...

class LatentWeights:
    def __init__(
        self,
        *,
        q_a: Linear | None,
        q_norm: Array | None,
        q_b: Linear,
        kv_a: Linear,
        kv_norm: Array,
        w_uk: Bank,
        w_uv: Bank,
        o: Linear,
        rope: Array,
        shape: AttentionShape,
    ) -> None: ...

class GroupedWeights:
    def __init__(
        self,
        *,
        q: Linear,
        k: Linear,
        v: Linear,
        o: Linear,
        q_norm: Array | None,
        k_norm: Array | None,
        rope: Array,
        shape: AttentionShape,
    ) -> None: ...

class Entry:
    def __init__(
        self, delta: Array, residual: Array | None, norm: Array, eps: float, out: Array, total: Array | None
    ) -> None: ...

class Device:
    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def fill(self, bank: Bank, index: int, row: int, values: Array) -> None: ...
    def fill_bf16(self, bank: Bank, index: int, row: int, bits: Array) -> None: ...
    def fill_codes(
        self, bank: Bank, index: int, row: int, codes: Array, scales: Array, mins: Array | None
    ) -> None: ...
    def read_units(
        self, bank: Bank, path: str, offset: int, checksums: Array, direct: bool
    ) -> tuple[int, int, bool, bool]: ...
    def measure(self, bank: Bank, index: int, row: int, values: Array) -> tuple[float, float]: ...
    def moe(
        self, x: Array, ids: Array, weights: Array, gate_up: Bank, down: Bank, shared: SharedExperts | None,
        counts: Array, out: Array
    ) -> None: ...
    def read(self, bank: Bank, index: int, out: Array) -> None: ...
    def embed(self, bank: Bank, ids: Array, out: Array) -> None: ...
    def linear(self, x: Array, bank: Bank, bias: Array | None, out: Array) -> None: ...
    def head_linear(self, x: Array, bank: Bank, out: Array) -> None: ...
    def norm(self, x: Array, weight: Array, eps: float, out: Array) -> None: ...
    def add_norm(self, delta: Array, residual: Array, weight: Array, eps: float, out: Array, total: Array) -> None: ...
    def mla_inputs(
        self,
        query: Array,
        kv: Array,
        w_uk: Bank,
        weight: Array,
        rope: RopeInputs,
        shape: AttentionShape,
        query_out: Array,
        rows_out: Array,
    ) -> None: ...
    def gqa_heads(
        self, x: Array, weight: Array | None, rope: RopeInputs, shape: AttentionShape, out: Array
    ) -> None: ...
    def latent_block(self, weights: LatentWeights, entry: Entry, layout: Layout, cache: Array | None) -> None: ...
    def grouped_block(
        self, weights: GroupedWeights, entry: Entry, layout: Layout, keys: Array | None, values: Array | None
    ) -> None: ...
    def cache_write(self, cache: Array, rows: Array, slots: Array, heads: int, exact: int) -> None: ...
    def attend(
        self, query: Array, keys: Array, values: Array | None, layout: Layout, shape: AttentionShape, out: Array
    ) -> None: ...
    def route(
        self, x: Array, gate: Bank, bias: Array | None, shape: RouteShape, ids: Array, weights: Array
    ) -> None: ...
    def experts(self, rows: Array, counts: Array, gate_up: Bank, down: Bank, out: Array) -> None: ...
    def combine(self, rows: Array, position: Array, weights: Array, shared: Array | None, out: Array) -> None: ...
    def sigmoid_scale(self, x: Array, gate: Array, out: Array) -> None: ...
    def probe(self, kind: str, nbytes: int, rounds: int) -> list[float]: ...
