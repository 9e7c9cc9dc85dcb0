"""Which checkpoint tensor goes where: one table per model, read forwards by the loader and backwards by export.

`weight_layout(spec)` names the banks and vectors that `Transformer` asks for and maps each Hugging Face tensor name to
parts of them. Nothing here reads a file or holds an array. MLA's `kv_b_proj` is split per head into
`w_uk` (transposed, absorbed into the query) and `w_uv`; an MTP block's `eh_proj` into its embedding and hidden halves.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoESpec

Role = Literal["embedding", "head", "attention", "experts", "router", "other"]
"""What a bank is for; `experts` is every feed-forward, routed, shared or dense."""


@dataclass(frozen=True, slots=True)
class BankSpec:
    """`count` matrices [rows, cols]. `role` decides the format (a router is never narrowed); banks of one `unit` are
    allocated together, so that an expert is one range of memory; `segments`: see `MatrixSpec`."""

    count: int
    rows: int
    cols: int
    role: Role = "other"
    unit: str = ""
    segments: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """Slice `tensor[row0:row1, col0:col1]` (transposed if asked) goes to matrix `index` of `bank` from row `at` on.

    A vector's part has only `bank` and, if it is cut, `cols`.
    """

    bank: str
    index: int = 0
    at: int = 0
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One checkpoint tensor: its shape as stored and the parts it fills."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(slots=True)
class WeightLayout:
    """Banks and vectors by key, and the checkpoint tensors that fill them."""

    banks: dict[str, BankSpec] = field(default_factory=dict)
    vectors: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def bank(self, key: str, tensor: str, rows: int, cols: int, role: Role) -> None:
        """A bank of one matrix that one tensor fills."""
        self.banks[key] = BankSpec(1, rows, cols, role)
        self.tensors[tensor] = TensorEntry((rows, cols), (Part(key),))

    def experts(self, key: str, count: int, inner: int, hidden: int) -> None:
        """gate_up and down of `count` experts, each expert one unit."""
        self.banks[f"{key}.gate_up"] = BankSpec(count, 2 * inner, hidden, "experts", key, 2)
        self.banks[f"{key}.down"] = BankSpec(count, hidden, inner, "experts", key)

    def vector(self, key: str, tensor: str, size: int) -> None:
        self.vectors[key] = size
        self.tensors[tensor] = TensorEntry((size,), (Part(key),))


def weight_layout(spec: ModelSpec, *, mtp: bool = True) -> WeightLayout:
    """The whole model's banks, vectors and tensors, in file order; with `mtp` the blocks past the last layer too.

    With tied embeddings there is no `head` bank: the model uses `embed`.
    """
    layout = WeightLayout()
    hidden = spec.hidden_size
    layout.bank("embed", "model.embed_tokens.weight", spec.vocab_size, hidden, "embedding")
    for index, layer in enumerate(spec.layers):
        _layer(layout, f"layers.{index}", f"model.layers.{index}", layer, spec)
    layout.vector("norm", "model.norm.weight", hidden)
    if not spec.tie_embeddings:
        layout.bank("head", "lm_head.weight", spec.vocab_size, hidden, "head")
    if mtp:
        for depth, layer in enumerate(spec.mtp_layers):
            _mtp(layout, depth, f"model.layers.{len(spec.layers) + depth}", layer, spec)
    return layout


def own_head(layout: WeightLayout) -> None:
    """Give a tied model a head of its own, filled by the embedding's tensor, so that the two may differ in format."""
    embed = layout.banks["embed"]
    layout.banks["head"] = BankSpec(1, embed.rows, embed.cols, "head")
    entry = layout.tensors["model.embed_tokens.weight"]
    layout.tensors["model.embed_tokens.weight"] = TensorEntry(entry.shape, (*entry.parts, Part("head")))


def _mtp(layout: WeightLayout, depth: int, source: str, layer: LayerSpec, spec: ModelSpec) -> None:
    key, hidden = f"mtp.{depth}", spec.hidden_size
    layout.vector(f"{key}.enorm", f"{source}.enorm.weight", hidden)
    layout.vector(f"{key}.hnorm", f"{source}.hnorm.weight", hidden)
    layout.banks[f"{key}.e_proj"] = BankSpec(1, hidden, hidden)
    layout.banks[f"{key}.h_proj"] = BankSpec(1, hidden, hidden)
    halves = (
        Part(f"{key}.e_proj", cols=(0, hidden)),
        Part(f"{key}.h_proj", cols=(hidden, 2 * hidden)),
    )
    layout.tensors[f"{source}.eh_proj.weight"] = TensorEntry((hidden, 2 * hidden), halves)
    _layer(layout, f"{key}.layer", source, layer, spec)
    layout.vector(f"{key}.norm", f"{source}.shared_head.norm.weight", hidden)


