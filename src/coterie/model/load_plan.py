"""The door check: match a checkpoint's headers with a model's name table, before a byte is allocated.

`make_plan` either raises one `LoadError` that names everything wrong (missing, unclaimed, misshapen, undecodable
tensors, absent or broken files) or returns what to read and where each bank's kind comes from. Rules for MTP blocks,
tied heads and harmless left-overs live here. No tensor data is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from coterie.model.banks import is_plain
from coterie.model.checkpoint import Checkpoint, Problem, refuse
from coterie.model.dequant import PLAIN_DTYPES, SCALE_DTYPES, scale_shape
from coterie.model.formats.codes import common_format
from coterie.model.formats.ggml import DECODERS, EXPANDED, expander, no_expander
from coterie.model.names import (
    TensorEntry,
    WeightLayout,
    canonical_name,
    file_name,
    fuse_experts,
    own_head,
    prefixes_in,
    split_latent,
    weight_layout,
)
from coterie.model.packed_plan import Packed, find_packed, is_packed
from coterie.model.safetensors_io import LoadError, StoredTensor
from coterie.spec.cache import CacheKind
from coterie.spec.model import Fp8BlockQuant, ModelSpec
from coterie.spec.stored import StoredQuant
from coterie.spec.weights import BF16, F32, QuantPlan, WeightFormat

DtypeChoice = Literal["auto", "float32", "bfloat16"]
NO_QUANT = QuantPlan()
NO_CODES: Mapping[str, WeightFormat] = {}

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MTP_COPIES = {"embed_tokens.weight": _EMBEDDING, "shared_head.head.weight": _HEAD}
_TIE_HINT = "set tie_word_embeddings to true if it should be"
_INV_FREQ = re.compile(r"(.+\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to read: the parts it fills (none if it is only compared) and the table that scales it, if FP8 in
    blocks, or the tables of a packed weight."""

    tensor: StoredTensor
    entry: TensorEntry
    scale: StoredTensor | None = None
    packed: Packed | None = None

    @property
    def sides(self) -> tuple[StoredTensor, ...]:
        """Tables that must be read before it."""
        if self.packed is not None:
            return self.packed.sides
        return () if self.scale is None else (self.scale,)

    @property
    def form(self) -> WeightFormat | None:
        """What its codes mean, if they can be held as they are."""
        if self.packed is not None:
            return self.packed.stored.form
        return DECODERS[self.tensor.dtype].form if self.tensor.dtype in DECODERS else None

    @property
    def is_quantised(self) -> bool:
        return self.packed is not None or self.tensor.dtype in DECODERS or self.tensor.dtype in EXPANDED


@dataclass(frozen=True, slots=True)
class Comparison:
    """A copy that the model does not use; the loader checks that it equals the original."""

    copy: str
    original: str
    matters: bool


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors that were knowingly not loaded."""

    reason: str
    tensors: int
    nbytes: int
    example: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to read, in reading order, and how to store it. `doubts` are notes that strict loading refuses."""

    layout: WeightLayout
    tensors: tuple[PlannedTensor, ...]
    comparisons: tuple[Comparison, ...]
    kind: CacheKind
    bank_formats: dict[str, WeightFormat]
    mtp_present: bool
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]


def make_plan(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: DtypeChoice, *, mtp: bool, quant: QuantPlan = NO_QUANT
) -> LoadPlan:
    """Check a checkpoint against a spec; raises `LoadError` with every problem found."""
    planner = _Planner(checkpoint, spec, quant)
    planner.choose_blocks(mtp)
    planner.check_query_projections()
    planner.tie_rule()
    for name, entry in planner.layout.tensors.items():
        planner.claim(name, entry)
    planner.left_over(mtp)
    refuse(checkpoint.source, checkpoint.problems + planner.problems)
    return planner.finish(dtype)


def bank_formats(
    layout: WeightLayout,
    dtype: DtypeChoice,
    stored: dict[str, set[str]],
    quant: QuantPlan = NO_QUANT,
    codes: Mapping[str, WeightFormat] = NO_CODES,
) -> dict[str, WeightFormat]:
    """The format of each bank, given the stored dtypes that fill it: nothing is narrowed unless asked for.

    `codes`: the format of banks that can hold a quantised checkpoint's codes as they are.
    """
    asked = {"experts": quant.experts, "attention": quant.attention, "head": quant.head}
    formats: dict[str, WeightFormat] = {}
    for key, size in layout.banks.items():
        as_stored = dtype == "auto" and bool(stored.get(key, set()) & {"F32", "F16"})
        wide = F32 if size.role == "router" or dtype == "float32" or as_stored else BF16
        if dtype == "auto" and size.role != "router":
            wide = codes.get(key, wide)
        formats[key] = quant.format(asked.get(size.role, "auto")) or wide
    return formats


