"""The loader against checkpoints in the released layout: every slice, every dtype, and every refusal at the door."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import all_keys, bank, check_every_value, load, refused
from tiny_checkpoints import (
    EXPERTS,
    HIDDEN,
    INNER,
    VOCAB,
    hf_tensors,
    tiny_spec,
    write_folder,
)

from coterie.model.load_report import LoadProgress
from coterie.model.loader import LoadError
from coterie.model.safetensors_io import PIECE_BYTES
from coterie.spec.model import AttentionSpec


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f32")])
def test_every_value_lands_in_its_place(tmp_path: Path, dtype: torch.dtype, kind: str, shards: int) -> None:
    tensors = hf_tensors(dtype)
    write_folder(tmp_path, tensors, shards)
    loaded, kernels = load(tmp_path)
    assert loaded.kind == kind and loaded.weights.keys() == all_keys()
    check_every_value(loaded, kernels, tensors)
    report = loaded.report
    assert len(report.files) == shards and report.tensors == len(tensors) and report.mtp_present
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors.values()) and not report.skipped
    assert all(item.exact for item in report.conversions)
    assert sum(item.tensors for item in report.conversions) == len(tensors)
    assert any("float16" in note for note in report.notes) == (dtype == torch.float16)


def test_narrowing_happens_only_when_asked_and_is_reported(tmp_path: Path) -> None:
    tensors = hf_tensors()
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path, dtype="bfloat16")
    assert loaded.kind == "bf16"
    embed = tensors["model.embed_tokens.weight"]
    assert torch.equal(bank(loaded, kernels, "embed"), embed.bfloat16().float())
    for key in ("layers.1.ffn.gate", "layers.1.ffn.correction_bias", "norm"):  # router and vectors keep every bit
        source = {"layers.1.ffn.gate": "model.layers.1.mlp.gate.weight", "norm": "model.norm.weight"}
        name = source.get(key, "model.layers.1.mlp.gate.e_score_correction_bias")
        value = bank(loaded, kernels, key) if key.endswith(".gate") else torch.from_numpy(loaded.weights[key])
        assert torch.equal(value, tensors[name])
    rounded = {(item.stored, item.kind): item.exact for item in loaded.report.conversions}
    assert rounded == {("F32", "bf16"): False, ("F32", "f32"): True}


def test_a_bfloat16_checkpoint_can_be_widened(tmp_path: Path) -> None:
    tensors = hf_tensors(torch.bfloat16)
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path, dtype="float32")
    assert loaded.kind == "f32"
    check_every_value(loaded, kernels, tensors)


def test_the_correction_bias_keeps_neighbouring_values_apart(tmp_path: Path) -> None:
    tensors = hf_tensors(torch.bfloat16)
    bias = 7.0 + 0.001 * torch.arange(EXPERTS)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = bias
    write_folder(tmp_path, tensors)
    loaded, _ = load(tmp_path)
    assert loaded.weights["layers.1.ffn.correction_bias"].tobytes() == bias.numpy().tobytes()


def test_one_float32_matrix_in_a_bfloat16_checkpoint_is_not_narrowed(tmp_path: Path) -> None:
    tensors = hf_tensors(torch.bfloat16)
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path)
    assert loaded.kind == "bf16" and loaded.weights["head"].kind == "f32"
    assert torch.equal(bank(loaded, kernels, "head"), tensors["lm_head.weight"])
    assert any("stay float32" in note for note in loaded.report.notes)


def test_a_single_query_projection(tmp_path: Path) -> None:
    tensors = hf_tensors(q_lora_rank=None)
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path, tiny_spec(q_lora_rank=None))
    assert torch.equal(bank(loaded, kernels, "layers.1.attention.q"), tensors["model.layers.1.self_attn.q_proj.weight"])


def test_both_query_projections_are_refused(tmp_path: Path) -> None:
    tensors = hf_tensors()
    single = hf_tensors(q_lora_rank=None)
    name = "model.layers.1.self_attn.q_proj.weight"
    write_folder(tmp_path, {**tensors, name: single[name]})
    for rank in (None, 10):
        error = refused(tmp_path, tiny_spec(q_lora_rank=rank))
        assert "both q_proj and q_a_proj" in error.problems[0]
        assert ("null" if rank is None else "10") in error.problems[0]


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model.", "language_model."])
@pytest.mark.parametrize("head", ["lm_head.weight", "beside"])
def test_prefixes_are_read_from_the_names(tmp_path: Path, prefix: str, head: str) -> None:
    tensors = hf_tensors()
    head = f"{prefix.removesuffix('model.')}lm_head.weight" if head == "beside" else head
    renamed = {
        prefix + name.removeprefix("model."): value for name, value in tensors.items() if name != "lm_head.weight"
    }
    write_folder(tmp_path, {**renamed, head: tensors["lm_head.weight"]})
    loaded, kernels = load(tmp_path)
    check_every_value(loaded, kernels, tensors)


def test_two_prefixes_are_two_models(tmp_path: Path) -> None:
    tensors = hf_tensors()
    tensors["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_folder(tmp_path, tensors)
    assert "two models in one folder" in refused(tmp_path).problems[0]


@pytest.mark.parametrize("which", ["both", "gate_up", "down"])
def test_stacked_experts(tmp_path: Path, which: str) -> None:
    tensors = hf_tensors()
    stacked = dict(tensors)
    for layer in (1, 2):
        base = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [stacked.pop(f"{base}.{e}.{name}_proj.weight") if which in ("both", part) else None for e in range(EXPERTS)]
            for name, part in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))
        )
        if which != "down":
            pairs = zip(gates, ups, strict=True)
            stacked[f"{base}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up in pairs])  # type: ignore[list-item]
        if which != "gate_up":
            stacked[f"{base}.down_proj"] = torch.stack(downs)  # type: ignore[arg-type]
    write_folder(tmp_path, stacked)
    loaded, kernels = load(tmp_path)
    check_every_value(loaded, kernels, tensors)


def test_transposed_stacked_experts_are_refused_by_shape(tmp_path: Path) -> None:
    tensors = {name: value for name, value in hf_tensors().items() if ".mlp.experts." not in name}
    for layer in (1, 2):
        tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.zeros(EXPERTS, HIDDEN, 2 * INNER)
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.zeros(EXPERTS, INNER, HIDDEN)
    write_folder(tmp_path, tensors)
    assert f"implies {[EXPERTS, 2 * INNER, HIDDEN]}" in str(refused(tmp_path))


# ---- MTP -------------------------------------------------------------------------------------------------------------
def test_mtp_off_skips_and_counts_the_block(tmp_path: Path) -> None:
    tensors = hf_tensors()
    write_folder(tmp_path, tensors)
    loaded, _ = load(tmp_path, mtp=False)
    assert loaded.weights.keys() == all_keys(mtp=False) and not loaded.report.mtp_present
    (skip,) = loaded.report.skipped
    block = [tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")]
    assert (skip.tensors, skip.nbytes) == (len(block), sum(tensor.nbytes for tensor in block))
    assert "MTP is off" in skip.reason


def test_a_checkpoint_without_the_declared_block_turns_mtp_off(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_tensors(mtp=False))
    loaded, _ = load(tmp_path)
    assert not loaded.report.mtp_present and loaded.weights.keys() == all_keys(mtp=False)
    assert any("MTP is off" in note for note in loaded.report.notes)


def test_a_block_that_the_config_does_not_declare_is_skipped(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_tensors())
    loaded, _ = load(tmp_path, tiny_spec(mtp_layers=()))
    assert "declares no such MTP block" in loaded.report.skipped[0].reason and not loaded.report.mtp_present


def test_a_decoder_layer_past_the_last_is_not_taken_for_mtp(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_tensors(mtp=False))
    spec = tiny_spec()
    error = refused(tmp_path, dataclasses.replace(spec, layers=spec.layers[:1], mtp_layers=()))
    assert all("model.layers.1." in problem for problem in error.problems)


def test_a_partial_mtp_block_is_refused(tmp_path: Path) -> None:
    tensors = hf_tensors()
    del tensors["model.layers.2.enorm.weight"]
    write_folder(tmp_path, tensors)
    assert refused(tmp_path).problems == ("'model.layers.2.enorm.weight' is missing",)


@pytest.mark.parametrize("differs", [False, True])
def test_copies_in_the_mtp_block_are_compared(tmp_path: Path, differs: bool) -> None:
    tensors = hf_tensors()
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"] + (1 if differs else 0)
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path)
    check_every_value(loaded, kernels, tensors)
    assert sum("equal copy" in skip.reason for skip in loaded.report.skipped) == (1 if differs else 2)
    notes = [note for note in loaded.report.notes if "differs from" in note]
    assert len(notes) == differs and all(
        "shared_head.head.weight differs from lm_head.weight" in note for note in notes
    )


# ---- tied embeddings -------------------------------------------------------------------------------------------------
def tie_case(folder: Path, head: str) -> None:
    tensors = hf_tensors()
    embed = tensors["model.embed_tokens.weight"]
    heads = {
        "equal": embed.clone(),
        "empty": torch.empty(0, HIDDEN),
        "different": embed + 1,
        "shape": embed[1:].clone(),
    }
    del tensors["lm_head.weight"]
    write_folder(folder, {**tensors, "lm_head.weight": heads[head]} if head in heads else tensors)


@pytest.mark.parametrize(
    ("head", "note", "skipped"),
    [
        ("absent", None, None),
        ("equal", None, "equal copy of model.embed_tokens.weight"),
        ("empty", "lm_head.weight is empty", "empty head"),
        ("different", "lm_head.weight differs from model.embed_tokens.weight", None),
        ("shape", "lm_head.weight differs from the embedding", "head of a tied model"),
    ],
)
def test_tied(tmp_path: Path, head: str, note: str | None, skipped: str | None) -> None:
    tie_case(tmp_path, head)
    loaded, _ = load(tmp_path, tiny_spec(tie_embeddings=True))
    assert loaded.weights.keys() == all_keys() - {"head"}
    assert [text for text in loaded.report.notes if "head" in text or "embedding" in text] == (
        [text for text in loaded.report.notes if note in text] if note else []
    )
    assert note is None or any(note in text for text in loaded.report.notes)
    assert (
        [skip.reason[: len(skipped)] for skip in loaded.report.skipped] == [skipped]
        if skipped
        else not loaded.report.skipped
    )


@pytest.mark.parametrize(("head", "says"), [("absent", "is absent"), ("empty", "is empty")])
def test_untied_without_a_head_suggests_the_tie(tmp_path: Path, head: str, says: str) -> None:
    tie_case(tmp_path, head)
    (problem,) = refused(tmp_path).problems
    assert says in problem and "set tie_word_embeddings to true" in problem


def test_untied_uses_the_head_that_is_there(tmp_path: Path) -> None:
    tie_case(tmp_path, "different")
    loaded, kernels = load(tmp_path)
    assert torch.equal(bank(loaded, kernels, "head"), bank(loaded, kernels, "embed") + 1)


def test_strict_refuses_a_tied_head_that_differs(tmp_path: Path) -> None:
    tie_case(tmp_path, "different")
    with pytest.raises(LoadError, match=r"strict loading refuses:\n  - lm_head.weight differs"):
        load(tmp_path, tiny_spec(tie_embeddings=True), strict=True)


# ---- tensors ---------------------------------------------------------------------------------------------------------
def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    tensors = hf_tensors()
    for name in [name for name in tensors if ".mlp.experts." in name]:
        del tensors[name]
    tensors["model.layers.0.mlp.extra_gate.weight"] = torch.zeros(3)
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB + 14, HIDDEN)
    tensors["model.norm.weight"] = torch.zeros(HIDDEN, dtype=torch.int8)
    write_folder(tmp_path, tensors)
    error = refused(tmp_path)
    assert len(error.problems) == 2 * EXPERTS * 3 + 3
    text = str(error)
    assert f"{len(error.problems)} problems" in text and "and 19 more" in text and "likely cause" in text
    every = "\n".join(error.problems)
    assert "'model.layers.0.mlp.extra_gate.weight' belongs to no part of a deepseek_v3 model" in every
    assert f"shape [{VOCAB + 14}, {HIDDEN}]" in every and f"vocab_size {VOCAB}" in every
    assert "'model.norm.weight' is stored as I8" in every


def test_rotary_frequencies_are_harmless(tmp_path: Path) -> None:
    tensors = hf_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    write_folder(tmp_path, tensors)
    loaded, _ = load(tmp_path)
    (skip,) = loaded.report.skipped
    assert skip.tensors == 2 and "rotary" in skip.reason


def test_empty_tensors_of_absent_parts_are_harmless(tmp_path: Path) -> None:
    """transformers writes them for `n_shared_experts` 0."""
    empty = {"model.layers.1.mlp.extra.gate_proj.weight": torch.zeros(0, HIDDEN)}
    write_folder(tmp_path, {**hf_tensors(), **empty})
    loaded, _ = load(tmp_path)
    (skip,) = loaded.report.skipped
    assert (skip.reason, skip.tensors, skip.example) == ("empty tensor", 1, next(iter(empty)))


def test_foreign_towers_are_unclaimed(tmp_path: Path) -> None:
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in hf_tensors().items()}
    write_folder(tmp_path, {**tensors, "model.layers.0.weight": torch.zeros(2)})
    assert refused(tmp_path).problems == ("'model.layers.0.weight' belongs to no part of a deepseek_v3 model",)


def test_grouped_attention_with_biases_and_mixtral_names(tmp_path: Path) -> None:
    attention = AttentionSpec("gqa", 3, 1, 4, 4, 0.5, tiny_spec().layers[0].attention.rope, q_bias=True, qk_norm=True)
    moe = dataclasses.replace(tiny_spec().layers[1].ffn, correction_bias=False, shared_intermediate_size=0)
    layer = dataclasses.replace(tiny_spec().layers[1], attention=attention, ffn=moe)
    spec = tiny_spec(model_type="mixtral", layers=(layer,), mtp_layers=(), tie_embeddings=True)
    prefix = "model.layers.0."
    shapes = {f"{prefix}block_sparse_moe.gate.weight": (EXPERTS, HIDDEN), "model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for name, width in (("q", 12), ("k", 4), ("v", 4)):
        shapes |= {
            f"{prefix}self_attn.{name}_proj.weight": (width, HIDDEN),
            f"{prefix}self_attn.{name}_proj.bias": (width,),
        }
    shapes |= {f"{prefix}self_attn.q_norm.weight": (4,), f"{prefix}self_attn.k_norm.weight": (4,)}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (HIDDEN, 12), "model.norm.weight": (HIDDEN,)}
    for e in range(EXPERTS):
        for name, shape in (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN)), ("w2", (HIDDEN, INNER))):
            shapes[f"{prefix}block_sparse_moe.experts.{e}.{name}.weight"] = shape
    shapes |= {f"{prefix}input_layernorm.weight": (HIDDEN,), f"{prefix}post_attention_layernorm.weight": (HIDDEN,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path, spec)
    experts = f"{prefix}block_sparse_moe.experts.2."
    gate_up = torch.cat([tensors[f"{experts}w1.weight"], tensors[f"{experts}w3.weight"]])
    assert torch.equal(bank(loaded, kernels, "layers.0.ffn.gate_up", 2), gate_up)
    assert torch.equal(bank(loaded, kernels, "layers.0.ffn.down", 2), tensors[f"{experts}w2.weight"])
    bias = tensors[f"{prefix}self_attn.q_proj.bias"].numpy()
    np.testing.assert_array_equal(loaded.weights["layers.0.attention.q.bias"], bias)


# ---- progress, report, memory ----------------------------------------------------------------------------------------
def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    tensors = hf_tensors()
    write_folder(tmp_path, tensors, 2)
    seen: list[LoadProgress] = []
    loaded, _ = load(tmp_path, progress=seen.append)
    done = [step.bytes_done for step in seen]
    assert done == sorted(done) and done[-1] == seen[-1].bytes_total == loaded.report.nbytes
    assert {step.tensor for step in seen} == set(tensors) and seen[-1].eta == 0 and seen[-1].rate > 0


def test_the_report_reads_as_lines(tmp_path: Path) -> None:
    write_folder(tmp_path, hf_tensors(torch.bfloat16))
    loaded, _ = load(tmp_path, tiny_spec(), mtp=False)
    text = "\n".join(loaded.report.lines())
    for part in ("GB/s", "BF16 -> bf16: exact", "F32 -> f32: exact", "skipped", "MTP is off"):
        assert part in text


def test_large_tensors_arrive_in_pieces(tmp_path: Path) -> None:
    vocab = 300_000
    tensors = hf_tensors(torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.randn(vocab, HIDDEN).bfloat16()
    tensors["lm_head.weight"] = torch.randn(vocab, HIDDEN).bfloat16()
    write_folder(tmp_path, tensors)
    loaded, kernels = load(tmp_path, tiny_spec(vocab_size=vocab))
    check_every_value(loaded, kernels, tensors)
    assert max(shape[0] for _, _, shape in kernels.fills) * HIDDEN * 2 <= PIECE_BYTES


MEMORY_SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from coterie.model.loader import load_weights
from coterie.spec.model import *

class Kernels:
    name = "numpy"
    def allocate(self, count, *specs): return tuple(np.zeros((count, m.rows, m.cols), np.uint16) for m in specs)
    def fill_bf16(self, bank, index, row, bits): bank[index, row:row + len(bits)] = bits
    def vector(self, values): return values

attention = AttentionSpec("gqa", 4, 4, 64, 64, 0.1, RopeSpec(64, 1e4, False))
spec = ModelSpec("llama", 160_000, 512, (LayerSpec(attention, DenseSpec(16_384)),), 1e-6, 64)

def peak():  # not ru_maxrss, which a child inherits from its parent
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

before = peak()
loaded = load_weights(Path(sys.argv[1]), spec, Kernels())
print(loaded.report.nbytes, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_is_about_the_weights(tmp_path: Path) -> None:
    """378 MB of bfloat16 weights; a whole embedding in float32 alone would be 328 MB more."""
    shapes = {
        "model.embed_tokens.weight": (160_000, 512),
        "lm_head.weight": (160_000, 512),
        "model.norm.weight": (512,),
    }
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (256, 512) for name in "qkv"}
    shapes |= {f"{layer}self_attn.o_proj.weight": (512, 256), f"{layer}mlp.down_proj.weight": (512, 16_384)}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (16_384, 512) for name in ("gate", "up")}
    shapes |= {f"{layer}{name}_layernorm.weight": (512,) for name in ("input", "post_attention")}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # a sparse file of zeros
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    nbytes, grown = map(int, run.stdout.split())
    assert nbytes == at and grown > 0.9 * nbytes
    assert grown <= 1.3 * nbytes + (64 << 20)
