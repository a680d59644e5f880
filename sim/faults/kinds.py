"""What goes wrong in a run, and when: drawn by seed before the run begins. Pure.

Swarm style: each seed enables a random subset of the kinds, so that a run is about few things at a time, and different
runs about different things. After the last fault comes a quiet time in which everything must mend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np


class FaultKind(StrEnum):
    """What can happen to a process, to its way to the broker, or to the broker."""

    CRASH = "crash"  # SIGKILL; a new process of the same name comes after the duration
    HANG = "hang"  # SIGSTOP, then SIGCONT after the duration
    HANG_AND_CRASH = "hang_and_crash"  # SIGSTOP, then SIGKILL after the duration; a new process comes at once
    RESTART = "restart"  # SIGTERM: drains for at most the duration, then a new process comes
    STUCK_STEP = "stuck_step"  # the worker's device does not end its step for the duration
    FAILING_STEP = "failing_step"  # steps of the worker fail, each with a certain chance
    PARTITION = "partition"  # nothing passes between the process and the broker, in both directions
    DEAF = "deaf"  # what the broker sends does not arrive
    MUTE = "mute"  # what the process sends does not arrive
    LOSS = "loss"  # messages to or from the process are lost, each with a certain chance
    DUPLICATION = "duplication"  # the same, doubled; the second copy comes up to 30 s late
    DELAY = "delay"  # the same, up to 30 s late, so that they are reordered as well
    BROKER_CRASH = "broker_crash"  # SIGKILL; what was on its way is lost; it is back after the duration
    BROKER_HANG = "broker_hang"  # SIGSTOP, then SIGCONT
    CHANGE = "change"  # workers form a group, or dissolve theirs
    CHANGE_ABANDONED = "change_abandoned"  # the same, asked for 600 s, but its planner is gone when all are prepared
    CHANGE_BY_HALF = "change_by_half"  # the same, but its planner is gone when it has told only one to commit
    CHANGE_TWICE = "change_twice"  # the same, but every message comes twice, and others contradict it
    LINK_CUT = "link_cut"  # the connection between two workers breaks, and none is made for the duration


BROKER = "broker"
MESSAGE_KINDS = frozenset({FaultKind.LOSS, FaultKind.DUPLICATION, FaultKind.DELAY})
WORKER_KINDS = frozenset({FaultKind.STUCK_STEP, FaultKind.FAILING_STEP})
BROKER_KINDS = frozenset({FaultKind.BROKER_CRASH, FaultKind.BROKER_HANG})
CHANGE_KINDS = frozenset(
    {FaultKind.CHANGE, FaultKind.CHANGE_ABANDONED, FaultKind.CHANGE_BY_HALF, FaultKind.CHANGE_TWICE}
)
GROUP_KINDS = CHANGE_KINDS | {FaultKind.LINK_CUT}
"""What happens to workers whose layers can be dropped; nothing of it ends a process."""
MAX_DELAY_S = 30.0
"""Longest extra delay of a message."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    """When it begins, seconds after the first request may come."""
    kind: FaultKind
    target: str
    """Name of a process, or `broker`."""
    duration_s: float
    """Seconds until it is mended."""
    ratio: float = 1.0
    """Of message faults and failing steps: the chance of each one."""

    @property
    def end_s(self) -> float:
        """When it is mended; what it delayed may come later."""
        return self.at_s + self.duration_s

    def __str__(self) -> str:
        chance = f" with chance {self.ratio:.2f}" if self.ratio < 1 else ""
        return f"{self.kind.value} of {self.target} for {self.duration_s:.2f} s{chance}"


@dataclass(frozen=True, slots=True)
class Move:
    """A request goes to another worker; nothing is wrong with that."""

    at_s: float
    """As of a fault."""
    source: str
    """Name of a worker."""
    choice: int
    """Of the other worker and of the request, among those that there are then."""
    is_twice: bool = False
    """The other worker is asked twice."""
    closes_s: float = 0.0
    """For which the source is to take no new requests from then on; 0: it takes them."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of one run, in order of time, and what is wrong with its requests."""

    faults: tuple[Fault, ...]
    num_poisonous: int
    """Requests that kill every worker that computes them."""
    moves: tuple[Move, ...] = ()
    """Besides."""


@dataclass(frozen=True, slots=True)
class FaultSpace:
    """What faults are drawn from."""

    workers: tuple[str, ...]
    dispatchers: tuple[str, ...]
    others: tuple[str, ...] = ()
    """Monitor and planners."""
    span_s: float = 12.0
    """Faults begin within this time."""
    max_faults: int = 6
    max_kinds: int = 4
    num_changes: int = 0
    """Changes of groups, besides; 0: the workers' layers stay where they are."""


