"""What a planner that has running requests change their worker wants, whatever its rule: from whom, and who to whom.

    view ─► a rule ─► Wanted: "from this worker"     who runs there? ─► Wanted.choose ─► moves, in their order

A worker gives in one move at a time, and takes in one. One that only takes gives nothing meanwhile, unless it has to.
What is not urgent waits where moves have had a worker's link for their share of the last minute (`LinkShare`).

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final, Protocol

from services.planner.policy.observe import can_work
from shared.ids import WorkerId
from shared.messages.fetch import FetchReason, RunningPart
from shared.messages.report import ClusterView, WorkerReport, WorkerStatus

LINK_WINDOW_S: Final = 60.0
"""Over which the share of a link's time is taken."""

Avoided = Set[tuple[WorkerId, WorkerId]]
"""Sources and targets between which nothing can move now."""


@dataclass(frozen=True, slots=True)
class WantedMove:
    """One request goes there."""

    part: RunningPart
    target: WorkerReport


class Wanted(Protocol):
    """Something that should leave a worker."""

    @property
    def source(self) -> WorkerReport:
        """That worker."""

    @property
    def reason(self) -> FetchReason:
        """Why, in a word."""

    @property
    def most_blocks(self) -> int:
        """KV blocks of a request that may go; larger ones need not be told."""

    @property
    def most_requests(self) -> int:
        """How many of those that run there are told."""

    @property
    def is_urgent(self) -> bool:
        """Whether it begins while others still come there."""

    @property
    def open_worker(self) -> WorkerId | None:
        """Who takes requests while all leave the source, which gets no new ones then; None: it does."""

    @property
    def targets(self) -> Sequence[WorkerReport]:
        """Who takes part, as far as is known before it is known who runs at the source."""

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId]) -> Sequence[WantedMove]:
        """Return who should go where, one after the other; nothing: nobody.

        Args:
            running: who runs at the source, and may leave.
            busy: who takes nothing more now.
        """

    def tell(self, move: WantedMove) -> str:
        """Say of a move why it is made, in words."""


class MoveRule(Protocol):
    """Says from whom something should leave."""

    def __call__(self, view: ClusterView, avoided: Avoided, now_s: float) -> Sequence[Wanted]:
        """Return it, the most urgent first."""


class LinkShare:
    """For how long moves had each worker's link of late, whichever way they went.

    Args:
        most: share of `LINK_WINDOW_S` from which on a worker's link is left to others.
    """

    def __init__(self, most: float) -> None:
        self._most_s = most * LINK_WINDOW_S
        self._moves: dict[WorkerId, deque[tuple[float, float]]] = {}
        """When each began and was over, by worker."""

    def note(self, workers: Iterable[WorkerId], begin_s: float, now_s: float) -> None:
        """Remember that a move between these is over."""
        for worker in workers:
            self._moves.setdefault(worker, deque()).append((begin_s, now_s))

    def spent(self, now_s: float) -> set[WorkerId]:
        """Return whose link has carried moves for all of its share."""
        since_s = now_s - LINK_WINDOW_S
        for worker, moves in list(self._moves.items()):
            while moves and moves[0][1] <= since_s:
                moves.popleft()
            if not moves:
                del self._moves[worker]
        return {
            worker
            for worker, moves in self._moves.items()
            if sum(end_s - max(begin_s, since_s) for begin_s, end_s in moves) >= self._most_s
        }


def takes_part(status: WorkerStatus) -> bool:
    """Return whether requests can leave a worker, or come to it, with their KV."""
    report = status.report
    can_move = bool(report.stage_address) and not report.group and not report.held
    return can_work(status) and can_move and report.num_blocks > 0
