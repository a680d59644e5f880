"""What the dispatcher says of its cluster and of its requests, asked once."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from cli.exit_codes import FAILED, CommandError
from cli.http import ask
from cli.status import ask_cluster
from shared.messages.report import ClusterView
from shared.open_requests import OpenRequests

LIMIT_S = 5.0
"""For each of two answers."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was said."""

    model: str
    view: ClusterView | None
    """None: the monitor has written none yet."""
    view_age_s: float
    """Of the view when it was asked for."""
    requests: OpenRequests | None
    """None: the server lists none, as one of an older version."""


async def look(session: aiohttp.ClientSession, url: str, api_key: str) -> Look:
    """Return what is said now.

    Raises:
        CommandError: nothing answers, or it is refused, or not understood.
    """
    fields, view = await ask_cluster(url, api_key, limit_s=LIMIT_S, session=session)
    own, age_s = fields.get("dispatcher"), fields.get("age_s")
    model = str(own.get("model", "")) if isinstance(own, dict) else ""
    age_s = age_s if isinstance(age_s, int | float) else 0.0
    return Look(model, view, age_s, await _ask_requests(session, url, api_key))


async def _ask_requests(session: aiohttp.ClientSession, url: str, api_key: str) -> OpenRequests | None:
    answer = await ask(f"{url}/v1/requests", api_key=api_key, limit_s=LIMIT_S, session=session)
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise CommandError(f"{url} answers {answer.status} to /v1/requests", code=FAILED)
    try:
        return OpenRequests.model_validate_json(answer.body)
    except ValueError as error:
        hint = "Use the `sluice` of the same version"
        raise CommandError(f"{url} describes its requests in an unknown way: {error}", hint, FAILED) from error