def _layer(layout: WeightLayout, key: str, source: str, layer: LayerSpec, spec: ModelSpec) -> None:
    hidden = spec.hidden_size
    layout.vector(f"{key}.attention_norm", f"{source}.input_layernorm.weight", hidden)
    attention = _mla if layer.attention.kind == "mla" else _gqa
    attention(layout, f"{key}.attention", f"{source}.self_attn", layer.attention, hidden)
    layout.vector(f"{key}.ffn_norm", f"{source}.post_attention_layernorm.weight", hidden)
    if isinstance(layer.ffn, DenseSpec):
        _gated_mlp(layout, f"{key}.ffn", f"{source}.mlp", layer.ffn.intermediate_size, hidden)
    else:
        _moe(layout, f"{key}.ffn", source, layer.ffn, spec)


def _linear(layout: WeightLayout, key: str, source: str, rows: int, cols: int, *, bias: bool = False) -> None:
    layout.bank(key, f"{source}.weight", rows, cols, "attention")
    if bias:
        layout.vector(f"{key}.bias", f"{source}.bias", rows)


def _mla(layout: WeightLayout, key: str, source: str, spec: AttentionSpec, hidden: int) -> None:
    heads, rank, nope, value = spec.num_heads, spec.kv_lora_rank, spec.qk_nope_head_dim, spec.v_head_dim
    if spec.q_lora_rank is None:
        _linear(layout, f"{key}.q", f"{source}.q_proj", heads * spec.qk_head_dim, hidden)
    else:
        _linear(layout, f"{key}.q_a", f"{source}.q_a_proj", spec.q_lora_rank, hidden, bias=spec.q_bias)
        layout.vector(f"{key}.q_norm", f"{source}.q_a_layernorm.weight", spec.q_lora_rank)
        _linear(layout, f"{key}.q_b", f"{source}.q_b_proj", heads * spec.qk_head_dim, spec.q_lora_rank)
    _linear(layout, f"{key}.kv_a", f"{source}.kv_a_proj_with_mqa", spec.latent_width, hidden, bias=spec.q_bias)
    layout.vector(f"{key}.kv_norm", f"{source}.kv_a_layernorm.weight", rank)
    layout.banks[f"{key}.w_uk"] = BankSpec(heads, rank, nope, "attention")
    layout.banks[f"{key}.w_uv"] = BankSpec(heads, value, rank, "attention")
    parts: list[Part] = []
    for head in range(heads):
        row = head * (nope + value)
        parts.append(Part(f"{key}.w_uk", head, rows=(row, row + nope), transpose=True))
        parts.append(Part(f"{key}.w_uv", head, rows=(row + nope, row + nope + value)))
    layout.tensors[f"{source}.kv_b_proj.weight"] = TensorEntry((heads * (nope + value), rank), tuple(parts))
    _linear(layout, f"{key}.o", f"{source}.o_proj", hidden, heads * value, bias=spec.o_bias)


def _gqa(layout: WeightLayout, key: str, source: str, spec: AttentionSpec, hidden: int) -> None:
    widths = {
        "q": spec.num_heads * spec.qk_head_dim,
        "k": spec.num_kv_heads * spec.qk_head_dim,
        "v": spec.num_kv_heads * spec.v_head_dim,
    }
    for name, width in widths.items():
        _linear(layout, f"{key}.{name}", f"{source}.{name}_proj", width, hidden, bias=spec.q_bias)
    if spec.qk_norm:
        layout.vector(f"{key}.q_norm", f"{source}.q_norm.weight", spec.qk_head_dim)
        layout.vector(f"{key}.k_norm", f"{source}.k_norm.weight", spec.qk_head_dim)
    _linear(layout, f"{key}.o", f"{source}.o_proj", hidden, spec.num_heads * spec.v_head_dim, bias=spec.o_bias)


def _gated_mlp(layout: WeightLayout, key: str, source: str, inner: int, hidden: int) -> None:
    layout.experts(key, 1, inner, hidden)
    layout.tensors[f"{source}.gate_proj.weight"] = TensorEntry((inner, hidden), (Part(f"{key}.gate_up"),))
    layout.tensors[f"{source}.up_proj.weight"] = TensorEntry((inner, hidden), (Part(f"{key}.gate_up", at=inner),))
    layout.tensors[f"{source}.down_proj.weight"] = TensorEntry((hidden, inner), (Part(f"{key}.down"),))


def _moe(layout: WeightLayout, key: str, layer_source: str, moe: MoESpec, spec: ModelSpec) -> None:
    hidden, inner, count = spec.hidden_size, moe.intermediate_size, moe.num_experts
    mixtral = spec.model_type == "mixtral"
    source = f"{layer_source}.block_sparse_moe" if mixtral else f"{layer_source}.mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    layout.bank(f"{key}.gate", f"{source}.gate.weight", count, hidden, "router")
    if moe.correction_bias:
        layout.vector(f"{key}.correction_bias", f"{source}.gate.e_score_correction_bias", count)
    layout.experts(key, count, inner, hidden)
    for e in range(count):
        expert = f"{source}.experts.{e}"
        layout.tensors[f"{expert}.{gate}.weight"] = TensorEntry((inner, hidden), (Part(f"{key}.gate_up", e),))
        layout.tensors[f"{expert}.{up}.weight"] = TensorEntry((inner, hidden), (Part(f"{key}.gate_up", e, inner),))
        layout.tensors[f"{expert}.{down}.weight"] = TensorEntry((hidden, inner), (Part(f"{key}.down", e),))
    if moe.shared_intermediate_size:
        shared = "shared_expert" if spec.model_type == "qwen2_moe" else "shared_experts"
        _gated_mlp(layout, f"{key}.shared", f"{source}.{shared}", moe.shared_intermediate_size, hidden)
    if moe.shared_gate:
        layout.bank(f"{key}.shared_gate", f"{source}.shared_expert_gate.weight", 1, hidden, "other")


