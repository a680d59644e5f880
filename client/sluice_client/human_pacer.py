"""The pacer for people: word by word, close behind the generator. See `pacer.py`; no clock, no task, no generator.

When the next word is due. B words wait; the last one was shown at e; g is the observed generation rate, r the reading
speed, both in words per second; the word arrived at a:

    fast = e + 1 / max(g, r, floor)                          as fast as generator or reader, whichever is faster
    slow = min(e + (1 + growth) / max(g, r), a + reserve)    no faster than keeps the reserve, or lets it grow
    due  = max(fast, slow, a)

`floor` is the rate that shows all that waited at some push within max_backlog, and holds until that text is shown: so
no word is shown later than reserve + max_backlog after it arrived. When the answer has ended, the words left are spread
evenly up to the end of the drain, or shown earlier if they are due earlier. A generator slower than the reader gets no
reserve: the reader waits anyway, and holding words back would add to it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from sluice_client.pacer_base import Pacer, Shown
from sluice_client.qoe import QoeTarget
from sluice_client.segment import Segmenter


@dataclass(frozen=True, slots=True)
class HumanPacing:
    """Parameters of human mode. A "word" is a unit of `segment.py`.

    Raises:
        ValueError: a number is out of its range.
    """

    reserve_s: float = 0.25
    """Text waits this long once the stream runs, so that a pause up to it is not seen. Raising: smoother, later."""
    reserve_growth_ratio: float = 0.25
    """While the reserve builds up, gaps between words are longer than the generator's by this share."""
    drain_s: float = 0.3
    """Everything is on the screen this long after the answer has ended."""
    max_backlog_s: float = 1.0
    """Text that waits beyond the reserve is shown within this time, however fast it comes. Raising: calmer, later."""
    tokens_per_word: float = 1.3
    """Turns the reader's tokens per second into words per second (Andes, section 6)."""
    rate_memory_s: float = 1.0
    """Time constant of the observed generation rate. Raising: steadier, slower to adapt."""
    min_observed_s: float = 0.05
    """Before this much time is observed, the generator is taken to be as fast as the reader."""
    pause_s: float = 0.25
    """A gap longer than this and than four usual ones is a pause: it counts in the rate as if it were no longer."""
    same_arrival_s: float = 1e-3
    """Pieces closer together than this arrived as one."""
    max_observed_gap_s: float = 1.0
    """No gap counts in the generation rate for more than this."""
    min_stall_s: float = 0.1
    """Shorter waits are not noticed, and neither summed nor counted."""

    def __post_init__(self) -> None:
        for name in (
            "drain_s",
            "max_backlog_s",
            "tokens_per_word",
            "rate_memory_s",
            "min_observed_s",
            "pause_s",
            "same_arrival_s",
            "max_observed_gap_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, not {getattr(self, name)!r}")
        for name in ("reserve_s", "reserve_growth_ratio", "min_stall_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number, 0 or more, not {getattr(self, name)!r}")


