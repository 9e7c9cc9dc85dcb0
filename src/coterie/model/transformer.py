"""Transformer: the decoder stack of any ModelSpec, as one generator over whatever kernels and transport it was given.

Not here: which tensor fills which weight (`names`, `loader`), the schedule, sampling. `Weights` is a plain mapping from
the keys of `model.names` to backend banks and vectors.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from coterie.comm.exchange import Exchange
from coterie.comm.local import LocalTransport
from coterie.comm.tensor_group import TensorGroup
from coterie.comm.transport import Handle, Transport
from coterie.comm.travel import Travel
from coterie.kernels.api import Array, Bank, BlockInput, GroupedWeights, Kernels, LatentWeights, Prepared, Projection
from coterie.model.attention import Attention, GroupedAttention, LatentAttention, LayerCache, bind
from coterie.model.overlap import drive
from coterie.moe.dispatch import Dispatcher
from coterie.moe.experts import Experts, FusedExperts, SplitExpert
from coterie.moe.layer import MoELayer
from coterie.moe.router import Router
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec
from coterie.spec.parallel import ExchangeDtype

Weights = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Runtime:
    """What every block of one rank shares: kernels, transport, the stage timer and the expert-load recorder.

    `exchange`: how the experts of several ranks are reached; None makes the plain one for the transport. `group`: the
    ranks that share this one's batches, each with its own heads and columns; None if there are no others.
    `exchange_dtype`: of routed experts' outputs when they are summed, however many ranks there are.
    """

    kernels: Kernels
    transport: Transport
    timer: StageTimer
    load: ExpertLoad | None = None
    exchange: Exchange | None = None
    group: TensorGroup | None = None
    exchange_dtype: ExchangeDtype = "float32"

    @classmethod
    def local(cls, kernels: Kernels) -> Runtime:
        """A single rank that records nothing."""
        return cls(kernels, LocalTransport(), StageTimer())


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm attention and feed-forward around a plain residual."""

    attention_norm: Array
    attention: Attention
    ffn_norm: Array
    ffn: Experts | SplitExpert | MoELayer
    eps: float
    runtime: Runtime
    index: int

    def stages(
        self, delta: Array, residual: Array | None, batch: Prepared, cache: LayerCache
    ) -> Generator[Handle, None, tuple[Array, Array]]:
        """(delta, residual) -> the same after this layer; its input is their sum (delta alone at the bottom)."""
        kernels, entry = self.runtime.kernels, BlockInput(delta, residual, self.attention_norm, self.eps)
        delta, residual = yield from self.attention.stages(entry, batch, cache)
        x, residual = kernels.add_norm(delta, residual, self.ffn_norm, self.eps)
        self.runtime.timer.lap("attention", self.index)
        if isinstance(self.ffn, MoELayer):
            delta = yield from self.ffn.stages(x, batch)
            return delta, residual
        if isinstance(self.ffn, SplitExpert):
            delta = yield from self.ffn.stages(x)
        else:
            delta = self.ffn.forward(x, batch.ones_counts)
        self.runtime.timer.lap("experts", self.index)
        return delta, residual


class Transformer:
    """The model on one rank. `spec` is that of the whole model, `self.spec` has the rank's own attention."""

    def __init__(self, spec: ModelSpec, weights: Weights, runtime: Runtime, max_positions: int | None = None) -> None:
        group = runtime.group
        self.spec = spec = spec if group is None else group.split.local(spec)
        self.weights = {key: value for key, value in weights.items() if not key.startswith("mtp.")}
        self.runtime = runtime
        self.embedding: Bank = weights["embed"]
        self.head: Bank = weights["head"] if "head" in weights else weights["embed"]
        self.norm: Array = weights["norm"]
        builder = LayerBuilder(spec, weights, runtime, max_positions or spec.max_positions)
        self.layers = [builder.layer(f"layers.{i}", i, layer) for i, layer in enumerate(spec.layers)]

    def stages(self, batch: Prepared, caches: list[LayerCache] | None = None) -> Generator[Handle, None, Array]:
        """The step's rows -> hidden states [T, H] after the final norm (what the head and an MTP block read).

        `caches` holds one mapping of streams per layer; None runs packed sequences without a cache.
        """
        self.runtime.timer.start()
        delta, residual = self.runtime.kernels.embed(self.embedding, batch.token_ids), None
        for index, layer in enumerate(self.layers):
            cache = {} if caches is None else caches[index]
            delta, residual = yield from layer.stages(delta, residual, batch, cache)
        hidden, _ = self.runtime.kernels.add_norm(delta, residual, self.norm, self.spec.norm_eps)
        self.runtime.timer.lap("other")
        return hidden

    def head_stages(self, hidden: Array) -> Generator[Handle, None, Array]:
        """Final-norm hidden rows [M, H] -> float32 logits [M, vocab], on the first rank of a group only."""
        logits = self.runtime.kernels.head(hidden, self.head)
        if self.runtime.group is not None:
            logits = yield from self.runtime.group.at("head", -1).collect(logits, self.spec.vocab_size)
        self.runtime.timer.lap("head")
        return logits

    def logits(self, hidden: Array) -> Array:
        """The same at once."""
        return drive(self.head_stages(hidden))


