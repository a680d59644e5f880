"""A cluster view in parts, each far below the bus's limit: what the monitor writes, and how readers put it together.

What does not change while a worker's process serves (`ProcessFacts`) stands on *pages*, which are told when they
change, and now and then for whoever missed them. The figures go with every view, in *parts*, which name their pages:

    page 0 of facts ─┐ names: 3f0a…
    page 1 of facts ─┤        91c4…       told once
    view 7, part 0 of 2: facts 3f0a…, 91c4… ; workers a to m ─┐
    view 7, part 1 of 2: the same names     ; workers n to z ─┴─► a whole view, or none: the older one stays

Pure: no bus here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final

from shared.ids import WorkerId
from shared.messages.report import ClusterView, ProcessFacts, ViewFacts, WorkerReport, WorkerStatus
from shared.wire import encode_json_rows, pack_rows

MAX_PART_BYTES: Final = 128 * 1024
"""About the most bytes of a part or page: read in some milliseconds. One worker's row may be larger, and goes alone."""
_NAME_BYTES: Final = 8
_FACTS: Final = frozenset(ProcessFacts.model_fields)
_LEFT_OUT: Final = {"report": set(_FACTS - {"worker_id"})}
_facts_of: Final = attrgetter(*sorted(_FACTS))


def encode_parts(view: ClusterView, names: Sequence[str]) -> list[bytes]:
    """Return the parts of a view whose workers' facts stand on the pages of these names. Defaults are left out."""
    rows = [status.model_dump_json(exclude=_LEFT_OUT, exclude_defaults=True).encode() for status in view.workers]
    return _with_heads(view, rows, names)


def encode_whole_parts(view: ClusterView) -> list[bytes]:
    """Return the parts of a view in which every report is whole, for people."""
    return _with_heads(view, [status.model_dump_json().encode() for status in view.workers], ())


def _with_heads(view: ClusterView, rows: Sequence[bytes], names: Sequence[str]) -> list[bytes]:
    packed = pack_rows(rows, MAX_PART_BYTES)
    head = view.model_copy(update={"num_parts": len(packed), "facts": tuple(names)})
    rest = head.model_copy(update={"waiting": ()})
    return [
        encode_json_rows((rest if part else head).model_copy(update={"part": part}), "workers", some)
        for part, some in enumerate(packed)
    ]


