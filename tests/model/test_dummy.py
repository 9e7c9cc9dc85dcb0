"""Random weights: complete, deterministic by seed, of the right scale, and finite when the model runs on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tiny_checkpoints import FakeKernels, tiny_spec

from coterie.model.load_report import LoadProgress
from coterie.model.loader import LoadedWeights, LoadOptions, load_weights
from coterie.model.names import weight_layout
from coterie.spec.model import Fp8BlockQuant, ModelSpec


def make(spec: ModelSpec, progress: Callable[[LoadProgress], None] | None = None, **options: object) -> LoadedWeights:
    return load_weights(None, spec, FakeKernels(), LoadOptions(load_format="dummy", **options), progress=progress)  # type: ignore[arg-type]


def flat(loaded: LoadedWeights) -> dict[str, bytes]:
    return {key: np.asarray(getattr(value, "values", value)).tobytes() for key, value in loaded.weights.items()}


@pytest.mark.parametrize("mtp", [True, False])
def test_every_weight_is_made(mtp: bool) -> None:
    loaded = make(tiny_spec(), mtp=mtp)
    layout = weight_layout(tiny_spec(), mtp=mtp)
    assert loaded.weights.keys() == layout.banks.keys() | layout.vectors.keys()
    for key, bank in layout.banks.items():
        values = loaded.weights[key].values
        assert values.shape == (bank.count, bank.rows, bank.cols) and (values != 0).mean() > 0.99, key
    assert loaded.report.mtp_present == mtp and "no meaning" in loaded.report.notes[0]


def test_the_seed_decides_and_nothing_else() -> None:
    spec = tiny_spec(vocab_size=5000)  # the embedding is cut from the pool, the rest is drawn
    first, again, other = (flat(make(spec, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert all(first[key] != other[key] for key in first)
    without = flat(make(spec, seed=1, mtp=False))
    assert without == {key: value for key, value in first.items() if key in without}
    assert len(set(first.values())) == len(first)


def test_the_scale_is_that_of_the_fan_in() -> None:
    loaded = make(tiny_spec(vocab_size=5000, hidden_size=400), dtype="float32")
    for key, fan_in in (("embed", 400), ("head", 400), ("layers.1.ffn.gate", 400), ("layers.0.ffn.gate_up", 400)):
        values = loaded.weights[key].values
        assert abs(values.std() * fan_in**0.5 - 1) < 0.05 and abs(values.mean()) * fan_in**0.5 < 0.05, key
    norm = loaded.weights["norm"]
    assert abs(norm.mean() - 1) < 0.03 and 0.05 < norm.std() < 0.2
    assert np.abs(loaded.weights["layers.1.ffn.correction_bias"]).max() < 0.2
    embed = loaded.weights["embed"].values[0]
    assert len(np.unique(embed[:, 0])) > 4500  # pool runs do not repeat rows


@pytest.mark.parametrize(
    ("declared", "quantization", "asked", "kind"),
    [
        ("float32", None, "auto", "f32"),
        ("float16", None, "auto", "f32"),
        ("bfloat16", None, "auto", "bf16"),
        ("bfloat16", Fp8BlockQuant(), "auto", "bf16"),
        ("float32", None, "bfloat16", "bf16"),
        ("bfloat16", None, "float32", "f32"),
    ],
)
def test_the_kind_follows_the_config(declared: str, quantization: Fp8BlockQuant | None, asked: str, kind: str) -> None:
    loaded = make(tiny_spec(dtype=declared, quantization=quantization), dtype=asked)
    assert loaded.kind == kind == loaded.weights["layers.0.attention.o"].kind
    assert loaded.weights["layers.1.ffn.gate"].kind == "f32"


def test_progress_counts_to_the_total() -> None:
    seen: list[LoadProgress] = []
    loaded = make(tiny_spec(), progress=seen.append)
    done = [step.bytes_done for step in seen]
    assert done == sorted(done) and done[-1] == seen[-1].bytes_total == loaded.report.nbytes
    assert loaded.report.nbytes == sum(
        bank.values.nbytes if hasattr(bank, "values") else bank.nbytes for bank in loaded.weights.values()
    )


def test_a_model_of_dummy_weights_gives_finite_logits() -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("coterie.kernels.reference")
    from coterie.kernels.batch import ForwardBatch
    from coterie.model.overlap import drive
    from coterie.model.transformer import Runtime, Transformer

    torch.set_num_threads(1)
    spec = tiny_spec(layers=(tiny_spec().layers[0], *[tiny_spec().layers[1]] * 11))
    kernels = reference.ReferenceKernels()
    loaded = load_weights(None, spec, kernels, LoadOptions(load_format="dummy"))
    model = Transformer(spec, loaded.weights, Runtime.local(kernels))
    batch = ForwardBatch.packed(np.arange(9), np.array([4, 5]))
    hidden = drive(model.stages(kernels.prepare(batch)))
    logits = kernels.to_host(model.logits(hidden))
    assert logits.shape == (9, spec.vocab_size) and np.isfinite(logits).all() and 0.1 < logits.std() < 10
