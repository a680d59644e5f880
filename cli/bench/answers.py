"""Reads what an unknown server says: nothing that it sends may end a load, or fill this machine's memory."""

from __future__ import annotations

import json
from typing import Any, Final

MAX_COUNT: Final = 10_000_000
"""Tokens of one request at most; a larger number is no count of tokens."""


def parse_answer(body: bytes | str) -> Any:
    """Return the JSON, or None if it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def count_of(value: object) -> int | None:
    """Return a number of tokens, or None if it is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_COUNT else None
