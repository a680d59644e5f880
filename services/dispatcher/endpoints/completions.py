"""POST /v1/completions: the older interface, a prompt without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from services.dispatcher.endpoints.call import CheckedCall, Prompt
from services.dispatcher.endpoints.fields import Fields, check_token_ids, type_name
from services.dispatcher.endpoints.guide_check import read_guide
from services.dispatcher.endpoints.params import parse_params
from services.dispatcher.endpoints.salt import cache_salt
from services.dispatcher.endpoints.sampling import completion_logprobs
from services.dispatcher.endpoints.unsupported import COMPLETIONS, SHARED_NAMES, refuse_unsupported
from services.dispatcher.http.arrival import Arrival, Caller, check_model
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.text.prompts import PromptCodec, TooManyTokensError
from shared.messages.request import MAX_PROMPT_TOKENS, pack_token_ids

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint."""
MAX_PROMPTS: Final = 1024
MAX_ECHOED_CHARS: Final = 1_048_576
"""Of one prompt: a stream has it in one event."""
_KNOWN = frozenset({*COMPLETIONS, *SHARED_NAMES, "prompt", "echo"})


def completion_call(arrival: Arrival, sender: Caller, body: dict[str, Any]) -> CheckedCall:
    """Return the checked request.

    Raises:
        ApiError: the first parameter that is not allowed.
    """
    front, fields = arrival.front, Fields(body)
    check_model(front, fields)
    refuse_unsupported(body, COMPLETIONS)
    prompts = _prompts(body.get("prompt"), front.codec.vocab_size)
    echo = fields.boolean("echo")
    logprobs = completion_logprobs(fields)
    params = parse_params(fields, front.rules_for(sender.grant), logprobs, read_guide(front, fields))
    _check_count(len(prompts), params.num_choices, front.rules.max_choices)
    if echo and logprobs is not None:
        raise unsupported("echo", "Log-probabilities of the prompt are not supported: 'echo' excludes 'logprobs'.")
    front.unknown_names.note(body, _KNOWN)
    retry = sender.retry("completions", body)
    return CheckedCall(
        request_id=arrival.request_id if retry is None else retry.request_id,
        public_id=sender.public_id,
        is_chat=False,
        params=params,
        encode=lambda: [_encode(prompt, front.codec, echo=echo) for prompt in prompts],
        num_prompts=len(prompts),
        num_chars=max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0),
        prompt_param="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        cache_salt=cache_salt(sender.caller, params.salt),
        grant=sender.grant,
        arrival_s=arrival.arrival_s,
        created_unix_s=arrival.created_unix_s,
        retry=retry,
        seen=sender.seen(params, len(prompts), retry),
    )


def _check_count(num_prompts: int, num_choices: int, most: int) -> None:
    if num_prompts * num_choices > most:
        message = f"This server takes at most {most} choices in one request, over all prompts."
        raise invalid("array_above_max_length", "prompt", message)


def _encode(prompt: str | list[int], codec: PromptCodec, *, echo: bool) -> Prompt:
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPT_TOKENS:
        raise TooManyTokensError(len(prompt))
    text = ""
    if echo:
        text = prompt if isinstance(prompt, str) else codec.decode(prompt, skip_special_tokens=True)
        if len(text) > MAX_ECHOED_CHARS:
            message = f"At most {MAX_ECHOED_CHARS} characters of a prompt are echoed; this one has {len(text)}."
            raise invalid("string_above_max_length", "prompt", message)
    return Prompt(pack_token_ids(codec.encode_text(prompt) if isinstance(prompt, str) else prompt), text)


def _prompts(value: Any, vocab_size: int) -> Sequence[str | list[int]]:
    """Return the prompts: all of them texts, or all of them token ids."""
    if value is None:
        raise invalid("missing_required_parameter", "prompt", "Missing required parameter: 'prompt'.")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("invalid_type", "prompt", f"'prompt' must be a string or an array, not {type_name(value)}.")
    if not value:
        raise invalid("array_below_min_length", "prompt", "'prompt' must not be empty.")
    if not isinstance(value[0], str | list):
        return [check_token_ids(value, "prompt", vocab_size)]
    if len(value) > MAX_PROMPTS:
        raise invalid("array_above_max_length", "prompt", f"'prompt' takes at most {MAX_PROMPTS} prompts.")
    kind = type(value[0])
    if not all(isinstance(inner, kind) for inner in value):
        raise invalid("invalid_type", "prompt", "The prompts must be all strings, or all arrays of token ids.")
    return value if kind is str else [_ids(inner, index, vocab_size) for index, inner in enumerate(value)]


def _ids(value: list[Any], index: int, vocab_size: int) -> list[int]:
    path = f"prompt.{index}"
    if not value:
        raise invalid("array_below_min_length", path, f"'{path}' must not be empty.")
    return check_token_ids(value, path, vocab_size)
