"""How the next token is chosen: the parameters of a request that go to the worker, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.http.errors import invalid
from services.dispatcher.text.generation_config import SamplingDefaults
from shared.types import MAX_LOGIT_BIAS, MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams, Thinking

MAX_INT: Final = 2**31 - 1
MAX_COMPLETION_LOGPROBS: Final = 5
"""OpenAI's limit for `/v1/completions`."""
MAX_STOP_TOKEN_IDS: Final = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, as far as it does not depend on the prompt."""

    common: SamplingParams
    """Of every choice, but for its seed and what is cut to the context: `max_tokens` and `min_tokens`."""
    seed: int | None
    """None: one is drawn, so that any worker continues alike."""
    thinking_budget: int | None = None
    """See `Thinking.budget`."""

    def held_to(self, grammar: bytes) -> Sampling:
        """Return the same of answers that have to match a grammar, and end where it ends."""
        held = {"grammar": grammar, "min_tokens": 0, "ignore_eos": False}
        return replace(self, common=self.common.model_copy(update=held))

    def choices(
        self, count: int, max_tokens: int, drawn_seed: int, thinking: Thinking | None = None
    ) -> list[SamplingParams]:
        """Return the parameters of each choice: they differ in their seeds, which count up.

        Args:
            count: `n`.
            max_tokens: what the context holds after the prompt, or less.
            drawn_seed: used if the request names none.
            thinking: of the answers to the prompt.
        """
        seed = drawn_seed if self.seed is None else self.seed
        cut = {
            "max_tokens": max_tokens,
            "min_tokens": min(self.common.min_tokens, max_tokens),
            "thinking": thinking,
        }
        return [self.common.model_copy(update={**cut, "seed": _nth_seed(seed, index)}) for index in range(count)]


def _nth_seed(seed: int, index: int) -> int:
    """Return seed + index; after the largest seed comes the smallest."""
    return (seed + index + MAX_SEED + 1) % (2 * MAX_SEED + 2) - MAX_SEED - 1


def parse_sampling(fields: Fields, vocab_size: int, defaults: SamplingDefaults, logprobs: int | None) -> Sampling:
    """Return how to sample.

    Args:
        fields: of the request.
        vocab_size: ids are below this.
        defaults: the model's.
        logprobs: from `chat_logprobs` or `completion_logprobs`.

    Raises:
        ApiError: the first parameter that is not allowed.
    """
    top_k = fields.integer("top_k", -1, MAX_INT)
    common = SamplingParams(
        max_tokens=MAX_INT,
        temperature=_or(fields.number("temperature", 0, 2), defaults.temperature),
        top_p=_or(fields.number("top_p", 0, 1, above=True), defaults.top_p),
        top_k=defaults.top_k if top_k is None else max(0, top_k),
        min_p=_or(fields.number("min_p", 0, 1), defaults.min_p),
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=_or(fields.number("repetition_penalty", 0, 2, above=True), defaults.repetition_penalty),
        logit_bias=_logit_bias(fields.mapping("logit_bias"), vocab_size),
        min_tokens=fields.integer("min_tokens", 0, MAX_INT) or 0,
        seed=fields.integer("seed", -(2**63), MAX_SEED) or 0,
        stop_token_ids=fields.tokens("stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        logprobs=logprobs,
    )
    budget = fields.integer("thinking_token_budget", 0, MAX_INT)
    return Sampling(common, None if fields.values.get("seed") is None else common.seed, budget)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def chat_logprobs(fields: Fields) -> int | None:
    """Return how many alternatives a chat request wants with each token; None if no log-probabilities at all."""
    wanted = fields.boolean("logprobs")
    number = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if number and not wanted:
        raise invalid("invalid_value", "top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    return number if wanted else None


def completion_logprobs(fields: Fields) -> int | None:
    """Return how many alternatives a completion wants with each token; None if no log-probabilities at all.

    `false`, which is chat's way to say so, means the same here.
    """
    if fields.values.get("logprobs") is False:
        return None
    return fields.integer("logprobs", 0, MAX_COMPLETION_LOGPROBS)


def _logit_bias(bias: Fields | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return (id, bias) by id."""
    if bias is None:
        return ()
    if len(bias.values) > MAX_LOGIT_BIAS:
        message = f"'logit_bias' has more than {MAX_LOGIT_BIAS} entries."
        raise invalid("object_above_max_length", "logit_bias", message)
    return tuple(sorted(_bias_entry(key, bias.values, vocab_size) for key in bias.values))


def _bias_entry(key: str, bias: Mapping[str, Any], vocab_size: int) -> tuple[int, float]:
    value = bias[key]
    if not key.isascii() or not key.isdecimal() or len(key) > 10 or str(int(key)) != key:
        raise invalid("invalid_value", "logit_bias", "The keys of 'logit_bias' must be token ids.")
    if int(key) >= vocab_size:
        message = f"'logit_bias' has a token id outside of the vocabulary (0 to {vocab_size - 1})."
        raise invalid("integer_above_max_value", "logit_bias", message)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid("invalid_type", "logit_bias", "The values of 'logit_bias' must be numbers.")
    if not -100 <= value <= 100:
        code = "decimal_above_max_value" if value > 0 else "decimal_below_min_value"
        raise invalid(code, "logit_bias", "The values of 'logit_bias' must be from -100 to 100.")
    return int(key), float(value)