def tied_head_differs(spec: ModelSpec, quant: QuantPlan) -> bool:
    """Whether a tied head is held a second time: as int8 it is, or a step would read the whole wide embedding."""
    return spec.tie_embeddings and quant.head == "int8"


class _Planner:
    """Working state of one `make_plan`: names in canonical spelling, and what has been claimed of them."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, quant: QuantPlan) -> None:
        self.checkpoint, self.spec, self.quant = checkpoint, spec, quant
        self.problems: list[Problem] = []
        self.notes: list[str] = [*checkpoint.notes]
        self.doubts: list[str] = [*checkpoint.doubts]
        self.planned: list[PlannedTensor] = []
        self.comparisons: list[Comparison] = []
        self.skipped: dict[str, list[StoredTensor]] = {}
        self.layout = WeightLayout()
        self.mtp_present = False
        self.prefix = self._prefix()
        self.rest: dict[str, StoredTensor] = {}
        self.foreign: list[str] = []
        for name, tensor in checkpoint.tensors.items():
            canonical = canonical_name(name, self.prefix)
            if canonical is None:
                self.foreign.append(name)
            elif canonical in self.rest:
                text = f"{name!r} and {self.rest[canonical].name!r} are two spellings of one tensor"
                self.problems.append(Problem("name", text))
            else:
                self.rest[canonical] = tensor
        self.lost = {known for name in checkpoint.lost if (known := canonical_name(name, self.prefix)) is not None}

    def _prefix(self) -> str:
        prefixes = prefixes_in(self.checkpoint.tensors.keys() | self.checkpoint.lost)
        if len(prefixes) > 1:
            both = " and ".join(repr(f"{prefix}embed_tokens.weight") for prefix in prefixes)
            self.problems.append(Problem("name", f"the files hold {both}: two models in one folder"))
        return prefixes[0] if prefixes else "model."

    # ---- what to expect ----------------------------------------------------------------------------------------------
    def choose_blocks(self, mtp: bool) -> None:
        """Build the layout, with MTP blocks if they are wanted and there."""
        spec, first = self.spec, len(self.spec.layers)
        names = self.rest.keys() | self.lost
        blocks = range(first, first + len(spec.mtp_layers))
        there = any(name.startswith(f"model.layers.{i}.") for i in blocks for name in names)
        if mtp and blocks and not there and not self.checkpoint.some_lost:
            self.doubts.append(
                f"config.json declares {len(blocks)} MTP block(s) but the checkpoint has none: MTP is off"
            )
        self.mtp_present = mtp and there
        self.layout = weight_layout(spec, mtp=self.mtp_present)
        fuse_experts(self.layout, names)
        split_latent(self.layout, names)
        if tied_head_differs(spec, self.quant):
            own_head(self.layout)

    def check_query_projections(self) -> None:
        """Refuse a layer that has both the single and the low-rank query projection."""
        both = [
            name
            for name in self.rest
            if name.endswith(".q_a_proj.weight") and name.replace(".q_a_proj.", ".q_proj.") in self.rest
        ]
        if both:
            rank = next(
                (layer.attention.q_lora_rank for layer in self.spec.layers if layer.attention.kind == "mla"), None
            )
            text = (
                f"{len(both)} layer(s) hold both q_proj and q_a_proj (first: {self.rest[both[0]].name!r}); "
                f"config.json has q_lora_rank {'null' if rank is None else rank}, so only one belongs to the model"
            )
            self.problems.append(Problem("name", text))

    def tie_rule(self) -> None:
        """Tied: a head tensor is not used, only compared. Untied: an absent or empty one is a problem."""
        head, embedding = self.rest.get(_HEAD), self.rest.get(_EMBEDDING)
        if self.spec.tie_embeddings:
            if head is None:
                return
            del self.rest[_HEAD]
            if not head.nbytes:
                self._skip("empty head tensor of a tied model", head)
                self.notes.append(f"{head.name} is empty and the embedding is tied: ignored")
            elif embedding is not None and (head.shape, head.dtype) == (embedding.shape, embedding.dtype):
                self._compare(head, embedding, matters=True)
            else:
                self._skip("head of a tied model", head)
                self.doubts.append(f"{head.name} differs from the embedding, but config.json ties them: ignored")
        elif head is None and is_packed("lm_head", self.rest):
            return
        elif head is None and not self._is_lost(_HEAD):
            text = f"lm_head.weight is absent and config.json does not tie it: {_TIE_HINT}"
            self.problems.append(Problem("missing", text))
            del self.layout.tensors[_HEAD]
        elif head is not None and not head.nbytes:
            text = f"{head.name} is empty and config.json does not tie it: {_TIE_HINT}"
            self.problems.append(Problem("missing", text))
            del self.layout.tensors[_HEAD], self.rest[_HEAD]

    # ---- matching ----------------------------------------------------------------------------------------------------
    def _is_lost(self, canonical: str) -> bool:
        return self.checkpoint.some_lost or canonical in self.lost

    def claim(self, canonical: str, entry: TensorEntry) -> None:
        """Match one entry of the layout with a stored tensor."""
        quant = self.spec.quantization
        declared = quant if isinstance(quant, StoredQuant) else None
        if quant is None or declared is not None:
            found = find_packed(canonical, entry, self.rest, declared, self.prefix)
            if found is not None:
                if found.problem is not None:
                    self.problems.append(found.problem)
                else:
                    self.planned.append(PlannedTensor(found.tensor, entry, packed=found.packed))
                return
        tensor = self.rest.pop(canonical, None)
        if tensor is None:
            if not self._is_lost(canonical):
                self._missing(file_name(canonical, self.prefix))
            return
        scale = self._claim_scale(canonical, tensor)
        if tensor.shape != entry.shape:
            text = f"{tensor.name!r} has shape {list(tensor.shape)}, config.json implies {list(entry.shape)}"
            if canonical in (_EMBEDDING, _HEAD):
                text += f" (vocab_size {entry.shape[0]}, hidden_size {entry.shape[1]})"
            self.problems.append(Problem("shape", text))
        elif tensor.dtype in EXPANDED and expander() is None:
            self.problems.append(Problem("format", f"{tensor.name!r}: {no_expander(tensor.dtype)}"))
        elif tensor.dtype not in (*PLAIN_DTYPES, "F8_E4M3", *DECODERS, *EXPANDED):
            text = f"{tensor.name!r} is stored as {tensor.dtype}; F32, BF16, F16 and block-scaled F8_E4M3 can be read"
            self.problems.append(Problem("format", text))
        elif tensor.dtype == "F8_E4M3" and not self._scale_fits(canonical, tensor, scale):
            return
        else:
            self.planned.append(PlannedTensor(tensor, entry, scale))

    def _missing(self, name: str) -> None:
        text = f"{name!r} is missing"
        if name in self.checkpoint.unlisted:
            text += f" from the index, though {self.checkpoint.unlisted[name].path.name} holds it"
        self.problems.append(Problem("missing", text))

    def _claim_scale(self, canonical: str, tensor: StoredTensor) -> StoredTensor | None:
        if tensor.dtype != "F8_E4M3":
            return None
        names = (f"{canonical}_scale_inv", f"{canonical}_scale", f"{canonical.removesuffix('.weight')}.scale")
        found = [self.rest.pop(name) for name in names if name in self.rest]
        if len(found) > 1:
            self.problems.append(
                Problem("name", f"{tensor.name!r} has two scale tables: {found[0].name!r}, {found[1].name!r}")
            )
        return found[0] if found else None

    def _scale_fits(self, canonical: str, tensor: StoredTensor, scale: StoredTensor | None) -> bool:
        block = self.spec.quantization if isinstance(self.spec.quantization, Fp8BlockQuant) else None
        if scale is None:
            if not self._is_lost(f"{canonical}_scale_inv"):
                text = f"{tensor.name!r} is F8_E4M3 but has no scale table ({tensor.name}_scale_inv)"
                self.problems.append(Problem("format", text))
            return False
        if block is None:
            text = f"{tensor.name!r} is F8_E4M3, but config.json has no quantization_config with a weight_block_size"
            self.problems.append(Problem("format", text))
            return False
        if len(tensor.shape) != 2 or scale.shape != (expected := scale_shape(tensor.matrix_shape, block)):
            blocks = f"{block.block_rows}x{block.block_cols}"
            wanted = list(expected) if len(tensor.shape) == 2 else "none"
            needed = f"{list(tensor.shape)} in blocks of {blocks} needs {wanted}"
            text = f"{scale.name!r} has shape {list(scale.shape)}, but {needed}"
            self.problems.append(Problem("shape", text))
            return False
        if scale.dtype not in SCALE_DTYPES:
            text = f"{scale.name!r} is stored as {scale.dtype}; scales can be {', '.join(SCALE_DTYPES)}"
            self.problems.append(Problem("format", text))
            return False
        return True

    # ---- what nothing claimed ----------------------------------------------------------------------------------------
    def left_over(self, mtp: bool) -> None:
        """Skip what is known to be harmless; every other tensor that nothing claimed is a problem."""
        first, declared = len(self.spec.layers), len(self.spec.mtp_layers)
        undeclared = {
            int(match[1])
            for name in self.rest
            if (match := _LAYER.fullmatch(name)) and match[2] == "eh_proj.weight" and int(match[1]) >= first + declared
        }
        off = "MTP is off" if declared and not mtp else "config.json declares no such MTP block"
        for name, tensor in self.rest.items():
            match = _LAYER.fullmatch(name)
            layer = int(match[1]) if match else -1
            if _INV_FREQ.fullmatch(name):
                self._skip("rotary frequencies (computed from config.json)", tensor)
            elif layer in undeclared or (first <= layer < first + declared and not self.mtp_present):
                self._skip(f"MTP block: {off}", tensor)
            elif match and first <= layer < first + declared and match[2] in _MTP_COPIES:
                self._copy_of_main(tensor, _MTP_COPIES[match[2]])
            elif not tensor.nbytes:
                self._skip("empty tensor", tensor)
            else:
                self._unclaimed(tensor.name)
        for name in self.foreign:
            self._unclaimed(name)

    def _copy_of_main(self, tensor: StoredTensor, canonical: str) -> None:
        if canonical == _HEAD and self.spec.tie_embeddings:
            canonical = _EMBEDDING
        name = file_name(canonical, self.prefix)
        original = next((item.tensor for item in self.planned if item.tensor.name in (name, canonical)), None)
        if original is not None and (original.shape, original.dtype) == (tensor.shape, tensor.dtype):
            self._compare(tensor, original, matters=False)
        else:
            self._skip("copy in an MTP block, in another form", tensor)

    def _unclaimed(self, name: str) -> None:
        if not self.checkpoint.problems:
            self.problems.append(Problem("unclaimed", f"{name!r} belongs to no part of a {self.spec.model_type} model"))

    def _skip(self, reason: str, tensor: StoredTensor) -> None:
        self.skipped.setdefault(reason, []).append(tensor)

    def _compare(self, copy: StoredTensor, original: StoredTensor, *, matters: bool) -> None:
        self.comparisons.append(Comparison(copy.name, original.name, matters))
        self.planned.append(PlannedTensor(copy, TensorEntry(copy.shape, ())))

    # ---- result ------------------------------------------------------------------------------------------------------
    def finish(self, dtype: DtypeChoice) -> LoadPlan:
        stored: dict[str, set[str]] = {}
        forms: dict[str, set[WeightFormat | None]] = {}
        for item in self.planned:
            for part in item.entry.parts:
                if part.bank in self.layout.banks:
                    stored.setdefault(part.bank, set()).add("" if item.is_quantised else item.tensor.dtype)
                    forms.setdefault(part.bank, set()).add(item.form if is_plain(part) else None)
        formats = bank_formats(self.layout, dtype, stored, self.quant, shared_forms(forms))
        free = [key for key, size in self.layout.banks.items() if size.role != "router" and not formats[key].is_scaled]
        wide = sum(formats[key] == F32 for key in free)
        kind: CacheKind = "f32" if wide == len(free) > 0 else "bf16"
        if 0 < wide < len(free):
            self.notes.append(f"{wide} of {len(free)} weight banks stay float32, as stored; the rest are bfloat16")
        dtypes = {item.tensor.dtype for item in self.planned if item.packed is None}
        if dtype == "auto" and "F16" in dtypes:
            self.notes.append(
                "float16 weights are kept as float32, which is exact; dtype bfloat16 halves the memory and rounds"
            )
        if dtypes & EXPANDED:
            self.notes.append(
                f"{', '.join(sorted(dtypes & EXPANDED))} have no form of their own in memory and become bfloat16, "
                "several times their size; the same model as IQ4_XS or Q4_K is smaller in memory"
            )
        quantised = any(item.is_quantised or item.scale is not None for item in self.planned)
        if self.spec.quantization is not None and not quantised:
            self.notes.append("config.json has a quantization_config, but no tensor is quantised")
        order = {path: number for number, path in enumerate(self.checkpoint.files)}
        planned = sorted(self.planned, key=lambda item: (order[item.tensor.path], item.tensor.start))
        skipped = tuple(
            Skipped(reason, len(tensors), sum(tensor.nbytes for tensor in tensors), tensors[0].name)
            for reason, tensors in self.skipped.items()
        )
        return LoadPlan(
            layout=self.layout,
            tensors=tuple(planned),
            comparisons=tuple(self.comparisons),
            kind=kind,
            bank_formats=formats,
            mtp_present=self.mtp_present,
            skipped=skipped,
            notes=tuple(self.notes),
            doubts=tuple(self.doubts),
        )


def shared_forms(forms: Mapping[str, set[WeightFormat | None]]) -> dict[str, WeightFormat]:
    """The format of each bank whose tensors are all quantised and fit into one."""
    result: dict[str, WeightFormat] = {}
    for key, found in forms.items():
        known = {form for form in found if form is not None}
        common = common_format(known) if len(known) == len(found) else None
        if common is not None:
            result[key] = common
    return result


def check_strict(plan: LoadPlan) -> None:
    """Raise if anything about the checkpoint is doubtful."""
    if plan.doubts:
        raise LoadError("strict loading refuses:\n" + "\n".join(f"  - {doubt}" for doubt in plan.doubts), plan.doubts)
