"""Tabulated step times against the cost they stand for: decode, prefill, both; skew, drafts, overlap."""

from dataclasses import replace

import pytest

from coterie.planner.cost import mixed_step
from coterie.planner.devices import device
from coterie.planner.layout import Layout
from coterie.planner.models import model
from coterie.planner.steptime import Setting, step_time

V3 = Setting(model=model("DeepSeek-V3")[1], hardware=device("h200"), layout=Layout(devices=16, tp=1, dp=16, ep=16))
DENSE = Setting(model=model("Llama-3.1-70B")[1], hardware=device("h100"), layout=Layout(devices=8, tp=8, dp=1, ep=8))


@pytest.mark.parametrize("setting", [V3, DENSE, replace(V3, gamma=lambda tokens: (1 + 8 / (8 + tokens), None))])
@pytest.mark.parametrize("streams, context", [(1, 100), (7, 3000), (64, 4096), (250, 900)])
def test_decode_is_the_costs(setting: Setting, streams: int, context: int) -> None:
    times, dp = step_time(setting, 2048, 512), setting.layout.dp
    assert times(streams, streams * context) == pytest.approx(setting.decode(streams * dp, context).seconds, rel=0.02)


@pytest.mark.parametrize("setting", [V3, DENSE])
@pytest.mark.parametrize("tokens", [64, 700, 4096])
def test_a_prompt_is_the_costs(setting: Setting, tokens: int) -> None:
    times, dp = step_time(setting, 2048, 8192), setting.layout.dp
    wanted = setting.prefill(dp, tokens).seconds
    assert times(0, 0, tokens, tokens * (tokens + 1) / 2) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("setting", [V3, DENSE])
def test_both_at_once_is_the_costs(setting: Setting) -> None:
    times, dp = step_time(setting, 2048, 8192), setting.layout.dp
    points = setting.point(40 * dp, 2000), setting.point(dp, 1000, prompt=True)
    wanted = mixed_step(setting.model, setting.hardware, setting.layout, points).seconds
    assert times(40, 80_000, 1000, 500_500) == pytest.approx(wanted, rel=0.03)


def test_a_drafted_step_is_shared_by_its_tokens() -> None:
    setting = replace(V3, draft=2, accept=0.8)
    times = step_time(setting, 2048, 1024)
    assert times(32, 32 * 2048) == pytest.approx(setting.decode(32 * 16, 2048).tpot, rel=0.05)


def test_overlap_is_the_costs_at_the_typical_context() -> None:
    setting = replace(V3, overlap=True)
    times = step_time(setting, 4096, 1024)
    assert times(128, 128 * 4096) == pytest.approx(setting.decode(128 * 16, 4096).seconds, rel=0.03)
