"""The planner's one policy against memory pressure: of the levers that help, the cheapest.

Pure: snapshot in, decision out. With an empty ladder the decision is always `none`; it still says what it sees, and why
it does nothing.

Source: the project's own design (the ladder joins Andes, BROS, Mell and KunServe); no paper has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.planner.policy.plans.drop_facts import ClusterFacts
from services.planner.policy.plans.drop_plan import NewGroup
from services.planner.policy.plans.intent import Order
from shared.ids import WorkerId

NO_LEVER = "none"
MAX_NAMES = 8
"""Workers that a reason names; of more it says so."""


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """KV memory of one worker that is alive and ready and takes requests: it is alone, or leads a group."""

    worker_id: WorkerId
    num_blocks: int
    num_used_blocks: int
    num_demanded_blocks: int
    """Blocks that waiting and preempted sequences need before they can run."""
    throttled: bool = False
    """The monitor says that requests wait, or will within a second, for KV memory."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What the planner knows at one tick."""

    view_age_s: float | None
    """Seconds since the newest cluster view arrived; None if none ever did."""
    workers: tuple[MemoryLoad, ...] = ()
    """Sorted by id; only those that can take work."""
    num_unavailable: int = 0
    """Workers in the view that are suspect, dead, loading or draining."""
    facts: ClusterFacts | None = None
    """Of the workers whose parameters can be dropped; None: there are none."""
    held_back: str = ""
    """Why groups may not change now, in words; empty: they may."""


@dataclass(frozen=True, slots=True)
class LadderParams:
    """When the ladder looks at all, and when it acts."""

    max_view_age_s: float = 1.5
    """An older view is not acted upon: the monitor is down, or we are cut off. Three of the monitor's periods."""
    pressure_ratio: float = 1.0
    """There is pressure when (used + demanded) / all blocks of the cluster is above this; lower acts earlier. A worker
    that is throttled is pressure by itself, however much the others have free (KunServe v1, section 4.1: "one or more
    instances")."""


class Situation(StrEnum):
    """What the ladder sees."""

    BLIND = "blind"  # no fresh view: no new plan
    EMPTY = "empty"  # nobody can take work
    CALM = "calm"
    PRESSURE = "pressure"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a lever would do, and its price."""

    cost_s: float
    """Seconds of readers' stalls, expected; the common currency of all levers."""
    reason: str
    order: Order | None = None
    """What workers are to do if it is taken."""
    lacking_tokens: int = 0
    """KV for which there is no room even then; not above 0: for all that is asked for there is."""


@dataclass(frozen=True, slots=True)
class Declined:
    """Why a lever does nothing now."""

    reason: str


class Lever(Protocol):
    """One rung."""

    @property
    def name(self) -> str:
        """Name in plans and events."""

    @property
    def is_standing(self) -> bool:
        """Whether it is pulled whenever it can be, with no pressure too, and what it does is not undone in calm."""

    def offer(self, snapshot: ClusterSnapshot) -> Offer | Declined | None:
        """Return what this lever would do about the pressure; if it cannot help now, why, or None."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which lever is pulled, and why."""

    lever: str
    situation: Situation
    reason: str
    order: Order | None = None
    """What the lever that is pulled has workers do."""
    lacking_tokens: int = 0
    """See `Offer`."""

    @property
    def is_in_need(self) -> bool:
        """Whether there is pressure, and no lever that helps."""
        return self.situation is Situation.PRESSURE and self.lever == NO_LEVER

    def differs_from(self, other: Decision | None) -> bool:
        """Whether this is another decision; the same one with newer figures in its reason or order is not."""
        return other is None or self.essence != other.essence

    @property
    def essence(self) -> tuple[object, ...]:
        """What makes two decisions the same."""
        order = self.order
        groups = () if order is None else order.groups
        changed = tuple(group.stages if isinstance(group, NewGroup) else group.members for group in groups)
        return self.lever, self.situation, type(order), changed


def decide(params: LadderParams, levers: Sequence[Lever], snapshot: ClusterSnapshot) -> Decision:
    """Return the cheapest lever that helps, the earlier one on a tie, or `none` if there is no need or no help.

    A standing lever needs no pressure.

    Args:
        params: limits.
        levers: in ladder order.
        snapshot: of this tick.
    """
    situation, what = _look(params, snapshot)
    in_need = situation is Situation.PRESSURE
    if not (in_need or situation is Situation.CALM):
        return Decision(NO_LEVER, situation, what)
    if in_need and not levers:
        return Decision(NO_LEVER, situation, f"{what}; the ladder has no lever yet, so requests wait")
    answers = [(lever.name, lever.offer(snapshot)) for lever in levers if in_need or lever.is_standing]
    offers = [(name, answer) for name, answer in answers if isinstance(answer, Offer)]
    if not offers:
        why = "".join(f"; {name}: {answer.reason}" for name, answer in answers if isinstance(answer, Declined))
        if in_need:
            why = f"; none of {', '.join(name for name, _ in answers)} can help now{why}"
        return Decision(NO_LEVER, situation, f"{what}{why}")
    name, best = min(offers, key=lambda priced: priced[1].cost_s)
    others = ", ".join(f"{other} {offer.cost_s:.2f} s" for other, offer in offers if other != name)
    against = f", against {others}" if others else ""
    reason = f"{what}; {best.reason}, at {best.cost_s:.2f} s{against}"
    return Decision(name, situation, reason, best.order, best.lacking_tokens)


def _look(params: LadderParams, snapshot: ClusterSnapshot) -> tuple[Situation, str]:
    if snapshot.view_age_s is None:
        return Situation.BLIND, "no view of the cluster has come yet"
    if snapshot.view_age_s > params.max_view_age_s:
        limit_s = params.max_view_age_s
        return Situation.BLIND, f"the last view is {snapshot.view_age_s:.1f} s old, the limit is {limit_s:g} s"
    num_blocks = sum(worker.num_blocks for worker in snapshot.workers)
    if num_blocks == 0:
        return Situation.EMPTY, f"no worker can take work ({snapshot.num_unavailable} known)"
    wanted = sum(worker.num_used_blocks + worker.num_demanded_blocks for worker in snapshot.workers)
    share = f"{wanted} of {num_blocks} KV blocks wanted on {len(snapshot.workers)} workers"
    throttled = [worker.worker_id for worker in snapshot.workers if worker.throttled]
    if throttled:
        names = ", ".join(throttled[:MAX_NAMES]) + (", …" if len(throttled) > MAX_NAMES else "")
        return Situation.PRESSURE, f"{share}; throttled: {names}"
    return (Situation.PRESSURE if wanted > params.pressure_ratio * num_blocks else Situation.CALM), share
