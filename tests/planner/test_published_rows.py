"""Rows of published measurements: reading the table, and what its free texts mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.planner.data import COLUMNS, KINDS, Row, number, parse_rows, quantity_of, read_rows, shipped_rows
from coterie.planner.named import device_of, host_of, layout_of, model_of
from coterie.planner.phrases import Pool, formats_of, load_of, parts_of, pool_of, setup, speculation_of
from coterie.spec.errors import SpecError


def row(**changes: str) -> Row:
    values = {
        "id": "x-001", "model": "DeepSeek-R1/V3", "hardware": "H200", "devices": "8", "parallelism": "sglang TP8 EP1",
        "precision": "fp8", "load": "4 concurrent", "isl": "1024", "osl": "1024", "metric": "TPOT", "unit": "ms (mean)",
        "source": "",
    }  # fmt: skip
    return Row(value=None, **(values | changes))


def test_the_shipped_table_is_read_whole() -> None:
    rows = shipped_rows()
    assert len(rows) > 200
    assert {each.kind for each in rows} == set(KINDS)
    assert all(each.value is not None and each.source for each in rows)
    assert all(each.quantity != "unknown" for each in rows)
    assert len({each.id for each in rows}) == len(rows)


def test_suspect_rows_are_marked() -> None:
    marked = {each.id for each in shipped_rows() if each.suspect}
    assert marked == {"ix-pd-ttft-013", "ix-pd-ttft-015", "ix-pd-ttft-016", "svc-053"}


def test_a_blank_value_is_a_question_and_columns_may_move(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        "\ufeffmetric,id,model,hardware,value,other\nTPOT,a,Qwen3-30B-A3B,H200,,x\n,,,,,\n", encoding="utf-8"
    )
    (one,) = read_rows(file)
    assert (one.id, one.value, one.metric, one.load) == ("a", None, "TPOT", "")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("id,model\n1,2\n", "hardware"),
        ("id,model,hardware,metric,value\na,b,c,TPOT,fast\n", "no number"),
        ("id,model,hardware,metric,value\na,b,c,TPOT,-1\n", "above 0"),
        ("id,model,hardware,metric,value\na,b,c,TPOT,inf\n", "above 0"),
    ],
)
def test_bad_tables_are_refused_in_one_line(text: str, part: str) -> None:
    with pytest.raises(SpecError, match=part):
        parse_rows(text, "t.csv")
    assert COLUMNS[0] == "id"


@pytest.mark.parametrize(
    ("metric", "quantity"),
    [
        ("TPOT", "tpot"), ("ITL_mean", "tpot"), ("TTFT", "ttft"), ("prefill_throughput_per_node", "prefill"),
        ("decode_throughput_per_gpu", "decode"), ("output_throughput_total", "output"),
        ("output_speed_per_user", "speed"), ("total_throughput_per_gpu_in_plus_out_at_interactivity", "total"),
        ("dispatch_latency", "dispatch"), ("combine_logical_bandwidth_RDMA", "combine-bandwidth"),
        ("kernel_latency", "kernel"), ("E2E_latency", "e2e"),
        ("achieved_rate", "rate"), ("expert_load_max_over_mean", "expert-imbalance"),
        ("B_cap (SIMULATED)", "capacity"), ("weather", "unknown"),
    ],
)  # fmt: skip
def test_what_a_metric_asks_for(metric: str, quantity: str) -> None:
    assert quantity_of(metric) == quantity


@pytest.mark.parametrize(
    ("text", "devices", "pool"),
    [
        ("sglang 0.5.9 agg TP8 moeTP8 EP1", 8, (8, 1, 1)),
        ("trtllm agg TP8 moeTP1 EP8", 8, (8, 1, 8)),
        ("trtllm agg TP1 DPattn64 moeTP8 EP8", 64, (1, 64, 8)),
        ("decode attention DP16 + EP16, MTP1", 16, (1, 16, 16)),
        ("prefill EP32+DP32, 32 redundant experts", 32, (1, 32, 32)),
        ("prefill EP2", 2, (1, 2, 2)),
        ("EP2 DP2", 2, (1, 2, 2)),
        ("decode DP+EP8", 8, (1, 8, 8)),
        ("TP8, experts EP2xTP4, no MTP", 8, (8, 1, 2)),
        ("TP8 (attention DP)", 8, (1, 8, 8)),
        ("DEP16", 16, (1, 16, 16)),
        ("TP1 DP32 EP32", 32, (1, 32, 32)),
        ("best config at 23 tok/s/user", 8, None),
    ],
)
def test_degrees_in_every_form(text: str, devices: int, pool: tuple[int, int, int] | None) -> None:
    assert pool_of(text, devices) == (None if pool is None else Pool(1, *pool))


def test_pools_apart() -> None:
    said = setup(row(parallelism="trtllm 0.8.1 disagg P4x(TP1 DP4 EP4) D3x(TP16 DP1 EP16) decode bs 20", devices="64"))
    assert said.disaggregated and said.prefill == Pool(4, 1, 4, 4) and said.decode == Pool(3, 16, 1, 16)
    assert said.load.per_rank == 20 and said.load.requests == 4 and said.engine == "trtllm" and said.version == "0.8.1"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("128 concurrent", ("given", 128, None, None)), ("~1088 concurrent", ("given", 1088, None, None)),
        ("<=37 concurrent", ("given", 37, None, None)), ("256/GPU", ("given", None, 256, None)),
        ("16384 tokens/GPU", ("given", None, None, 16384)), ("max load (offline)", ("max", None, None, None)),
        ("KV-full", ("max", None, None, None)), ("production mix", ("production", None, None, None)),
        ("1", ("given", 1, None, None)), ("", ("none", None, None, None)),
    ],
)  # fmt: skip
def test_loads(text: str, found: tuple[object, ...]) -> None:
    load = load_of(text)
    assert (load.open, load.requests, load.per_rank, load.tokens) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fp8", ("fp8", "fp8")), ("FP8 GEMM+dispatch, BF16 MLA+combine", ("fp8", "bf16")),
        ("NVFP4 MoE, FP8 attention", ("fp4", "fp8")), ("NVFP4", ("fp4", "bf16")), ("Q4_K_M", ("q4.85", "q4.85")),
        ("INT8 CPU / INT4 GPU", ("int8", "int4")), ("FP8 GPU / INT4 CPU", ("int4", "fp8")), ("", ("", "")),
    ],
)  # fmt: skip
def test_formats(text: str, found: tuple[str, str]) -> None:
    assert formats_of(text) == found


def test_speculation() -> None:
    assert speculation_of("no MTP") == (0, 1.0)
    assert speculation_of("MTP1 (1.92 tokens/step)") == (1, 1.92)
    assert speculation_of("simulated MTP (60% acceptance)") == (1, pytest.approx(1.6))


def test_hardware_in_parts() -> None:
    hosts, beside = parts_of("2x Xeon Gold 6454S (8ch DDR5-4800 each) + RTX 4090D")
    assert hosts == ((2, "Xeon Gold 6454S (8ch DDR5-4800 each)"),) and beside == ((1, "RTX 4090D"),)
    assert parts_of("H800 + CX7 400G") == ((), ((1, "H800"),))
    assert parts_of("Intel Xeon 6972P x2") == (((2, "Intel Xeon 6972P"),), ())
    assert device_of("RTX 4090D").name == "RTX-4090" and device_of("GB200 NVL72").domain == 72
    spec, cores = host_of("EPYC 9654 (12ch DDR5-4800)", False)
    assert spec.memory_gbps == pytest.approx(460.8) and cores == 96


def test_models_by_the_names_of_articles() -> None:
    assert model_of("DeepSeek-R1/V3")[1].num_parameters == model_of("DeepSeek-V3 (8 experts)")[1].num_parameters
    assert model_of("DeepSeek-R1-Distill-Llama-70B")[0] == "Llama-3.1-70B"
    name, spec, exact = model_of("Imaginary-120B-A6B")
    assert not exact and name == "Imaginary-120B-A6B"
    assert spec.num_parameters == pytest.approx(120e9, rel=0.1) and spec.num_active_parameters < 12e9
    with pytest.raises(SpecError, match="Imaginary"):
        model_of("Imaginary")


def test_every_shipped_row_of_a_served_model_has_a_layout() -> None:
    for each in shipped_rows():
        said = setup(each)
        if each.kind in ("tpot", "ttft", "thr"):
            spec = model_of(each.model)[1]
            for pool in (said.prefill, said.decode):
                assert pool is not None, each.id
                assert layout_of(pool, said, spec).devices == pool.devices
    assert number("ShareGPT avg 301") == 301 and number("8k") == 8192 and number("none") is None
