"""Where the workers of a group that is to come about stand in its pipeline, and how that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.kv_moves.placed_kv import PlacedKv
from shared.ids import WorkerId
from shared.layers import LayerRange

NextShares = Callable[[], Sequence[PlacedKv]]
"""Returns by stage the blocks of the next round, once all of the last one are there; none: that was all."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """One stage of a group that is to come about."""

    worker_id: WorkerId
    address: str
    """`host:port` where it waits for the others; empty where all are in one process."""
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A group that is to come about, as one of its members sees it."""

    plan_id: int
    """Same for all members, and for no other group of theirs; a plan may form several groups."""
    stages: tuple[StagePlace, ...]
    """In the order of the pipeline; more than one."""
    index: int
    """Which of them this worker is."""

    @property
    def own(self) -> StagePlace:
        """This worker's stage."""
        return self.stages[self.index]

    @property
    def key(self) -> tuple[int, WorkerId]:
        """Same for all members, and for no other group of the cluster."""
        return self.plan_id, self.stages[0].worker_id

    @property
    def name(self) -> str:
        """As `key`, in one word."""
        return f"{self.plan_id}/{self.stages[0].worker_id}"


class GroupFailedError(Exception):
    """The group did not come about: a member did not come, or a connection broke."""
