"""When groups may change: after some calm, not at once after a restore, and later and later after failures.

    use of a group, in its members' capacity without drop
    1.0 ┤ ╭──╮                               a restore is due after `hold_s` below the ratio (`restore_ratio.py`)
    0.5 ┼╭╯··╰─╮·╭╮······················
        ┤╯     ╰─╯╰──────────────┬───────►   restored; for `cooldown_s` a worker that was throttled all the time counts
                  │◄── hold_s ──►│           for nothing, one that was calm in between does

Pure reducers: facts in, decisions out; time is an argument, seconds of one monotonic clock. Source: KunServe v2,
section 4.4 ("the memory usage is below 50 % of the GPU (without drop)"); hold, cool-down and back-off are the
project's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.planner.policy.levers.ladder import MemoryLoad
from shared.ids import WorkerId

ROUNDING_S = 1e-6
"""A span that is this little shorter than a limit has reached it: clocks round."""


class RestoreBy(StrEnum):
    """By which rule groups are brought back."""

    RATIO = "ratio"  # used little for a while (v2, section 4.4)
    BENEFIT = "benefit"  # it has cost more than to restore it and drop again (`restore_benefit`)


@dataclass(frozen=True, slots=True)
class PatienceParams:
    """How much patience there is."""

    restore_by: RestoreBy = RestoreBy.RATIO
    restore_ratio: float = 0.5
    """Use over capacity without drop below which a group is no longer needed (v2, section 4.4); higher restores sooner,
    and drops again sooner. By benefit only whether it is 0 counts: then no group is restored."""
    restore_max_ratio: float = 0.8
    """By benefit: share of the capacity without drop below which use has to stay; higher restores sooner, with less
    room for what comes."""
    restore_horizon_s: float = 3.0
    """By benefit: seconds ahead for which the growth of what runs is counted in, as if nothing ended."""
    restore_again_s: float = 60.0
    """By benefit: a drop so few seconds after a restore doubles the price of the next restore of these workers."""
    restore_hold_s: float = 10.0
    """Seconds that it must stay below; higher waits longer for the next burst."""
    cooldown_s: float = 10.0
    """Seconds after a restore in which only what has been calm meanwhile is a reason to drop."""
    retry_s: float = 2.0
    """Pause after a plan that did not come about; it doubles with each failure in a row."""
    max_retry_s: float = 60.0
    """Longest pause."""
    restore_beside: bool = True
    """Parameters are loaded beside serving before a group is restored, where its workers can; else with a stall."""
    ahead_wait_s: float = 10.0
    """Seconds that a group which is due waits until it has so little KV that it can move ahead."""
    load_stall_s: float = 30.0
    """Seconds without any progress after which such a load is given up."""

    def __post_init__(self) -> None:
        if not 0 < self.retry_s <= self.max_retry_s:
            raise ValueError("0 < retry_s <= max_retry_s must hold")

    @property
    def fit_ratio(self) -> float:
        """Share of the room without drop that a group may want and still be brought back; 0: none is."""
        by_benefit = self.restore_by is RestoreBy.BENEFIT and self.restore_ratio > 0
        return self.restore_max_ratio if by_benefit else self.restore_ratio

    @property
    def fit_horizon_s(self) -> float:
        """Seconds ahead for which growth is counted into what a group wants."""
        return self.restore_horizon_s if self.restore_by is RestoreBy.BENEFIT else 0.0


class Backoff:
    """Counts failures in a row."""

    def __init__(self, params: PatienceParams) -> None:
        self._params = params
        self._num_failures = 0
        self._until_s = 0.0

    def failed(self, now_s: float) -> float:
        """Note a failure; return the seconds until the next try."""
        pause_s = min(self._params.retry_s * 2.0 ** min(self._num_failures, 64), self._params.max_retry_s)
        self._num_failures += 1
        self._until_s = now_s + pause_s
        return pause_s

    def succeeded(self) -> None:
        """Forget the failures."""
        self._num_failures = 0
        self._until_s = 0.0

    @property
    def num_failures(self) -> int:
        """Failures in a row."""
        return self._num_failures

    def left_s(self, now_s: float) -> float:
        """Return the seconds until the next try; 0: now."""
        return max(self._until_s - now_s, 0.0) if self._num_failures else 0.0


class Cooldown:
    """Which workers' shortage counts after a restore."""

    def __init__(self, params: PatienceParams) -> None:
        self._params = params
        self._until_s = 0.0
        self._was_calm: dict[WorkerId, None] = {}

    def restored(self, now_s: float) -> None:
        """Note that groups were dissolved just now."""
        self._until_s = now_s + self._params.cooldown_s
        self._was_calm.clear()

    def apply(self, workers: Sequence[MemoryLoad], now_s: float) -> str:
        """Take the workers of this moment; return why nothing may be dropped for them, or an empty text."""
        if now_s >= self._until_s:
            return ""
        self._was_calm |= {worker.worker_id: None for worker in workers if not worker.throttled}
        throttled = [worker.worker_id for worker in workers if worker.throttled]
        if not throttled or any(name in self._was_calm for name in throttled):
            return ""
        return f"groups were restored a moment ago; {self._until_s - now_s:.1f} s are given to it"
