"""When groups may change: after some calm, not at once after a restore, and later and later after failures.

    use of a group, in its members' capacity without drop
    1.0 ┤ ╭──╮                               a restore is due after `hold_s` below the ratio, without a break
    0.5 ┼╭╯··╰─╮·╭╮······················
        ┤╯     ╰─╯╰──────────────┬───────►   restored; for `cooldown_s` a worker that was throttled all the time counts
                  │◄── hold_s ──►│           for nothing, one that was calm in between does

Pure reducers: facts in, decisions out; time is an argument, seconds of one monotonic clock. Source: KunServe v2,
section 4.4 ("the memory usage is below 50 % of the GPU (without drop)"); hold, cool-down and back-off are the
project's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.planner.policy.levers.ladder import MemoryLoad
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import (
    ClusterFacts,
    InstanceFacts,
    expected_tokens,
    groups_of,
    missing_layers,
)
from services.planner.policy.restoring.restore import why_no_room
from shared.ids import WorkerId

ROUNDING_S = 1e-6
"""A span that is this little shorter than a limit has reached it: clocks round."""


class RestoreBy(StrEnum):
    """By which rule groups are brought back."""

    RATIO = "ratio"  # used little for a while (v2, section 4.4)
    BENEFIT = "benefit"  # it has cost more than to restore it and drop again (`restore_benefit`)


@dataclass(frozen=True, slots=True)
class PacingParams:
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

    def __init__(self, params: PacingParams) -> None:
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


class RestoreWatch:
    """Follows which groups are used little."""

    def __init__(self, params: PacingParams) -> None:
        self._params = params
        self._since_s: dict[str, float] = {}
        self._why: dict[str, str] = {}

    def apply(self, facts: ClusterFacts, now_s: float) -> tuple[str, ...]:
        """Take the facts of this moment; return the groups that are due for a restore, sorted.

        A group that lacks layers is none of them: its members become whole by themselves.
        """
        since_s, self._since_s = self._since_s, {}
        rule = CapacityRule(facts.model)
        groups = groups_of(facts)
        for name, members in groups.items():
            if may_part(self._params, rule, members):
                self._since_s[name] = since_s.get(name, now_s)
        hold_s = self._params.restore_hold_s - ROUNDING_S
        due = sorted(name for name, began_s in self._since_s.items() if now_s - began_s >= hold_s)
        self._why = {name: self._reason(rule, groups[name], now_s - self._since_s[name]) for name in due}
        return tuple(due)

    def forget(self, group_ids: Iterable[str] | None = None) -> None:
        """Begin anew with these groups, None: with all: what was seen so far does not count."""
        for name in list(self._since_s) if group_ids is None else group_ids:
            self._since_s.pop(name, None)

    def _reason(self, rule: CapacityRule, members: Sequence[InstanceFacts], for_s: float) -> str:
        wanted, room = expected_tokens(members, 0.0), rule.tokens(rule.whole_blocks(members))
        ratio = self._params.restore_ratio
        return f"by ratio: it wants {wanted} tokens, and for {for_s:.1f} s less than {ratio:.0%} of {room} without drop"

    def why(self, group_id: str) -> str:
        """Return in words why this group was due when `apply` returned last; empty: it was not."""
        return self._why.get(group_id, "")

    def note_drop(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Take notice of a drop; this rule learns nothing from it."""

    def note_restore(self, worker_ids: Iterable[WorkerId], now_s: float) -> None:
        """Take notice of a restore; this rule learns nothing from it."""


def may_part(params: PacingParams, rule: CapacityRule, members: Sequence[InstanceFacts]) -> bool:
    """Return whether these members are a group, none is throttled, and what it wants fits them without drop."""
    if len(members) < 2 or missing_layers(rule.model, members) is not None:
        return False
    return not any(member.throttled for member in members) and fits_alone(params, rule, members)


def fits_alone(params: PacingParams, rule: CapacityRule, members: Sequence[InstanceFacts]) -> bool:
    """Return whether a group wants less than the share of what its members would have alone that the rule leaves it.

    By benefit each of its requests, too, surely finds a member that takes all of it (`restore`), none being larger than
    `largest_request_tokens` says.
    """
    if expected_tokens(members, params.fit_horizon_s) >= params.fit_ratio * rule.tokens(rule.whole_blocks(members)):
        return False
    if params.restore_by is RestoreBy.RATIO:
        return True
    return why_no_room(rule, members[0].group, members, largest_request_tokens(rule, members)) is None


def largest_request_tokens(rule: CapacityRule, members: Iterable[InstanceFacts]) -> int:
    """Return what no running request of a group has more of, tokens of KV; at least 1.

    Reports do not say how large the largest one is: it is no longer than the model is served with, and leaves at least
    a block to each of the others.
    """
    largest = 1
    for member in members:
        others_tokens = max(member.num_running - 1, 0) * rule.model.block_size
        bound = max(member.used_tokens - others_tokens, 1)
        largest = max(largest, min(bound, member.max_request_tokens or bound))
    return largest


class Cooldown:
    """Which workers' shortage counts after a restore."""

    def __init__(self, params: PacingParams) -> None:
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
