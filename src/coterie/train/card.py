"""The model card: what the model is, what it was trained on, and the measured figures. Text only, measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.spec.model import ModelSpec
from coterie.train.baselines import BaselineBits
from coterie.train.checkpoint import RunState
from coterie.train.config import Recipe
from coterie.train.data import Corpus
from coterie.train.evaluate import RegisterResult
from coterie.train.model import routed_layers


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything the card says that is not in the recipe."""

    spec: ModelSpec
    state: RunState
    results: Sequence[RegisterResult]
    baselines: dict[str, BaselineBits]
    window: int
    command: str
    machine: str


def write_card(recipe: Recipe, corpus: Corpus, facts: CardFacts) -> str:
    """The card in Markdown with the front matter that model hubs read."""
    parts = [_head(recipe, facts), _bits(facts), _registers(corpus), _experts(facts), _end(recipe)]
    return "\n\n".join(parts) + "\n"


def _head(recipe: Recipe, facts: CardFacts) -> str:
    spec, state, shape = facts.spec, facts.state, recipe.model
    tokens = state.step * recipe.schedule.tokens_per_step
    return f"""---
library_name: coterie
pipeline_tag: text-generation
tags: [mixture-of-experts, deepseek_v3, multi-token-prediction]
---
# {recipe.name}

A small DeepSeek-V3-style Mixture-of-Experts model that exercises every part of a large one: multi-head latent
attention (latent {shape.kv_lora_rank} + {shape.rope_dim} rope, {shape.num_heads} heads), {shape.dense_layers} dense
layer then {shape.num_layers - shape.dense_layers} layers of {shape.num_experts} routed experts (top
{shape.experts_per_token}, width {shape.expert_width}) and {shape.shared_experts} shared one, sigmoid scores with the
auxiliary-loss-free correction bias, one multi-token-prediction block, a byte-level BPE of {shape.vocab_size} tokens. It
is for trying and testing a serving system. It continues text in the style of what it has read; it knows no facts and
follows no instructions.

- Parameters: {spec.num_parameters:,} and {spec.num_mtp_parameters:,} in the prediction block;
  {spec.num_active_parameters:,} are active per token. Weights: bfloat16, routers and biases float32.
- Context: {shape.max_positions} tokens.
- Trained on {tokens:,} tokens ({state.step:,} steps of {recipe.schedule.tokens_per_step:,}) in
  {state.seconds / 60:.0f} minutes of steps on {facts.machine}, with

      {facts.command}"""


def _bits(facts: CardFacts) -> str:
    lines = [
        "## Bits per byte on held-out text",
        "",
        "Lower is better. Whole held-out text, windows of "
        f"{facts.window} tokens with half a window of context at least, weights as shipped, `<|eos|>` between "
        "documents counted. `xz` is `xz -9e` of the held-out text alone, and after the register's training text. "
        "5-gram is interpolated modified Kneser-Ney on the register's training text, over bytes and over this model's "
        "tokens. "
        "MTP: how often the prediction block names the model's own next greedy token (the acceptance of one draft).",
        "",
        "| register | model | xz -9e | xz after training text | 5-gram bytes | 5-gram tokens | MTP |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in facts.results:
        base = facts.baselines[result.name]
        lines.append(
            f"| {result.name} | **{result.bits_per_byte:.3f}** | {base.xz:.3f} | {base.xz_primed:.3f} "
            f"| {base.bytes_5gram:.3f} | {base.tokens_5gram:.3f} | {result.mtp_agreement:.0%} |"
        )
    return "\n".join(lines)


def _registers(corpus: Corpus) -> str:
    lines = [
        "## Data",
        "",
        "Held-out documents are disjoint from training documents; a page that exists in several languages is held out "
        "in all of them. Part of the training text is repeated as conversations (a few lines from the user, continued "
        "by the assistant). Licences and sources: `NOTICE`.",
        "",
        "| register | training bytes | tokens | held-out bytes | licence |",
        "|---|---|---|---|---|",
    ]
    for register in corpus.registers:
        lines.append(
            f"| {register.name} | {register.train_bytes:,} | {len(register.train):,} "
            f"| {register.held_bytes:,} | {register.licence} |"
        )
    lines.append(f"| conversations | (repeats) | {len(corpus.chat):,} | none | as above |")
    return "\n".join(lines)


def _experts(facts: CardFacts) -> str:
    """Busiest experts per register and layer, and a histogram of shares."""
    names = [result.name for result in facts.results]
    lines = [
        "## Expert use",
        "",
        "Share of a register's routed rows on its four busiest experts (`id: share`; uniform would be "
        f"{1 / len(facts.results[0].expert_counts[0]):.1%} each), per layer.",
        "",
        "| layer | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    bars = ["", "Histogram of all experts, one character each (`▁` rare to `█` the register's busiest):", "", "```"]
    for row, (index, _, _) in enumerate(routed_layers(facts.spec)):
        label = f"MTP ({index})" if index >= len(facts.spec.layers) else str(index)
        cells = []
        for result in facts.results:
            counts = result.expert_counts[row]
            total = max(sum(counts), 1)
            top = sorted(range(len(counts)), key=lambda expert: -counts[expert])[:4]
            cells.append(", ".join(f"{expert}: {counts[expert] / total:.0%}" for expert in top))
            bars.append(f"layer {label:8s} {result.name:14s} {_sparkline(counts)}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *bars, "```"])


def _sparkline(counts: Sequence[int]) -> str:
    peak = max(max(counts), 1)
    return "".join("▁▂▃▄▅▆▇█"[min(7, count * 8 // peak)] for count in counts)


def _end(recipe: Recipe) -> str:
    return f"""## Chat form

`<|bos|>` then `<|user|>question<|assistant|>answer<|eos|>` for each turn; the template is in `tokenizer_config.json`.
The assistant continues the user's lines as a text would go on.

## Training

Muon for matrices and AdamW for the rest (rates {recipe.optimiser.muon_rate:g} and {recipe.optimiser.adam_rate:g}),
learning rate to zero along a line after {recipe.schedule.stable:.0%} of the run, sequences of
{", ".join(str(stage.length) for stage in recipe.schedule.stages)} tokens in turn, correction-bias speed
{recipe.schedule.bias_speed:g} to {recipe.schedule.bias_speed_final:g}, sequence-wise balance loss
{recipe.schedule.sequence_balance:g}, MTP loss weight {recipe.schedule.mtp_weight:g} to
{recipe.schedule.mtp_weight_final:g}. The loss curve is in `loss.png`."""
