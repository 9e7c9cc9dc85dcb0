"""Readings for a hardware file: what is read of the system, the step timer on a made-up model, kernels' readings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.engine.build import build_engine, open_model
from coterie.engine.config import EngineConfig
from coterie.engine.readings import Reader, disk_rate, fastest, memory_limit, processor_name
from coterie.engine.small_steps import StepTimer, tiny_config
from coterie.spec.errors import CoterieError


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_control_group_bounds_memory(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/box\n")
    write(tmp_path, "sys/fs/cgroup/box/memory.max", "123456789\n")
    assert memory_limit(tmp_path) == 123456789
    write(tmp_path, "sys/fs/cgroup/box/memory.max", "max\n")
    assert memory_limit(tmp_path) == memory_limit(tmp_path / "nothing") > 123456789


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: A Processor @ 2 GHz\n")
    assert processor_name(tmp_path) == "A Processor @ 2 GHz"
    assert processor_name(tmp_path / "nothing")


def test_a_disk_has_a_rate_or_none(tmp_path: Path) -> None:
    assert disk_rate(tmp_path, 8 << 20) >= 0
    assert not list(tmp_path.iterdir())


def test_the_fastest_of_several_calls_counts() -> None:
    calls = []
    assert 0 <= fastest(lambda: calls.append(1), 0.0) < 1
    assert len(calls) >= 3


def test_readings_of_attention_are_finite_and_complete() -> None:
    found = list(Reader(1).attention())
    assert {each.form for each in found} == {"mla", "gqa"} and {each.rows for each in found} == {1, 16, 512}
    assert all(np.isfinite(each.seconds) and min(each.seconds, each.nbytes, each.operations) > 0 for each in found)
    prompt = next(each for each in found if each.form == "gqa" and each.rows == 512)
    assert prompt.operations == 2 * 16 * (128 + 128) * 512 * 513 / 2


def timer(**changes: int) -> StepTimer:
    config = EngineConfig(load_format="dummy", max_model_len=256, kv_cache_tokens=2048, enable_prefix_caching=False)
    return StepTimer(build_engine(open_model(tiny_config(64, (2, 1), 128) | changes), config)[0])


def test_the_timer_times_whole_prompts_and_single_steps() -> None:
    found = timer()
    assert found.prompt(20) > 0
    times = found.streams(3, 10, 5)
    assert len(times) == 5 and min(times) > 0
    assert not found.core.has_work  # all streams are gone, so the next reading starts alone
    assert found.prompt(20) > 0


def test_a_failed_step_is_said() -> None:
    with pytest.raises(CoterieError, match="failed"):
        timer().prompt(1000)