# ---- what files do to the names -------------------------------------------------------------------------------------
PREFIXES = (
    "model.",
    "",
    "language_model.model.",
    "language_model.",
    "model.language_model.",
    "model.language_model.model.",
)
"""What a file may write for the table's `model.`: some exports lack it, multi-modal ones nest the text model."""

_EMBEDDING = "embed_tokens.weight"
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\.(?:gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")


def prefixes_in(names: Container[str]) -> list[str]:
    """The prefixes under which the file has an embedding, the one tensor that every model has. One is right."""
    return [prefix for prefix in PREFIXES if f"{prefix}{_EMBEDDING}" in names]


def canonical_name(name: str, prefix: str) -> str | None:
    """A file's tensor name in the spelling of `weight_layout`; None if it lies outside the text model."""
    if name in ("lm_head.weight", f"{prefix}lm_head.weight", f"{prefix.removesuffix('model.')}lm_head.weight"):
        return "lm_head.weight"
    return f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else None


def file_name(canonical: str, prefix: str) -> str:
    """How a file with `prefix` spells a canonical name."""
    return f"{prefix}{canonical.removeprefix('model.')}" if canonical.startswith("model.") else canonical


def fuse_experts(layout: WeightLayout, present: Container[str]) -> None:
    """Where a file stacks the experts of a layer, expect `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I] instead.

    GGUF files stack `gate_proj` and `up_proj` [E, I, H] by themselves. Decided by names only; the shapes are checked
    like any other. Parts count rows of the flattened [E * rows, cols].
    """
    _rename_block(layout, present)
    groups: dict[str, list[str]] = {}
    for tensor in layout.tensors:
        if match := _EXPERT.fullmatch(tensor):
            groups.setdefault(match["experts"], []).append(tensor)
    for experts, tensors in groups.items():
        _stack(layout, experts, tensors, present)


def _stack(layout: WeightLayout, experts: str, tensors: list[str], present: Container[str]) -> None:
    for end in ("gate_up", "gate", "up", "down"):
        fused = f"{experts}.{end}_proj"
        if fused not in present:
            continue
        bank_end = "down" if end == "down" else "gate_up"
        firsts = {name: layout.tensors[name].parts[0] for name in tensors if name in layout.tensors}
        bank = next((part.bank for part in firsts.values() if part.bank.endswith(f".{bank_end}")), None)
        if bank is None:
            continue
        size = layout.banks[bank]
        half = end in ("gate", "up")
        rows = size.rows // 2 if half else size.rows
        at = rows if end == "up" else 0
        for name, part in firsts.items():
            if part.bank == bank and (not half or part.at == at):
                del layout.tensors[name]
        parts = tuple(Part(bank, e, at, rows=(e * rows, (e + 1) * rows)) for e in range(size.count))
        layout.tensors[fused] = TensorEntry((size.count, rows, size.cols), parts)


def split_latent(layout: WeightLayout, present: Container[str]) -> None:
    """Where a file holds `k_b_proj` [N, R, nope] and `v_b_proj` [N, V, R] (GGUF), expect them for `kv_b_proj`."""
    for name in [tensor for tensor in layout.tensors if tensor.endswith(".kv_b_proj.weight")]:
        key, value = (name.replace(".kv_b_proj.", f".{half}_b_proj.") for half in "kv")
        if key not in present and value not in present:
            continue
        banks = {part.bank for part in layout.tensors.pop(name).parts}
        for tensor, bank in ((key, min(banks)), (value, max(banks))):
            size = layout.banks[bank]
            parts = tuple(Part(bank, n, rows=(n * size.rows, (n + 1) * size.rows)) for n in range(size.count))
            layout.tensors[tensor] = TensorEntry((size.count, size.rows, size.cols), parts)


def _rename_block(layout: WeightLayout, present: Container[str]) -> None:
    """Mixtral's `block_sparse_moe` is `mlp` where a file was saved under the names that transformers 5 uses inside."""

    def spelling(tensor: str) -> str:
        block, dot, end = tensor.partition(".block_sparse_moe.")
        return f"{block}.mlp.{end}" if dot and f"{block}.mlp.gate.weight" in present else tensor

    layout.tensors = {spelling(tensor): entry for tensor, entry in layout.tensors.items()}
