"""POST /v1/completions: the older interface, a prompt without a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from services.dispatcher.http.arrival import check_model, note_arrival
from services.dispatcher.http.call import Call, Prompt
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.http.fields import Fields, check_token_ids, type_name
from services.dispatcher.http.front import Front
from services.dispatcher.http.generate import generate
from services.dispatcher.http.params import parse_params
from services.dispatcher.http.salt import cache_salt
from services.dispatcher.http.sampling import completion_logprobs
from services.dispatcher.http.unsupported import COMPLETIONS, refuse_unsupported
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
        *("frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "best_of", "logprobs", "echo"),
        *("response_format", "user", "cache_salt"),
    }
)


async def completions(front: Front, request: web.BaseRequest, public_id: str) -> web.StreamResponse:
    """Continue a prompt."""
    arrival = note_arrival(front)
    body = await arrival.body(request)
    fields = Fields(body)
    check_model(front, fields)
    refuse_unsupported(body, COMPLETIONS)
    encode, num_chars = _prompt(body.get("prompt"), front.codec, echo=fields.boolean("echo"))
    params = parse_params(fields, front.rules, completion_logprobs(fields))
    _check_echo(fields)
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
        cache_salt=cache_salt(request.headers, params.salt),
        arrival_s=arrival.arrival_s,
        created_unix_s=arrival.created_unix_s,
    )
    return await generate(front, call, request)


def _check_echo(fields: Fields) -> None:
    if fields.boolean("echo") and fields.values.get("logprobs") is not None:
        raise unsupported("echo", "Log-probabilities of the prompt are not supported: 'echo' excludes 'logprobs'.")


def _prompt(value: Any, codec: PromptCodec, *, echo: bool) -> tuple[Callable[[], Prompt], int]:
    """Return how to make the prompt, and its characters: a string, a list with one string, or token ids."""
    if value is None:
        raise invalid("missing_required_parameter", "prompt", "Missing required parameter: 'prompt'.")
    if isinstance(value, str):
        return lambda: Prompt(codec.encode_text(value), value if echo else ""), len(value)
    if not isinstance(value, list):
        raise invalid("invalid_type", "prompt", f"'prompt' must be a string or an array, not {type_name(value)}.")
    if not value:
        raise invalid("array_below_min_length", "prompt", "'prompt' must not be empty.")
    if isinstance(value[0], str | list):
        return _one_prompt(value, codec, echo=echo)
    ids = check_token_ids(value, "prompt", codec.vocab_size)
    return lambda: Prompt(ids, codec.decode(ids, skip_special_tokens=True) if echo else ""), 0


def _one_prompt(values: list[Any], codec: PromptCodec, *, echo: bool) -> tuple[Callable[[], Prompt], int]:
    if len(values) > MAX_PROMPTS:
        raise invalid("array_above_max_length", "prompt", f"'prompt' takes at most {MAX_PROMPTS} prompts.")
    if len(values) > 1:
        raise unsupported("prompt", "Only one prompt per request is supported.")
    inner = values[0]
    if isinstance(inner, list) and inner and isinstance(inner[0], str | list):
        raise invalid("invalid_type", "prompt", "'prompt' is nested too deeply.")
    return _prompt(inner, codec, echo=echo)
