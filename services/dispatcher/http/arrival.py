"""What every endpoint with a body does first: note the arrival, read the body, find the model."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from aiohttp import web

from services.dispatcher.access.grants import Grant
from services.dispatcher.answers.event_ids import MAX_CHOICES, Seen, parse_last_event_id
from services.dispatcher.answers.idempotency import Retry, derive_retry
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.params import Params
from services.dispatcher.http.body import parse_object, read_body
from services.dispatcher.http.errors import ApiError, failure_error, invalid
from services.dispatcher.http.front import Front
from services.dispatcher.http.guard import grant_of
from services.dispatcher.session.request import FailureCode
from services.dispatcher.text.pool import TextPoolFullError
from shared.api_keys import Tier
from shared.ids import RequestId

R = TypeVar("R")

MAX_ECHOED_CHARS: Final = 64
MAX_SHORT_BYTES: Final = 64 * 1024
"""Of a body that is read on the event loop: what is in a longer one takes its time."""
MAX_SHORT_FORM_BYTES: Final = 8 * 1024
"""The same of one that may hold a schema, which is looked through."""
_ASKS_FORM: Final = re.compile(rb'"(?:json_schema|structured_outputs|guided_[a-z]+)"')
_ASKS_BEST_EFFORT: Final = re.compile(rb'"service_tier"\s*:\s*"flex"')
"""Of a body that has not been read. Within a string its quotes would have a backslash each."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request says besides its parameters."""

    headers: Mapping[str, str]
    public_id: str
    """What `x-request-id` says."""
    grant: Grant
    """What it may do."""

    @property
    def caller(self) -> str:
        """Who asks."""
        return self.grant.identity

    def retry(self, endpoint: str, body: Mapping[str, Any]) -> Retry | None:
        """Return what follows from its key; None without one.

        Raises:
            ApiError: the key is none.
        """
        return derive_retry(self.headers, self.caller, endpoint, body)

    def seen(self, params: Params, num_prompts: int, retry: Retry | None) -> Seen:
        """Return what the client has of each choice; nothing at all for an answer that cannot be resumed.

        Raises:
            ApiError: it says something that cannot be.
        """
        num_choices = num_prompts * params.num_choices
        can_resume = params.stream and retry is not None
        seen = parse_last_event_id(self.headers, num_choices, can_resume=can_resume)
        return seen if can_resume and num_choices <= MAX_CHOICES else ()


@dataclass(frozen=True, slots=True)
class Arrival:
    """When and as what a request came."""

    front: Front
    request_id: RequestId
    """For a request without a key."""
    arrival_s: float
    created_unix_s: int

    async def read(self, request: web.BaseRequest, understand: Callable[[dict[str, Any]], R]) -> R:
        """Return what is understood of the JSON object that was sent; of a long one in a thread.

        Raises:
            ApiError: it is none, or is not understood; 429 if too many wait for the thread.
        """
        settings = self.front.settings
        data = await read_body(request, settings.body_limit, settings.body_limit_s)
        return await at_length(
            self.front, data, lambda: understand(parse_object(data)), max_tier=grant_of(request).tenant.max_tier
        )


def note_arrival(front: Front) -> Arrival:
    """Return a new arrival, now."""
    return Arrival(front, RequestId(uuid.uuid4().hex), front.now(), int(front.unix_now()))


async def at_length(front: Front, data: bytes, work: Callable[[], R], *, max_tier: Tier) -> R:
    """Return the result of reading what came: at once if it is short, else in a thread, one after the other.

    Best effort waits apart: no more of it than one is before somebody else's.

    Args:
        front: whose thread.
        data: what came.
        work: reads it.
        max_tier: of whose it is.

    Raises:
        ApiError: the work raised it; 429 if too many wait.
    """
    if len(data) <= MAX_SHORT_FORM_BYTES or (len(data) <= MAX_SHORT_BYTES and not _ASKS_FORM.search(data)):
        return work()
    if max_tier.is_best_effort or _ASKS_BEST_EFFORT.search(data):
        return await in_thread(partial(front.bodies.run_flex, num_chars=len(data)), work, is_flex=True)
    return await in_thread(front.bodies.run, work)


async def in_thread(
    run: Callable[[Callable[[], R]], Awaitable[R]], work: Callable[[], R], *, is_flex: bool = False
) -> R:
    """Return the result of work that takes its time.

    Args:
        run: of a `TextPool`.
        work: that is done.
        is_flex: it is best effort.

    Raises:
        ApiError: the work raised it; 429 if too many wait for a thread.
    """
    try:
        return await run(work)
    except TextPoolFullError:
        raise failure_error(FailureCode.RESOURCE_UNAVAILABLE if is_flex else FailureCode.QUEUE_FULL) from None


def check_model(front: Front, fields: Fields) -> None:
    """Raise unless the request names the model that is served. The name goes nowhere but into this comparison."""
    name = fields.text("model")
    if name is None:
        raise invalid("missing_required_parameter", "model", "Missing required parameter: 'model'.")
    if name not in front.models:
        raise unknown_model(name)


def unknown_model(name: str) -> ApiError:
    """Return the 404 for a model that is not served."""
    shown = "".join(char if char.isprintable() else "?" for char in name[:MAX_ECHOED_CHARS])
    dots = "…" if len(name) > MAX_ECHOED_CHARS else ""
    return ApiError(404, "model_not_found", f"The model '{shown}{dots}' does not exist.", param="model")
