"""Whether and when a request that failed before its first token is sent again. Pure; the generator is given.

Source: the conventions of OpenAI's SDKs (Retry-After, x-should-retry, back-off from 0.5 to 8 s with jitter).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

RETRIED_STATUSES = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on retries."""

    max_retries: int = 2
    """Attempts after the first one; 0 turns retries off."""
    first_backoff_s: float = 0.5
    """Wait before the first retry if the server names none; doubles with each."""
    max_backoff_s: float = 8.0
    """Longest wait of our own choice."""
    max_retry_after_s: float = 60.0
    """A server that asks for a longer wait gets no retry: the error goes to the caller, with the time."""

    def delay_s(self, attempt: int, retry_after_s: float | None, rng: random.Random) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (from 0); None: give up.

        With Retry-After the wait is that time and up to a quarter more, never less.
        """
        if attempt >= self.max_retries:
            return None
        if retry_after_s is None:
            backoff_s: float = min(self.first_backoff_s * 2.0**attempt, self.max_backoff_s)
            return backoff_s * rng.uniform(0.75, 1.0)
        return None if retry_after_s > self.max_retry_after_s else retry_after_s * rng.uniform(1.0, 1.25)


def may_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Whether a response with this status invites another try."""
    return status in RETRIED_STATUSES and headers.get("x-should-retry", "").lower() != "false"


def parse_retry_after(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Seconds to wait by Retry-After (seconds or a date) or retry-after-ms; None if absent or not understood.

    Args:
        headers: of the response; looked up in lower case.
        now_unix_s: wall time, for dates.
    """
    milliseconds = _parse_number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _parse_number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_unix_s)
    except (ValueError, OverflowError):
        return None


def _parse_number(value: str | None) -> float | None:
    try:
        number = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
