"""Pages that two memories of one device hand over to each other, one for one, so that neither has more than before.

    worker 0    keys 3 | a b |  ──a, b──►   worker 1    keys 3 | a b |      computes layer 3 from now on
                keys 0 | c d |  ◄──c, d──               keys 0 | c d |      computed layer 0 until now

Nothing is copied: a page stays where it was made, and another memory maps it. Who takes more than it gives gives pages
of any contents for the rest, *blanks*. In the ledger a page of the budget is another page of the device afterwards.

    open ── export, adopt ──► apply ──┬──► commit      what was given is nobody's here any more
                                      └──► undo        all is as it was

Two memories must not both undo and commit: whoever carries a swap out sees to that (`pages/exchange.py`).

Source: KunServe v2, section 4.2 (KV is exchanged when layers move). The paper's instances are on different devices and
copy; that instances of one device need not is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from services.worker.memory.change import carry_out
from services.worker.memory.layout import Region
from services.worker.memory.pool import LedgerError, Place, Prepared
from services.worker.memory.ranges import PageHandle, PageId, VirtualMemory, VirtualRange


class PagesKeptError(Exception):
    """Pages were not handed over: each memory has its own.

    Args:
        reason: for people.
        is_own: the reason lies in this worker's memory, so that another try would fail as well.
    """

    def __init__(self, reason: str, *, is_own: bool = False) -> None:
        super().__init__(reason)
        self.is_own = is_own


class PageSwap:
    """One memory's part. `ElasticMemory.swap` opens one; nothing else changes that memory until it is over.

    Args:
        memory: whose pages are swapped.
        ranges: every region's.
        page_ids: the memory's page that stands for each of the ledger's.
        prepared: moves of the ledger; each page of theirs goes, and another one comes for it.
        on_commit: called with the pages that stand for the ledger's afterwards.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        ranges: Mapping[Region, VirtualRange],
        page_ids: Sequence[PageId],
        prepared: Prepared,
        on_commit: Callable[[list[PageId]], None],
    ) -> None:
        self._memory = memory
        self._ranges = ranges
        self._before, self._after = list(page_ids), list(page_ids)
        self._prepared = prepared
        self._on_commit = on_commit
        self._given: dict[Place, int] = {}
        self._taken: dict[Place, int] = {}
        self._blanks_given: list[int] = []
        self._blanks_taken: list[int] = []
        """Of all four: pages of the ledger that were not exported, or not exchanged for another, yet."""
        self._adopted: list[PageId] = []
        self._unmap: Callable[[], None] | None = None
        """Takes back what `apply` did."""
        for move, pages in zip(prepared.moves, prepared.pages, strict=True):
            _note(move.source, pages.tolist(), self._given, self._blanks_given)
            _note(move.target, pages.tolist(), self._taken, self._blanks_taken)
        self._swapped = [page for pages in prepared.pages for page in pages.tolist()]

    @property
    def num_pages(self) -> int:
        """That go, and that come."""
        return len(self._swapped)

    @property
    def num_left(self) -> int:
        """That were not exported yet, and that did not come yet."""
        return sum(map(len, (self._given, self._taken, self._blanks_given, self._blanks_taken)))

    def export(self, place: Place | None) -> PageHandle:
        """Return a descriptor of a page that goes; whoever has it closes it.

        Args:
            place: where it is mapped, of a page; None: a blank.

        Raises:
            LedgerError: none goes from there, or it has gone.
            OSError, MemoryError: the system refuses.
        """
        return self._memory.export(self._before[_pick(place, self._given, self._blanks_given)])

    def adopt(self, place: Place | None, handle: PageHandle) -> None:
        """Take in a page that comes; the descriptor may be closed then.

        Args:
            place: where it will be mapped; None: a blank.
            handle: as the other side exported it.

        Raises:
            LedgerError: none is to come there, or it has come.
            MappingError: the descriptor has no such page.
            OSError: the system refuses.
        """
        page = self._memory.adopt(handle)
        self._adopted.append(page)
        self._after[_pick(place, self._taken, self._blanks_taken)] = page

    def apply(self) -> None:
        """Map what has come in the place of what goes: all of it, or nothing. The device is waited for.

        Raises:
            LedgerError: something has not come, or not gone.
            MemoryLostError: it failed, and undoing it too.
            OSError, MemoryError: the system refuses; nothing was changed.
        """
        if self.num_left:
            raise LedgerError(f"of {2 * self.num_pages} pages that go and come {self.num_left} are missing")
        page_bytes = self._memory.page_bytes
        self._unmap = carry_out(self._prepared, self._ranges, page_bytes, self._before, self._after)

    def commit(self) -> None:
        """Keep what has come, and forget what was given."""
        assert self._unmap is not None, "nothing was applied"
        self._unmap = None
        self._adopted.clear()
        self._on_commit(self._after)
        for page in self._swapped:
            self._memory.hand_over(self._before[page])

    def undo(self) -> None:
        """Let all be as it was, and forget what has come. Idempotent; nothing after `commit`.

        Raises:
            MemoryLostError: what is mapped is not what it was.
        """
        unmap, self._unmap = self._unmap, None
        if unmap is not None:
            unmap()
        while self._adopted:
            self._memory.disown(self._adopted.pop())


def _note(place: Place | None, pages: list[int], placed: dict[Place, int], blanks: list[int]) -> None:
    if place is None:
        blanks += pages
    else:
        placed.update({Place(place.region, place.first + i): page for i, page in enumerate(pages)})


def _pick(place: Place | None, placed: dict[Place, int], blanks: list[int]) -> int:
    """Remove and return the ledger's page of a place, or a blank's."""
    try:
        return blanks.pop() if place is None else placed.pop(place)
    except (IndexError, KeyError):
        raise LedgerError(f"no page goes or comes at {place}" if place else "there are no more blanks") from None
