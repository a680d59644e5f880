"""How many instances the cluster needs when dropping parameters does not give its requests room.

    a plan gains less than is required                 ──┐
    there is none, and requests lack room for `wait_s`   │
    groups stand, and use has grown over a window        ├─► tokens lacking ─► instances wanted, in all
    so that it overruns them within another one        ──┘                          │
    ◄── what is wanted would fit the instances that there were, without drop, for `hold_s`: taken back ──┘

    lacking = R - gained - free elsewhere            where there is pressure; R: `drop.tokens_short`
            or wanted + growth over the last window - capacity as it stands
    wanted instances = min(instances that there are + ⌈lacking / tokens of a whole instance⌉, max_instances)

What is free at groups that are not throttled counts, because waiting requests are brought there, and whoever joins a
group brings it along. While it lasts a wish
only grows: what is lacking is counted beside the instances that have come since, so one that takes its time is asked
for once. How long one takes nobody knows here; another window is the guess.

Pure reducer: facts and decision in, wish out; time is an argument, seconds of one monotonic clock. Source: KunServe v2,
section 4.1 and 5.5 (a drop gains the time in which instances start); that use which grows is a reason, and the
hysteresis, is the project's own design.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from services.planner.policy.levers.ladder import Decision, Situation
from services.planner.policy.patience import ROUNDING_S
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop import tokens_short
from services.planner.policy.plans.drop_facts import (
    ClusterFacts,
    InstanceFacts,
    groups_of,
    missing_layers,
    wanted_tokens,
)

NUM_SAMPLES = 64
"""Looks at the use that a window remembers."""


@dataclass(frozen=True, slots=True)
class ScaleParams:
    """When more instances are asked for."""

    max_instances: int = 0
    """Most instances that are asked for, with those that there are; 0: none ever."""
    wait_s: float = 5.0
    """Seconds for which room must be lacking where nothing can be dropped, or only at a price above that of waiting;
    higher is less easily alarmed by what ends by itself."""
    window_s: float = 30.0
    """Seconds over which use must have grown since a drop; higher is less easily alarmed, and asks later."""
    hold_s: float = 60.0
    """Seconds for which demand must fit without the instances that were asked for; higher takes a wish back later."""


@dataclass(frozen=True, slots=True)
class ScaleWish:
    """Instances that should be there."""

    num_instances: int
    """In all: those that there are, and those that are lacking."""
    lacking_tokens: int
    """KV for which there is no room, when it was last raised."""
    reason: str
    num_before: int = 0
    """Instances that there were when it began."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    wanted: int


