"""Small HTTP questions to a dispatcher."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from cli.exit_codes import UNREACHABLE, CommandError

MAX_ANSWER_BYTES = 8 * 1024**2


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a body."""

    status: int
    body: bytes


async def ask(url: str, *, api_key: str = "", limit_s: float = 5.0) -> Answer:
    """Return what GET says; a key is sent along if there is one.

    Raises:
        CommandError: nothing answers there, or no HTTP, or not within the time.
    """
    timeout = aiohttp.ClientTimeout(total=limit_s)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, session.get(url) as response:
            return Answer(response.status, await response.content.read(MAX_ANSWER_BYTES))
    except aiohttp.InvalidURL as error:
        raise CommandError(f"'{url}' is no URL", "Use --url http://127.0.0.1:8000", UNREACHABLE) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = "no answer in time" if isinstance(error, asyncio.TimeoutError) else type(error).__name__
        hint = "Start a cluster with `sluice up`, or name another with --url"
        raise CommandError(f"nothing answers at {url} ({reason})", hint, UNREACHABLE) from error
