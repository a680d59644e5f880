"""Packs running requests onto fewer workers: who overflows gives one away, and one of the emptiest is emptied.

    a worker whose memory runs out before a move could end    gives one request to the fullest worker with room for it,
                                                              or to one that is not in use, else for a moment
    every few seconds one of the four emptiest in use         gives all of them to others in use, if all find room there

What is packed are KV blocks, but for those that are at the target by name, with what requests grow by: until the move
is over, or for half a minute if a worker is emptied, so that it does not come back at once. A target's steps may not
become longer than a limit by then, by its own cost model, slowed down by prompts as of late.

Dispatchers place by `pack`, so that the emptiest get nothing while others have room. Who lacks memory is not emptied,
and gets nothing.

Pure, but for when it looked last. Source: the project's own (`pack.py`, whose planning it uses).
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from services.planner.policy.moves import Avoided, Wanted, WantedMove, move_rate, takes_part
from services.planner.policy.packing.bins import Bin, Item
from services.planner.policy.packing.pack import EMPTY_PERIOD_S, NUM_EMPTIEST, Elsewhere
from shared.ids import WorkerId
from shared.messages.fetch import MAX_RUNNING, FetchReason, RunningPart
from shared.messages.report import ClusterView, WorkerReport, WorkerStatus, cost_beside_prompts
from shared.systems import PACKED_STEP_S

DECISION_S: Final = 2.5
"""From what a worker reports until a move begins because of it, and for another one if the first target refuses."""
MOVE_S: Final = 1.5
"""Of a move, as long as no KV has moved, or where nobody says how large it is."""
LONG_MOVE_S: Final = 3.0
"""Up to which a move takes its time, if its tokens could be computed as well."""
REST_S: Final = 10.0
"""For which there is room as all grow: where a request is given away, and where it goes."""
EMPTY_HORIZON_S: Final = 30.0
"""For which requests of a worker that is emptied find room, as they grow, where they go."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """What both have."""

    source: WorkerReport
    others: Sequence[WorkerReport]
    """Who may take something."""
    reason: FetchReason = FetchReason.PACK
    most_blocks: int = 10**9
    most_requests: int = MAX_RUNNING
    targets: Sequence[WorkerReport] = ()
    is_urgent: bool = False
    open_worker: WorkerId | None = None

    def free_of(self, busy: Set[WorkerId]) -> list[WorkerReport]:
        """Return the others that may take something now."""
        return [other for other in self.others if other.worker_id not in busy]


@dataclass(frozen=True, slots=True)
class Relief(_Leaving):
    """A worker gives away one request before its memory runs out."""

    num_lacking: int = 1
    """Blocks that it will lack before the move could be over."""

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId] = frozenset()) -> Sequence[WantedMove]:
        """Return the smallest request without which the others have room for a while, else the largest that can go.

        To the fullest worker where it rests for a while; if there is none, to where it has room for longest. Of those
        that are not in use it takes the last: a dispatcher that sends a prompt meanwhile takes the first.
        """
        if num_sequences(self.source) < 2:
            return ()  # a request that is alone has all the room there is
        others = self.free_of(busy)
        by_size = sorted(running, key=lambda part: (part.num_blocks, part.choices))
        first = [part for part in by_size if self._is_enough(part)]
        in_order = (*first, *reversed(by_size[: len(by_size) - len(first)]))
        for horizon_s, sign in ((REST_S, 1), (DECISION_S + MOVE_S, -1)):
            for part in in_order:
                fitting = [other for other in others if self._fits(part, other, horizon_s)]
                if fitting:
                    target = max(fitting, key=lambda other: (-sign * free_blocks(other), other.worker_id))
                    return (WantedMove(part, target, overflows=True),)
        return ()

    def _is_enough(self, part: RunningPart) -> bool:
        """Return whether those who stay have room once a request is gone, and does not grow there."""
        later = _later_blocks(self.source, REST_S) - grown_blocks(self.source, len(part.choices), REST_S)
        return later - part.num_blocks <= self.source.num_blocks

    def _fits(self, part: RunningPart, other: WorkerReport, horizon_s: float) -> bool:
        """Return whether a worker has room for a request for so long, and its steps stay short."""
        growth = grown_blocks(self.source, len(part.choices), horizon_s)
        free = other.num_blocks - _later_blocks(other, horizon_s)
        return free >= needed_blocks(part, other) + growth and _is_fast([part], other, horizon_s)

    def tell(self, move: WantedMove) -> str:
        """See `Wanted`."""
        return f"{self.source.worker_id} will lack {self.num_lacking} KV blocks; {move.target.worker_id} has room"


@dataclass(frozen=True, slots=True)
class Emptying(_Leaving):
    """A worker gives away all of its requests, so that it is not in use any more."""

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId] = frozenset()) -> Sequence[WantedMove]:
        """Return where each goes; nothing if not all who are there can go, and find room."""
        if sum(len(part.choices) for part in running) < num_sequences(self.source):
            return ()  # somebody waits, or computes a prompt
        others = self.free_of(busy)
        together = _together(running, others)
        items = [Item({number: 0}, self._size(parts, others)) for number, parts in enumerate(together)]
        parts_of = {id(item): parts for item, parts in zip(items, together, strict=True)}
        bins = [
            Bin(number, number, other.num_blocks, used=_later_blocks(other, EMPTY_HORIZON_S))
            for number, other in enumerate(others)
        ]
        plan = Elsewhere(sorted((bin_.free, bin_.number, bin_) for bin_ in bins), room=0).plan(items)
        moves = [WantedMove(part, others[bin_.number]) for item, bin_ in plan or () for part in parts_of[id(item)]]
        is_fast = all(
            _is_fast([move.part for move in moves if move.target is target], target, EMPTY_HORIZON_S)
            for target in {id(move.target): move.target for move in moves}.values()
        )
        return moves if is_fast else ()

    def tell(self, move: WantedMove) -> str:
        """See `Wanted`."""
        return f"{self.source.worker_id} is emptied; {move.target.worker_id} has room"

    def _size(self, parts: Sequence[RunningPart], others: Sequence[WorkerReport]) -> int:
        """Return the most blocks that requests need at one of the others; they share a prefix if they are several."""
        held = sum(part.num_held_blocks - part.num_prefix_blocks for part in parts)
        prefix = 0 if _is_everywhere(parts[0].prefix, others) else parts[0].num_prefix_blocks
        return held + prefix + grown_blocks(self.source, sum(len(part.choices) for part in parts), EMPTY_HORIZON_S)


class Consolidation:
    """The rule; see the module. Remembers when it looked at which of the emptiest."""

    def __init__(self) -> None:
        self._not_before_s = float("-inf")
        self._num_looks = 0

    def __call__(self, view: ClusterView, avoided: Avoided, now_s: float) -> Sequence[Wanted]:
        """Return who should give one request away, and now and then who should be emptied."""
        wanted: list[Wanted] = []
        is_due = now_s >= self._not_before_s
        if is_due:
            self._not_before_s = now_s + EMPTY_PERIOD_S / NUM_EMPTIEST
            self._num_looks += 1
        for digest in sorted({s.report.model_digest for s in view.workers if s.report.model_digest}):
            statuses = [s for s in view.workers if s.report.model_digest == digest and takes_part(s)]
            open_ = [status for status in statuses if not status.report.migration.closing]
            reports, rate = [status.report for status in open_], move_rate([each.report for each in statuses])
            for status in statuses:
                num_lacking = lacking_blocks(status.report, rate)
                if num_lacking > 0:
                    others = _others(status.report, reports, avoided)
                    wanted.append(Relief(status.report, others, is_urgent=True, num_lacking=num_lacking))
            if is_due:
                calm = [s.report for s in open_ if num_sequences(s.report) and not _is_short(s, rate)]
                wanted += self._emptying(calm, avoided)
        return wanted

    def _emptying(self, in_use: Sequence[WorkerReport], avoided: Avoided) -> Sequence[Wanted]:
        by_used = sorted(in_use, key=lambda report: (report.num_used_blocks, report.worker_id))
        if len(by_used) < 2:
            return ()
        source = by_used[self._num_looks % min(NUM_EMPTIEST, len(by_used) - 1)]
        others = _others(source, in_use, avoided)
        room = sum(max(each.num_blocks - _later_blocks(each, EMPTY_HORIZON_S), 0) for each in others)
        is_told = num_sequences(source) <= MAX_RUNNING
        if not is_told or source.num_used_blocks > room:
            return ()
        emptiest = max(others, key=lambda report: (free_blocks(report), report.worker_id))
        return (Emptying(source, others, open_worker=emptiest.worker_id),)


def _is_short(status: WorkerStatus, rate: float) -> bool:
    report = status.report
    return status.throttled or report.num_queued_for_memory > 0 or lacking_blocks(report, rate) > 0


def move_s(report: WorkerReport, rate: float) -> float:
    """Return the seconds in which a request of a worker's average size leaves it, as fast as others moved.

    Where that is long, it goes as tokens if these are computed before.
    """
    if not rate or not report.kv_bytes or not report.num_running:
        return MOVE_S
    num_blocks = report.num_used_blocks / report.num_running
    kv_s = report.kv_bytes / report.num_blocks * num_blocks / rate
    tokens_s = num_blocks * report.block_size * report.token_s if report.token_s else math.inf
    return min(kv_s, max(tokens_s, LONG_MOVE_S))


def needed_blocks(part: RunningPart, target: WorkerReport) -> int:
    """Return how many blocks a request needs at a worker that may have its prefix by name."""
    return part.num_held_blocks - (part.num_prefix_blocks if _is_everywhere(part.prefix, [target]) else 0)


def _is_everywhere(prefix: str, reports: Sequence[WorkerReport]) -> bool:
    return all(any(each.name == prefix for each in report.migration.shared_prefixes) for report in reports)


def _together(running: Sequence[RunningPart], others: Sequence[WorkerReport]) -> list[list[RunningPart]]:
    """Return the requests that go to one worker because they share a prefix which not all others have."""
    found: dict[str, list[RunningPart]] = {}
    for number, part in enumerate(running):
        is_alone = not part.prefix or _is_everywhere(part.prefix, others)
        found.setdefault(f"{number}" if is_alone else f"prefix {part.prefix}", []).append(part)
    return list(found.values())


def _is_fast(parts: Sequence[RunningPart], target: WorkerReport, horizon_s: float) -> bool:
    """Return whether a worker's steps are short enough with requests that come, as all grow, and beside prompts."""
    num_coming = sum(len(part.choices) for part in parts)
    num_later = num_sequences(target) + num_coming
    grown = grown_blocks(target, num_later, horizon_s) * target.block_size
    num_tokens = sum(part.num_tokens * len(part.choices) for part in parts)
    num_here = (target.num_blocks - free_blocks(target)) * target.block_size
    return cost_beside_prompts(target).of(num_later, num_here + num_tokens + grown) <= PACKED_STEP_S


