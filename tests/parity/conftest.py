"""Oracles are built once per session and case; torch keeps to one thread so that the suite's time is steady."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from entries import Case
from oracle import Oracle


@pytest.fixture(scope="session")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Oracle]:
    """Build (or reuse) the oracle of a case; its folder carries the case's own spelling of the config."""
    torch.set_num_threads(1)
    built: dict[str, Oracle] = {}

    def get(case: Case) -> Oracle:
        if case.entry.id not in built:
            oracle = Oracle(case.entry, tmp_path_factory.mktemp(case.entry.id))
            rewrite_config(oracle.folder, oracle.folder, case.override)
            built[case.entry.id] = oracle
        return built[case.entry.id]

    return get


def rewrite_config(source: Path, target: Path, changes: dict) -> None:
    """Write `source`'s config.json with `changes` into `target`, whose weights are those of `source`."""
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    if target != source:
        for file in source.glob("*.safetensors"):
            (target / file.name).symlink_to(file)
