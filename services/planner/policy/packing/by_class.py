"""Has running requests lie where Mell puts them, by size class, and says who is filled next.

    every second each worker says who runs there ─► who has gone, grown, come ─► a class packer
    who runs elsewhere than the packer has it    ─► goes there, as soon as there is room

A bin is a worker, and has one as long as something lies in it. Who comes is where a dispatcher has put it, by what it
was told (`Filling`): if that was too old, it moves at once. Sizes are KV blocks, with what is generated until the
next look and a move that it leads to are over, so that a worker does not overflow meanwhile. If it does, because its
move is late or refused, it preempts as ever; what finds no place at all stays where it is.

Workers whose model or memory is not what most have are left out, as are members of groups.

Pure, but for what it remembers. Source: Mell, section VI-C; the packers: `mell.py`, `mell_printed.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from services.planner.policy.moves import Avoided, Wanted, WantedMove, move_rate, takes_part
from services.planner.policy.packing.bins import Bin, Name
from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.classes import SizeClass, least_size
from services.planner.policy.packing.consolidation import (
    DECISION_S,
    free_blocks,
    grown_blocks,
    lacking_blocks,
    move_s,
    needed_blocks,
    num_sequences,
)
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import MAX_LISTED, FetchReason, RunningPart
from shared.messages.plan import FilledNext, Filling
from shared.messages.report import ClusterView, WorkerReport

LOOK_S: Final = 1.0
"""Between two looks at a worker's requests: the tick of the paper."""


@dataclass(frozen=True, slots=True)
class Relocation:
    """A worker says who runs there, and what lies elsewhere by now leaves it."""

    by_class: ByClass
    source: WorkerReport
    avoided: Avoided
    reason: FetchReason = FetchReason.PACK
    most_blocks: int = 10**9
    most_requests: int = MAX_LISTED
    is_urgent: bool = True
    open_worker: WorkerId | None = None
    targets: Sequence[WorkerReport] = ()

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId] = frozenset()) -> Sequence[WantedMove]:
        """Return who goes where, of those for whom there is room by now."""
        self.by_class.note(self.source.worker_id, running)
        moves: list[WantedMove] = []
        is_short = self.by_class.is_short(self.source)
        taken: Counter[WorkerId] = Counter()
        for part in running:
            target = self.by_class.place_of(part)
            if target is None or target.worker_id in {self.source.worker_id, *busy}:
                continue
            needed, pair = needed_blocks(part, target), (self.source.worker_id, target.worker_id)
            if pair not in self.avoided and taken[target.worker_id] + needed <= free_blocks(target):
                taken[target.worker_id] += needed
                moves.append(WantedMove(part, target, overflows=is_short))
        return moves

    def tell(self, move: WantedMove) -> str:
        """See `Wanted`."""
        return f"by its size class it belongs on {move.target.worker_id}"


