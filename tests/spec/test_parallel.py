"""ParallelConfig: what follows from what is given, and what is refused with the valid values."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.model.shipped import shipped_model_path
from coterie.spec.errors import SpecError
from coterie.spec.model import ModelSpec
from coterie.spec.parallel import ONE_RANK, ParallelConfig
from coterie.spec.tensor_split import TensorSplit


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, 1),
        ({"ep": 4}, 4),
        ({"dp": 4}, 4),
        ({"dp": 2, "ep": 2}, 2),
        ({"ep": 8, "nodes": 2}, 8),
        ({"tp": 1}, 1),
        ({"tp": 2}, 2),
        ({"tp": 2, "dp": 3}, 6),
        ({"tp": 2, "ep": 4, "nodes": 2}, 4),
    ],
)
def test_the_number_of_ranks_follows(given: dict[str, Any], ranks: int) -> None:
    config = ParallelConfig(**given)
    assert config.num_ranks == ranks and config.is_single == (ranks == 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ep": 0}, "ep must be from 1 to 1024, not 0"),
        ({"dp": -1}, "dp must be from 1"),
        ({"nodes": 0}, "nodes must be from 1"),
        ({"ep": 2000}, "not 2000"),
        ({"redundant_experts": -1}, "at least 0, not -1"),
        ({"rebalance_steps": -1}, "rebalance_steps must be at least 0.* not -1, 8 and 32"),
        ({"rebalance_moves": 0}, "rebalance_moves at least 1"),
        ({"rebalance_rate": 0.0}, "above 0 MB/s"),
        ({"rebalance_rate": float("nan")}, "above 0 MB/s"),
        ({"stall_seconds": 0.5}, "stall_seconds must be from 1 to 100000, not 0.5"),
        ({"stall_seconds": float("nan")}, "stall_seconds must be from 1"),
        ({"tp": 2, "ep": 3}, "ep 3 does not divide into groups of tp 2; give a multiple of 2"),
        ({"tp": 2, "ep": 6, "nodes": 2}, "2 ranks of a tp group must lie on one node.*3 a node.*a multiple of 4 ranks"),
        ({"tp": 2, "dp": 2, "ep": 2}, "ep 2 does not go with dp 2 and tp 2.*give ep 4, dp 1"),
        ({"dp": 2, "ep": 4}, r"ep 4 does not go with dp 2 and tp 1.*give ep 2, dp 4"),
        ({"ep": 4, "nodes": 3}, "4 ranks do not divide over 3 nodes; valid numbers of nodes: 1, 2, 4"),
        ({"redundant_experts": 8}, "redundant_experts 8 only several ranks can have: ask for some with ep"),
        ({"ep": 1, "rebalance_steps": 5, "overlap": "on"}, "rebalance_steps 5 and overlap on only several ranks"),
        ({"nodes": 2}, "1 ranks do not divide over 2 nodes"),
    ],
)
def test_impossible_layouts_say_what_is_possible(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        ParallelConfig(**given)


def test_placement_of_the_shipped_model() -> None:
    spec = ModelSpec.from_hf(shipped_model_path())
    placement = ParallelConfig(ep=4, nodes=2).placement(spec)
    assert placement.slot_to_expert.shape == (5, 32) and placement.node_of_rank.tolist() == [0, 0, 1, 1]
    assert ParallelConfig(ep=3).placement(spec).num_slots == 33, "the smallest number that divides"
    assert ParallelConfig(ep=4, redundant_experts=12).placement(spec).slots_per_rank == 11
    assert ONE_RANK.placement(spec).num_slots == 32
    assert ParallelConfig(tp=4, dp=2).placement(spec).num_ranks == 8
    assert ParallelConfig(tp=4, dp=2).split(6) == TensorSplit(2, 4)
    with pytest.raises(SpecError, match=r"tp 3 does not divide the attention heads .*\(8\); tp can be 1, 2, 4, 8$"):
        ParallelConfig(tp=3).placement(spec)
    with pytest.raises(SpecError, match=r"34 slots for 32 experts on 4 ranks.*multiple of 4.*0, 4, 8"):
        ParallelConfig(ep=4, redundant_experts=2).placement(spec)


def test_the_ranks_of_a_dense_model_are_one_tensor_group() -> None:
    dense = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    spec = ModelSpec.from_hf(dense)
    placement = ParallelConfig(tp=4).placement(spec)
    assert (placement.num_layers, placement.num_slots, placement.num_experts, placement.num_ranks) == (0, 0, 0, 4)
    assert placement.node_of_rank.tolist() == [0] * 4
    for layout in ({"ep": 2}, {"dp": 2, "tp": 2}):
        with pytest.raises(SpecError, match=r"2 groups of ranks share .* this one has no experts; .* use tp alone"):
            ParallelConfig(**layout).placement(spec)
    with pytest.raises(SpecError, match=r"tp can be 1, 2, 4$"):
        ParallelConfig(tp=3).placement(spec)
    for layout in ({"redundant_experts": 2}, {"rebalance_steps": 10}):
        with pytest.raises(SpecError, match="no experts to copy or move"):
            ParallelConfig(tp=2, **layout).placement(spec)
