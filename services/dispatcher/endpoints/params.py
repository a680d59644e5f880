"""The parameters that chat and completions share, checked and put into our own terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from services.dispatcher.endpoints.fields import Fields, type_name
from services.dispatcher.endpoints.salt import parse_salt
from services.dispatcher.endpoints.sampling import MAX_INT, Sampling, parse_sampling
from services.dispatcher.http.errors import invalid, unsupported
from services.dispatcher.text.generation_config import SamplingDefaults
from shared.api_keys import Tier
from shared.types import LatencyLimits, ReaderTarget

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 512
MAX_CHOICES: Final = 128
MAX_USER_CHARS: Final = 64
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512

SERVICE_TIERS: Final[dict[str, Tier]] = {
    "auto": Tier.DEFAULT,
    "default": Tier.DEFAULT,
    "scale": Tier.DEFAULT,
    "priority": Tier.PRIORITY,
    "fast": Tier.PRIORITY,
    "flex": Tier.FLEX,
}
"""What is asked for -> what is given to whom may have it."""


@dataclass(frozen=True, slots=True)
class ParamRules:
    """What is allowed, and what holds for a parameter that is not given."""

    vocab_size: int
    defaults: SamplingDefaults
    max_choices: int
    """Choices of one request, over all its prompts."""
    max_tier: Tier = Tier.DEFAULT
    """The most urgent tier that the sender gets; more is asked for in vain."""


@dataclass(frozen=True, slots=True)
class Params:
    """One request's parameters, as far as they do not depend on the prompt."""

    stream: bool
    include_usage: bool
    num_choices: int
    max_tokens: int | None
    """As asked for, at most 2³¹ − 1; what exceeds the context is cut to it."""
    sampling: Sampling
    stops: tuple[str, ...]
    tier: Tier
    """The one that is really used."""
    qoe: ReaderTarget | None
    """None if no reader follows the answer: it is not streamed, or best effort."""
    slo: LatencyLimits | None
    """None if the request says nothing of it."""
    salt: str
    """The request's own."""

    def held_to(self, grammar: bytes) -> Params:
        """Return the parameters of answers that have to match a grammar.

        Raises:
            ApiError: something else is to end them.
        """
        for name, is_given in (("stop", self.stops), ("stop_token_ids", self.sampling.common.stop_token_ids)):
            if is_given:
                raise invalid("invalid_value", name, f"'{name}' does not go with an answer that is held to a schema.")
        return replace(self, sampling=self.sampling.held_to(grammar))

    @property
    def service_tier(self) -> str:
        """The tier's name, as the answer has it."""
        return self.tier.label


def parse_params(fields: Fields, rules: ParamRules, logprobs: int | None) -> Params:
    """Return the shared parameters.

    Args:
        fields: of the request.
        rules: of this dispatcher and its model.
        logprobs: see `SamplingParams.logprobs`; the endpoints have different names for it.

    Raises:
        ApiError: the first one that is not allowed.
    """
    _check_labels(fields)
    stream, tier = fields.boolean("stream"), _tier(fields, rules.max_tier)
    params = Params(
        stream=stream,
        include_usage=_include_usage(fields, stream=stream),
        num_choices=_num_choices(fields, rules),
        max_tokens=_max_tokens(fields),
        sampling=parse_sampling(fields, rules.vocab_size, rules.defaults, logprobs),
        stops=_stops(fields.values.get("stop")),
        tier=tier,
        qoe=_qoe(fields, is_read=stream and not tier.is_best_effort),
        slo=_slo(fields),
        salt=parse_salt(fields),
    )
    if params.max_tokens is not None and params.sampling.common.min_tokens > params.max_tokens:
        raise invalid("invalid_value", "min_tokens", "'min_tokens' must not be above 'max_tokens'.")
    return params


def _check_labels(fields: Fields) -> None:
    """Raise unless `user` and `metadata` are as OpenAI has them; nothing here reads them."""
    user = fields.text("user")
    if user is not None and len(user) > MAX_USER_CHARS:
        raise invalid("string_above_max_length", "user", f"'user' has at most {MAX_USER_CHARS} characters.")
    metadata = fields.mapping("metadata")
    if metadata is None:
        return
    if len(metadata.values) > MAX_METADATA_PAIRS:
        raise invalid("object_above_max_length", "metadata", f"'metadata' has at most {MAX_METADATA_PAIRS} pairs.")
    for key, value in metadata.values.items():
        if not isinstance(value, str):
            raise invalid(
                "invalid_type", "metadata", f"The values of 'metadata' must be strings, not {type_name(value)}."
            )
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            lengths = f"{MAX_METADATA_KEY_CHARS} characters, and its values {MAX_METADATA_VALUE_CHARS}"
            raise invalid("string_above_max_length", "metadata", f"The keys of 'metadata' have at most {lengths}.")


def _num_choices(fields: Fields, rules: ParamRules) -> int:
    count = fields.integer("n", 1, MAX_CHOICES) or 1
    if count > rules.max_choices:
        message = f"This server takes at most {rules.max_choices} choices in one request."
        raise invalid("integer_above_max_value", "n", message)
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of < count:
        raise invalid("invalid_value", "best_of", "'best_of' must not be below 'n'.")
    if best_of is not None and best_of > count:
        raise unsupported("best_of", "Choosing the best of several answers is not supported: 'best_of' must be 'n'.")
    return count


def _include_usage(fields: Fields, *, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    include_usage = options is not None and options.boolean("include_usage")
    if include_usage and not stream:
        raise invalid("invalid_value", "stream_options", "'stream_options' needs 'stream' to be true.")
    return include_usage


def _max_tokens(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", 1, MAX_INT)
    new = fields.integer("max_completion_tokens", 1, MAX_INT)
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


def _tier(fields: Fields, most: Tier) -> Tier:
    name = fields.text("service_tier") or "auto"
    if name not in SERVICE_TIERS:
        message = f"'service_tier' must be one of {', '.join(SERVICE_TIERS)}."
        raise invalid("invalid_value", "service_tier", message)
    return min(SERVICE_TIERS[name], most)


def _qoe(fields: Fields, *, is_read: bool) -> ReaderTarget | None:
    given = fields.mapping("qoe")
    default = ReaderTarget()
    if given is None:
        return default if is_read else None
    ttft_s = given.number("ttft_s", 0, 3600, above=True)
    speed = given.number("speed_tokens_per_s", 0, 10_000, above=True)
    if not is_read:
        return None
    return ReaderTarget(
        ttft_s=default.ttft_s if ttft_s is None else ttft_s,
        speed_tokens_per_s=default.speed_tokens_per_s if speed is None else speed,
    )


def _slo(fields: Fields) -> LatencyLimits | None:
    given = fields.mapping("slo")
    if given is None:
        return None
    ttft_s = given.number("ttft_s", 0, 3600, above=True)
    return LatencyLimits(ttft_s=ttft_s, tpot_s=given.number("tpot_s", 0, 3600, above=True))
