"""Small HTTP questions to a dispatcher."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from cli.exit_codes import REFUSED, UNREACHABLE, CommandError
from shared.browsers import Foreign
from shared.troubleshooting import sections
from sluice_client.transport import describe

MAX_ANSWER_BYTES = 8 * 1024**2
MAX_VIEW_BYTES = 256 * 1024**2
"""Of `/v1/cluster`: 2.5 KB for each worker."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A status and a body."""

    status: int
    body: bytes


def is_url(text: str) -> bool:
    """Return whether a text is the address of a web server."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def check_url(text: str) -> str:
    """Return what was given with --url without what comes behind: `sluice up` prints it with `/v1`.

    Raises:
        CommandError: it is no URL.
    """
    if not is_url(text):
        raise CommandError(f"'{text}' is no URL", "Use --url http://127.0.0.1:8000", REFUSED)
    return text.rstrip("/").removesuffix("/v1")


def refusal_hint(said: str, key_hint: str) -> str:
    """Return what to do about a 401 or 403: give a key, or ask a server without keys by a name that it knows.

    Args:
        said: code of the error, or all that came.
        key_hint: what to do about a key.
    """
    return "Ask by its address, or start the server with --allow-host" if Foreign.HOST in said else key_hint


def topic_of(said: str) -> str:
    """Return the code of a server's error if there is a section about it, else "".

    Args:
        said: the code, or the JSON of the error.
    """
    return next((code for code in sections() if code == said or f'"{code}"' in said), "")


async def read_body(response: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return the whole body, or its beginning if it is longer than `max_bytes`; one read gives only what is there."""
    parts: list[bytes] = []
    left = max_bytes
    while left and (part := await response.content.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


async def ask(
    url: str,
    *,
    api_key: str = "",
    limit_s: float = 5.0,
    max_bytes: int = MAX_ANSWER_BYTES,
    session: aiohttp.ClientSession | None = None,
) -> HttpAnswer:
    """Return what GET says; a key is sent along if there is one. Of a longer body so many bytes are read.

    Args:
        url: to ask.
        api_key: "": none.
        limit_s: seconds until the whole answer must be there.
        max_bytes: of a body that are read.
        session: of who asks often, whose connections are kept; None: one for this question.

    Raises:
        CommandError: nothing answers there, or no HTTP, or not within the time; or it is no URL.
    """
    timeout = aiohttp.ClientTimeout(total=limit_s)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            nullcontext(session) if session is not None else aiohttp.ClientSession() as used,
            used.get(url, timeout=timeout, headers=headers) as response,
        ):
            return HttpAnswer(response.status, await read_body(response, max_bytes))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = "no answer in time" if isinstance(error, asyncio.TimeoutError) else describe(error)
        hint = "Start a cluster with `sluice up`, or name another with --url"
        raise CommandError(f"nothing answers at {url} ({reason})", hint, UNREACHABLE, "nothing_answers") from error