class ByClass:
    """The rule; see the module.

    Args:
        form: makes a packer of bins with a capacity.
    """

    def __init__(self, form: Callable[[int], ClassPacker]) -> None:
        self._form = form
        self._packer = form(1)
        self._reports: Mapping[WorkerId, WorkerReport] = {}
        """Of the workers that take part."""
        self._rate = 0.0
        self._worker_of: dict[Bin, WorkerId] = {}
        self._named: dict[WorkerId, set[RequestId]] = {}
        """Those that run at a worker as it said last, or have been sent there since."""
        self._looked_s: dict[WorkerId, float] = {}

    def __call__(self, view: ClusterView, avoided: Avoided, now_s: float) -> Sequence[Wanted]:
        """Return each worker that something runs at, if it is time to ask it."""
        self._see([status.report for status in view.workers if takes_part(status)])
        due = [
            report
            for report in self._reports.values()
            if (num_sequences(report) or self._named.get(report.worker_id))
            and num_sequences(report) <= MAX_LISTED
            and now_s - self._looked_s.get(report.worker_id, -LOOK_S) >= LOOK_S
        ]
        self._looked_s |= dict.fromkeys((report.worker_id for report in due), now_s)
        return [Relocation(self, report, avoided) for report in due]

    def note(self, worker_id: WorkerId, running: Sequence[RunningPart]) -> None:
        """Know who runs at a worker now."""
        report = self._reports.get(worker_id)
        if report is None:
            return
        sizes = {_name(part): self._size(report, part) for part in running}
        gone: list[RequestId] = []
        for name in self._named.get(worker_id, set()) - sizes.keys():
            place = self._lies_at(name)
            if place in {None, worker_id}:
                gone.append(name)
            else:
                self._named.setdefault(place, set()).add(name)  # if it has ended, that one says so
        self._named[worker_id] = set(sizes)
        packer = self._packer
        come: dict[Name, int] = {name: size for name, size in sizes.items() if packer.where(name) is None}
        packer.batch(sorted(gone), {name: size for name, size in sizes.items() if name not in come}, come)
        packer.evicted.clear()  # it stays where it is, and is asked about again
        self._name_bins()

    def place_of(self, part: RunningPart) -> WorkerReport | None:
        """Return the worker that a request lies at; None: nowhere."""
        place = self._lies_at(_name(part))
        return None if place is None else self._reports.get(place)

    def is_short(self, report: WorkerReport) -> bool:
        """Return whether a worker will lack memory before a move could be over."""
        return lacking_blocks(report, self._rate) > 0

    @property
    def filling(self) -> Filling:
        """Who gets the next request of each size."""
        capacity = self._packer.capacity
        unused = next(iter(self._unused()), None)
        by_size: list[FilledNext] = []
        for kind in SizeClass:
            bin_ = self._packer.next_bin(least_size(kind, capacity))
            worker_id = unused if bin_ is None else self._worker_of.get(bin_)
            if worker_id is not None:
                block_size = self._reports[worker_id].block_size
                min_tokens = (least_size(kind, capacity) - 1) * block_size + 1
                by_size.append(FilledNext(min_tokens=min_tokens, worker_id=worker_id))
        return Filling(by_size=tuple(by_size))

    def _see(self, reports: Sequence[WorkerReport]) -> None:
        """Know who takes part, and forget what lies at those who do not any more."""
        kinds = Counter((report.num_blocks, report.model_digest) for report in reports)
        kind = max(kinds, key=lambda each: (kinds[each], each), default=(self._packer.capacity, ""))
        if kind[0] != self._packer.capacity:
            self._packer = self._form(kind[0])
            self._worker_of.clear()
            self._named.clear()
        alike = [report for report in reports if (report.num_blocks, report.model_digest) == kind]
        self._reports = {report.worker_id: report for report in alike}
        self._rate = move_rate(alike)
        gone = {name for worker_id in self._named.keys() - self._reports.keys() for name in self._named.pop(worker_id)}
        gone |= {name for named in self._named.values() for name in named if self._is_lost(name)}
        for bin_, worker_id in self._worker_of.items():
            if worker_id not in self._reports:
                self._packer.change_capacity(bin_.number, 0)  # nothing more is put there
        self._packer.batch(sorted(gone), {}, {})
        self._packer.bins.max_bins = len(self._reports)
        self._name_bins()

    def _name_bins(self) -> None:
        """Let each bin in use be a worker: of those in which nothing lies, the one at which most of it runs."""
        in_use = set(self._packer.bins)
        self._worker_of = {bin_: worker_id for bin_, worker_id in self._worker_of.items() if bin_ in in_use}
        for bin_ in sorted(in_use - self._worker_of.keys(), key=lambda each: each.order):
            sizes = {name: size for item in bin_.items.values() for name, size in item.members.items()}
            unused = self._unused()
            here = [sum(sizes[name] for name in sizes.keys() & self._named.get(each, set())) for each in unused]
            self._worker_of[bin_] = unused[here.index(max(here))]

    def _unused(self) -> list[WorkerId]:
        """Return the workers in which nothing lies, those first at which nothing runs."""
        used = set(self._worker_of.values())
        free = [report for report in self._reports.values() if report.worker_id not in used]
        return [each.worker_id for each in sorted(free, key=lambda each: (num_sequences(each) > 0, each.worker_id))]

    def _lies_at(self, name: RequestId) -> WorkerId | None:
        number = self._packer.where(name)
        return None if number is None else self._worker_of.get(self._packer.bins[number])

    def _is_lost(self, name: RequestId) -> bool:
        """Return whether a request lies at a worker that does not take part any more."""
        place = self._lies_at(name)
        return place is not None and place not in self._reports

    def _size(self, report: WorkerReport, part: RunningPart) -> int:
        horizon_s = LOOK_S + DECISION_S + move_s(report, self._rate)
        return min(part.num_held_blocks + grown_blocks(report, len(part.choices), horizon_s), report.num_blocks)


def _name(part: RunningPart) -> RequestId:
    return part.choices[0][0]
