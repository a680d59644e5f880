"""The ids of a stream's events: how far each choice has come, so that another connection can go on from there.

    17-1c9a7f02          17 tokens, and a digest of them
    17-1c9a7f02-end      the whole text; only the finish reason may be missing
    17-1c9a7f02,_,3-…    several choices, by index; nothing was sent of the second one

By the digest an answer that was made again, and came out differently, is told from the one that the client has the
beginning of. A client that counts tokens itself may leave digest and `-end` out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.dispatcher.http.errors import invalid

HEADER: Final = "Last-Event-ID"
MAX_CHOICES: Final = 16
"""Streams of more choices have no ids: each event carries the state of all of them."""
_NOTHING: Final = "_"
_PART: Final = re.compile(r"(\d{1,7})(?:-([0-9a-f]{8}))?(-end)?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """How much of a choice a client has."""

    num_tokens: int
    digest: int | None
    """CRC-32 of the tokens as little-endian u32; None: the client does not say."""
    is_end: bool = False
    """It has all of the text, also what is shown only because nothing follows."""

    def __str__(self) -> str:
        digest = "" if self.digest is None else f"-{self.digest:08x}"
        return f"{self.num_tokens}{digest}{'-end' if self.is_end else ''}"


Seen = Sequence[Position | None]
"""By choice; None: nothing of it was seen."""


def parse_last_event_id(headers: Mapping[str, str], num_choices: int, *, can_resume: bool) -> Seen:
    """Return how much of each choice the client has; nothing at all without the header.

    Args:
        headers: of the request.
        num_choices: of the request, over all prompts.
        can_resume: it is a stream with a key.

    Raises:
        ApiError: the header is no id of such a stream, or stands at a request that cannot be resumed.
    """
    given = headers.get(HEADER)
    if given is None:
        return [None] * num_choices
    if not can_resume or num_choices > MAX_CHOICES:
        message = f"'{HEADER}' needs a stream of at most {MAX_CHOICES} choices, and its 'Idempotency-Key'."
        raise invalid("invalid_value", HEADER, message)
    parts = given.strip().split(",")
    if len(parts) != num_choices:
        raise invalid("invalid_value", HEADER, f"'{HEADER}' must have one part for each of {num_choices} choices.")
    return [_parse_part(part) for part in parts]


def _parse_part(part: str) -> Position | None:
    if part == _NOTHING:
        return None
    found = _PART.match(part)
    if found is None:
        raise invalid("invalid_value", HEADER, f"'{HEADER}' must be the id of an event of this stream.")
    count, digest, end = found.groups()
    return Position(int(count), None if digest is None else int(digest, 16), end is not None)


class EventIds:
    """Where the choices of one stream stand.

    Args:
        seen: where the client stands already.
    """

    __slots__ = ("_parts",)

    def __init__(self, seen: Seen) -> None:
        self._parts = [_NOTHING if position is None else str(position) for position in seen]

    def label(self, index: int, position: Position) -> bytes:
        """Return the line that makes the next event say that a choice has come so far."""
        self._parts[index] = str(position)
        return f"id: {','.join(self._parts)}\n".encode()
