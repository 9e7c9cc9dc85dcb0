"""Coterie: inference for Mixture-of-Experts language models of the DeepSeek family, CPU first.

`LLM` and `SamplingParams` are imported on first use, so that `import coterie` stays cheap and needs no backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.engine.llm import LLM
    from coterie.engine.messages import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from coterie.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from coterie.engine.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
