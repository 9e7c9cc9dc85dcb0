"""Released configs with changes, and the shape of a refusal, for the tests of the config reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.spec import ModelSpec, SpecError

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A released config with changes; a value of `...` removes the key."""
    values = {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}
    return {key: value for key, value in values.items() if value is not ...}


def v3(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3's config with changes."""
    return config("deepseek-v3", **changes)


def refused(values: Any, *words: str, strict: bool = False) -> None:
    """`values` is a SpecError of one line that has every one of `words`."""
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_hf(values, strict=strict)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
