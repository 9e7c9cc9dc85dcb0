"""Tiny random transformers models in the real checkpoint's layout: the oracle of the parity tests.

Every parameter is randomised (transformers leaves correction biases at zero and norms at one, which hides mistakes).
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

MATRIX = Path(__file__).parent.parent / "data" / "parity_matrix.json"
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Entry:
    """One configuration: transformers classes, config, how to randomise, and the logits tolerance."""

    id: str
    config_class: str
    model_class: str
    config: dict[str, Any]
    tolerance: float = 2e-4
    bias_shift: float = 0.0
    seed: int = 1
    mtp_layers: int = 0
    mutation: dict[str, Any] = field(default_factory=dict)
    """Changes of our config.json that must move the logits: an entry counts only with a mutation it detects."""


def matrix_entries(ids: list[str]) -> list[Entry]:
    """Entries of the shared matrix, with `max_position_embeddings` raised and rope parameters unchanged."""
    table = {entry["id"]: entry for entry in json.loads(MATRIX.read_text())}
    return [
        Entry(
            id=name,
            config_class=table[name]["config_class"],
            model_class=table[name]["model_class"],
            config={**table[name]["config"], "max_position_embeddings": MAX_POSITIONS},
            tolerance=table[name]["tolerance"],
            bias_shift=table[name]["randomise"]["bias_shift"],
            seed=table[name]["seed"],
            mtp_layers=table[name].get("mtp_layers", 0),
        )
        for name in ids
    ]


class Oracle:
    """The transformers model of an entry, and its folder as `LLM` reads it."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry, self.folder = entry, folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, entry.config_class)(**entry.config)
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
            torch.manual_seed(entry.seed)
            self.model = getattr(transformers, entry.model_class)(config).eval().float()
            randomise(self.model, entry)
            self.model.save_pretrained(folder)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Whole-prompt logits, float32 [T, vocab]."""
        return self.model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()

    @torch.no_grad()
    def greedy(self, token_ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy continuation and the top-2 margin at each step."""
        tokens, margins, cache = [], [], transformers.DynamicCache()
        step = torch.tensor([token_ids])
        for _ in range(count):
            row = self.model(step, past_key_values=cache, use_cache=True).logits[0, -1]
            best = row.topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            step = torch.tensor([[tokens[-1]]])
        return tokens, margins


def randomise(model: torch.nn.Module, entry: Entry) -> None:
    """Matrices N(0, 1.2/sqrt(fan_in)), norms base +- 0.2, biases N(0, 0.3), correction biases N(0, 0.3) + shift."""
    generator = torch.Generator().manual_seed(entry.seed)

    def normal(shape: torch.Size, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
    for name, value in named:
        if "correction_bias" in name:
            value.data = normal(value.shape, 0.3) + entry.bias_shift
        elif value.ndim >= 2:
            value.data = normal(value.shape, 1.2 / math.sqrt(value.shape[-1]))
        elif "norm" in name:
            value.data = value.data + (torch.rand(value.shape, generator=generator) - 0.5) * 0.4
        else:
            value.data = normal(value.shape, 0.3)


def prompt(length: int, seed: int, vocab: int = 97) -> list[int]:
    """A fixed random prompt without the special ids 0, 1, 2."""
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()
