"""Local ranks of tensor-parallel groups for tests: small models of each attention family, steps over a paged cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.cache.streams import PagedCache
from coterie.comm.local import LocalTransport
from coterie.comm.tensor_group import TensorGroup
from coterie.kernels.api import Kernels
from coterie.kernels.batch import ForwardBatch
from coterie.model.loader import LoadOptions, load_weights
from coterie.model.overlap import drive_all, interleave
from coterie.model.shard import ExpertShard
from coterie.model.transformer import Runtime, Transformer
from coterie.observe.expert_load import ExpertLoad
from coterie.observe.stages import StageTimer
from coterie.spec.cache import CacheKind
from coterie.spec.model import ModelSpec
from coterie.spec.parallel import ExchangeDtype, ParallelConfig
from coterie.spec.tensor_split import TensorSplit

PAGE = 4
_COMMON = {
    "vocab_size": 133, "hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 141,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_MLA = {
    **_COMMON, "num_key_value_heads": 4, "kv_lora_rank": 33, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "num_nextn_predict_layers": 0,
}  # fmt: skip
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 18, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "mla q_lora": {**_MLA, "model_type": "deepseek_v3", "q_lora_rank": 20},
    "mla single query": {**_MLA, "model_type": "deepseek_v3", "q_lora_rank": None},
    "mla biases": {**_MLA, "model_type": "glm4_moe_lite", "q_lora_rank": 20, "attention_bias": True},
    "gqa norms": {**_GQA, "model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "gqa qkv bias, shared gate": {
        **_GQA, "model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 69,
    },
    "gqa all biases": {
        **_GQA, "model_type": "dots1", "n_routed_experts": 8, "n_shared_experts": 3, "first_k_dense_replace": 1,
        "attention_bias": True, "num_key_value_heads": 1, "sliding_window": None,
    },
    "dense, tied": {
        **_COMMON, "model_type": "llama", "num_key_value_heads": 2, "head_dim": 18, "tie_word_embeddings": True,
    },
    "gqa heads of their own": {
        **_COMMON, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4,
        "head_dim": 18, "sliding_window": None,
    },
}  # fmt: skip


def family(name: str) -> ModelSpec:
    return ModelSpec.from_hf(FAMILIES[name])


@dataclass
class Sequences:
    """Sequences on pages of their own; `step` takes (sequence, begin, end) parts of them."""

    lengths: Sequence[int]
    vocab: int = 133

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // PAGE) for length in self.lengths)

    def step(self, parts: list[tuple[int, int, int]]) -> ForwardBatch:
        """Logits are wanted for the last row of each part."""
        firsts = np.concatenate([[0], np.cumsum([-(-length // PAGE) for length in self.lengths])])
        positions = [np.arange(begin, end) for _, begin, end in parts]
        ends = np.cumsum([0] + [end - begin for _, begin, end in parts]).astype(np.int32)
        width = max((-(-end // PAGE) for _, _, end in parts), default=0)
        tables = np.full((len(parts), width), -1, np.int32)
        slots = [np.zeros(0, np.int64)]
        for row, (s, _, end) in enumerate(parts):
            blocks = -(-end // PAGE)
            tables[row, :blocks] = np.arange(firsts[s], firsts[s] + blocks)
            slots.append(tables[row, positions[row] // PAGE].astype(np.int64) * PAGE + positions[row] % PAGE)
        tokens = [(s * 31 + p * 17) % self.vocab for (s, _, _), p in zip(parts, positions, strict=True)]
        return ForwardBatch(
            token_ids=np.concatenate([*tokens, np.zeros(0)]).astype(np.int32),
            positions=np.concatenate([*positions, np.zeros(0)]).astype(np.int32),
            query_start=ends,
            context_lens=np.array([end for _, _, end in parts], np.int32),
            logit_rows=ends[1:] - 1,
            block_tables=tables,
            slot_mapping=np.concatenate(slots),
            page_size=PAGE,
        )


@dataclass
class Model:
    """What to build on every rank: a source of weights and how the ranks are laid out."""

    spec: ModelSpec
    kernels: Kernels
    options: dict[str, Any]
    path: Any = None
    cache: CacheKind = "bf16"
    exchange_dtype: ExchangeDtype = "float32"

    def ranks(self, dp: int, tp: int, num_blocks: int) -> list[Rank]:
        """dp groups of tp ranks each, experts over all of them; one rank is the plain model."""
        size, ranks = dp * tp, []
        world = LocalTransport.group(size)
        moe = list(self.spec.moe_layers())
        placement = ParallelConfig(dp=dp, tp=tp).placement(self.spec)
        for rank, transport in enumerate(world):
            split, timer = TensorSplit(rank % tp, tp), StageTimer()
            shard = ExpertShard.of(placement, self.spec, rank, split) if size > 1 else None
            options = LoadOptions(shard=shard, **self.options)
            weights = load_weights(self.path, self.spec, self.kernels, options).weights
            first = rank // tp * tp
            group = None
            if tp > 1:
                inner = transport.subgroup(f"tp-{first}", range(first, first + tp))
                group = TensorGroup(inner, self.kernels, timer)
            load = None
            if moe:
                load = ExpertLoad([index for index, _ in moe], moe[0][1].num_experts, self.kernels.to_host)
            runtime = Runtime(
                self.kernels, transport, timer, load, group=group, exchange_dtype=self.exchange_dtype
            )
            model = Transformer(self.spec, weights, runtime)
            ranks.append(Rank(model, PagedCache(model.spec, num_blocks, PAGE, self.cache, self.kernels), transport))
        return ranks


@dataclass
class Rank:
    model: Transformer
    cache: PagedCache
    transport: LocalTransport

    def run(self, batch: ForwardBatch, micro_batches: int = 1) -> Generator:
        """(hidden [T, H], logits [M, vocab]) of one step."""
        kernels = self.model.runtime.kernels
        parts = (batch,) if micro_batches == 1 else batch.split(batch.num_tokens // 2)
        stages = [self.model.stages(kernels.prepare(part), self.cache.layers) for part in parts]
        halves = yield from interleave(stages, self.model.runtime.timer.enter)
        hidden = halves[0] if len(halves) == 1 else kernels.concat(halves)
        logits = yield from self.model.head_stages(hidden[kernels.prepare(batch).logit_rows])
        return kernels.to_host(hidden), kernels.to_host(logits)


def run_steps(ranks: list[Rank], tp: int, steps: list[list[ForwardBatch]], micro_batches: int = 1) -> list[Any]:
    """For each step the (hidden, logits) of each group; every rank of a group must have the same hidden rows."""
    results = []
    for batches in steps:
        out = drive_all([rank.run(batches[i // tp], micro_batches) for i, rank in enumerate(ranks)])
        for i, (hidden, _) in enumerate(out):
            np.testing.assert_array_equal(hidden, out[i // tp * tp][0])
        results.append(out[::tp])
    return results