@dataclass(slots=True)
class _Page:
    """Some workers' facts as JSON, in the order in which they came."""

    rows: dict[WorkerId, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    name: str = ""
    """Empty: it has changed since it was named."""

    def put(self, worker_id: WorkerId, row: bytes) -> None:
        self.drop(worker_id)
        self.rows[worker_id] = row
        self.num_bytes += len(row)

    def drop(self, worker_id: WorkerId) -> None:
        self.num_bytes -= len(self.rows.pop(worker_id, b""))
        self.name = ""

    def has_room(self, num_bytes: int) -> bool:
        return not self.rows or self.num_bytes + num_bytes <= MAX_PART_BYTES


class FactsPages:
    """Which facts stand on which page. A worker keeps its page, so that one that starts anew changes no other."""

    def __init__(self) -> None:
        self._pages: list[_Page] = []
        self._page_of: dict[WorkerId, int] = {}
        self._known: dict[WorkerId, tuple[Any, ...]] = {}

    def take(self, workers: Sequence[WorkerStatus]) -> None:
        """Have the pages hold the facts of exactly these workers."""
        for status in workers:
            report = status.report
            facts = _facts_of(report)
            if self._known.get(report.worker_id) != facts:
                self._known[report.worker_id] = facts
                self._place(report)
        if len(self._known) > len(workers):
            for worker_id in self._known.keys() - {status.report.worker_id for status in workers}:
                del self._known[worker_id]
                self._pages[self._page_of.pop(worker_id)].drop(worker_id)
        while self._pages and not self._pages[-1].rows:
            self._pages.pop()

    def names(self) -> tuple[str, ...]:
        """Return what each page is called: another name whenever it holds something else."""
        for page in self._pages:
            page.name = page.name or blake2b(b",".join(page.rows.values()), digest_size=_NAME_BYTES).hexdigest()
        return tuple(page.name for page in self._pages)

    def encode(self, page: int) -> bytes:
        """Return a page as it is told and stored."""
        head = ViewFacts(name=self.names()[page])
        return encode_json_rows(head, "workers", list(self._pages[page].rows.values()))

    def _place(self, report: WorkerReport) -> None:
        row = report.model_dump_json(include=set(_FACTS), exclude_defaults=True).encode()
        before = self._page_of.get(report.worker_id)
        if before is not None:
            self._pages[before].drop(report.worker_id)
            if self._pages[before].has_room(len(row)):
                self._pages[before].put(report.worker_id, row)
                return
        page = next((page for page, each in enumerate(self._pages) if each.has_room(len(row))), len(self._pages))
        if page == len(self._pages):
            self._pages.append(_Page())
        self._pages[page].put(report.worker_id, row)
        self._page_of[report.worker_id] = page


class ViewAssembly:
    """Parts and pages in, in the order in which they come; whole views out.

    A part that is not the next one is ignored, and so is the rest of a view of which one is missing.
    """

    def __init__(self) -> None:
        self._pages: dict[str, dict[WorkerId, ProcessFacts]] = {}
        self._facts: dict[WorkerId, ProcessFacts] = {}
        """Of the named pages."""
        self._names: tuple[str, ...] | None = None
        """Of the pages that `_facts` is made of; None: of others than the present view's."""
        self._parts: list[ClusterView] = []
        self._num_joined = 0
        self._workers: list[WorkerStatus] = []

    @property
    def missing(self) -> list[int]:
        """The pages that the view on its way needs, and that have not come."""
        names = self._parts[0].facts if self._parts else ()
        return [page for page, name in enumerate(names) if name not in self._pages]

    @property
    def num_parts(self) -> int:
        """Of the view on its way; 0: none is."""
        return self._parts[0].num_parts if self._parts else 0

    def take(self, message: ClusterView | ViewFacts) -> ClusterView | None:
        """Take a part or a page that was decoded just now; return the view that it makes whole, if it does."""
        if isinstance(message, ViewFacts):
            self._pages[message.name] = {facts.worker_id: facts for facts in message.workers}
        elif message.part == 0:
            self._begin(message)
        elif self._parts and _follows(message, self._parts[-1]):
            self._parts.append(message)
        else:
            return None
        return self._join()

    def _begin(self, first: ClusterView) -> None:
        self._parts, self._num_joined, self._workers = [first], 0, []
        self._pages = {name: page for name, page in self._pages.items() if name in set(first.facts)}
        if self._names != first.facts:
            self._names = None

    def _join(self) -> ClusterView | None:
        """Give the workers of each part their facts as soon as all pages are there."""
        if not self._parts or self.missing:
            return None
        first = self._parts[0]
        if self._names is None:
            self._names = first.facts
            self._facts = {name: facts for page in first.facts for name, facts in self._pages[page].items()}
        for part in self._parts[self._num_joined :]:
            self._workers += map(self._with_facts, part.workers)
        self._num_joined = len(self._parts)
        if self._num_joined < first.num_parts:
            return None
        whole = first.model_copy(update={"num_parts": 1, "facts": (), "workers": tuple(self._workers)})
        self._parts, self._workers = [], []
        return whole

    def _with_facts(self, status: WorkerStatus) -> WorkerStatus:
        facts = self._facts.get(status.report.worker_id)
        if facts is not None:
            # in place: nobody else has the report yet, and copies of thousands would hold the event loop up
            vars(status.report).update(vars(facts))
        return status


def _follows(part: ClusterView, before: ClusterView) -> bool:
    names = part.sequence_number, part.num_parts, part.facts
    return part.part == before.part + 1 and names == (before.sequence_number, before.num_parts, before.facts)
