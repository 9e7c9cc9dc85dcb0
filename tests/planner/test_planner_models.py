"""Shipped models and devices: exact parameters and cache bytes, names near and far, what the engine refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.engine.config import EngineConfig
from coterie.engine.resolve import check_config
from coterie.model.names import weight_layout
from coterie.planner.devices import device, devices, read_device
from coterie.planner.models import model
from coterie.spec import ModelSpec, SpecError
from coterie.spec.errors import CoterieError

MODELS = Path("src/coterie/data/planner/models")

CACHE = {  # (bytes a layer, bytes of all layers), bf16, from the published configurations
    "DeepSeek-V2": (1152, 69_120),
    "DeepSeek-V2-Lite": (1152, 31_104),
    "DeepSeek-V3": (1152, 70_272),
    "DeepSeek-R1": (1152, 70_272),
    "Kimi-K2": (1152, 70_272),
    "Llama-2-70B": (4096, 327_680),
    "Llama-3.1-70B": (4096, 327_680),
    "GPT-3-175B": (49_152, 4_718_592),
    "Llama-4-Maverick": (4096, 196_608),
    "Qwen3-235B-A22B": (2048, 192_512),
    "Qwen3-30B-A3B": (2048, 98_304),
    "Mixtral-8x7B": (4096, 131_072),
}
PARAMETERS = {  # billions in all, and active with the embedding table, as published
    "DeepSeek-V3": (671.03, 37.55),
    "DeepSeek-V2": (235.74, 21.38),
    "DeepSeek-V2-Lite": (15.71, 2.66),
    "Kimi-K2": (1026.41, 32.86),
    "Mixtral-8x7B": (46.70, 12.88),
    "Mixtral-8x22B": (140.62, 39.15),
    "Qwen3-235B-A22B": (235.09, 22.19),
    "Qwen3-30B-A3B": (30.53, 3.35),
    "Qwen3-Coder-480B-A35B": (480.15, 35.47),
    "Llama-2-70B": (68.98, 68.98),
    "Llama-3.1-405B": (405.85, 405.85),
    "Llama-4-Maverick": (400.71, 17.18),
    "GPT-3-175B": (174.57, 174.57),
}

TABLES = ("DeepSeek-V2-Lite", "GLM-4.5-Air", "Mixtral-8x7B", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "dots.llm1")
"""One of each way to lay tensors out."""


@pytest.mark.parametrize("name", CACHE)
def test_cache_bytes_are_exact(name: str) -> None:
    _, spec = model(name)
    assert (spec.kv_bytes_per_token() // len(spec.layers), spec.kv_bytes_per_token()) == CACHE[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    _, spec = model(name)
    active = spec.num_active_parameters + (0 if spec.tie_embeddings else spec.counts.embedding)
    assert (round(spec.num_parameters / 1e9, 2), round(active / 1e9, 2)) == PARAMETERS[name]


def test_kinds_of_weights_of_v3() -> None:
    _, spec = model("DeepSeek-V3")
    counts = spec.counts
    assert counts.total == spec.num_parameters == 671_026_419_200
    assert (counts.attention + counts.latent) // 61 + 1536 + 512 == 187_107_328  # with the latents' norms
    assert counts.routed == 58 * 256 * 44_040_192
    assert counts.shared == 58 * 44_040_192
    assert spec.mtp_counts.routed == 256 * 44_040_192


@pytest.mark.parametrize("name", TABLES)
def test_counts_are_those_of_the_loaders_table(name: str) -> None:
    """The planner's bytes and the loader's banks are one arithmetic."""
    _, spec = model(name)
    layout = weight_layout(spec, mtp=True)
    roles: dict[str, int] = {}
    for bank in layout.banks.values():
        roles[bank.role] = roles.get(bank.role, 0) + bank.count * bank.rows * bank.cols
    counts = spec.counts + spec.mtp_counts
    assert roles["attention"] == counts.attention + counts.kv + counts.latent
    assert roles["experts"] == counts.dense + counts.shared + counts.routed
    assert roles.get("router", 0) + roles.get("other", 0) == counts.other
    assert roles["embedding"] == counts.embedding and roles.get("head", 0) == counts.head
    assert sum(layout.vectors.values()) == counts.vectors


@pytest.mark.parametrize("name", ["GPT-3-175B", "Llama-4-Maverick"])
def test_comparisons_are_planned_and_refused_by_the_engine(name: str) -> None:
    _, spec = model(name)
    with pytest.raises(CoterieError, match="can be planned but not run: the engine lacks"):
        check_config(spec, EngineConfig())
    with pytest.raises(SpecError, match="is not supported: it needs"):
        ModelSpec.from_hf(MODELS / f"{name}.json")


def test_a_model_is_a_name_a_folder_or_a_file(tmp_path: Path) -> None:
    for name in ("deepseek-v3", "DeepSeek V3", "v3", "deepseek-ai/DeepSeek-V3"):
        assert model(name)[0] == "DeepSeek-V3"
    (tmp_path / "config.json").write_text((MODELS / "DeepSeek-V2-Lite.json").read_text())
    assert model(str(tmp_path)) == (tmp_path.name, model("v2-lite")[1])
    assert model(str(tmp_path / "config.json"))[0] == tmp_path.name


@pytest.mark.parametrize("name", ["deepsek-v3", "DeepSeek-V33", "", "nothing-like-it", "./nowhere"])
def test_an_unknown_model_lists_near_names(name: str) -> None:
    with pytest.raises(SpecError, match=r"DeepSeek-V3|config\.json") as caught:
        model(name)
    assert "\n" not in str(caught.value)


def test_a_config_with_missing_fields_names_them(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mixtral", "num_hidden_layers": 2}')
    with pytest.raises(SpecError, match=r"required field .* is missing"):
        model(str(path))
    path.write_text('{"model_type": ')
    with pytest.raises(SpecError, match="not valid JSON"):
        model(str(path))


def test_devices_are_named_forgivingly_and_unknown_ones_list_near_names() -> None:
    assert device("h100").name == "H100-SXM5-80GB" and device("B200").memory_gbps == 8000
    assert device("gb200 nvl72").domain == 72
    assert device("xeon-6454s").name == device("6454S gold").name == "Xeon-Gold-6454S"
    with pytest.raises(SpecError, match="near are H100-SXM5-80GB"):
        device("h1000")
    with pytest.raises(SpecError, match="possible are"):
        device("")


def test_ridge_points_are_those_of_the_reference_paper() -> None:
    for name, ridge in {
        "v100": 138.89,
        "a100": 153.02,
        "h200": 206.15,
        "b200": 281.25,
        "v5p": 166,
        "mi325x": 217.9,
    }.items():
        assert device(name).ridge == pytest.approx(ridge, rel=1e-3)


def test_every_device_has_a_source_and_rates_in_order() -> None:
    assert len({spec.name for spec in devices()}) == len(devices()) >= 31
    for spec in devices():
        assert (spec.source and spec.rate(16) <= spec.rate(8)) or spec.name.startswith(("B300", "GB300"))


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: gpu\nbf16_tops: 1e3\nmemory_gb: 96\nmemory_gbps: 4000\n")
    assert read_device(path).name == device(str(path)).name == "mine"
    for text, word in {
        "kind: gpu\nbf16_tops: 100\n": "missing memory_gb, memory_gbps",
        "kind: gpu\nbf16_tops: 100\nmemory_gb: 96\nmemory_gbps: 4000\nmemory_gbs: 1\n": "did you mean memory_gb",
        "kind: cat\nbf16_tops: 100\nmemory_gb: 96\nmemory_gbps: 4000\n": "not one of gpu",
        "kind: gpu\nbf16_tops: fast\nmemory_gb: 96\nmemory_gbps: 4000\n": "bf16_tops 'fast' is not a number",
        "kind: gpu\nbf16_tops: 100\nmemory_gb: -96\nmemory_gbps: 4000\n": "memory_gb of mine must be",
        "kind: gpu\nbf16_tops: .nan\nmemory_gb: 96\nmemory_gbps: 4000\n": "is not a number",
        "kind: gpu\nbf16_tops: 1\nmemory_gb: 96\nmemory_gbps: 4000\ndomain: 1.5\n": "domain 1.5 is not a whole number",
        "[1, 2": "not valid YAML",
        "- 1": "holds no fields",
    }.items():
        path.write_text(text)
        with pytest.raises(SpecError, match=word) as caught:
            device(str(path))
        assert "\n" not in str(caught.value)
    with pytest.raises(SpecError, match="cannot read"):
        device(str(tmp_path / "none.yaml"))
