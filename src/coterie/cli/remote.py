"""A running OpenAI-compatible server as seen by `coterie chat --url`: plain urllib, one streamed answer at a time."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from coterie.cli.common import Timing
from coterie.spec.errors import CoterieError

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Show:
    """Where pieces of an answer go: its text, and what the model thinks."""

    text: Callable[[str], object]
    thought: Callable[[str], object]


class RemoteServer:
    """Base URL, key and model name of a server; `reply` streams one chat answer from it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        base = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        if not base.startswith(("http://", "https://")):
            raise CoterieError(f"'{url}' is not a URL of a server; write it as http://127.0.0.1:8000")
        self.base = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/models", None, CONNECT_SECONDS) as response:
            models = self._object(response.read()).get("data") or []
        if not models:
            raise CoterieError(f"{self.base}/models lists no model")
        self.model = str(models[0]["id"])

    def reply(self, messages: list[dict[str, str]], options: Mapping[str, Any], show: Show) -> Timing:
        """Stream the answer to `messages`, handing each piece of it to `show`."""
        body = {"model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in options.items() if value is not None}
        started = time.monotonic()
        first_token: float | None = None
        usage: Mapping[str, int] = {}
        with self._open("/chat/completions", json.dumps(body).encode(), SILENCE_SECONDS) as response:
            for event in self._events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    thought = delta.get("reasoning_content") or delta.get("reasoning")
                    if thought or delta.get("content"):
                        first_token = first_token or time.monotonic() - started
                    if thought:
                        show.thought(thought)
                    if delta.get("content"):
                        show.text(delta["content"])
        total = time.monotonic() - started
        return Timing(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), total, first_token)

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """Decode server-sent events until [DONE]; an error event, or an end without one, is raised."""
        for line in self._lines(response):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = self._object(data)
            if event.get("error"):
                raise CoterieError(f"{self.base} failed: {message_of(event)}")
            yield event
        raise CoterieError(f"{self.base} closed the stream before the end of the answer")

    def _lines(self, response: HTTPResponse) -> Iterator[bytes]:
        """Lines of an answer. A server that dies or falls silent in the middle of one is an error like others."""
        try:
            yield from response
        except (OSError, HTTPException) as error:
            said = str(error) or type(error).__name__
            raise CoterieError(f"{self.base} broke off the answer ({said})") from error

    def _open(self, path: str, body: bytes | None, timeout: float) -> HTTPResponse:
        try:
            request = urllib.request.Request(self.base + path, data=body, headers=self._headers)
            response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            raise CoterieError(f"{self.base}{path} answered {error.code}: {message_in(said)}") from error
        except (urllib.error.URLError, HTTPException, TimeoutError) as error:
            reason = getattr(error, "reason", error)
            raise CoterieError(f"no server answers at {self.base} ({reason}); start one with coterie serve") from error
        except ValueError as error:
            raise CoterieError(f"'{self.base}' is not a URL; write it as http://127.0.0.1:8000") from error
        return response

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError as error:
            raise CoterieError(f"{self.base} did not answer with JSON; is it an OpenAI-compatible server?") from error
        if not isinstance(value, dict):
            raise CoterieError(f"{self.base} did not answer with a JSON object; is it an OpenAI-compatible server?")
        return value


def message_in(text: str) -> str:
    """Find the message of an OpenAI error body, or show the body's beginning."""
    try:
        value = json.loads(text)
    except ValueError:
        return text[:200]
    return message_of(value) if isinstance(value, dict) else text[:200]


def message_of(value: Mapping[str, Any]) -> str:
    """Return error.message of an OpenAI error body."""
    error = value.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or value)
