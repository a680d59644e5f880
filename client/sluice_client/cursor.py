"""Where one request stands: its names, the server that has it, and how far its answer has come. Also the servers."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

KEY_HEADER = "Idempotency-Key"
EVENT_HEADER = "Last-Event-ID"
REQUEST_HEADER = "x-request-id"
MAX_KEY_CHARS = 255


def check_key(key: str | None) -> str:
    """The key, or a new one.

    Raises:
        ValueError: it cannot be a header.
    """
    if key is None:
        return uuid.uuid4().hex
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise ValueError(f"idempotency_key must have 1 to {MAX_KEY_CHARS} printable ASCII characters, not {key!r}")
    return key


@dataclass(slots=True)
class Cursor:
    """One request, over all of its connections."""

    key: str
    """The same for every attempt: the server knows them as one request."""
    request_id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    """By which the server's log has it, and by which it can be cancelled."""
    base_url: str = ""
    """Of the server that has it; empty before there is one."""
    is_resumable: bool = False
    """The server said that it can go on after a lost connection."""
    last_event_id: str = ""
    num_events: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether a part of the answer is here."""
        return self.num_events > 0

    def headers(self) -> dict[str, str]:
        """What every attempt says."""
        headers = {KEY_HEADER: self.key, REQUEST_HEADER: self.request_id}
        if self.last_event_id:
            headers[EVENT_HEADER] = self.last_event_id
        return headers


class Servers:
    """The base URLs of a client, and which of them is asked next.

    Args:
        base_urls: one, or several that serve the same model; /v1 is added where a URL has no path of its own.

    Raises:
        ValueError: none, or one is not an http(s) URL.
    """

    def __init__(self, base_urls: str | Sequence[str]) -> None:
        given = [base_urls] if isinstance(base_urls, str) else list(base_urls)
        if not given:
            raise ValueError("base_url must name at least one server")
        self.urls = [_with_path(url) for url in given]
        self._at = 0

    @property
    def current(self) -> str:
        """The server to ask."""
        return self.urls[self._at]

    def leave(self, url: str) -> None:
        """This server is in trouble: ask the next one, unless others have moved on already."""
        if url == self.current:
            self._at = (self._at + 1) % len(self.urls)


def _with_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"base_url must look like http://host:8000, not {url!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
