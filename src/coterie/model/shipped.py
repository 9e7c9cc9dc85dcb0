"""Where the model that comes with the package lies: `coterie/data/demo`. Reads no weights and chooses no engine."""

from __future__ import annotations

from pathlib import Path

from coterie.spec.errors import CoterieError


def shipped_model_path() -> str:
    """Return the folder of the shipped model. Raises `CoterieError` if this installation has none."""
    folder = Path(__file__).resolve().parents[1] / "data" / "demo"
    if not (folder / "config.json").is_file():
        raise CoterieError(
            f"no model was named and this installation ships none (looked for {folder}/config.json); "
            "give a folder with config.json and safetensors files"
        )
    return str(folder)
