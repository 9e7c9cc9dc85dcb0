"""select: each choice is reported with its reason; what cannot be had is refused by name with what can."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from coterie.kernels.machine import machine
from coterie.kernels.native import NativeKernels
from coterie.kernels.select import Choice, choose_isa, choose_thread_count, select
from coterie.spec.errors import CoterieError


def test_native_by_default_with_a_reason_for_everything() -> None:
    kernels, report = select()
    assert isinstance(kernels, NativeKernels)
    values = {choice.what: choice.value for choice in report}
    assert values == {
        "backend": "native",
        "isa": machine().isa_levels[-1],
        "threads": str(machine().threads),
    }
    assert all(choice.reason for choice in report)
    assert (kernels.isa, kernels.threads) == (values["isa"], machine().threads)


def test_forced_level_and_threads() -> None:
    kernels, report = select("native", threads=1, isa="generic")
    assert isinstance(kernels, NativeKernels)
    assert (kernels.isa, kernels.threads) == ("generic", 1)
    assert Choice("isa", "generic", "asked for") in report


def test_a_missing_level_is_refused() -> None:
    facts = replace(machine(), isa_levels=("generic",))
    with pytest.raises(CoterieError, match="'avx512' is not available on this processor; choose auto or one of gen"):
        choose_isa(facts, "avx512")
    with pytest.raises(CoterieError, match="'sse9' is unknown"):
        select(isa="sse9")


def test_too_many_threads_are_allowed_and_said() -> None:
    facts = replace(machine(), threads=4, threads_reason="a cgroup quota of 4 CPUs")
    choice = choose_thread_count(facts, 8)
    assert choice.value == "8"
    assert "a cgroup quota of 4 CPUs" in choice.reason
    for count in (0, 1025):
        with pytest.raises(CoterieError, match=f"threads={count}: give 1 to 1024"):
            select(threads=count)


def test_unknown_values_are_refused() -> None:
    with pytest.raises(CoterieError, match="'cuda' is unknown; choose native or reference"):
        select("cuda")
    with pytest.raises(CoterieError, match="'float16' is unknown"):
        select(dtype="float16")
    with pytest.raises(CoterieError, match="use backend 'reference' for float64"):
        select(dtype="float64")
    with pytest.raises(CoterieError, match="leave it at auto"):
        select("reference", isa="avx2")


def test_reference_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CoterieError, match=r"needs torch.*pip install 'coterie\[torch\]', or use backend 'native'"):
        select("reference")


def test_reference_in_both_types() -> None:
    torch = pytest.importorskip("torch")
    for name in ("float32", "float64"):
        kernels, report = select("reference", threads=1, dtype=name)
        assert kernels.name == "reference"
        assert kernels.dtype == getattr(torch, name)
        assert {choice.what: choice.value for choice in report}["activations"] == name
