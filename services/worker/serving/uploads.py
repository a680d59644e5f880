"""Prompts that are larger than a message: their parts arrive before the submission, and wait here for it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from shared.messages.request import Upload

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Of all parts that wait; the oldest uploads are forgotten first."""
KEEP_S: Final = 30.0
"""How long parts wait for the next one, or for their submission."""


@dataclass(slots=True)
class _Waiting:
    data: bytearray = field(default_factory=bytearray)
    touched_s: float = 0.0


class Uploads:
    """Bounded in bytes and time; owned by the intake."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[str, int], _Waiting] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, part: Upload, now_s: float) -> int:
        """Take a part; return how many bytes of this upload are here: the offset of the part to send next.

        A part that was sent twice is ignored; one that came too early is not taken.
        """
        self._forget_old(now_s)
        waiting = self._waiting.setdefault((part.request_id, part.attempt), _Waiting())
        waiting.touched_s = now_s
        if part.offset == len(waiting.data):
            waiting.data += part.data
            self._num_bytes += len(part.data)
        num_here = len(waiting.data)
        while self._num_bytes > MAX_WAITING_BYTES:
            self._drop(next(iter(self._waiting)))
        return num_here

    def take(self, request_id: str, attempt: int, num_bytes: int) -> bytes | None:
        """Return a whole upload and forget it; None if not all of it is here."""
        waiting = self._waiting.get((request_id, attempt))
        if waiting is None:
            return None
        self._drop((request_id, attempt))
        return bytes(waiting.data) if len(waiting.data) == num_bytes else None

    def _forget_old(self, now_s: float) -> None:
        for name in [name for name, waiting in self._waiting.items() if now_s - waiting.touched_s > KEEP_S]:
            self._drop(name)

    def _drop(self, name: tuple[str, int]) -> None:
        self._num_bytes -= len(self._waiting.pop(name).data)
