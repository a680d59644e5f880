"""POST /tokenize and /detokenize: how a prompt is cut, exactly as the generating endpoints would cut it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from aiohttp import web

from services.dispatcher.answers.answer_text import json_text_parts
from services.dispatcher.answers.generate import refused_by_template, untokenizable
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.messages import count_chars, parse_messages
from services.dispatcher.endpoints.template_kwargs import NAMES, parse_prompt_end, parse_template_kwargs
from services.dispatcher.endpoints.tools import check_reads_tools, parse_tools
from services.dispatcher.endpoints.unsupported import TOKENIZE, refuse_unsupported
from services.dispatcher.http.arrival import check_model, in_thread, note_arrival
from services.dispatcher.http.errors import ApiError, invalid
from services.dispatcher.http.front import Front
from services.dispatcher.http.sse import WholeAnswer
from services.dispatcher.session.request import FailureCode
from services.dispatcher.text.prompts import PromptCodec, TooManyTokensError, UntokenizableError
from services.dispatcher.text.template import TemplateRefusalError

MAX_CHARS: Final = 1_048_576
"""Characters of one text; a tokenizer needs some 200 bytes of memory for each."""
MAX_LISTED_TOKENS: Final = 250_000
"""Token ids in one answer or question."""
ENTRIES_AT_A_TIME: Final = 4096
"""Entries of an array that are written as JSON at a time."""
_KNOWN: Final = frozenset(
    {
        *TOKENIZE,
        *NAMES,
        *("model", "prompt", "messages", "tokens", "add_special_tokens", "return_token_strs"),
        "tools",
    }
)


async def tokenize(front: Front, request: web.BaseRequest, _public_id: str) -> web.StreamResponse:
    """Return the token ids of a prompt or of a conversation."""
    work = await note_arrival(front).read(request, partial(_tokenizing, front))
    ids, strings = await in_thread(front.pool.run, work)
    return WholeAnswer(front.streams, _listed(ids, strings, front.max_request_tokens), {})


def _tokenizing(front: Front, body: dict[str, Any]) -> Callable[[], tuple[list[int], list[str] | None]]:
    """Return how to make the ids, and the tokens if they are asked for."""
    fields = _fields(front, body)
    refuse_unsupported(body, TOKENIZE)
    encode, param = _encoder(fields, front.codec)
    with_strings = fields.boolean("return_token_strs")

    def work() -> tuple[list[int], list[str] | None]:
        try:
            ids = encode()
        except TemplateRefusalError as error:
            raise refused_by_template(error, param) from None
        except TooManyTokensError as error:
            raise _too_many(error.num_tokens, param) from None
        except UntokenizableError as error:
            raise untokenizable(error, param) from None
        if len(ids) > MAX_LISTED_TOKENS:
            raise _too_many(len(ids), param)
        return ids, front.codec.tokens_of(ids) if with_strings else None

    return work


def _too_many(num_tokens: int, param: str) -> ApiError:
    message = f"The text has {num_tokens} tokens; at most {MAX_LISTED_TOKENS} are listed."
    return invalid(FailureCode.TOO_LONG.value, param, message)


def _listed(ids: Sequence[int], strings: Sequence[str] | None, max_model_len: int) -> Iterator[bytes]:
    """Return the answer of `tokenize` as JSON, some entries at a time."""
    yield f'{{"count": {len(ids)}, "max_model_len": {max_model_len}, "tokens": '.encode()
    yield from _array(ids)
    yield b', "token_strs": '
    if strings is None:
        yield b"null"
    else:
        yield from _array(strings)
    yield b"}"


def _array(values: Sequence[int] | Sequence[str]) -> Iterator[bytes]:
    before = "["
    for start in range(0, len(values), ENTRIES_AT_A_TIME):
        yield (before + json.dumps(values[start : start + ENTRIES_AT_A_TIME])[1:-1]).encode()
        before = ", "
    yield b"]" if values else b"[]"


async def detokenize(front: Front, request: web.BaseRequest, _public_id: str) -> web.StreamResponse:
    """Return the text of token ids, control tokens included."""
    ids = await note_arrival(front).read(request, partial(_ids_of, front))
    text = await in_thread(front.pool.run, lambda: front.codec.decode(ids))
    return WholeAnswer(front.streams, chain((b'{"prompt": ',), json_text_parts(text), (b"}",)), {})


def _ids_of(front: Front, body: dict[str, Any]) -> tuple[int, ...]:
    fields = _fields(front, body)
    if body.get("tokens") is None:
        raise invalid("missing_required_parameter", "tokens", "Missing required parameter: 'tokens'.")
    return fields.tokens("tokens", MAX_LISTED_TOKENS, front.codec.vocab_size)


def _fields(front: Front, body: dict[str, Any]) -> Fields:
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
    tools = parse_tools(fields.values.get("tools"))
    if tools:
        check_reads_tools(codec.tool_template)
    _check_size(count_chars(conversation), "messages")
    is_special = fields.boolean("add_special_tokens")
    end = parse_prompt_end(fields, conversation)
    definitions = [tool.definition for tool in tools] or None
    kwargs = parse_template_kwargs(fields, codec.template_for(conversation, definitions))
    encode = partial(codec.encode_chat, add_special_tokens=is_special, kwargs=kwargs, tools=definitions)
    return partial(
        encode, conversation, add_generation_prompt=end.begins_answer, continues_last=end.continues_last
    ), "messages"


def _check_size(num_chars: int, param: str) -> None:
    if num_chars > MAX_CHARS:
        raise invalid("string_above_max_length", param, f"At most {MAX_CHARS} characters are tokenised at a time.")
