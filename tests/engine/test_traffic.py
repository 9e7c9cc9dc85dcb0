"""Traffic: bytes and operations of a step, against counts made here from shapes and from the routing that happened."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.engine.bench import BenchEngine, Case, difference, fit_config
from coterie.engine.build import open_model
from coterie.engine.config import EngineConfig
from coterie.engine.traffic import Traffic, Work, expected_hits
from coterie.observe.expert_load import ExpertLoad
from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec, MoESpec

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0,
    "eos_token_id": None, "num_nextn_predict_layers": 0,
}  # fmt: skip
CASE = Case(prompt_len=20, context=9, decode_len=4, batch=3, rounds=2)


@pytest.fixture
def small_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engine.limits.array_bytes", lambda: 64 << 20)


@pytest.fixture
def engine(small_array: None, request: pytest.FixtureRequest) -> BenchEngine:
    config = EngineConfig(load_format="dummy", threads=None if request.param == "reference" else 2,
                          backend=request.param, chunked_prefill_size=16, page_size=4)  # fmt: skip
    return BenchEngine(open_model(CONFIG), config, [CASE], None)


both = pytest.mark.parametrize("engine", ["native", "reference"], indirect=True)


@both
def test_one_token_costs_the_flops_of_the_spec(engine: BenchEngine) -> None:
    for context in (0, 7):
        work = Work(steps=1, tokens=1, logit_rows=1, cached_rows=context, pairs=context)
        assert sum(engine.traffic.need(work).operations.values()) == engine.traffic.spec.flops_per_token(context)


@both
def test_one_token_reads_its_own_weights(engine: BenchEngine) -> None:
    traffic = engine.traffic
    need = traffic.need(Work(1, 1, 1, 5, 5, hits={1: 2, 2: 2}))
    values = traffic.spec.num_active_parameters - traffic.spec.counts.vectors
    expected = 4 * (values + 5 * traffic.spec.kv_bytes_per_token(1))
    assert expected <= need.nbytes <= 1.3 * expected  # panels are padded
    if engine.info.config.backend == "reference":
        assert need.nbytes == expected
    assert traffic.need(Work(1, 1, 1, 5, 5)).nbytes == pytest.approx(need.nbytes)  # one token: K experts either way


@both
def test_a_measured_case_adds_up(engine: BenchEngine) -> None:
    result = engine.run(CASE, lambda line: None)
    assert [stretch.work.tokens for stretch in result.prefill] == [20, 20]
    assert [stretch.work.steps for stretch in result.prefill] == [2, 2]  # chunks of 16
    assert {stretch.work.logit_rows for stretch in result.prefill} == {1}
    assert {stretch.work.pairs for stretch in result.prefill} == {20 * 21 // 2}
    assert {stretch.work.cached_rows for stretch in result.prefill} == {16 + 20}
    for stretch in result.decode:
        assert (stretch.work.steps, stretch.work.tokens, stretch.work.logit_rows) == (4, 12, 12)
        assert stretch.work.hits is not None
        assert set(stretch.work.hits) == {1, 2}
        assert all(4 * 2 <= hits <= 4 * 6 for hits in stretch.work.hits.values())
        assert stretch.seconds > 0
    assert result.decode[1].work.cached_rows == result.decode[0].work.cached_rows + 4 * 3 * 4
    for fraction in (result.bandwidth_fraction, result.matrix_fraction, result.floor_fraction):
        assert fraction(result.decode) > 0
        assert fraction(result.prefill) > 0
    assert not engine.core.has_work
    engine.core.check_integrity()
    assert engine.peak_rss() > engine.traffic.weight_bytes


def test_expected_hits() -> None:
    moe = MoESpec(num_experts=64, top_k=6, intermediate_size=1)
    assert expected_hits(moe, 1) == pytest.approx(6)
    assert expected_hits(moe, 2) == pytest.approx(12 - 36 / 64)
    assert expected_hits(moe, 10_000) == pytest.approx(64)


def test_recorder_counts_hits_of_each_step() -> None:
    load = ExpertLoad([3, 4], 4, np.asarray)
    for counts in ([1, 0, 2, 0], [0, 0, 0, 3]):
        load.record(3, np.array(counts))
    load.record(4, np.array([0, 0, 0, 0]))
    assert load.hits() == {3: 3, 4: 0}
    assert load.read().tolist() == [[1, 0, 2, 3], [0, 0, 0, 0]]


def test_a_recorder_that_heard_nothing_gives_expectations() -> None:
    before = Work(1, 1, 1, 1, 1, hits={0: 2})
    assert difference(Work(2, 2, 2, 2, 2, hits={0: 2}), before).hits is None
    assert difference(Work(2, 2, 2, 2, 2, hits={0: 4}), before) == Work(1, 1, 1, 1, 1, hits={0: 2})


@pytest.mark.parametrize("name", ["max_model_len", "kv_cache_tokens"])
def test_room_that_was_asked_for_must_be_enough(name: str) -> None:
    with pytest.raises(CoterieError, match=f"{name} 16 is too small"):
        fit_config(EngineConfig(**{name: 16}), [CASE])
    fitted = fit_config(EngineConfig(), [CASE])
    assert fitted.max_model_len is not None and fitted.kv_cache_tokens is not None
    assert fitted.max_model_len > CASE.context + CASE.rounds * CASE.decode_len
    assert not fitted.enable_prefix_caching


def test_dense_tied_models_count_their_embedding_as_head(small_array: None) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    spec = ModelSpec.from_hf(config)
    engine = BenchEngine(open_model(config), EngineConfig(load_format="dummy", threads=1), [CASE], None)
    assert isinstance(engine.traffic, Traffic)
    operations = engine.traffic.need(Work(1, 1, 1, 3, 3)).operations
    assert sum(operations.values()) == spec.flops_per_token(3)
