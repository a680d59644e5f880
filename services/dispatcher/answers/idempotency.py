"""Requests that a client may send again: `Idempotency-Key`, and everything that is derived from it.

The names of the request at workers and its seed come from caller, key and body, so that every dispatcher makes the same
answer of the same request, and another body under the same key is another request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from services.dispatcher.http.errors import invalid
from shared.ids import RequestId

HEADER: Final = "Idempotency-Key"
MAX_KEY_CHARS: Final = 255
_KEY: Final = re.compile(rf"[\x20-\x7e]{{1,{MAX_KEY_CHARS}}}\Z")
_DIGEST_BYTES: Final = 16
_HOW_IT_IS_SENT: Final = ("stream", "stream_options")
"""Names in the body that do not change the answer: a stream may be resumed over another transport."""


@dataclass(frozen=True, slots=True)
class Retry:
    """What a request with a key is known by."""

    key: str
    """As given; goes back to the client in a header."""
    name: str
    """Of caller and key."""
    request_id: RequestId
    """Of caller, key and body."""
    seed: int
    """For a request that names none, 0 to 2⁶³ − 1."""


def derive_retry(headers: Mapping[str, str], caller: str, endpoint: str, body: Mapping[str, Any]) -> Retry | None:
    """Return what follows from the client's key, the same in every dispatcher; None if it gives none.

    Args:
        headers: of the request.
        caller: who asks; two callers never share a request.
        endpoint: `chat` or `completions`.
        body: the parameters of the request.

    Raises:
        ApiError: the key is empty, too long, or has characters other than printable ASCII.
    """
    key = headers.get(HEADER)
    if key is None:
        return None
    if not _KEY.match(key):
        message = f"'{HEADER}' must have 1 to {MAX_KEY_CHARS} printable ASCII characters."
        raise invalid("invalid_value", HEADER, message)
    name = _digest(b"name", caller.encode("utf-8", "surrogateescape"), key.encode())
    what = {field: value for field, value in body.items() if field not in _HOW_IT_IS_SENT}
    request_id = _digest(b"request", name, endpoint.encode(), to_json(what))
    seed = int.from_bytes(_digest(b"seed", request_id)[:8], "little") >> 1
    return Retry(key, name.hex(), RequestId(request_id.hex()), seed)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"sluice-retry")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)  # lengths: no two lists of parts read alike
    return digest.digest()
