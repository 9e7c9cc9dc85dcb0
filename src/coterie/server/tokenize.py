"""POST /tokenize and /detokenize: exactly the ids that the engine would see, and their text.

The same functions as for chat and completions make the ids; nothing here has rules of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from coterie.engine.sampling_params import check_token_ids
from coterie.server.answers import DetokenizeAnswer, TokenizeAnswer
from coterie.server.errors import bad_request
from coterie.server.logprobs import token_bytes, token_name
from coterie.server.prompts import ChatFields, chat_prompt, encode_messages, encode_text
from coterie.server.protocol import DetokenizeRequest, TokenizeRequest
from coterie.server.state import ServedModel, ServerState

if TYPE_CHECKING:
    from coterie.engine.tokenizer import Tokenizer

A = TypeVar("A")
R = TypeVar("R")

_INLINE_IDS = 4096
"""Up to so many ids are spelled at once, more on a thread."""


async def tokenize(state: ServerState, model: ServedModel, request: TokenizeRequest) -> TokenizeAnswer:
    """Ids of a raw prompt or of a chat's messages."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("prompt: give either prompt or messages", param="prompt")
    if request.messages is not None:
        fields = ChatFields(
            request.add_generation_prompt, request.reasoning_effort, request.chat_template_kwargs, request.tools
        )
        prompt = await encode_messages(model, chat_prompt(request.messages, fields, state.config.max_messages))
        ids = prompt.token_ids
    else:
        special = request.add_special_tokens is not False
        ids = await encode_text(model, request.prompt or "", add_special_tokens=special)
    names = await _off_the_loop(len(ids), _names, model, ids) if request.return_token_strs else None
    return TokenizeAnswer(count=len(ids), max_model_len=model.engine.max_model_len, tokens=ids, token_strs=names)


async def detokenize(state: ServerState, model: ServedModel, request: DetokenizeRequest) -> DetokenizeAnswer:
    """Text of ids, special tokens included."""
    if model.tokenizer is None:
        raise bad_request(f"{model.name} has no tokenizer", param="tokens")
    check_token_ids("tokens", request.tokens, model.engine.spec.vocab_size)
    return DetokenizeAnswer(await _off_the_loop(len(request.tokens), _text, model.tokenizer, request.tokens))


async def _off_the_loop(size: int, function: Callable[[A, list[int]], R], argument: A, ids: list[int]) -> R:
    """Run at once for a few ids, on a thread for many: other requests go on meanwhile."""
    if size <= _INLINE_IDS:
        return function(argument, ids)
    return await asyncio.to_thread(function, argument, ids)


def _names(model: ServedModel, ids: list[int]) -> list[str]:
    return [token_name(token_bytes(model.tokenizer, i)) for i in ids]


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)
