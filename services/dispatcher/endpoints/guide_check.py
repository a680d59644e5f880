"""What asks for a form of its answer is read, counted, and tried before any worker hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.guided import Guide, parse_guide
from services.dispatcher.http.errors import ApiError, invalid, unsupported
from services.dispatcher.http.front import Front
from services.dispatcher.text.grammar_trials import NoTrialsError

ONE_OF_HEADER: Final = "x-sluice-one-of"
"""Of an answer that is held to less than its schema says: `any-of`, its `oneOf` is taken as `anyOf`."""
_ONE_OF_HINT: Final = "'strict': false in 'json_schema' has it taken as 'anyOf'."


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer is held to, tried."""

    grammar: bytes
    """As workers get it."""
    is_coerced: bool
    """A `oneOf` of it is taken as `anyOf`."""


def read_guide(front: Front, fields: Fields) -> Guide | None:
    """Return what the answer is to be held to; a refusal counts. See `parse_guide`."""
    try:
        return parse_guide(fields)
    except ApiError as error:
        front.metrics.guided(error.code or "")
        raise


async def check_grammar(front: Front, guide: Guide, tenant: str) -> Held:
    """Return the grammar as workers get it, tried in the child process, now or before.

    Args:
        front: the parts to work with.
        guide: a grammar that nobody has compiled.
        tenant: who waits for it.

    Raises:
        ApiError: it does not compile, nothing matches it, or it takes too much.
        TrialsFullError: too many wait.
    """
    try:
        verdict = await front.trials.verdict(guide.grammar, tenant)
    except NoTrialsError:
        raise unsupported(
            guide.param, "This model's tokenizer is of a kind over which no grammar can be made."
        ) from None
    if verdict.is_costly:
        front.metrics.guided("grammar_too_costly")
        message = f"'{guide.param}' takes too much time or memory to be held. Make it smaller."
        raise invalid("grammar_too_costly", guide.param, message)
    if verdict.reason:
        front.metrics.guided(guide.code.value)
        hint = f" {_ONE_OF_HINT}" if "coerce_one_of" in verdict.reason else ""
        raise invalid(guide.code.value, guide.param, f"'{guide.param}' is refused: {verdict.reason}.{hint}")
    front.metrics.guided("coerced" if verdict.is_coerced else "accepted")
    return Held(verdict.converted or guide.grammar, verdict.is_coerced)
