"""The loop of a benchmark's worker process: one request a line on stdin, one answer a line on what was stdout.

Only the standard library: peers run it in environments of their own. Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer_requests(make: Callable[[], Any]) -> None:
    """Make the worker and call the method that each request's `op` names; an exception is an answer, not the end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = make()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request["op"])(request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