def num_sequences(report: WorkerReport) -> int:
    """Return how many sequences are at a worker, in whatever state."""
    return report.num_running + report.num_waiting + report.num_preempted


def grown_blocks(report: WorkerReport, count: int, horizon_s: float) -> int:
    """Return by how many blocks so many of a worker's sequences grow in a time.

    At the pace of those that run there, or a token in each step: who has just come is not in the average yet.
    """
    if not report.num_running or not report.block_size:
        return count
    in_each_step = 1 / report.step_time_s if report.step_time_s else 0.0
    tokens_per_s = max(report.tokens_per_s / report.num_running, in_each_step)
    return count * (1 + int(tokens_per_s * horizon_s / report.block_size))


def free_blocks(report: WorkerReport) -> int:
    """Return the blocks that nobody holds or asks for."""
    asked = max(report.num_demanded_blocks, report.num_uncomputed_blocks)
    return report.num_blocks - report.num_used_blocks - asked


def lacking_blocks(report: WorkerReport, rate: float = 0.0) -> int:
    """Return how many blocks a worker will lack before a move could be over, at that rate; 0 or less: none."""
    return _later_blocks(report, DECISION_S + move_s(report, rate)) - report.num_blocks


def _later_blocks(report: WorkerReport, horizon_s: float) -> int:
    return report.num_blocks - free_blocks(report) + grown_blocks(report, report.num_running, horizon_s)


def _others(source: WorkerReport, reports: Sequence[WorkerReport], avoided: Avoided) -> list[WorkerReport]:
    return [
        each
        for each in reports
        if each.worker_id != source.worker_id and (source.worker_id, each.worker_id) not in avoided
    ]
