"""The parameters that chat and completions share, checked and put into our own terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from services.dispatcher.http.errors import invalid
from services.dispatcher.http.fields import Fields, type_name
from shared.types import MAX_SEED, QoeTarget, RequestClass, SamplingParams

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 512
MAX_MAX_TOKENS: Final = 2**31 - 1
"""Largest `max_tokens` that is understood; what exceeds the context is cut to it."""

SERVICE_TIERS: Final[dict[str, tuple[RequestClass, str]]] = {
    "auto": (RequestClass.REAL_TIME, "default"),
    "default": (RequestClass.REAL_TIME, "default"),
    "scale": (RequestClass.REAL_TIME, "default"),
    "priority": (RequestClass.REAL_TIME, "default"),
    "fast": (RequestClass.REAL_TIME, "default"),
    "flex": (RequestClass.BEST_EFFORT, "flex"),
}
"""What is asked for -> (class, the tier that is really used; nobody has a right to priority yet)."""


@dataclass(frozen=True, slots=True)
class Params:
    """One request's parameters, as far as they do not depend on the prompt."""

    stream: bool
    include_usage: bool
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    service_tier: str
    """The tier that is really used."""
    request_class: RequestClass
    qoe: QoeTarget | None
    """None if no reader follows the answer (not streamed)."""

    def sampling(self, max_tokens: int, draw_seed: Callable[[], int]) -> SamplingParams:
        """Return the sampling parameters; a seed is drawn if none was given, so that any worker continues alike."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=draw_seed() if self.seed is None else self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


def parse_params(fields: Fields, vocab_size: int) -> Params:
    """Return the shared parameters.

    Raises:
        ApiError: the first one that is not allowed.
    """
    stream = fields.boolean("stream")
    tier, request_class = _service_tier(fields)
    return Params(
        stream=stream,
        include_usage=_include_usage(fields, stream=stream),
        max_tokens=_max_tokens(fields),
        temperature=_or(fields.number("temperature", 0, 2), 1.0),
        top_p=_or(fields.number("top_p", 0, 1, above=True), 1.0),
        top_k=max(0, fields.integer("top_k", -1, MAX_MAX_TOKENS) or 0),
        seed=fields.integer("seed", -(2**63), MAX_SEED),
        stops=_stops(fields.values.get("stop")),
        stop_token_ids=_stop_token_ids(fields.values.get("stop_token_ids"), vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        service_tier=tier,
        request_class=request_class,
        qoe=_qoe(fields, stream=stream),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("invalid_value", "stream_options", "'stream_options' needs 'stream' to be true.")
    return options.boolean("include_usage")


def _max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, MAX_MAX_TOKENS)
    new = fields.integer("max_completion_tokens", 1, MAX_MAX_TOKENS)
    if old is not None and new is not None and old != new:
        message = "'max_tokens' and 'max_completion_tokens' differ; give one of them."
        raise invalid("invalid_value", "max_completion_tokens", message)
    return old if new is None else new


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise invalid("invalid_type", "stop", f"'stop' must be a string or an array, not {type_name(value)}.")
    if len(stops) > MAX_STOPS:
        raise invalid("array_above_max_length", "stop", f"'stop' takes at most {MAX_STOPS} strings.")
    for stop in stops:
        if not isinstance(stop, str):
            raise invalid("invalid_type", "stop", f"'stop' takes strings, not {type_name(stop)}.")
        if not stop:
            raise invalid("string_below_min_length", "stop", "A stop string must not be empty.")
        if len(stop) > MAX_STOP_CHARS:
            raise invalid("string_above_max_length", "stop", f"A stop string has at most {MAX_STOP_CHARS} characters.")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid("invalid_type", "stop_token_ids", "'stop_token_ids' must be an array of token ids.")
    if len(value) > 64:
        raise invalid("array_above_max_length", "stop_token_ids", "'stop_token_ids' takes at most 64 ids.")
    return tuple(check_token_ids(value, "stop_token_ids", vocab_size))


def check_token_ids(values: list[Any], param: str, vocab_size: int) -> list[int]:
    """Return the ids if each is an integer of the vocabulary.

    Raises:
        ApiError: one is not.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid("invalid_type", param, f"'{param}' must have integers only, not {type_name(value)}.")
        if not 0 <= value < vocab_size:
            code = "integer_below_min_value" if value < 0 else "integer_above_max_value"
            raise invalid(code, param, f"'{param}' has a token id outside of the vocabulary (0 to {vocab_size - 1}).")
    return values


def _service_tier(fields: Fields) -> tuple[str, RequestClass]:
    name = fields.text("service_tier") or "auto"
    if name not in SERVICE_TIERS:
        message = f"'service_tier' must be one of {', '.join(SERVICE_TIERS)}."
        raise invalid("invalid_value", "service_tier", message)
    request_class, tier = SERVICE_TIERS[name]
    return tier, request_class


def _qoe(fields: Fields, *, stream: bool) -> QoeTarget | None:
    given = fields.mapping("qoe")
    default = QoeTarget()
    if given is None:
        return default if stream else None
    ttft_s = given.number("ttft_s", 0, 3600, above=True)
    speed = given.number("speed_tokens_per_s", 0, 10_000, above=True)
    if not stream:
        return None
    return QoeTarget(ttft_s=_or(ttft_s, default.ttft_s), speed_tokens_per_s=_or(speed, default.speed_tokens_per_s))
