"""POST /v1/completions: the older interface, a prompt without a chat template."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from services.dispatcher.http.arrival import check_model, note_arrival
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.http.fields import Fields, type_name
from services.dispatcher.http.front import Front
from services.dispatcher.http.generate import Call, generate
from services.dispatcher.http.params import check_token_ids, parse_params
from services.dispatcher.http.unsupported import COMPLETIONS, refuse_completion_logprobs, refuse_unsupported
from services.dispatcher.text.prompts import PromptCodec

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint."""
MAX_PROMPTS: Final = 1024
_KNOWN = frozenset(
    {
        *COMPLETIONS,
        *("model", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "modalities"),
        *("temperature", "top_p", "top_k", "min_p"),
        *("seed", "stop", "stop_token_ids", "ignore_eos", "service_tier", "qoe", "n", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "logprobs", "response_format", "user"),
    }
)


async def completions(front: Front, request: web.BaseRequest, public_id: str) -> web.StreamResponse:
    """Continue a prompt."""
    arrival = note_arrival(front)
    body = await arrival.body(request)
    fields = Fields(body)
    check_model(front, fields)
    refuse_unsupported(body, COMPLETIONS)
    refuse_completion_logprobs(fields)
    encode, num_chars = _prompt(body.get("prompt"), front.codec)
    params = parse_params(fields, front.codec.vocab_size)
    front.unknown_names.note(body, _KNOWN)
    call = Call(
        request_id=arrival.request_id,
        public_id=public_id,
        is_chat=False,
        params=params,
        encode=encode,
        num_chars=num_chars,
        prompt_param="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        arrival_s=arrival.arrival_s,
        created_unix_s=arrival.created_unix_s,
    )
    return await generate(front, call, request)


def _prompt(value: Any, codec: PromptCodec) -> tuple[Callable[[], list[int]], int]:
    """Return how to make the prompt's ids, and its characters: a string, a list with one string, or token ids."""
    if value is None:
        raise invalid("missing_required_parameter", "prompt", "Missing required parameter: 'prompt'.")
    if isinstance(value, str):
        return partial(codec.encode_text, value), len(value)
    if not isinstance(value, list):
        raise invalid("invalid_type", "prompt", f"'prompt' must be a string or an array, not {type_name(value)}.")
    if not value:
        raise invalid("array_below_min_length", "prompt", "'prompt' must not be empty.")
    if isinstance(value[0], str | list):
        return _one_prompt(value, codec)
    ids = check_token_ids(value, "prompt", codec.vocab_size)
    return lambda: ids, 0


def _one_prompt(values: list[Any], codec: PromptCodec) -> tuple[Callable[[], list[int]], int]:
    if len(values) > MAX_PROMPTS:
        raise invalid("array_above_max_length", "prompt", f"'prompt' takes at most {MAX_PROMPTS} prompts.")
    if len(values) > 1:
        raise unsupported("prompt", "Only one prompt per request is supported.")
    inner = values[0]
    if isinstance(inner, list) and inner and isinstance(inner[0], str | list):
        raise invalid("invalid_type", "prompt", "'prompt' is nested too deeply.")
    return _prompt(inner, codec)
