"""ColumnCuts: the rows of each bank that a rank of a tensor-parallel group holds, and a layout that is cut to them.

A bank's rows are its outputs. Query projections and GQA's keys and values are cut between heads, MLA's per-head
matrices by head; the output projection, feed-forwards that every row passes and the head in panels of 32. Formats have
their scales along a row, so a kept row has the bytes that a full load gives it. Embedding, norms, router, MLA's latent
projections and experts are not cut here. Not here: reading (`loader`), who holds what (`spec.tensor_split`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from coterie.model.names import BankSpec, Part, TensorEntry, WeightLayout
from coterie.spec.model import AttentionSpec, DenseSpec, LayerSpec, ModelSpec
from coterie.spec.tensor_split import Range, TensorSplit


@dataclass(frozen=True, slots=True)
class ColumnCuts:
    """By key, what is kept: rows of each segment of a bank, matrices of a bank, values of a vector."""

    rows: dict[str, Range] = field(default_factory=dict)
    matrices: dict[str, Range] = field(default_factory=dict)
    vectors: dict[str, Range] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSpec, split: TensorSplit) -> ColumnCuts:
        """What a rank holds. A tied head is the embedding, which every rank holds whole."""
        cuts = cls()
        if split.size > 1:
            for index, layer in enumerate(spec.layers):
                _cut_layer(cuts, f"layers.{index}", layer, spec.hidden_size, split)
            _note(cuts.rows, "head", split.columns(spec.vocab_size), spec.vocab_size)
        return cuts

    def layout(self, layout: WeightLayout) -> WeightLayout:
        """The layout with smaller banks, and only tensors of which a part is left."""
        banks = {key: self._bank(key, size) for key, size in layout.banks.items()}
        vectors = {key: _length(self.vectors.get(key, (0, size))) for key, size in layout.vectors.items()}
        entries = ((name, self.entry(entry, layout)) for name, entry in layout.tensors.items())
        return WeightLayout(banks, vectors, {name: entry for name, entry in entries if entry.parts})

    def entry(self, entry: TensorEntry, layout: WeightLayout) -> TensorEntry:
        """A tensor's parts that are kept, at the place they have here; `layout` is the one before."""
        parts = (new for part in entry.parts for new in self._parts(part, entry.shape, layout.banks.get(part.bank)))
        return TensorEntry(entry.shape, tuple(parts))

    def _bank(self, key: str, size: BankSpec) -> BankSpec:
        if key in self.matrices:
            return replace(size, count=_length(self.matrices[key]))
        if key in self.rows:
            return replace(size, rows=_length(self.rows[key]) * size.segments)
        return size

    def _parts(self, part: Part, shape: tuple[int, ...], size: BankSpec | None) -> Iterator[Part]:
        if part.bank in self.vectors:
            yield replace(part, cols=self.vectors[part.bank])
        elif part.bank in self.matrices:
            first, end = self.matrices[part.bank]
            if first <= part.index < end:
                yield replace(part, index=part.index - first)
        elif part.bank in self.rows and size is not None:
            assert not part.transpose, "a transposed part is cut by matrices only"
            yield from _cut_rows(part, shape, size, self.rows[part.bank])
        else:
            yield part


def _cut_rows(part: Part, shape: tuple[int, ...], size: BankSpec, kept: Range) -> Iterator[Part]:
    """What is left of a part when of each segment the rows `kept` are."""
    begin, end = part.rows or (0, shape[0])
    segment = size.rows // size.segments
    for number in range(size.segments):
        first = max(part.at, number * segment + kept[0])
        last = min(part.at + end - begin, number * segment + kept[1])
        if first < last:
            rows = (begin + first - part.at, begin + last - part.at)
            yield replace(part, at=first - number * segment - kept[0] + number * _length(kept), rows=rows)


def _cut_layer(cuts: ColumnCuts, key: str, layer: LayerSpec, hidden: int, split: TensorSplit) -> None:
    _cut_attention(cuts, f"{key}.attention", layer.attention, split)
    outputs = split.columns(hidden)
    _note(cuts.rows, f"{key}.attention.o", outputs, hidden)
    if layer.attention.o_bias:
        _note(cuts.vectors, f"{key}.attention.o.bias", outputs, hidden)
    dense, inner = f"{key}.ffn", 0
    if isinstance(layer.ffn, DenseSpec):
        inner = layer.ffn.intermediate_size
    elif layer.ffn.shared_intermediate_size:
        dense, inner = f"{key}.ffn.shared", layer.ffn.shared_intermediate_size
    if inner:
        _note(cuts.rows, f"{dense}.gate_up", split.columns(inner), inner)
        _note(cuts.rows, f"{dense}.down", outputs, hidden)


def _cut_attention(cuts: ColumnCuts, key: str, spec: AttentionSpec, split: TensorSplit) -> None:
    heads = split.heads(spec.num_heads)
    if spec.kind == "mla":
        query = "q" if spec.q_lora_rank is None else "q_b"
        cuts.rows[f"{key}.{query}"] = _times(heads, spec.qk_head_dim)
        cuts.matrices[f"{key}.w_uk"] = cuts.matrices[f"{key}.w_uv"] = heads
        return
    keys = split.key_heads(spec.num_kv_heads)
    widths = {"q": (heads, spec.qk_head_dim), "k": (keys, spec.qk_head_dim), "v": (keys, spec.v_head_dim)}
    for name, (kept, width) in widths.items():
        cuts.rows[f"{key}.{name}"] = _times(kept, width)
        if spec.q_bias:
            cuts.vectors[f"{key}.{name}.bias"] = _times(kept, width)


def _note(cuts: dict[str, Range], key: str, kept: Range, whole: int) -> None:
    """Cut what is not kept whole."""
    if kept != (0, whole):
        cuts[key] = kept


def _times(heads: Range, width: int) -> Range:
    return heads[0] * width, heads[1] * width


def _length(kept: Range) -> int:
    return kept[1] - kept[0]
