"""A scripted engine that stands where AsyncEngine stands, a byte tokenizer, and clients for both transports.

Its door is the real one, so that what the engine refuses is refused here too; tokens and text come from the script.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from coterie.engine.admission import Door
from coterie.engine.config import NO_CLASSES, EngineConfig
from coterie.engine.errors import EngineBusy
from coterie.engine.messages import SamplingParams, ServiceClass, Stats, TokenLogprob
from coterie.engine.output import ChoiceDelta, PromptInfo
from coterie.engine.tokenizer import BYTE_ALPHABET
from coterie.observe.requests import RequestObserver
from coterie.server.app import create_app
from coterie.server.config import ServerConfig
from coterie.server.run import Server, bind, url_of
from coterie.server.state import ServerState

CONTEXT = 128
VOCAB = 300
BOS = 256
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

HANG = "hang"
Item = PromptInfo | ChoiceDelta | Exception | float | str
Script = Callable[[list[int], SamplingParams], list[Item]]


class ByteTokenizer:
    """One token a byte; raw text gets BOS 256, 257 is the end."""

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_template = chat_template
        self.bos_token, self.eos_token = "<s>", "</s>"
        self.bos_token_id = BOS
        self.special_ids = frozenset({BOS, BOS + 1})
        self.vocab_size = 258

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(text.split("<s>")):
            ids += [BOS] * (i > 0) + list(piece.encode())
        return [BOS] * add_special_tokens + ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if i < 256 or not skip_special_tokens]
        return b"".join(map(self.id_to_bytes, kept)).decode("utf-8", "replace")

    def id_to_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else {256: b"<s>", 257: b"</s>"}.get(token_id, b"")


def say(text: str, *, cached: int = 0, finish: str = "stop") -> Script:
    """Every choice says `text`, a byte a token, the choices taking turns."""

    def script(prompt: list[int], params: SamplingParams) -> list[Item]:
        scores = None
        if params.prompt_logprobs is not None:
            scores = [None, *(logprob_row(token, params.prompt_logprobs) for token in prompt[1:])]
        items: list[Item] = [PromptInfo(cached, scores)]
        data = text.encode()
        if params.max_tokens is not None:
            data = data[: params.max_tokens]
        for position, byte in enumerate(data):
            rows = None if params.logprobs is None else (tuple(logprob_row(byte, params.logprobs)),)
            for index in range(params.n):
                last = position == len(data) - 1
                reason: Any = (finish if len(data) == len(text.encode()) else "length") if last else None
                items.append(ChoiceDelta(index, chr(byte), (byte,), rows, reason))
        if not data:
            items += [ChoiceDelta(index, "", finish_reason="length") for index in range(params.n)]
        return items

    return script


def logprob_row(token: int, k: int) -> list[TokenLogprob]:
    """The chosen token first, then the k best, of which it is the first."""
    best = [TokenLogprob(token, -0.5, 1), TokenLogprob(ord("x"), -1.5, 2), TokenLogprob(ord("y"), -2.5, 3)]
    return [best[0], *best[:k]]


class MockEngine:
    """Runs a script for each request; counts what was started, finished and aborted."""

    def __init__(self, script: Script | None = None, tokenizer: Any = "bytes", context: int = CONTEXT) -> None:
        self.model_name = "mock-model"
        self.spec = SimpleNamespace(vocab_size=VOCAB)
        self.tokenizer: Any = ByteTokenizer() if tokenizer == "bytes" else tokenizer
        self.max_model_len = context
        self.config, self.service = EngineConfig(), NO_CLASSES
        self.observer = RequestObserver()
        self.script = script or say("Hello")
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.classes: list[ServiceClass | None] = []
        self.started: list[str] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.shut_down: list[bool] = []
        self.ready = self.alive = True
        self.max_open = 1000
        self.now: Stats | None = Stats(0, 0, 0.0, 10, 0, 0, 0, 0, 0, 0, {"attention": 1.5})
        self._door = Door(vocab_size=VOCAB, max_model_len=context, max_running=8, max_queued=8, has_text=True)

    def stream(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        service_class: ServiceClass | None = None,
    ) -> MockStream:
        assert request_id is not None and request_id not in self.started
        self.classes.append(service_class)
        return MockStream(self, request_id, prompt, params)

    def start(self, request_id: str, prompt: list[int], params: SamplingParams) -> list[Item]:
        """What the door lets in gets its script."""
        params = self._door.check(prompt, params)
        if len(self.started) - len(self.finished) - len(self.aborted) >= self.max_open:
            raise EngineBusy("the queue is full", retry_after=3)
        self.started.append(request_id)
        self.asked.append((prompt, params))
        return list(self.script(prompt, params))

    @property
    def takes_grammars(self) -> bool:
        return self._door.has_end

    def unavailable(self) -> str | None:
        return None

    def is_ready(self) -> bool:
        return self.ready

    def is_alive(self) -> bool:
        return self.alive

    def stats(self) -> Stats | None:
        return self.now

    async def shutdown(self, *, drain: bool) -> None:
        self.shut_down.append(drain)


class MockStream:
    """Tells a script's items: floats are pauses, HANG never ends, exceptions are raised once all before is taken."""

    def __init__(self, engine: MockEngine, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self._engine, self._id, self._prompt, self._params = engine, request_id, prompt, params
        self._task: asyncio.Task[None] | None = None
        self._news: list[PromptInfo | ChoiceDelta] = []
        self._failure: Exception | None = None
        self._closed = False

    async def start(self, wake: Callable[[], None]) -> None:
        items = self._engine.start(self._id, self._prompt, self._params)
        self._task = asyncio.create_task(self._play(items, wake))

    def take(self) -> list[PromptInfo | ChoiceDelta]:
        news, self._news = self._news, []
        if not news and self._failure is not None:
            raise self._failure
        return news

    @property
    def is_over(self) -> bool:
        return self._closed and not self._news and self._failure is None

    async def _play(self, items: list[Item], wake: Callable[[], None]) -> None:
        while items:
            item = items.pop(0)
            if isinstance(item, Exception):
                self._failure = item
            elif isinstance(item, float):
                await asyncio.sleep(item)
                continue
            elif isinstance(item, str):
                await asyncio.Event().wait()
            else:
                await asyncio.sleep(0)
                self._news.append(item)
            if not items and self._failure is None:
                self._end(self._engine.finished)
            wake()
            if self._failure is not None:
                return

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            if not self._closed:
                self._end(self._engine.aborted)

    def _end(self, where: list[str]) -> None:
        self._closed = True
        where.append(self._id)


def make_state(engine: MockEngine | None, **config: Any) -> ServerState:
    """A state that serves `engine`, or is still loading."""
    state = ServerState(ServerConfig(**config))
    if engine is not None:
        state.set_engine(engine)  # type: ignore[arg-type]
    return state


def ask(state: ServerState, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run `work` with a client of the app, without a socket."""

    async def run() -> Any:
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await work(client)

    return asyncio.run(run())


def post(engine: MockEngine | ServerState, path: str, body: Any, **headers: str) -> httpx.Response:
    """One POST. `body`: JSON as a value, or bytes."""
    state = make_state(engine) if isinstance(engine, MockEngine) else engine
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(state, lambda client: client.post(path, content=content, headers=headers))


def get(engine: MockEngine | ServerState, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """One request without a body."""
    state = make_state(engine) if isinstance(engine, MockEngine) else engine
    return ask(state, lambda client: client.request(method, path, headers=headers))


def events(text: str) -> list[Any]:
    """The data of a stream's events, [DONE] as it is; comments are left out."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


class Live:
    """A server on a real socket, on a thread of its own."""

    def __init__(
        self, launch: Callable[[RequestObserver], Any], relaunch: Callable[..., Any] | None = None, **config: Any
    ) -> None:
        self._config = ServerConfig(port=0, **config)
        self._launch, self._relaunch = launch, relaunch
        self._listener = bind(self._config.host, 0)
        self.url = url_of(self._listener, "http" if self._config.access.tls is None else "https")
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self.server = Server(self._config, self._listener, self._relaunch)
            self._up.set()
            await self.server.run(self._launch, lambda url: self.ready.set())

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error
        finally:
            self._listener.close()

    def start(self) -> None:
        """Start the thread and wait until it accepts connections."""
        self._thread.start()
        assert self._up.wait(10)

    def stop(self, *, times: int = 1) -> None:
        """As `times` signals do."""
        for _ in range(times):
            self._loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def live(engine: Any, relaunch: Callable[..., Any] | None = None, **config: Any) -> Iterator[Live]:
    """A live server that has loaded `engine`; stopped at the end."""
    server = Live(lambda observer: engine, relaunch, **config)
    server.start()
    try:
        assert server.ready.wait(10), server.error
        yield server
    finally:
        with contextlib.suppress(RuntimeError):
            server.stop(times=2)
        server.join()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for something another thread does."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        pause.wait(0.01)
    return condition()


TINY = {
    "model_type": "deepseek_v3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "float32",
}  # fmt: skip
"""A DeepSeek-V3-style model of a few thousand weights, with the vocabulary of `tiny_folder`'s tokenizer."""


def tiny_folder(folder: Path) -> Path:
    """A model folder without weights: every byte a token, 256 `<s>`, 257 `</s>`, and `TEMPLATE`."""
    tokenizer = Tokenizer(BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    rules = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder
