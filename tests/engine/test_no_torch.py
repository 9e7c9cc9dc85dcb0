"""Serving needs no torch: the front end and LLM run in an interpreter where importing it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not installed here")
        return None

sys.meta_path.insert(0, NoTorch())
from coterie import LLM, SamplingParams
from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine

params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
with LLM(sys.argv[1], load_format="dummy", threads=1, max_model_len=64) as llm:
    called = llm.generate("Hello", params)[0].outputs[0].token_ids

async def main():
    engine = AsyncEngine.launch(sys.argv[1], EngineConfig(load_format="dummy", threads=1, max_model_len=64))
    output = await engine.generate(engine.tokenizer.encode("Hello"), params)
    await engine.shutdown(drain=True)
    return output.outputs[0].token_ids

assert asyncio.run(main()) == called and len(called) == 5
assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
try:
    LLM(sys.argv[1], backend="reference", load_format="dummy")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_serving_without_torch(tiny_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CoterieError") and "torch" in done.stdout
