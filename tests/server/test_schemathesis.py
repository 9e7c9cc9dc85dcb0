"""schemathesis, which knows nothing but /openapi.json, against the shipped model on a live server: no 5xx, nothing that
the page does not announce, and enough of what it invents is answered with tokens for that to mean something."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest
from server_fakes import Live

from coterie.engine.config import EngineConfig
from coterie.engine.frontend import AsyncEngine
from coterie.model.shipped import shipped_model_path
from coterie.server.config import Access, ApiKey

# Not checked: that every body which fits the schema is accepted. A schema cannot say that a prompt fits the context, a
# token id the vocabulary, or that one of two fields is wanted.
FLAGS = ["--seed", "1", "--phases", "coverage,fuzzing", "--max-examples", "15", "--request-timeout", "60",
         "--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-color"]  # fmt: skip


@pytest.mark.slow
def test_the_server_is_what_its_schema_says(tmp_path):
    config = EngineConfig(max_model_len=48, threads=1)
    access = Access(api_keys=(ApiKey("key"),))
    server = Live(lambda observer: AsyncEngine.launch(shipped_model_path(), config), access=access)
    server.start()
    try:
        assert server.ready.wait(60), server.error
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
        header = {"Authorization": "Bearer key"}
        ran = subprocess.run(
            [*command, server.url + "/openapi.json", "-H", "Authorization: Bearer key", *FLAGS],
            capture_output=True, text=True, timeout=280, cwd=tmp_path,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
        metrics = httpx.get(server.url + "/metrics", headers=header).text
        answered = re.findall(r'http_requests_total\{path="(.*?)",status="(\d+)"\} (\d+)', metrics)
        assert not [line for line in answered if line[1] >= "500"]
        good = {path: int(count) for path, status, count in answered if status == "200"}
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
            assert good.get(path, 0) >= 1, (path, answered)
    finally:
        server.stop(times=2)
        server.join()
    assert server.error is None