class _GenerationRate:
    """Words per second of the generator: a running mean that forgets with a time constant."""

    def __init__(self, pacing: HumanPacing) -> None:
        self._pacing = pacing
        self._last_s: float | None = None
        self._words = 0.0
        self._seconds = 0.0
        self._arrivals = 0.0  # gaps between pieces, those of one burst counted once

    def observe(self, now_s: float, num_words: int | None) -> None:
        """Count the words that a piece at `now_s` begins; None: the piece is not prose and says nothing."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or num_words is None:
            return
        gap_s = min(now_s - last_s, self._longest_gap_s())
        decay = math.exp(-gap_s / self._pacing.rate_memory_s)
        self._words = self._words * decay + num_words
        self._seconds = self._seconds * decay + gap_s
        self._arrivals = self._arrivals * decay + (gap_s > self._pacing.same_arrival_s)

    def _longest_gap_s(self) -> float:
        """The gap from which on the generator paused rather than worked."""
        if self._arrivals <= 0:
            return self._pacing.max_observed_gap_s
        usual_s = self._seconds / self._arrivals
        return min(self._pacing.max_observed_gap_s, max(self._pacing.pause_s, 4 * usual_s))

    def words_per_s(self, default: float) -> float:
        """The rate, or `default` while too little was seen."""
        if self._seconds < self._pacing.min_observed_s or self._words <= 0:
            return default
        return self._words / self._seconds


@dataclass(slots=True)
class _Unit:
    """A word, or a run of code, that waits."""

    text: str
    num_tokens: int
    paced: bool
    arrived_s: float


class HumanPacer(Pacer):
    """Shows words at the pace of the generator, behind a reserve; see the module's text for the rule."""

    def __init__(self, target: QoeTarget, pacing: HumanPacing | None = None) -> None:
        super().__init__(target)
        self.pacing = pacing or HumanPacing()
        self._reading_per_s = target.speed_tokens_per_s / self.pacing.tokens_per_word
        self._segmenter = Segmenter()
        self._rate = _GenerationRate(self.pacing)
        self._waiting: deque[_Unit] = deque()
        self._num_paced_waiting = 0
        self._num_paced_shown = 0
        self._floors: deque[tuple[int, float]] = deque()  # (up to this paced word, words per second), falling rates
        self._changed_s = float("-inf")  # last push or finish: nothing that waited then is due before
        self._last_shown_s: float | None = None
        self._read_s: float | None = None  # when a reader at reading speed begins the last shown word

    def finish(self, now_s: float) -> None:
        """The answer has ended: what waits is shown within `drain_s`."""
        super().finish(now_s)
        self._changed_s = self._now_s

    def _accept(self, text: str, num_tokens: int, *, paced: bool) -> None:
        self._changed_s = self._now_s
        if num_tokens:
            self._state.deliver(self._now_s, num_tokens)
        num_words = None
        if paced:
            num_words = self._accept_prose(text)
        elif text:
            self._append(text, paced=False)
        self._rate.observe(self._now_s, num_words)
        if num_words:
            self._raise_floor()
        self._add_tokens(num_tokens)

    def _accept_prose(self, text: str) -> int | None:
        """Cut text into words and runs of code; returns how many words begin, None if it holds no prose."""
        num_words, has_prose = 0, False
        for fragment in self._segmenter.feed(text):
            has_prose = has_prose or fragment.paced
            if fragment.starts_unit:
                self._append(fragment.text, paced=fragment.paced)
                num_words += fragment.paced
            else:
                self._continue(fragment.text)
        return num_words if has_prose else None

    def _append(self, text: str, *, paced: bool) -> None:
        self._waiting.append(_Unit(text, 0, paced, self._now_s))
        self._num_paced_waiting += paced

    def _continue(self, text: str) -> None:
        """The rest of a word goes with its beginning, or at once if that is on the screen."""
        if self._waiting:
            self._waiting[-1].text += text
        else:
            self._ready.append(Shown(text, self._now_s, 0))

    def _add_tokens(self, num_tokens: int) -> None:
        if self._waiting:
            self._waiting[-1].num_tokens += num_tokens
        elif num_tokens:
            self._ready.append(Shown("", self._now_s, num_tokens))

    def _raise_floor(self) -> None:
        rate = self._num_paced_waiting / self.pacing.max_backlog_s
        while self._floors and self._floors[-1][1] <= rate:
            self._floors.pop()
        self._floors.append((self._num_paced_shown + self._num_paced_waiting, rate))

    def _next_waiting_s(self) -> float | None:
        if not self._waiting:
            return None
        head = self._waiting[0]
        earliest_s = max(head.arrived_s, self._changed_s)
        if self._skipped:
            return self._now_s
        if self._last_shown_s is None:
            return earliest_s
        earliest_s = max(earliest_s, self._last_shown_s)
        return max(earliest_s, self._paced_due_s(head, self._last_shown_s)) if head.paced else earliest_s

    def _paced_due_s(self, head: _Unit, last_s: float) -> float:
        pace_per_s = max(self._reading_per_s, self._rate.words_per_s(self._reading_per_s))
        floor_per_s = self._floors[0][1] if self._floors else 0.0
        fast_s = last_s + 1 / max(pace_per_s, floor_per_s)
        growth_s = last_s + (1 + self.pacing.reserve_growth_ratio) / pace_per_s
        due_s = max(fast_s, min(growth_s, head.arrived_s + self.pacing.reserve_s))
        return due_s if self._finish_s is None else min(due_s, self._drain_due_s(self._finish_s, last_s))

    def _drain_due_s(self, finish_s: float, last_s: float) -> float:
        start_s = max(finish_s, last_s)
        left_s = max(0.0, finish_s + self.pacing.drain_s - start_s)
        return start_s + left_s / self._num_paced_waiting

    def _show(self, due_s: float) -> Shown:
        unit = self._waiting.popleft()
        if unit.paced:
            self._num_paced_waiting -= 1
            self._num_paced_shown += 1
            while self._floors and self._floors[0][0] <= self._num_paced_shown:
                self._floors.popleft()
        self._read(due_s, paced=unit.paced)
        self._last_shown_s = due_s
        return Shown(unit.text, due_s, unit.num_tokens)

    def _read(self, due_s: float, *, paced: bool) -> None:
        """Move the reader on by one word, and count the wait if there was nothing left to read."""
        if self._read_s is None:
            self._read_s = due_s
            return
        next_s = self._read_s + 1 / self._reading_per_s if paced else self._read_s
        wait_s = due_s - next_s
        if paced and wait_s >= self.pacing.min_stall_s:
            self._count_stall(wait_s, self.pacing.min_stall_s)
        self._read_s = max(due_s, next_s)
