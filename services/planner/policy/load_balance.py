"""Which running requests should change their worker, so that memory is used alike, or lasts where it runs short.

    view ─► find_pairs: fullest ─► emptiest, second fullest ─► second emptiest, …     who runs there? ─► choose

A worker is as full as what is used and what those that wait there ask for say, over all (*virtual usage*): a queue
counts as memory that is lacking. A pair is worth a move while it is further apart than `MIN_GAP`, and a request may go
that makes it no less even. Of those best effort goes first, then who has the least KV, which moves soonest.

Pure. Source: Llumnix (OSDI'24, section 4.4: virtual usage, pairs by freeness, lower priorities and shorter requests
first). Deviations: usage is a share of memory, not steps until it is full; all that waits counts, not its head alone;
gaps in place of two thresholds, of which the paper gives no figures.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, TypeVar

from services.planner.policy.moves import Avoided, MoveRule, WantedMove, takes_part
from services.planner.policy.observe import giving_way
from shared.ids import WorkerId
from shared.messages.fetch import MAX_RUNNING, FetchReason, RunningPart
from shared.messages.report import ClusterView, WorkerReport, WorkerStatus
from shared.systems import Migrates

K = TypeVar("K", bound=Hashable)
MIN_GAP: Final = 0.1
"""Difference of the shares of memory in use that is worth a move."""
MAX_TARGET_USAGE: Final = 0.9
"""Nobody is sent to a worker that is fuller."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One worker has more to do than another."""

    source: WorkerReport
    target: WorkerReport
    most_blocks: int
    """KV blocks of a request that may go: with more the target would be the fuller one."""
    reason: FetchReason = FetchReason.BALANCE
    most_requests: int = MAX_RUNNING
    is_urgent: bool = False
    open_worker: WorkerId | None = None

    @property
    def targets(self) -> Sequence[WorkerReport]:
        """See `Wanted`."""
        return (self.target,)

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId] = frozenset()) -> Sequence[WantedMove]:
        """Return one that may go: best effort first, then who has the least KV."""
        part = choose(self, running)
        return () if part is None else (WantedMove(part, self.target),)

    def tell(self, move: WantedMove) -> str:
        """See `Wanted`."""
        return f"{_told(self.source)}, {_told(move.target)}"


def find_pairs(view: ClusterView, migrates: Migrates, avoided: Avoided = frozenset()) -> tuple[Pair, ...]:
    """Return between whom requests should move, each worker once at most, the widest gap first.

    Args:
        view: of the cluster.
        migrates: when they do.
        avoided: sources and targets between which nothing can move now.
    """
    if migrates is Migrates.NEVER:
        return ()
    pairs: list[Pair] = []
    for digest in sorted({s.report.model_digest for s in view.workers if s.report.model_digest}):
        statuses = [s for s in view.workers if s.report.model_digest == digest and takes_part(s)]
        pairs += _pairs_of(statuses, migrates, avoided)
    return tuple(sorted(pairs, key=lambda pair: (usage(pair.target) - usage(pair.source), pair.source.worker_id)))


def balance(migrates: Migrates) -> MoveRule:
    """Return the rule by which requests move then."""
    return lambda view, avoided, _: find_pairs(view, migrates, avoided)


def choose(pair: Pair, running: Sequence[RunningPart]) -> RunningPart | None:
    """Return which of the requests that the source runs should go; None: none."""
    fitting = [part for part in running if 0 < part.num_blocks <= pair.most_blocks]
    return min(fitting, key=lambda part: (part.tier, part.num_blocks, part.choices), default=None)


def usage(report: WorkerReport) -> float:
    """Return a worker's virtual usage: a share of its memory, without best effort that waits and gives way."""
    demanded = report.num_demanded_blocks - giving_way(report).num_demanded_blocks
    return (report.num_used_blocks + demanded) / report.num_blocks


def _pairs_of(statuses: Sequence[WorkerStatus], migrates: Migrates, avoided: Avoided) -> list[Pair]:
    """Return the pairs among workers of one model."""
    by_usage = sorted(statuses, key=lambda status: (-usage(status.report), status.report.worker_id))
    sources = [s for s in by_usage if migrates is Migrates.TO_BALANCE or _is_short(s)]
    left = [s.report.worker_id for s in reversed(by_usage) if not _is_short(s) and usage(s.report) < MAX_TARGET_USAGE]
    reports = {status.report.worker_id: status.report for status in statuses}
    usages = {name: usage(report) for name, report in reports.items()}
    names = pair_up(usages, [status.report.worker_id for status in sources], left, avoided)
    return [_pair(reports[source], reports[target]) for source, target in names]


def pair_up(
    usages: Mapping[K, float], sources: Iterable[K], targets: Iterable[K], avoided: Set[tuple[K, K]] = frozenset()
) -> list[tuple[K, K]]:
    """Return who gives to whom: each in one pair at most, and no pair closer than `MIN_GAP`.

    Args:
        usages: shares of memory in use.
        sources: who may give, the fullest first.
        targets: who may take, the emptiest first.
        avoided: pairs between which nothing can move.
    """
    left, taken, pairs = dict.fromkeys(targets), set[K](), list[tuple[K, K]]()
    for source in sources:
        target = next((each for each in left if (source, each) not in avoided), None)
        if target is None or source in taken or usages[source] - usages[target] < MIN_GAP:
            continue
        taken.add(target)
        left.pop(source, None)
        left.pop(target)
        pairs.append((source, target))
    return pairs


def _pair(source: WorkerReport, target: WorkerReport) -> Pair:
    most_blocks = (usage(source) - usage(target)) / (1 / source.num_blocks + 1 / target.num_blocks)
    return Pair(source, target, max(int(most_blocks), 1))


def _told(report: WorkerReport) -> str:
    return f"{report.worker_id} has {usage(report):.0%} of its KV memory used or asked for"


def _is_short(status: WorkerStatus) -> bool:
    return status.throttled or status.report.num_queued_for_memory > 0
