"""The model in the package: what the issue of its making asked for, and that it runs the same in every way.

Its own figures (bits per byte per register, expert use) are in its card; here only what a test can hold it to.
"""

from __future__ import annotations

import lzma
import math
from pathlib import Path

import numpy as np
import pytest

from coterie import LLM, SamplingParams
from coterie.model.shipped import shipped_model_path
from coterie.spec import DenseSpec, ModelSpec, MoESpec

PROSE = (
    "Now is the winter of our discontent\nMade glorious summer by this son of York\n"
    "And all the clouds that lowerd upon our house\nIn the deep bosom of the ocean buried\n"
    "Now are our brows bound with victorious wreaths\nOur bruised arms hung up for monuments\n"
)
CODE = (
    "class Counter:\n    def __init__(self, start=0):\n        self.value = start\n\n"
    "    def add(self, amount):\n        if amount < 0:\n            raise ValueError('amount must be positive')\n"
    "        self.value += amount\n        return self.value\n"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llm():
    with LLM(shipped_model_path(), threads=2) as model:
        yield model


def test_it_is_a_small_deepseek_v3() -> None:
    spec = ModelSpec.from_hf(shipped_model_path())
    assert spec.model_type == "deepseek_v3" and len(spec.mtp_layers) == 1
    assert isinstance(spec.layers[0].ffn, DenseSpec)
    for layer in spec.layers[1:]:
        assert isinstance(layer.ffn, MoESpec)
        assert layer.ffn.num_experts >= 32 and layer.ffn.top_k == 4 and layer.ffn.scoring == "sigmoid"
        assert layer.ffn.correction_bias and layer.ffn.shared_intermediate_size == layer.ffn.intermediate_size
    assert all(layer.attention.kind == "mla" for layer in spec.layers)
    folder = Path(shipped_model_path())
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20 * 2**20
    assert "bits per byte" in (folder / "README.md").read_text().lower()


@pytest.mark.parametrize("text", [PROSE, CODE], ids=["prose", "code"])
def test_it_has_learned(llm: LLM, text: str) -> None:
    """Far fewer bits per byte than xz on the same text, which no untrained model gives."""
    tokens = llm.encode(text)
    logits = llm.logits(tokens).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_total = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    nats = sum(log_total[i] - logits[i, tokens[i + 1]] for i in range(len(tokens) - 1))
    ours = nats / math.log(2) / len(text.encode())
    xz = 8 * len(lzma.compress(text.encode(), preset=9)) / len(text.encode())
    assert ours < 0.6 * xz, f"{ours:.2f} bits per byte, xz {xz:.2f}"


def test_greedy_is_the_same_in_every_way_of_running(llm: LLM) -> None:
    prompts = [PROSE, CODE, PROSE + CODE, "Enter the KING", "日本 Привет 🙂 é"]

    def answers(model: LLM) -> list:
        outputs = model.generate(prompts, GREEDY)
        return [(o.outputs[0].text, o.outputs[0].token_ids, [s[0] for s in o.outputs[0].logprobs]) for o in outputs]

    alone = [answer for prompt in prompts for answer in [_one(llm, prompt)]]
    assert answers(llm) == alone, "batched, and on cached prefixes"
    ways = [{"chunked_prefill_size": 7}, {"threads": 1}, {"page_size": 16, "enable_prefix_caching": False}]
    for options in ways:
        with LLM(shipped_model_path(), **{"threads": 2, **options}) as other:
            assert answers(other) == alone, options


def _one(llm: LLM, prompt: str) -> tuple:
    completion = llm.generate([prompt], GREEDY)[0].outputs[0]
    return completion.text, completion.token_ids, [step[0] for step in completion.logprobs]


def test_it_sees_registers_with_different_experts() -> None:
    """Specialisation, and the conservation law: counts of a layer sum to tokens x K."""
    from coterie.comm.local import LocalTransport
    from coterie.kernels.batch import ForwardBatch
    from coterie.kernels.native import NativeKernels
    from coterie.model.loader import load_weights
    from coterie.model.overlap import drive
    from coterie.model.transformer import Runtime, Transformer
    from coterie.observe.expert_load import ExpertLoad
    from coterie.observe.stages import StageTimer

    path = Path(shipped_model_path())
    spec, kernels = ModelSpec.from_hf(path), NativeKernels()
    routed = dict(spec.moe_layers())
    weights = load_weights(path, spec, kernels).weights
    use = []
    with LLM(path) as llm:
        texts = [llm.encode(PROSE * 3), llm.encode(CODE * 3)]
    for tokens in texts:
        load = ExpertLoad(list(routed), 32, kernels.to_host)
        model = Transformer(spec, weights, Runtime(kernels, LocalTransport(), StageTimer(), load))
        batch = kernels.prepare(ForwardBatch.packed(np.array(tokens), np.array([len(tokens)])))
        drive(model.stages(batch))
        counts = load.read()
        assert (counts.sum(1) == len(tokens) * 4).all()
        use.append(counts / counts.sum(1, keepdims=True))
    distance = 0.5 * np.abs(use[0] - use[1]).sum(1)
    assert distance.max() > 0.3, "prose and code use the same experts"
