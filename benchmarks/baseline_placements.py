"""Placements that prefix-aware placement is compared with, beside the dispatcher's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Any, Final

from services.dispatcher.policy.placement import PLACEMENTS, Placed, Placement, PlacementLoad, place_least_loaded
from shared.ids import WorkerId
from sim.names import unknown_name
from sim.workload.prefixes import SimConversation

ASKING: Final = ContextVar[SimConversation | None]("asking", default=None)
"""Whose turn is being placed; None: a service looks who would take what waits."""
BASELINES: Final = ("round-robin", "session-affinity")


def placement_of(name: str, affinity: Callable[[SimConversation], int]) -> Placement:
    """Return the placement of this name, a new one each time.

    Raises:
        StartupError: there is none.
    """
    if name == "round-robin":
        return _round_robin()
    if name == "session-affinity":
        return _session_affinity(affinity)
    if name not in PLACEMENTS:
        raise unknown_name("there is no placement", name, [*PLACEMENTS, *BASELINES])
    return PLACEMENTS[name]


def _round_robin() -> Placement:
    turns = count()

    def groups(workers: Sequence[PlacementLoad]) -> Iterator[Sequence[PlacementLoad]]:
        first = next(turns) % max(len(workers), 1)
        yield from ([worker] for worker in (*workers[first:], *workers[:first]))

    return _first_of(groups)


def _session_affinity(affinity: Callable[[SimConversation], int]) -> Placement:
    homes: dict[int, WorkerId] = {}

    def groups(workers: Sequence[PlacementLoad]) -> Iterator[Sequence[PlacementLoad]]:
        conversation = ASKING.get()
        if conversation is not None and affinity(conversation) in homes:
            home = homes[affinity(conversation)]
            yield [worker for worker in workers if worker.worker_id == home]
        yield workers

    def note(placed: Placed) -> None:
        conversation = ASKING.get()
        if conversation is not None:
            homes.setdefault(affinity(conversation), placed.worker_id)

    return _first_of(groups, note)


def _first_of(
    groups: Callable[[Sequence[PlacementLoad]], Iterable[Sequence[PlacementLoad]]],
    note: Callable[[Placed], None] = lambda _: None,
) -> Placement:
    """Return the placement on the least loaded worker of the first group that has one which takes the request."""

    def place(workers: Sequence[PlacementLoad], *args: Any, **kwargs: Any) -> Placed | None:
        for group in groups(workers):
            placed = place_least_loaded(group, *args, **kwargs)
            if placed is not None:
                note(placed)
                return placed
        return None

    return place
