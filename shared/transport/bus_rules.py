"""What both buses check and count in the same way: subjects, keys, handlers. No transport here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from shared.process.log import get_logger

_TOKEN = re.compile(r"[^\s.*>]+\Z")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*\Z")
_BUCKET = re.compile(r"[a-zA-Z0-9_-]+\Z")
_SAID_HEADERS: Final = (b"nats-service-error", b"nats-expected-")
"""What processes put into headers of this kind; every other one is put there by a broker that reads out of a stream."""


@dataclass(slots=True)
class BusStats:
    """What went wrong on one connection since it was made."""

    handler_errors: int = 0
    """Handlers, watch handlers and responders that raised."""
    dropped_in: int = 0
    """Messages that found a full queue in front of their handler (a slow consumer)."""
    dropped_out: int = 0
    """Messages published while the connection was broken and its buffer full."""
    too_large: int = 0
    """Messages and values over the broker's limit; none of them was sent."""
    refused: int = 0
    """Publishes or subscriptions that the broker did not permit."""
    late_answers: int = 0
    """Answers that the broker did not permit: their requests came over a connection that is gone."""
    disconnects: int = 0
    reconnects: int = 0
    strays: int = 0
    """Messages that were dropped unread: see `is_stray`."""
    other_errors: int = 0

    def note_handler_error(self, subject: str, error: Exception) -> None:
        """Count and log a handler that raised."""
        self.handler_errors += 1
        get_logger().error("handler raised", subject=subject, exc_info=error)

    def note_too_large(self, subject: str, size_bytes: int, max_bytes: int) -> None:
        """Count a message that cannot be sent; logged as those that are dropped."""
        self.too_large += 1
        if is_power_of_two(self.too_large):
            get_logger().error(
                "message too large", subject=subject, size=size_bytes, limit=max_bytes, too_large=self.too_large
            )

    def note_dropped(self, subject: str) -> None:
        """Count a message that found a full queue; logged at 1, 2, 4, 8, … so that a flood does not fill the log."""
        self.dropped_in += 1
        if is_power_of_two(self.dropped_in):
            get_logger().warning("slow consumer, messages dropped", subject=subject, dropped=self.dropped_in)

    def note_stray(self, subject: str) -> None:
        """Count and log a message that is dropped unread."""
        self.strays += 1
        if is_power_of_two(self.strays):
            get_logger().warning("message out of a stream dropped", subject=subject, dropped=self.strays)


def is_power_of_two(count: int) -> bool:
    """Return whether the count is 1, 2, 4, 8 and so on: when to log what happens often."""
    return count > 0 and count & (count - 1) == 0


@lru_cache(maxsize=4096)
def check_subject(subject: str) -> str:
    """Return the subject if a message can be sent to it.

    Raises:
        ValueError: an empty token, white space, or a wildcard.
    """
    if not all(map(_TOKEN.match, subject.split("."))):
        raise ValueError(
            f"'{subject[:80]}' is not a subject: use tokens without white space, '*' and '>', joined by '.'"
        )
    return subject


@lru_cache(maxsize=4096)
def check_pattern(pattern: str) -> str:
    """Return the pattern if it can be subscribed to.

    Raises:
        ValueError: an empty token, white space, `>` before the end, or a wildcard inside a token.
    """
    parts = pattern.split(".")
    if parts[-1] == ">":
        parts.pop()
    if pattern != ">" and not (parts and all(part == "*" or _TOKEN.match(part) for part in parts)):
        raise ValueError(f"'{pattern[:80]}' cannot be subscribed to: '*' is a whole token, '>' the last one")
    return pattern


def check_key(key: str) -> str:
    """Return the key if a bucket can hold it.

    Raises:
        ValueError: a character other than letters, digits and `-/_=.`, or an empty token.
    """
    if not _KEY.match(key):
        raise ValueError(f"'{key[:80]}' is not a key: use letters, digits and '-/_=', joined by '.'")
    return key


def check_bucket(bucket: str) -> str:
    """Return the name if it can be a bucket's.

    Raises:
        ValueError: a character other than letters, digits, `_` and `-`.
    """
    if not _BUCKET.match(bucket):
        raise ValueError(f"'{bucket[:80]}' is not a bucket: use letters, digits, '_' and '-'")
    return bucket


def has_wildcard(pattern: str) -> bool:
    """Return whether the (checked) pattern can match more than one subject."""
    return pattern.endswith(">") or "*" in pattern


def matches(pattern: list[str], subject: list[str]) -> bool:
    """Return whether a pattern's tokens match a subject's: `*` one token, a last `>` one or more."""
    if pattern[-1] == ">":
        if len(subject) < len(pattern):
            return False
        pattern = pattern[:-1]
    elif len(subject) != len(pattern):
        return False
    return all(token in ("*", found) for token, found in zip(pattern, subject, strict=False))


def is_stray(pattern: str, subject: str, headers: bytes | None) -> bool:
    """Return whether a message did not come straight from a process that may say this on this subject.

    A broker checks what clients publish. What it takes out of a stream by itself (a push consumer, a republished
    write, a stored message that is read with another's subject as the place for the answer) it delivers anywhere, in
    the words of whoever wrote to the stream. Such a message has the stream's subject, or headers that tell of it.

    Args:
        pattern: subscribed to.
        subject: of the message.
        headers: as they came, `NATS/1.0…`; None or empty: it has none.
    """
    if subject != pattern and not (has_wildcard(pattern) and matches(pattern.split("."), subject.split("."))):
        return True
    if not headers:
        return False
    status, *lines = headers.lower().split(b"\r\n")
    if status.startswith(b"nats/1.0 503"):  # nobody listens: the broker says to what
        lines = [line for line in lines if not line.startswith(b"nats-subject:")]
    return any(line.startswith(b"nats-") and not line.startswith(_SAID_HEADERS) for line in lines)
