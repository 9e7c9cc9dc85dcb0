"""ServerState: the model being served (none while it loads), the server's phase, and what is running now.

One per app, handed to the routes; no module global. Not here: routes, and how the model is loaded (`server.run`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET

from coterie import __version__
from coterie.server.config import ServerConfig
from coterie.server.errors import ApiError, Fault, unavailable
from coterie.server.formats import HERMES, Formats, choose_formats
from coterie.server.generation import Generation, PromptJob
from coterie.server.limits import BodyLimits, BodyReader
from coterie.server.metrics import ServerMetrics
from coterie.server.protocol import Unknown
from coterie.server.streaming import Envelope
from coterie.server.templates import ChatTemplate, TemplateLimits, check_template
from coterie.server.tiers import TIER_OF_CLASS
from coterie.spec.errors import CoterieError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from coterie.engine.frontend import AsyncEngine
    from coterie.engine.messages import ServiceClass
    from coterie.engine.tokenizer import Tokenizer
    from coterie.server.reload import Reloader

Phase = Literal["loading", "ready", "exchanging", "no model", "draining"]
"""exchanging: the old model ends or is gone, the new one loads. no model: that failed."""

logger = logging.getLogger("coterie.server")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model and what the routes need of it. `service_class`: of the request at hand, see `for_class`."""

    engine: AsyncEngine
    name: str
    template: ChatTemplate
    formats: Formats
    created: int
    fingerprint: str
    service_class: ServiceClass | None = None

    def for_class(self, service_class: ServiceClass | None) -> ServedModel:
        """The model as a request of that class meets it."""
        return self if service_class is None else replace(self, service_class=service_class)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model that takes and gives token ids only."""
        return self.engine.tokenizer

    @property
    def max_sequences(self) -> int:
        """Sequences that may run or wait together."""
        config = self.engine.config
        return config.max_running_requests + config.max_queued_requests

    def check_name(self, asked: str | None) -> None:
        """Refuse another model's name; an absent one means this model."""
        if asked is not None and asked != self.name:
            message = f"model: {asked[:200]!r} is not served here; the model is {self.name!r}"
            raise ApiError(Fault(404, message, param="model", code="model_not_found"))

    def envelope(self, prefix: str, *, include_usage: bool = False, continuous_usage: bool = False) -> Envelope:
        """A fresh id and the fields that go with it."""
        request_id = f"{prefix}{uuid.uuid4().hex}"
        now = int(time.time())
        tier = UNSET if self.service_class is None else TIER_OF_CLASS[self.service_class]
        return Envelope(request_id, now, self.name, self.fingerprint, include_usage, continuous_usage, tier)


class ServerState:
    """What the routes share. Touched by the event loop's thread only.

    Raises CoterieError if the config's chat template cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.bodies = BodyReader(BodyLimits(config.max_body_bytes, config.max_body_seconds, config.max_json_depth))
        self.metrics = ServerMetrics(config.metrics_compat)
        self.unknown = Unknown(strict=config.strict_api)
        self.phase: Phase = "loading"
        # Read and compiled at once: nobody waits for a model to load to hear that the file cannot be used.
        self._own_template = _template_file(config.chat_template) if config.chat_template is not None else None
        choose_formats(self._own_template, config.parsers)
        self._model: ServedModel | None = None
        self._running: set[Generation] = set()
        self._preparing: Counter[AsyncEngine] = Counter()
        self.reloader: Reloader | None = None

    @property
    def loaded(self) -> ServedModel | None:
        """The model, if it has been loaded."""
        return self._model

    def set_engine(self, engine: AsyncEngine) -> None:
        """Begin to serve, or go on with another model: new requests go to it.

        Raises CoterieError if the model's chat template cannot be used; then nothing has changed.
        """
        config = self.config
        name = config.served_model_name or engine.model_name
        tokenizer = engine.tokenizer
        source = self._own_template
        if source is None and tokenizer is not None:
            source = tokenizer.chat_template
        tokens = {} if tokenizer is None else {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        limits = TemplateLimits(config.template_seconds, config.template_max_chars)
        formats = choose_formats(source, config.parsers)
        named = {"bos_token": None, "eos_token": None} | tokens
        template = ChatTemplate(source, named, limits, formats.calls or HERMES)
        for line in formats.lines():
            logger.info(line)
        mark = hashlib.sha256(f"{__version__} {engine.model_name} {engine.config}".encode()).hexdigest()[:10]
        self._model = ServedModel(engine, name, template, formats, int(time.time()), f"fp_{mark}")
        self.metrics.serve(name, engine.stats)
        engine.observer = self.metrics
        if self.phase != "draining":
            self.phase = "ready"

    def give_up(self, engine: AsyncEngine) -> None:
        """Forget an engine that nobody uses any more, so that its memory can be freed."""
        if self._model is not None and self._model.engine is engine:
            self._model = None
            self.metrics.rest()

    def model(self) -> ServedModel:
        """The model for a new request, or a 503 that says why there is none."""
        if self.phase == "exchanging":
            raise unavailable("the model is being exchanged for another", retry_after=5, code="exchanging")
        if self.phase == "no model":
            raise unavailable("no model is loaded, as the last exchange failed", retry_after=30, code="no_model")
        if self.phase == "draining":
            raise unavailable("the server is shutting down", retry_after=30, code="shutting_down")
        if self._model is None or self.phase == "loading":
            raise unavailable("the model is still loading", retry_after=5, code="loading")
        return self._model

    @contextlib.contextmanager
    def preparing(self) -> Iterator[ServedModel]:
        """The model for a new request, as `model` gives it; its engine is not given up before the block ends."""
        model = self.model()
        self._preparing[model.engine] += 1
        try:
            yield model
        finally:
            self._preparing[model.engine] -= 1
            if not self._preparing[model.engine]:
                del self._preparing[model.engine]  # it would keep the engine's memory

    def is_used(self, engine: AsyncEngine) -> bool:
        """Whether a request is being prepared for an engine or answered by it."""
        return self._preparing[engine] > 0 or any(generation.engine is engine for generation in self._running)

    def begin(self, model: ServedModel, jobs: Sequence[PromptJob], names: Mapping[str, str]) -> Generation:
        """A generation for a request, not started; its `close` must follow."""
        generation = Generation(model.engine, jobs, names, self._running.discard, model.service_class)
        self._running.add(generation)
        return generation

    @property
    def num_running(self) -> int:
        """HTTP requests that are being answered."""
        return len(self._running)

    @property
    def is_busy(self) -> bool:
        """Whether any request is being prepared or answered."""
        return bool(self._running) or any(self._preparing.values())

    def stop_all(self, reason: str) -> None:
        """End every running request with an error."""
        for generation in list(self._running):
            generation.stop(reason)


def _template_file(path: str) -> str:
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"cannot read the chat template {path}: {error}") from error
    try:
        check_template(source)
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from error
    return source
