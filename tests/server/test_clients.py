"""Other people's clients against the shipped model on a live server: what they show is what the server says to a plain
request. `make test-slow` puts each family of them into a folder of its own (`.venv/clients`), with their dependencies.

Nothing here reaches beyond this machine; the settings that keep the clients from trying are part of each test.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from server_fakes import Live

from coterie import LLM
from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.model.shipped import shipped_model_path

CLIENTS = Path(sys.prefix) / "clients"
HERE = Path(__file__).parent
GREEDY = {"temperature": 0, "max_tokens": 8}
HI = {"messages": [{"role": "user", "content": "hi"}]}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The shipped model behind a live server."""
    config = EngineConfig(max_model_len=1024, threads=1)
    server = Live(lambda observer: AsyncEngine.launch(shipped_model_path(), config))
    server.start()
    assert server.ready.wait(60), server.error
    yield server.url
    server.stop(times=2)
    server.join()


def python(family: str, *arguments: str, alone: bool = True, **environment: str) -> str:
    """Run Python with a family of clients; alone: without the packages of the environment. Returns its stdout."""
    folder = CLIENTS / family
    if not folder.exists():
        pytest.skip(f"make test-slow installs {folder}")
    command = [sys.executable, *(["-S"] if alone else []), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(folder)} | environment
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def said(url: str, path: str, body: dict) -> dict:
    """The server's own answer."""
    return httpx.post(url + path, json=body, timeout=60).raise_for_status().json()


def chat_text(url: str) -> str:
    return said(url, "/v1/chat/completions", HI | GREEDY)["choices"][0]["message"]["content"]


def test_openai_of_the_previous_major():
    """langchain-openai and instructor still pin it; the tests of the current major are run again with it."""
    assert int(openai.__version__.split(".")[0]) >= 3
    version = python("openai-2", "-c", "import openai; print(openai.__version__)", alone=False)
    assert version.startswith("2."), version
    python("openai-2", "-m", "pytest", "-q", str(HERE / "test_http_openai_client.py"), alone=False)


LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
common = dict(model="demo", base_url=sys.argv[1], api_key="none", temperature=0, max_tokens=8, max_retries=0)
chat, responses = ChatOpenAI(**common), ChatOpenAI(**common, use_responses_api=True)
answer, other = chat.invoke("hi"), responses.invoke("hi")
chosen = chat.invoke("hi", logprobs=True, top_logprobs=2).response_metadata["logprobs"]["content"]
print(json.dumps({
    "text": answer.content, "usage": answer.usage_metadata, "reason": answer.response_metadata["finish_reason"],
    "streamed": "".join(chunk.content for chunk in chat.stream("hi")), "tokens": [entry["token"] for entry in chosen],
    "responses": other.text, "responses_usage": other.usage_metadata,
    "responses_streamed": "".join(chunk.text for chunk in responses.stream("hi")),
}))
"""


def test_langchain(url):
    seen = json.loads(python("openai-2", "-c", LANGCHAIN, url + "/v1"))
    text = chat_text(url)
    assert seen["text"] == seen["streamed"] == seen["responses"] == seen["responses_streamed"] == text
    assert "".join(seen["tokens"]) == text and seen["reason"] == "length"
    for usage in (seen["usage"], seen["responses_usage"]):
        assert usage["output_tokens"] == 8 and usage["total_tokens"] == usage["input_tokens"] + 8
        assert usage["output_token_details"]["reasoning"] == 0


STRUCTURED = """
import json, sys
from typing import Literal
import instructor
from instructor.core.exceptions import IncompleteOutputException
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

