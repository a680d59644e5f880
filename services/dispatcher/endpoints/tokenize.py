"""POST /tokenize and /detokenize: how a prompt is cut, exactly as the generating endpoints would cut it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, TypeVar

from aiohttp import web

from services.dispatcher.answers.generate import refused_by_template
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.messages import count_chars, parse_messages
from services.dispatcher.endpoints.unsupported import TOKENIZE, refuse_unsupported
from services.dispatcher.http.arrival import check_model, note_arrival
from services.dispatcher.http.errors import failure_error, invalid
from services.dispatcher.http.front import Front
from services.dispatcher.session.request import FailureCode
from services.dispatcher.text.pool import TextPoolFullError
from services.dispatcher.text.prompts import PromptCodec, TooManyTokensError
from services.dispatcher.text.template import TemplateRefusalError

R = TypeVar("R")

MAX_CHARS: Final = 1_048_576
"""Characters of one text; a tokenizer needs some 200 bytes of memory for each."""
MAX_LISTED_TOKENS: Final = 250_000
"""Token ids in one answer or question."""
_KNOWN: Final = frozenset(
    {
        *TOKENIZE,
        *("model", "prompt", "messages", "tokens", "add_special_tokens", "add_generation_prompt", "return_token_strs"),
    }
)


async def tokenize(front: Front, request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return the token ids of a prompt or of a conversation."""
    fields = await _fields(front, request)
    refuse_unsupported(fields.values, TOKENIZE)
    encode, param = _encoder(fields, front.codec)
    with_strings = fields.boolean("return_token_strs")
    max_model_len = front.max_request_tokens

    def work() -> bytes:
        ids = encode()
        if len(ids) > MAX_LISTED_TOKENS:
            raise TooManyTokensError(len(ids))
        strings = front.codec.tokens_of(ids) if with_strings else None
        content = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
        return json.dumps(content).encode()

    try:
        body = await _run(front, work)
    except TemplateRefusalError as error:
        raise refused_by_template(error, param) from None
    except TooManyTokensError as error:
        message = f"The text has {error.num_tokens} tokens; at most {MAX_LISTED_TOKENS} are listed."
        raise invalid(FailureCode.TOO_LONG.value, param, message) from None
    return web.Response(body=body, content_type="application/json")


async def detokenize(front: Front, request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return the text of token ids, control tokens included."""
    fields = await _fields(front, request)
    if fields.values.get("tokens") is None:
        raise invalid("missing_required_parameter", "tokens", "Missing required parameter: 'tokens'.")
    ids = fields.tokens("tokens", MAX_LISTED_TOKENS, front.codec.vocab_size)
    body = await _run(front, lambda: json.dumps({"prompt": front.codec.decode(ids)}).encode())
    return web.Response(body=body, content_type="application/json")


async def _fields(front: Front, request: web.BaseRequest) -> Fields:
    body = await note_arrival(front).body(request)
    fields = Fields(body)
    if body.get("model") is not None:
        check_model(front, fields)
    front.unknown_names.note(body, _KNOWN)
    return fields


def _encoder(fields: Fields, codec: PromptCodec) -> tuple[Callable[[], list[int]], str]:
    """Return how to make the ids, and the parameter that holds the text."""
    text, messages = fields.text("prompt"), fields.values.get("messages")
    if (text is None) == (messages is None):
        code = "missing_required_parameter" if text is None else "invalid_value"
        raise invalid(code, "prompt", "Give either 'prompt' or 'messages'.")
    if text is not None:
        _check_size(len(text), "prompt")
        is_special = fields.boolean("add_special_tokens", default=True)
        return lambda: codec.encode_text(text, add_special_tokens=is_special), "prompt"
    conversation = parse_messages(messages)
    _check_size(count_chars(conversation), "messages")
    is_special = fields.boolean("add_special_tokens")
    is_prompt = fields.boolean("add_generation_prompt", default=True)
    return (
        lambda: codec.encode_chat(conversation, add_generation_prompt=is_prompt, add_special_tokens=is_special),
        "messages",
    )


def _check_size(num_chars: int, param: str) -> None:
    if num_chars > MAX_CHARS:
        raise invalid("string_above_max_length", param, f"At most {MAX_CHARS} characters are tokenised at a time.")


async def _run(front: Front, work: Callable[[], R]) -> R:
    try:
        return await front.pool.run(work)
    except TextPoolFullError:
        raise failure_error(FailureCode.QUEUE_FULL) from None
