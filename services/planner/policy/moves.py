"""What a planner that has running requests change their worker wants, whatever its rule: from whom, and who to whom.

    view ─► a rule ─► Wanted: "from this worker"     who runs there? ─► Wanted.choose ─► moves, in their order

A worker gives in one move at a time, and takes in one. One that only takes gives nothing meanwhile, unless it has to.
How each travels, or that it waits: `MoveBudget` in `packing/adaptive.py`.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from statistics import harmonic_mean
from typing import Protocol

from services.planner.policy.observe import can_work
from shared.ids import WorkerId
from shared.messages.fetch import FetchReason, RunningPart
from shared.messages.report import ClusterView, WorkerReport, WorkerStatus

Avoided = Set[tuple[WorkerId, WorkerId]]
"""Sources and targets between which nothing can move now."""


@dataclass(frozen=True, slots=True)
class WantedMove:
    """One request goes there."""

    part: RunningPart
    target: WorkerReport
    overflows: bool = False
    """Its worker has no room for it any more."""


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
        """Whether it begins while others still come there, however much its links have carried."""

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


def takes_part(status: WorkerStatus) -> bool:
    """Return whether requests can leave a worker, or come to it, with their KV."""
    report = status.report
    can_move = bool(report.stage_address) and not report.group and not report.held
    return can_work(status) and can_move and report.num_blocks > 0


def move_rate(reports: Sequence[WorkerReport]) -> float:
    """Return the bytes per second at which KV comes to workers, by the average time of a byte; 0: none has."""
    rates = [report.migration.bytes_per_s for report in reports if report.migration.bytes_per_s]
    return harmonic_mean(rates) if rates else 0.0