class ScaleSignal:
    """Follows what the cluster lacks, and says how many instances it wants."""

    def __init__(self, params: ScaleParams) -> None:
        self._params = params
        self._samples: deque[_Sample] = deque()
        self._wish: ScaleWish | None = None
        self._fits_since_s: float | None = None
        self._short_since_s: float | None = None
        """Since when room is lacking, and nothing is dropped for it."""

    @property
    def wish(self) -> ScaleWish | None:
        """What is wanted now; None: nothing."""
        return self._wish

    def resume(self, wish: ScaleWish) -> None:
        """Go on with what a planner before this one wanted, as far as it may be wanted still."""
        num_wanted = min(wish.num_instances, self._params.max_instances)
        if num_wanted > 0:
            self._wish = replace(wish, num_instances=num_wanted)

    def apply(self, facts: ClusterFacts | None, decision: Decision, now_s: float, held_back: str = "") -> None:
        """Take the facts of this moment and what was decided of them.

        Args:
            facts: of the workers that can drop; None: nobody knows, and a wish stays as it is.
            decision: of the ladder; its order, if there is one, is not carried out yet.
            now_s: this moment.
            held_back: why groups may not change now; what cannot be decided yet is not lacking.
        """
        if facts is None or not facts.instances or decision.situation in (Situation.BLIND, Situation.EMPTY):
            self._samples.clear()
            self._fits_since_s = self._short_since_s = None
            return
        if self._params.max_instances == 0:
            return
        rule = CapacityRule(facts.model)
        each_tokens = tokens_of_one(rule, facts)
        lacking, why = self._lacking(rule, facts, decision, now_s, held_back)
        if lacking > 0 and each_tokens > 0:
            self._fits_since_s = None
            self._raise(len(facts.instances), lacking, each_tokens, why)
        elif self._wish is not None:
            self._settle(self._wish, facts, each_tokens, now_s)

    def _raise(self, num_instances: int, lacking: int, each_tokens: int, why: str) -> None:
        """Want what is lacking, if it is more than is wanted already."""
        num_wanted = min(num_instances + -(-lacking // each_tokens), self._params.max_instances)
        if num_wanted <= max(num_instances, self._wish.num_instances if self._wish is not None else 0):
            return
        num_before = num_instances if self._wish is None else self._wish.num_before
        reason = (
            f"{why}; {lacking} tokens of KV are lacking, an instance has room for {each_tokens}: "
            f"{num_wanted} instances are wanted, there are {num_instances}"
        )
        if num_wanted == self._params.max_instances:
            reason = f"{reason}, and may be {num_wanted}"
        self._wish = ScaleWish(num_wanted, lacking, reason, num_before)

    def _settle(self, wish: ScaleWish, facts: ClusterFacts, each_tokens: int, now_s: float) -> None:
        """Take the wish back once demand has fit for long enough."""
        wanted = _wanted(facts)
        if wanted > wish.num_before * each_tokens:
            self._fits_since_s = None
            return
        if self._fits_since_s is None:
            self._fits_since_s = now_s
        if now_s - self._fits_since_s >= self._params.hold_s - ROUNDING_S:
            self._wish = self._fits_since_s = None

    def _lacking(
        self, rule: CapacityRule, facts: ClusterFacts, decision: Decision, now_s: float, held_back: str
    ) -> tuple[int, str]:
        """Return how many tokens of KV are lacking, and why."""
        unmet = self._lasting(_unmet(rule, facts, decision), decision, now_s, held_back)
        overrun, since_s = self._overrun(rule, facts, now_s)
        if unmet > 0 and unmet >= overrun:
            return unmet, f"not satisfiable by a drop: {decision.reason}"
        if overrun > 0:
            return overrun, f"use has grown for {since_s:.0f} s although parameters were dropped"
        return 0, ""

    def _lasting(self, unmet: int, decision: Decision, now_s: float, held_back: str) -> int:
        """Return what is lacking of these tokens: at once beside a plan, else after a while; what waits, not yet."""
        if unmet <= 0 or decision.order is not None:
            self._short_since_s = None
            return unmet
        if held_back:
            return 0
        if self._short_since_s is None:
            self._short_since_s = now_s
        return unmet if now_s - self._short_since_s >= self._params.wait_s - ROUNDING_S else 0

    def _overrun(self, rule: CapacityRule, facts: ClusterFacts, now_s: float) -> tuple[int, float]:
        """Return by how much use overruns the groups if it grows as it did over the window, and how long it grew."""
        groups = groups_of(facts).values()
        if not any(len(members) > 1 for members in groups):
            self._samples.clear()
            return 0, 0.0
        wanted = sum(map(wanted_tokens, groups))
        self._remember(_Sample(now_s, wanted))
        first = self._samples[0]
        span_s = now_s - first.at_s
        if span_s < self._params.window_s - ROUNDING_S:
            return 0, 0.0
        middle = next(each for each in self._samples if each.at_s >= first.at_s + span_s / 2 - ROUNDING_S)
        if not first.wanted < middle.wanted < wanted:
            return 0, 0.0
        growth = (wanted - first.wanted) * self._params.window_s / span_s
        return int(wanted + growth) - sum(_room(rule, members) for members in groups), span_s

    def _remember(self, sample: _Sample) -> None:
        """Keep samples of the last window, and the newest before it."""
        pause_s = self._params.window_s / NUM_SAMPLES
        if not self._samples or sample.at_s - self._samples[-1].at_s >= pause_s - ROUNDING_S:
            self._samples.append(sample)
        while len(self._samples) > 1 and sample.at_s - self._samples[1].at_s >= self._params.window_s - ROUNDING_S:
            self._samples.popleft()


def tokens_of_one(rule: CapacityRule, facts: ClusterFacts) -> int:
    """Return the KV that a whole instance has room for, as most here have: the median, the lower one of two; tokens."""
    whole = facts.model.all_layers
    rooms = sorted(rule.blocks(whole, each.num_pages, each.max_blocks) for each in facts.instances)
    return rule.tokens(rooms[(len(rooms) - 1) // 2])


def _unmet(rule: CapacityRule, facts: ClusterFacts, decision: Decision) -> int:
    """Return the tokens that what was decided leaves without room anywhere; not above 0: it leaves none."""
    if decision.situation is not Situation.PRESSURE:
        return 0
    short = tokens_short(facts) if decision.order is None else decision.lacking_tokens
    free = 0
    for members in groups_of(facts).values():
        if not any(member.throttled for member in members):
            free += max(_room(rule, members) - _with_growth(members), 0)
    return short - free


def _room(rule: CapacityRule, members: list[InstanceFacts]) -> int:
    """Return the KV that a group has room for, tokens; 0 if it cannot serve."""
    return 0 if missing_layers(rule.model, members) is not None else rule.tokens(rule.group_blocks(members))


def _with_growth(members: list[InstanceFacts]) -> int:
    return wanted_tokens(members) + sum(member.growth_tokens for member in members)


def _wanted(facts: ClusterFacts) -> int:
    return sum(_with_growth(members) for members in groups_of(facts).values())
