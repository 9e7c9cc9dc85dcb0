"""The binding edge and the thread pool: bad shapes and indices are refused by name; idle threads sleep."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from kernel_cases import PagedSequences, fill_caches, gqa_spec, make_bank, mla_spec, new_bank, normal, plain_stream

from coterie.kernels import _native
from coterie.kernels.batch import ForwardBatch
from coterie.kernels.native import NativeKernels
from coterie.spec.model import MoESpec


@pytest.fixture
def kernels() -> NativeKernels:
    return NativeKernels(2)


def test_linear_refuses_wrong_widths_and_types(kernels: NativeKernels) -> None:
    bank = make_bank(kernels, normal(1, 1, 8, 5), "f32")
    with pytest.raises(ValueError, match=r"linear: x has shape \[3, 6\], needs \[3, 5\]"):
        kernels.linear(normal(2, 3, 6), bank)
    with pytest.raises(ValueError, match=r"linear: bias has shape \[7\], needs \[8\]"):
        kernels.linear(normal(2, 3, 5), bank, normal(3, 7))
    with pytest.raises(TypeError, match="float32 arrays, not float64"):
        kernels.linear(normal(2, 3, 5).astype(np.float64), bank)
    with pytest.raises(ValueError, match="linear: bank holds 2 matrices"):
        kernels.linear(normal(2, 3, 5), new_bank(kernels, 2, 8, 5, "f32"))


def test_weights_refuse_what_does_not_fit(kernels: NativeKernels) -> None:
    bank = new_bank(kernels, 2, 8, 5, "bf16")
    with pytest.raises(ValueError, match="fill: rows 6 to 9 of a matrix with 8"):
        kernels.fill(bank, 0, 6, normal(1, 3, 5))
    with pytest.raises(ValueError, match="fill: matrix 2 of 2"):
        kernels.fill(bank, 2, 0, normal(1, 3, 5))
    with pytest.raises(ValueError, match="values has shape"):
        kernels.fill(bank, 0, 0, normal(1, 3, 6))
    with pytest.raises(ValueError, match="read: matrix -1 of 2"):
        kernels.read(bank, -1)
    with pytest.raises(ValueError, match="at least 1"):
        new_bank(kernels, 0, 8, 5, "f32")
    with pytest.raises(ValueError, match="kind 'int3' is unknown"):
        _native.Format("int3", 0, "f32", [])
    with pytest.raises(ValueError, match="9 rows in 2 segments"):
        _native.Matrix(9, 5, 2, _native.Format("f32", 0, "f32", []))


def test_indices_out_of_range_are_refused(kernels: NativeKernels) -> None:
    table = make_bank(kernels, normal(1, 1, 10, 4), "f32")
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=rf"embed: token_ids holds {bad}, must be in \[0, 10\)"):
            kernels.embed(table, np.array([3, bad], np.int32))
    with pytest.raises(ValueError, match="sort_by_expert: expert_ids holds 4"):
        kernels.sort_by_expert(np.array([[4]], np.int32), 4)
    with pytest.raises(ValueError, match="combine: position holds 2"):
        kernels.combine(normal(1, 2, 4), np.array([[2]]), normal(2, 1, 1), None)
    spec = gqa_spec()
    query, key = normal(1, 1, 6 * 18), normal(2, 1, 2 * 18)
    with pytest.raises(ValueError, match=r"gqa_inputs: positions holds 16, must be in \[0, 16\)"):
        kernels.gqa_inputs(query, key, None, kernels.rope_table(spec.rope, 16), np.array([16], np.int32), spec)


def test_experts_and_route_check_their_counts(kernels: NativeKernels) -> None:
    gate_up, down = new_bank(kernels, 2, 6, 4, "f32", 2), new_bank(kernels, 2, 4, 3, "f32")
    with pytest.raises(ValueError, match="counts add up to 3 for 2 rows"):
        kernels.experts(normal(1, 2, 4), np.array([1, 2]), gate_up, down)
    with pytest.raises(ValueError, match="a negative count"):
        kernels.experts(normal(1, 2, 4), np.array([3, -1]), gate_up, down)
    with pytest.raises(ValueError, match="needs 2 of"):
        kernels.experts(normal(1, 2, 4), np.array([1, 1]), gate_up, new_bank(kernels, 2, 4, 4, "f32"))
    gate = new_bank(kernels, 1, 6, 4, "f32")
    with pytest.raises(ValueError, match="route: top_k 7 of 6"):
        kernels.route(normal(1, 2, 4), gate, None, MoESpec(6, 7, 1))
    with pytest.raises(ValueError, match="route: 1 of 4 groups of 6 experts"):
        kernels.route(normal(1, 2, 4), gate, None, MoESpec(6, 2, 1, num_groups=4))


def test_cache_and_block_tables_are_checked(kernels: NativeKernels) -> None:
    spec, layout = mla_spec(), PagedSequences((20,), 8)
    rows = normal(1, 20, spec.latent_width)
    (cache,), _ = fill_caches(kernels, layout, [rows], "f32")
    query = normal(2, 1, spec.num_heads, spec.latent_width)
    good = layout.batch([(0, 19, 20)])

    def attend(**changes: object) -> None:
        fields = {name: getattr(good, name) for name in ForwardBatch.__dataclass_fields__} | changes
        kernels.attend(query, cache, None, kernels.prepare(ForwardBatch(**fields)), spec)

    attend()
    assert good.block_tables is not None
    with pytest.raises(ValueError, match="block -1 of sequence 0"):
        attend(block_tables=np.full_like(good.block_tables, -1))
    with pytest.raises(ValueError, match=r"block 6 of sequence 0 is not in \[0, 6\)"):
        attend(block_tables=np.full_like(good.block_tables, 6))
    with pytest.raises(ValueError, match="position 19 of sequence 0 lies past its block table"):
        attend(block_tables=good.block_tables[:, :2])
    with pytest.raises(ValueError, match="query_start does not span the rows"):
        attend(query_start=np.array([0, 2], np.int32))
    with pytest.raises(ValueError, match="slot_mapping holds 48"):
        kernels.cache_write(cache, rows[:1], kernels.prepare(layout_with_slot(good, 48)), plain_stream(rows))


def layout_with_slot(batch: ForwardBatch, slot: int) -> ForwardBatch:
    fields = {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}
    return ForwardBatch(**fields | {"slot_mapping": np.array([slot])})


def test_rows_of_a_sequence_must_be_consecutive(kernels: NativeKernels) -> None:
    spec, layout = mla_spec(), PagedSequences((20,), 8)
    (cache,), _ = fill_caches(kernels, layout, [normal(1, 20, spec.latent_width)], "f32")
    batch = layout.batch([(0, 4, 6)])
    batch.positions[1] = 9
    query = normal(2, 2, spec.num_heads, spec.latent_width)
    with pytest.raises(ValueError, match="sequence 0 are not at consecutive positions"):
        kernels.attend(query, cache, None, kernels.prepare(batch), spec)


def test_strided_inputs_are_read_right(kernels: NativeKernels) -> None:
    bank = make_bank(kernels, normal(1, 1, 8, 5), "f32")
    x = normal(2, 6, 10)
    np.testing.assert_array_equal(kernels.linear(x[::2, 1:6], bank), kernels.linear(x[::2, 1:6].copy(), bank))


def test_many_callers_share_one_pool() -> None:
    kernels = NativeKernels(3)
    bank = make_bank(kernels, normal(1, 1, 512, 300), "f32")
    inputs = [normal(seed, 5 + seed, 300) for seed in range(4)]
    expected = [NativeKernels(1).linear(x, bank) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(200):
            if not np.array_equal(kernels.linear(inputs[index], bank), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_pools_come_and_go() -> None:
    x = normal(1, 64, 300)
    for _ in range(50):
        kernels = NativeKernels(3)
        bank = make_bank(kernels, normal(2, 1, 96, 300), "f32")
        assert kernels.linear(x, bank).shape == (64, 96)


def test_idle_workers_use_no_processor() -> None:
    kernels = NativeKernels(4)
    bank = make_bank(kernels, normal(1, 1, 2048, 256), "f32")
    kernels.linear(normal(2, 64, 256), bank)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2, "three spinning workers would have used more than a second"


def test_import_needs_no_torch() -> None:
    code = "import sys; import coterie.kernels.native, coterie.kernels.select; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