def draw_faults(space: FaultSpace, random: np.random.Generator) -> FaultPlan:
    """Return some faults of some kinds, in order of time."""
    kinds = [kind for kind in FaultKind if kind not in GROUP_KINDS]
    enabled = [kinds[i] for i in random.permutation(len(kinds))[: int(random.integers(1, space.max_kinds + 1))]]
    count = int(random.integers(1, space.max_faults + 1))
    faults = [_draw_fault(space, enabled[int(random.integers(len(enabled)))], random) for _ in range(count)]
    num_poisonous = 1 if random.random() < 0.15 else 0
    faults += [_draw_change(space, random) for _ in range(space.num_changes)]
    return FaultPlan(tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind, fault.target))), num_poisonous)


def draw_merging(space: FaultSpace, random: np.random.Generator) -> tuple[Fault, ...]:
    """Return faults for four workers: two groups of two form, then one is to join the other while something fails.

    The change is tried twice or three times, half of the times by a planner that dies or says everything twice. The
    fault comes up to a fifth of a second later: while workers prepare, are prepared, change, meet, or serve again while
    KV is on its way.
    """
    kinds = [kind for kind in FaultKind if kind not in CHANGE_KINDS]
    changes = sorted(CHANGE_KINDS)
    faults = [Fault(0.3, FaultKind.CHANGE, space.workers[0], 2.0), Fault(1.3, FaultKind.CHANGE, space.workers[2], 2.0)]
    at_s = 2.0
    for _ in range(int(random.integers(2, 4))):
        at_s = round(at_s + float(random.uniform(0.6, 2.5)), 3)
        kind = FaultKind.CHANGE if random.random() < 0.5 else changes[int(random.integers(len(changes)))]
        worker = space.workers[int(random.integers(len(space.workers)))]
        faults.append(Fault(at_s, kind, worker, round(float(random.uniform(0.5, 2.0)), 3)))
        fault = _draw_fault(space, kinds[int(random.integers(len(kinds)))], random)
        faults.append(replace(fault, at_s=round(at_s + float(random.uniform(0.0, 0.2)), 3)))
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind, fault.target)))


def draw_moves(
    space: FaultSpace, random: np.random.Generator, longest_s: float, fault_ratio: float
) -> tuple[tuple[Move, ...], tuple[Fault, ...]]:
    """Return moves of requests, and faults that begin while they may be under way.

    Args:
        space: what is drawn from.
        random: of the seed.
        longest_s: how long a move may take.
        fault_ratio: share of the moves that something comes upon.
    """
    kinds = [kind for kind in FaultKind if kind not in CHANGE_KINDS]
    moves: list[Move] = []
    faults: list[Fault] = []
    for _ in range(int(random.integers(8, 20))):
        at_s = round(float(random.random()) * space.span_s, 3)
        source = space.workers[int(random.integers(len(space.workers)))]
        moves.append(Move(at_s, source, int(random.integers(1000)), is_twice=bool(random.random() < 0.1)))
        if random.random() >= fault_ratio:
            continue
        fault = _draw_fault(space, kinds[int(random.integers(len(kinds)))], random)
        late_s = float(np.exp(random.uniform(np.log(0.002), np.log(longest_s))))
        faults.append(replace(fault, at_s=round(at_s + late_s, 3)))
    moves.sort(key=lambda move: (move.at_s, move.source, move.choice))
    return tuple(moves), tuple(faults)


def _draw_fault(space: FaultSpace, kind: FaultKind, random: np.random.Generator) -> Fault:
    ratio = float(random.choice([0.1, 0.3, 1.0])) if kind in MESSAGE_KINDS | {FaultKind.FAILING_STEP} else 1.0
    return Fault(
        at_s=round(float(random.random()) * space.span_s, 3),
        kind=kind,
        target=_draw_target(space, kind, random),
        duration_s=_draw_duration_s(random),
        ratio=ratio,
    )


def _draw_change(space: FaultSpace, random: np.random.Generator) -> Fault:
    """Return a change of roles, half of them undisturbed; its duration is how long a prepared worker waits."""
    kinds = sorted(GROUP_KINDS)
    kind = FaultKind.CHANGE if random.random() < 0.5 else kinds[int(random.integers(len(kinds)))]
    return Fault(
        at_s=round(float(random.random()) * space.span_s, 3),
        kind=kind,
        target=space.workers[int(random.integers(len(space.workers)))],
        duration_s=round(float(random.uniform(0.3, 2.0)), 3),
    )


def _draw_target(space: FaultSpace, kind: FaultKind, random: np.random.Generator) -> str:
    """Most faults hit workers: they are many, and hold the state that must survive."""
    if kind in BROKER_KINDS:
        return BROKER
    groups = [space.workers, space.dispatchers, space.others]
    chances = [0.65, 0.2, 0.15] if space.others else [0.75, 0.25, 0.0]
    names = space.workers if kind in WORKER_KINDS | {FaultKind.LINK_CUT} else groups[int(random.choice(3, p=chances))]
    return names[int(random.integers(len(names)))]


def _draw_duration_s(random: np.random.Generator) -> float:
    """Return 0.05 to 12 s, evenly by order of magnitude: less than the clocks that notice (3 s), and more."""
    return round(float(np.exp(random.uniform(np.log(0.05), np.log(12.0)))), 3)