class Play(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: Literal["Hamlet", "Macbeth"]
    act: int = Field(ge=1, le=5)

common = dict(model="demo", temperature=0, max_retries=0)
found = {}
for name, route in (("langchain", False), ("langchain, responses", True)):
    chat = ChatOpenAI(**common, base_url=sys.argv[1], api_key="none", use_responses_api=route)
    found[name] = chat.with_structured_output(Play, method="json_schema").invoke("a play").model_dump()
chat = ChatOpenAI(**common, base_url=sys.argv[1], api_key="none")
found["langchain, tools"] = chat.with_structured_output(Play, method="function_calling").invoke("a play").model_dump()
asked = chat.bind_tools([Play], tool_choice="any")
found["langchain, bound"] = asked.invoke("a play").tool_calls[0]["args"]
chunks = list(asked.stream("a play"))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
found["langchain, streamed"] = whole.tool_calls[0]["args"]
messages = [{"role": "user", "content": "a play"}]
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none"), mode=mode)
    for seed in range(20):
        # Instructor's tools allow further properties, and the small model, once it has begun one, may never end it.
        ask = dict(model="demo", temperature=1, max_retries=0, max_tokens=200, seed=seed)
        try:
            play = client.chat.completions.create(**ask, response_model=Play, messages=messages)
        except IncompleteOutputException:
            continue
        found["instructor, " + mode.name] = play.model_dump()
        break
print(json.dumps(found))
"""


def test_structured_output_of_langchain_and_instructor(url):
    """By schema and by forced calls (instructor's default): always the shape of the client's own class."""
    found = json.loads(python("openai-2", "-c", STRUCTURED, url + "/v1"))
    assert len(found) == 7
    for play in found.values():
        assert play["title"] in ("Hamlet", "Macbeth") and 1 <= play["act"] <= 5


def test_llm_command(url, tmp_path):
    models = f"- model_id: here\n  model_name: demo\n  api_base: {url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    ask = ("-m", "llm", "-m", "here", "hi", "-o", "temperature", "0", "-o", "max_tokens", "8")
    for flags in ((), ("--no-stream",)):
        shown = python("openai-2", *ask, *flags, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none")
        assert shown.strip() == chat_text(url).strip()
    followed = python("openai-2", "-m", "llm", "-c", "and?", "-o", "max_tokens", "4", LLM_USER_PATH=str(tmp_path))
    assert followed.strip()


LITELLM = """
import json, sys
import litellm
common = dict(api_base=sys.argv[1], api_key="none", temperature=0, max_tokens=8)
seen = {}
for name in ("openai/demo", "hosted_vllm/demo"):
    ask = dict(common, model=name, messages=[{"role": "user", "content": "hi"}])
    answer = litellm.completion(**ask)
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    seen[name] = {
        "text": answer.choices[0].message.content, "tokens": answer.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_tokens": chunks[-1].usage.completion_tokens,
    }
raw = litellm.text_completion(model="text-completion-openai/demo", prompt="To be", **common)
print(json.dumps({"chats": seen, "raw": raw.choices[0].text}))
"""


def test_litellm(url):
    seen = json.loads(python("litellm", "-c", LITELLM, url + "/v1", LITELLM_LOCAL_MODEL_COST_MAP="True"))
    text = chat_text(url)
    for answer in seen["chats"].values():
        assert answer == {"text": text, "tokens": 8, "streamed": text, "streamed_tokens": 8}
    plain = said(url, "/v1/completions", {"prompt": "To be"} | GREEDY)
    assert seen["raw"] == plain["choices"][0]["text"]


CHOICES = [
    {"question": "To be, or not", "choices": ["to be", "banana", "the"], "answer": 0},
    {"question": "Hello wörld 漢", "choices": ["!", "é"], "answer": 1},
]
QUESTIONS = [{"question": "To be, or not", "answer": "?"}, {"question": "Who goes", "answer": "?"}]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{name}.jsonl}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
CHOICE = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\nmetric_list:\n  - metric: acc\n'
GENERATE = """output_type: generate_until
generation_kwargs: {until: ["."], max_gen_toks: 8, temperature: 0}
metric_list:
  - metric: exact_match
"""


def test_lm_eval_scores_are_ours(url, tmp_path):
    """Two tasks of our own: its log-likelihoods are those of `LLM.logits`, its texts those of the server."""
    for name, rows, rest in (("own_choice", CHOICES, CHOICE), ("own_text", QUESTIONS, GENERATE)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, folder=tmp_path) + rest)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = f"model=demo,base_url={url}/v1/completions,max_retries=1,tokenizer={shipped_model_path()}"
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    python(
        "lm-eval", "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks",
        "own_choice,own_text", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples",
        alone=False, **offline,
    )  # fmt: skip
    scored, written = (samples(tmp_path / "out", name) for name in ("own_choice", "own_text"))
    ours = LLM(threads=1)
    for row, sample in zip(CHOICES, scored, strict=True):
        for choice, [[value, greedy]] in zip(row["choices"], sample["resps"], strict=True):
            log_likelihood, is_best = score(ours, row["question"], " " + choice)
            assert math.isclose(float(value), log_likelihood, rel_tol=1e-5), (row, choice)
            assert (str(greedy) == "True") == is_best
    for row, sample in zip(QUESTIONS, written, strict=True):
        body = {"prompt": row["question"], "stop": ["."], "add_special_tokens": False} | GREEDY
        assert sample["resps"] == [[said(url, "/v1/completions", body)["choices"][0]["text"]]]


def samples(folder: Path, task: str) -> list[dict]:
    """What lm-eval logged of a task, in the order of its documents."""
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def score(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """Sum of log-probabilities of the continuation's tokens, and whether greedy decoding would say it."""
    start = len(llm.tokenizer.encode(context, add_special_tokens=False))
    ids = llm.tokenizer.encode(context + continuation, add_special_tokens=False)
    rows = llm.logits(ids).astype(np.float64)[start - 1 : -1]
    best = rows.max(axis=1, keepdims=True)
    normal = rows - best - np.log(np.exp(rows - best).sum(axis=1, keepdims=True))
    chosen = np.array(ids[start:])
    return float(normal[np.arange(len(chosen)), chosen].sum()), bool((rows.argmax(axis=1) == chosen).all())


def test_aiperf_measures_what_it_asked_for(url, tmp_path):
    """A short closed loop over streams: every request is answered, and its counts are the server's. Answers go on past
    an end, as aiperf counts an answer without text as a failure."""
    python(
        "aiperf", "-m", "aiperf", "profile", "--model", "demo", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", shipped_model_path(), "--request-count", "6", "--concurrency", "2", "--ui", "none",
        "--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "16", "--output-artifact-dir", str(tmp_path),
        "--random-seed", "1", "--extra-inputs", "ignore_eos:true", "temperature:0",
        HF_HOME=str(tmp_path / "hf"), HOME=str(tmp_path),
    )  # fmt: skip
    [file] = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(file.read_text())
    assert not report["error_summary"], report["error_summary"]
    assert report["request_count"]["avg"] == 6
    assert report["time_to_first_token"]["avg"] > 0
