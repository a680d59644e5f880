"""What moves to a worker while it serves: how far it is, how fast, and who waits; told in reports and by events.

    begin ──► TransferMeter ◄── reach: bytes that are there ── device      `<kind>_begun`
                  │ look ──► TransferProgress, in every report
    end  ◄────────┘                                                        `<kind>_ended`, with bytes, seconds, rate

Source: none; the papers measure exchange and restore, and say nothing of their operators.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.worker.executor.parameter_load import ParameterLoad
from shared.messages.report import TransferKind, TransferProgress
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.sizes import describe_bytes

RATE_WINDOW_S: Final = 1.0
"""Over which a rate is taken."""
NUM_SAMPLES: Final = 32
"""Of a window at most."""
LOOK_S: Final = 0.05
"""Between two looks at parameters that come."""
MAX_SOURCES: Final = 8
"""That an event names."""
_log = get_logger()


@dataclass(frozen=True, slots=True)
class TransferFacts:
    """What is known of a move when it begins."""

    kind: TransferKind
    num_bytes: int
    sources: tuple[str, ...] = ()
    """Names of workers, or of what else it comes from."""
    mode: str = ""


class TransferMeter:
    """How far one move is. Pure: time is an argument, seconds of one monotonic clock.

    Args:
        facts: of the move.
        now_s: when it begins.
    """

    def __init__(self, facts: TransferFacts, now_s: float) -> None:
        self.facts = facts
        self.num_bytes = facts.num_bytes
        """In all, as far as is known; never less than what is there."""
        self.num_moved_bytes = 0
        """That are there."""
        self._began_s = now_s
        self._samples: deque[tuple[float, int]] = deque([(now_s, 0)])
        """Time and bytes; the first one is the last of before the window, if there is one."""

    def reach(self, num_moved_bytes: int, now_s: float, num_bytes: int | None = None) -> None:
        """Take note of how many bytes are there by now, and of how many in all if that has changed."""
        self.num_moved_bytes = num_moved_bytes
        self.num_bytes = max(self.num_bytes if num_bytes is None else num_bytes, num_moved_bytes)
        if now_s - self._samples[-1][0] >= RATE_WINDOW_S / NUM_SAMPLES:
            self._samples.append((now_s, num_moved_bytes))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - RATE_WINDOW_S:
            self._samples.popleft()

    def elapsed_s(self, now_s: float) -> float:
        """Return the seconds since it began."""
        return now_s - self._began_s

    def bytes_per_s(self, now_s: float) -> float:
        """Return the rate of the last second, or since the beginning if that is less.

        In the first instants, in which it would say anything, as if they had been as long as a sample.
        """
        past_s = max(now_s - RATE_WINDOW_S, self._began_s)
        at_s, count = self._samples[0]
        for sample_s, sample in self._samples:
            if sample_s <= past_s:
                at_s, count = sample_s, sample
        return max(self.num_moved_bytes - count, 0) / max(now_s - at_s, RATE_WINDOW_S / NUM_SAMPLES)

    def look(self, now_s: float, num_waiting: int = 0) -> TransferProgress:
        """Return how far it is at this moment."""
        return TransferProgress(
            kind=self.facts.kind,
            num_bytes=self.num_bytes,
            num_moved_bytes=self.num_moved_bytes,
            bytes_per_s=self.bytes_per_s(now_s),
            elapsed_s=self.elapsed_s(now_s),
            num_waiting=num_waiting,
            mode=self.facts.mode,
            sources=self.facts.sources,
        )


class Transfers:
    """All moves to one worker; the only one to tell of them.

    Args:
        count_waiting: returns how many sequences wait for KV that is on its way.
        announce: tells people the name of what happened, and the reason.
        now: the worker's clock, seconds.
        tasks: owns what follows loads.
    """

    def __init__(
        self,
        count_waiting: Callable[[], int],
        announce: Callable[[str, str], None],
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self._count_waiting = count_waiting
        self._announce = announce
        self._now = now
        self._tasks = tasks
        self._meters: list[TransferMeter] = []
        self._following: tuple[asyncio.Task[None], TransferMeter] | None = None

    def begin(self, facts: TransferFacts) -> TransferMeter:
        """Tell that something begins to move; the caller says how far it is, and `end`s it."""
        meter = TransferMeter(facts, self._now())
        self._meters.append(meter)
        waiting = ""
        if facts.kind is TransferKind.KV_EXCHANGE:
            waiting = f"; {self._count_waiting()} requests wait for theirs"
        self._announce(f"{facts.kind}_begun", f"{_what(facts, facts.num_bytes)}{waiting}")
        return meter

    def end(self, meter: TransferMeter, outcome: str) -> None:
        """Tell that nothing more comes of a move, and what became of it. Idempotent."""
        if meter not in self._meters:
            return
        self._meters.remove(meter)
        facts, took_s = meter.facts, meter.elapsed_s(self._now())
        rate = meter.num_moved_bytes / took_s if took_s > 0 else 0.0
        _log.info(
            f"{facts.kind}_ended",
            num_bytes=meter.num_bytes,
            num_moved_bytes=meter.num_moved_bytes,
            took_s=round(took_s, 4),
            mode=facts.mode,
            sources=", ".join(facts.sources[:MAX_SOURCES]),
            outcome=outcome,
        )
        moved = f"{describe_bytes(meter.num_moved_bytes)} of {_what(facts, meter.num_bytes)}"
        self._announce(f"{facts.kind}_ended", f"{moved} in {took_s:.3f} s, {describe_bytes(rate)}/s: {outcome}")

    def follow(self, look: Callable[[], ParameterLoad | None]) -> None:
        """Tell of parameters that are loaded from now on, until they are there or nobody loads them any more.

        Args:
            look: returns how far they are; None: nothing is being loaded.
        """
        self.follow_no_more()
        load = look()
        if load is not None:
            meter = self.begin(TransferFacts(TransferKind.PARAMETER_LOAD, load.num_bytes))
            self._following = self._tasks.start(self._follow(meter, look), name="parameter-load"), meter

    def follow_no_more(self) -> None:
        """Tell that the parameters that are being loaded, if any are, are not waited for. Idempotent."""
        if self._following is not None:
            task, meter = self._following
            self._following = None
            task.cancel()
            self.end(meter, "ended by the next change")

    def look(self) -> tuple[TransferProgress, ...]:
        """Return what is on its way, in the order in which it began."""
        now_s = self._now()
        return tuple(
            meter.look(now_s, self._count_waiting() if meter.facts.kind is TransferKind.KV_EXCHANGE else 0)
            for meter in self._meters
        )

    async def _follow(self, meter: TransferMeter, look: Callable[[], ParameterLoad | None]) -> None:
        while (load := look()) is not None:
            meter.facts = replace(meter.facts, sources=tuple(name for name, _ in load.given))
            meter.reach(load.num_loaded_bytes, self._now(), load.num_bytes)
            if load.is_over:
                self.end(meter, _outcome_of(load))
                return
            await asyncio.sleep(LOOK_S)
        self.end(meter, "ended by the next change")


def _outcome_of(load: ParameterLoad) -> str:
    if load.num_loaded_bytes < load.num_bytes:
        return "no source gave the rest; it is asked for again by the next plan, or when the group dissolves"
    return "all is there: " + ", ".join(f"{describe_bytes(count)} from {name}" for name, count in load.given)


def _what(facts: TransferFacts, num_bytes: int) -> str:
    what = "parameters" if facts.kind is TransferKind.PARAMETER_LOAD else "KV"
    return f"{describe_bytes(num_bytes)} of {what}{_from(facts.sources)}{', ' + facts.mode if facts.mode else ''}"


def _from(sources: Sequence[str]) -> str:
    if not sources:
        return ""
    more = f" and {len(sources) - MAX_SOURCES} more" if len(sources) > MAX_SOURCES else ""
    return f" from {', '.join(sources[:MAX_SOURCES])}{more}"
