"""One in-process engine for `generate` and `chat`: launch it with progress, stream one answer, measure it, stop it.

Synchronous outside, asynchronous inside: the event loop runs only while something is asked. Not a server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from coterie.cli.common import LoadProgress, Timing, engine_config, error_console, model_folder
from coterie.cli.parallel import parallel_config
from coterie.engine.frontend import AsyncEngine
from coterie.engine.launch import RunSpec
from coterie.engine.messages import FinishReason, SamplingParams
from coterie.engine.output import PromptInfo, RequestTimes
from coterie.server.config import ParserNames, ServerConfig
from coterie.server.formats import choose_formats
from coterie.server.parsers import AnswerParser, ParseRules, start_of
from coterie.server.templates import ChatPrompt, ChatTemplate, TemplateLimits
from coterie.spec.errors import CoterieError

SERVER = ServerConfig()
TEMPLATE_LIMITS = TemplateLimits(SERVER.template_seconds, SERVER.template_max_chars)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt gave. `stage_seconds` are the engine's own, for this answer only."""

    output_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_cached_tokens: int
    timing: Timing
    stage_seconds: Mapping[str, float]


class LocalEngine:
    """Owns an AsyncEngine and the event loop it is asked from; use as a context manager.

    `needs_text`: text will be asked of it, so a model without a tokenizer is refused, if possible before it is loaded.
    """

    def __init__(self, values: Mapping[str, Any], *, needs_text: bool = False) -> None:
        self._runner = asyncio.Runner()
        self._template: ChatTemplate | None = None
        folder, config, parallel = model_folder(values), engine_config(values), parallel_config(values)
        is_folder = folder is not None and (Path(folder) / "config.json").is_file()
        if needs_text and folder is not None and is_folder and not (Path(folder) / "tokenizer.json").is_file():
            raise _reads_no_text(Path(folder).resolve().name)
        started = time.monotonic()
        with LoadProgress(error_console()) as progress:
            self.engine = AsyncEngine.launch(folder, config, run=RunSpec(parallel=parallel), progress=progress)
        self.load_seconds = time.monotonic() - started

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._runner.run(self.engine.shutdown(drain=False))
        self._runner.close()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids; without a tokenizer the model takes ids only."""
        if self.engine.tokenizer is None:
            raise _reads_no_text(self.engine.model_name)
        return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[list[int], AnswerParser]:
        """Lay messages out by the model's chat template: token ids, and the parser that tells thoughts of the answer
        from its text."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise _reads_no_text(self.engine.model_name)
        if self._template is None:
            tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
            self._template = ChatTemplate(tokenizer.chat_template, tokens, TEMPLATE_LIMITS)
        text = self._template.render_now(ChatPrompt([dict(message) for message in messages], True, {}))
        thinking = choose_formats(tokenizer.chat_template, ParserNames()).thinking
        parser = AnswerParser(ParseRules(thinking), start_of(text, thinking))
        return tokenizer.encode(text, add_special_tokens=self._template.is_fallback), parser

    def answer(self, prompt_ids: list[int], params: SamplingParams, show: Callable[[str], object]) -> Answer:
        """Stream one answer, handing each piece of text to `show`. Ctrl-C aborts it and raises KeyboardInterrupt."""
        return self._runner.run(self._answer(prompt_ids, params, show))

    async def _answer(self, prompt_ids: list[int], params: SamplingParams, show: Callable[[str], object]) -> Answer:
        before = self._stage_seconds()
        output_ids: list[int] = []
        pieces: list[str] = []
        num_cached, finish_reason, stop_reason = 0, None, None
        stream = self.engine.stream(prompt_ids, params)
        try:
            async for news in stream:
                if isinstance(news, PromptInfo):
                    num_cached = news.num_cached_tokens
                    continue
                output_ids += news.token_ids
                pieces.append(news.text)
                if news.text:
                    show(news.text)
                if news.error is not None:
                    raise CoterieError(news.error)
                finish_reason = news.finish_reason or finish_reason
                stop_reason = news.stop_reason if news.stop_reason is not None else stop_reason
        finally:
            await stream.aclose()
        timing = _timing(stream.times, len(prompt_ids), len(output_ids))
        stages = {stage: total - before.get(stage, 0.0) for stage, total in self._stage_seconds().items()}
        return Answer(tuple(output_ids), "".join(pieces), finish_reason, stop_reason, num_cached, timing, stages)

    def _stage_seconds(self) -> dict[str, float]:
        stats = self.engine.stats()
        return {} if stats is None else dict(stats.stage_seconds)


def _timing(times: RequestTimes, num_prompt_tokens: int, num_output_tokens: int) -> Timing:
    """Seconds as the engine stamped them; what reads the stream may be behind."""
    assert times.finished is not None, "the stream has ended"
    first = None if times.first_token is None else times.first_token - times.arrival
    return Timing(num_prompt_tokens, num_output_tokens, times.finished - times.arrival, first)


def _reads_no_text(model: str) -> CoterieError:
    return CoterieError(f"{model} has no tokenizer.json, so it reads no text; use generate --prompt-ids 1,2,3")
