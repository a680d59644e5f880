"""What all modes of the pacer share, and `reading` and `off`. See `pacer.py`; no clock, no task, no generator."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sluice_client.qoe import QoeState, QoeTarget

MIN_READING_STALL_S = 1e-3
"""A shorter wait adds to the seconds of a reading pacer, not to its number of stalls."""


class Piece(NamedTuple):
    """Text that arrives from a stream; a plain string means one token, paced."""

    text: str
    num_tokens: int = 1
    """Tokens that are complete with this text, 0 or more."""
    paced: bool = True
    """False for text that no one reads word by word."""
    thinks: bool = False
    """Until its arrival the model has thought: nobody reads that, and what came before was no text."""


class Shown(NamedTuple):
    """Text on the screen."""

    text: str
    at_s: float
    """The instant at which it is due; `pop` is called then or later."""
    num_tokens: int
    """Tokens that are complete with this text."""


@dataclass(frozen=True, slots=True)
class PacerStats:
    """What a reader went through so far."""

    qoe: float
    """From the arrivals, as the definition says: whatever the mode it is the QoE of the reading timeline, in [0, 1]."""
    stall_seconds: float
    """Time for which a reader at reading speed had read everything and waited, after the first token."""
    num_stalls: int
    buffered_tokens: int
    """Arrived, not yet popped."""
    buffered_chars: int
    ttft_s: float | None
    """Arrival of the first token; None while there is none."""
    received_s: float | None
    """Arrival of the newest token; None while there is none."""
    longest_gap_s: float
    """The longest time between the arrivals of two tokens so far."""
    shown_s: float | None
    """When the last text that was popped was due; None while there is none. Later than `received_s`: by pacing."""


class Pacer(ABC):
    """What all modes share: order, the ready text, the counters."""

    def __init__(self, target: QoeTarget) -> None:
        self.target = target
        self._state = QoeState(target)
        self._now_s = float("-inf")
        self._ttft_s: float | None = None
        self._received_s: float | None = None
        self._longest_gap_s = 0.0
        self._shown_s: float | None = None
        self._finish_s: float | None = None
        self._skipped = False
        self._ready: list[Shown] = []
        self.buffered_tokens = 0
        """Tokens that arrived and are not popped."""
        self.buffered_chars = 0
        """Code points that arrived and are not popped."""
        self._stall_s = 0.0
        self._num_stalls = 0

    def push(self, now_s: float, text: str, num_tokens: int = 1, *, paced: bool = True, thinks: bool = False) -> None:
        """Take a piece that arrived at `now_s`.

        Args:
            now_s: instant of arrival.
            text: may be empty (tokens that have no text yet).
            num_tokens: how many tokens it completes, 0 or more.
            paced: False for text that no one reads word by word (tool calls); smooth mode then passes it on in turn.
            thinks: see `Piece`.
        """
        assert num_tokens >= 0, "a piece cannot hold fewer than 0 tokens"
        assert self._finish_s is None, "push after finish"
        self._advance(now_s)
        if thinks:
            self._state.think(self._now_s)
        if num_tokens:
            self._ttft_s = self._now_s if self._ttft_s is None else self._ttft_s
            if self._received_s is not None:
                self._longest_gap_s = max(self._longest_gap_s, self._now_s - self._received_s)
            self._received_s = self._now_s
        self.buffered_tokens += num_tokens
        self.buffered_chars += len(text)
        if text or num_tokens:
            self._accept(text, num_tokens, paced=paced)
        self._advance(now_s)

    def finish(self, now_s: float) -> None:
        """The answer has ended; no push follows. Calling it again changes nothing."""
        if self._finish_s is None:
            self._advance(now_s)
            self._finish_s = self._now_s

    def skip(self, now_s: float) -> None:
        """The reader asks for everything: what has arrived is due now, what follows is due as it arrives."""
        self._advance(now_s)
        self._skipped = True
        self._advance(now_s)

    def pop(self, now_s: float) -> list[Shown]:
        """Take everything that is due at `now_s` off the buffer, in order."""
        self._advance(now_s)
        shown, self._ready = self._ready, []
        for item in shown:
            self.buffered_tokens -= item.num_tokens
            self.buffered_chars -= len(item.text)
            self._shown_s = item.at_s
        return shown

    def next_due_s(self) -> float | None:
        """The instant from which `pop` returns something, if nothing else happens; None when nothing is buffered."""
        return self._ready[0].at_s if self._ready else self._next_waiting_s()

    @property
    def qoe(self) -> float:
        """Final QoE once finished; before, the QoE at the last instant given; 1 while nothing is expected."""
        if self._finish_s is not None:
            return self._state.final()
        return 1.0 if self._now_s == float("-inf") else self._state.qoe_at(self._now_s)

    def stats(self) -> PacerStats:
        """A snapshot of the counters."""
        return PacerStats(
            qoe=self.qoe,
            stall_seconds=self._stall_s,
            num_stalls=self._num_stalls,
            buffered_tokens=self.buffered_tokens,
            buffered_chars=self.buffered_chars,
            ttft_s=self._ttft_s,
            received_s=self._received_s,
            longest_gap_s=self._longest_gap_s,
            shown_s=self._shown_s,
        )

    def _advance(self, now_s: float) -> None:
        """Move what is due by `now_s` from waiting to ready."""
        self._now_s = max(self._now_s, now_s)
        while (due_s := self._next_waiting_s()) is not None and due_s <= self._now_s:
            self._ready.append(self._show(due_s))

    def _count_stall(self, wait_s: float, min_counted_s: float) -> None:
        self._stall_s += wait_s
        self._num_stalls += wait_s >= min_counted_s

    @abstractmethod
    def _accept(self, text: str, num_tokens: int, *, paced: bool) -> None:
        """Put a piece that arrives at `_now_s` behind what waits."""

    @abstractmethod
    def _next_waiting_s(self) -> float | None:
        """When the first waiting text is due, as things stand; None when nothing waits."""

    @abstractmethod
    def _show(self, due_s: float) -> Shown:
        """Remove the first waiting text, which is shown at `due_s`."""


_PARTS = re.compile(
    r"\s*(?:[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]+)|\s+"
)
"""Words with the blanks before them, Chinese and Japanese by character."""


def cut_piece(text: str, num_tokens: int) -> Iterator[tuple[str, int]]:
    """Cut a piece into as many parts as it has tokens, or words if those are fewer, each with its share of the tokens.

    Where one token ends and the next begins is not known: they are taken to be spread evenly over the words.
    """
    parts = _PARTS.findall(text) if num_tokens > 1 else []
    count = min(num_tokens, len(parts))
    if count < 2:
        yield text, num_tokens
        return
    first = given = 0
    for index in range(1, count + 1):
        end, until = index * len(parts) // count, index * num_tokens // count
        yield "".join(parts[first:end]), until - given
        first, given = end, until


class ReadingPacer(Pacer):
    """Token i at displayed[i], never early; of a piece of several tokens, each word when the last of its tokens is."""

    def __init__(self, target: QoeTarget) -> None:
        super().__init__(target)
        self._waiting: deque[Shown] = deque()
        self._last_due_s = float("-inf")

    def _accept(self, text: str, num_tokens: int, *, paced: bool) -> None:
        del paced  # reading mode knows tokens, not what they are
        had_tokens, lag_s = self._state.num_tokens > 0, self._state.lag_s
        for part, count in cut_piece(text, num_tokens):
            if count:
                self._last_due_s = self._state.deliver(self._now_s, count)
            self._waiting.append(Shown(part, max(self._last_due_s, self._now_s), count))
        if num_tokens and had_tokens:
            self._count_stall(self._state.lag_s - lag_s, MIN_READING_STALL_S)

    def _next_waiting_s(self) -> float | None:
        if not self._waiting:
            return None
        return self._now_s if self._skipped else self._waiting[0].at_s

    def _show(self, due_s: float) -> Shown:
        return self._waiting.popleft()._replace(at_s=due_s)


class DirectPacer(ReadingPacer):
    """No pacing: text is due as it arrives. For programs; it keeps the statistics of a reading pacer."""

    def __init__(self, target: QoeTarget) -> None:
        super().__init__(target)
        self._skipped = True
