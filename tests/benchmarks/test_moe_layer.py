"""moe_layer.py: engines compute the layer that the float32 oracle computes, on inputs that are alike for all."""

from __future__ import annotations

import numpy as np
import pytest
from moe_layer import Contest, Engine
from moe_workers import Shape, Weights, Worker, exact

SHAPE = [8, 2, 256, 128]


def load(engine: str, config: dict) -> tuple[Worker, dict]:
    worker = Worker(engine)
    return worker, worker.load({"shape": SHAPE, "layers": 2, "seed": 3, "config": {"threads": 2, **config}})


@pytest.mark.parametrize(
    ("engine", "config", "bound"),
    [
        ("coterie", {"kind": "bf16"}, 0.005),
        ("coterie", {"kind": "int8"}, 0.03),
        ("coterie", {"kind": "int4"}, 0.2),
        ("torch", {}, 0.01),
    ],
)
def test_engines_compute_the_layer(engine: str, config: dict, bound: float) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    worker, answer = load(engine, config)
    assert 0 < answer["error_to_f32"] < bound
    values = 3 * 8 * 256 * 128
    assert answer["nbytes"] >= values * (0.5 if config.get("kind") == "int4" else 1)
    times = worker.run({"tokens": 5, "rounds": 3, "seed": 1})["seconds"]
    assert len(times) == 3
    assert min(times) > 0


def test_inputs_are_bf16_and_routing_is_distinct() -> None:
    weights = Weights(Shape(*SHAPE), 5)
    for values in (weights.part(0, 1, 2), weights.rows(4, 0)):
        assert not np.any(values.view(np.uint32) & 0xFFFF)
    assert weights.part(0, 1, 2).shape == (256, 128)
    assert not np.array_equal(weights.part(0, 0, 0), weights.part(1, 0, 0))
    ids, scale = weights.routing(50, 1)
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert np.unique(ids).tolist() == list(range(8))
    np.testing.assert_allclose(scale.sum(1), 1, rtol=1e-6)
    assert np.array_equal(exact(weights, 0), exact(Weights(Shape(*SHAPE), 5), 0))


def test_table_of_a_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Engine("ours", "coterie", {"kind": "int8"}, "python", 8), Engine("theirs", "kt", {}, "python", 8)]
    contest = Contest("tiny", engines, 2)
    contest.reads = [1e10]
    contest.failures["theirs"] = "crashed"
    contest.times = {("ours", 1): [0.001, 0.002, 0.004], ("theirs", 1): [0.003, 0.006, 0.012]}
    text = contest.markdown()
    assert "| 1 rows | 2.00 (1.00..4.00), 500 | 6.00 (3.00..12.0), 167 |" in text
    assert "| 1 rows | 3.00 |" in text
    assert "| 8 rows | - | failed |" in text
    assert "- theirs: crashed" in text
