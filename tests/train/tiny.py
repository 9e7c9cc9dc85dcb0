"""A recipe small enough for tests: a two-layer model, two local registers, sequences of 32 tokens."""

from __future__ import annotations

from pathlib import Path

RECIPE = """
name = "tiny"
seed = 3
[model]
vocab_size = 320
hidden_size = 32
num_layers = 3
dense_layers = 1
dense_width = 48
num_heads = 2
q_lora_rank = {q_lora_rank}
kv_lora_rank = 16
nope_dim = 8
rope_dim = 4
value_dim = 8
num_experts = 8
experts_per_token = 2
expert_width = 12
shared_experts = 1
routed_scale = 1.5
mtp_depths = 1
rope_theta = 10000.0
max_positions = 192
tie_embeddings = {tied}
[schedule]
tokens = 7680
tokens_per_step = 256
stages = [{{ start = 0.0, length = 32 }}, {{ start = 0.8, length = 64 }}]
warmup_steps = 3
stable = 0.5
mtp_weight = 0.3
mtp_weight_final = 0.1
bias_speed = 5e-3
bias_speed_final = 1e-3
bias_stop = 0.97
sequence_balance = 1e-4
[optimiser]
muon_rate = 1e-2
muon_momentum = 0.9
adam_rate = 1e-2
adam_beta1 = 0.9
adam_beta2 = 0.95
weight_decay = 0.05
clip = 1.0
[machine]
threads = 1
compute = "{compute}"
[data]
held_out = 0.05
chat_share = 0.5
[[data.sources]]
register = "verse"
kind = "files"
member = "verse"
licence = "ours"
[[data.sources]]
register = "code"
kind = "files"
member = "code"
licence = "ours"
"""

VERSE = (
    "the owl of night and the lark of day sat in a tree and {0} songs had they\nand {1} more they sang to the moon\n"
)
CODE = "def area_{0}(width, height):\n    total = width * height + {1}\n    return total\n\n"


def write_recipe(folder: Path, *, compute: str = "float32", tied: bool = True, q_lora_rank: int = 0) -> Path:
    """Write the recipe and its texts into a folder; return the recipe's path."""
    for name, template in (("verse", VERSE), ("code", CODE)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for page in range(6):
            text = "".join(template.format(page * 31 + line, line * line % 17) for line in range(60))
            (folder / name / f"{page}.txt").write_text(text, "utf-8")
    file = folder / "tiny.toml"
    file.write_text(RECIPE.format(compute=compute, tied=str(tied).lower(), q_lora_rank=q_lora_rank), "utf-8")
    return file