class LayerBuilder:
    """Decoder layers from a spec and a weight mapping; rope tables are shared between layers that agree."""

    def __init__(self, spec: ModelSpec, weights: Weights, runtime: Runtime, max_positions: int) -> None:
        self.spec, self.weights, self.runtime, self.max_positions = spec, weights, runtime, max_positions
        self._ropes: dict[RopeSpec, Array] = {}
        self._moe_rows = {layer: row for row, (layer, _) in enumerate(spec.moe_layers())}
        self._exchange = runtime.exchange or _plain_exchange(spec, runtime.transport)

    def layer(self, key: str, index: int, layer: LayerSpec) -> DecoderLayer:
        """The layer whose weights start with `key`; `index` is its row in the expert-load record."""
        build = self._latent if layer.attention.kind == "mla" else self._grouped
        return DecoderLayer(
            self.weights[f"{key}.attention_norm"],
            build(f"{key}.attention", layer.attention, self._group("attention", index)),
            self.weights[f"{key}.ffn_norm"],
            self._ffn(f"{key}.ffn", index, layer.ffn),
            self.spec.norm_eps,
            self.runtime,
            index,
        )

    def _group(self, stage: str, index: int) -> TensorGroup | None:
        return None if self.runtime.group is None else self.runtime.group.at(stage, index)

    def _rope(self, rope: RopeSpec) -> Array:
        if rope not in self._ropes:
            self._ropes[rope] = self.runtime.kernels.rope_table(rope, self.max_positions)
        return self._ropes[rope]

    def _linear(self, key: str) -> Projection:
        return Projection(self.weights[key], self.weights.get(f"{key}.bias"))

    def _latent(self, key: str, spec: AttentionSpec, group: TensorGroup | None) -> LatentAttention:
        single, kernels = spec.q_lora_rank is None, self.runtime.kernels
        weights = LatentWeights(
            q_a=None if single else self._linear(f"{key}.q_a"),
            q_norm=None if single else self.weights[f"{key}.q_norm"],
            q_b=self._linear(f"{key}.q" if single else f"{key}.q_b"),
            kv_a=self._linear(f"{key}.kv_a"),
            kv_norm=self.weights[f"{key}.kv_norm"],
            w_uk=self.weights[f"{key}.w_uk"],
            w_uv=self.weights[f"{key}.w_uv"],
            o=self._linear(f"{key}.o"),
            rope=self._rope(spec.rope),
        )
        bound = bind(kernels, weights, spec) if group is None else None
        return LatentAttention(spec, weights, kernels, bound, group)

    def _grouped(self, key: str, spec: AttentionSpec, group: TensorGroup | None) -> GroupedAttention:
        kernels = self.runtime.kernels
        norms = (self.weights[f"{key}.q_norm"], self.weights[f"{key}.k_norm"]) if spec.qk_norm else None
        weights = GroupedWeights(
            q=self._linear(f"{key}.q"),
            k=self._linear(f"{key}.k"),
            v=self._linear(f"{key}.v"),
            o=self._linear(f"{key}.o"),
            norms=norms,
            rope=self._rope(spec.rope),
        )
        bound = bind(kernels, weights, spec) if group is None else None
        return GroupedAttention(spec, weights, kernels, bound, group)

    def _ffn(self, key: str, index: int, ffn: DenseSpec | MoESpec) -> Experts | SplitExpert | MoELayer:
        weights, runtime = self.weights, self.runtime
        if isinstance(ffn, DenseSpec):
            return self._dense(key, index, ffn.intermediate_size)
        assert self._exchange is None or index in self._moe_rows, "several ranks have no experts of MTP blocks"
        experts, rounded = self._experts(key), runtime.exchange_dtype == "bfloat16"
        inner = ffn.shared_intermediate_size
        shared = self._dense(f"{key}.shared", index, inner) if inner else None
        gate, fused = weights.get(f"{key}.shared_gate"), None
        if self._exchange is None and not isinstance(shared, SplitExpert):
            fused = FusedExperts.of(experts, shared, gate, rounded=rounded)
        travel = Travel(runtime.kernels, experts.gate_up, rounded=rounded)
        return MoELayer(
            layer=index,
            router=Router(ffn, weights[f"{key}.gate"], weights.get(f"{key}.correction_bias"), runtime.kernels),
            dispatcher=Dispatcher(
                ffn.num_experts, runtime.kernels, self._exchange, self._moe_rows.get(index, 0), travel
            ),
            experts=experts,
            shared=shared,
            shared_gate=gate,
            kernels=runtime.kernels,
            timer=runtime.timer,
            load=runtime.load,
            fused=fused,
            group=self._group("combine", index),
        )

    def _experts(self, key: str) -> Experts:
        return Experts(self.weights[f"{key}.gate_up"], self.weights[f"{key}.down"], self.runtime.kernels)

    def _dense(self, key: str, index: int, inner: int) -> Experts | SplitExpert:
        """An expert that sees every row, with this rank's columns of it where a group shares it."""
        experts, group = self._experts(key), self._group("experts", index)
        if group is None:
            return experts
        return SplitExpert(experts.gate_up, experts.down, inner, experts.kernels, group)


def _plain_exchange(spec: ModelSpec, transport: Transport) -> Exchange | None:
    """Experts in order over the ranks of one node; None for one rank."""
    experts = [moe.num_experts for _, moe in spec.moe_layers()]
    return None if transport.size == 1 or not experts else Exchange.linear(transport, len(experts), experts[0])
