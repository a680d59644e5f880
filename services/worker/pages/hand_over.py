"""A stage's part when workers of one device become a group: whose pages go, how, and what its model has then.

offered ── the leader: decide ──► a table by pages; or by copies, as between devices
                                    └── carry_out: drop layers, hand pages over, have all blocks there is memory for
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from services.worker.executor.elastic_model import ElasticModel
from services.worker.kv_moves.kv_table import KvOffer, KvTable
from services.worker.kv_moves.places import GroupPlace
from services.worker.memory.card import card_of
from services.worker.memory.page_swap import PagesKeptError, PageSwap
from services.worker.memory.spans import Spans
from services.worker.pages.exchange import PageExchange
from services.worker.pages.flows import blocks_of, page_flows, shift_of, table_by_pages
from services.worker.pages.wire import PageDoor, PageSocket, dial_doors
from shared.process.log import get_logger

DIAL_S = 1.0
"""Longest time in which another stage's door opens: it waits there already."""
_log = get_logger()


class HandOver:
    """See the module. `close` in the end.

    Args:
        place: in the group that forms.
        model: of this worker.
        limit_s: in which pages have to change hands.
        is_on: pages are handed over where they can be.
    """

    def __init__(self, place: GroupPlace, model: ElasticModel, limit_s: float, *, is_on: bool) -> None:
        self._place = place
        self._model = model
        self._limit_s = limit_s
        self._door: PageDoor | None = None
        self._socks: list[PageSocket] = []
        self.card = ""
        """As in `KvOffer`."""
        self.is_possible = True
        """This worker's memory has not refused to hand over pages."""
        if not is_on:
            return
        try:
            self._door = PageDoor() if place.index else None
        except OSError as error:
            _log.warning("pages_not_handed_over", stage=place.index, reason=str(error))
            return
        card, facts = card_of(model.device), model.facts
        self.card = card and f"{card}/{facts.page_bytes}/{facts.block_bytes}"

    @property
    def door(self) -> str:
        """As in `KvOffer`."""
        return "" if self._door is None else self._door.path

    def decide(self, offers: Sequence[KvOffer], by_copies: Callable[[Sequence[KvOffer]], KvTable]) -> KvTable:
        """Return what moves: by pages, with connections to all who are to hand some over, if no more is lost so.

        Of the leader. Blocks.

        Args:
            offers: by stage.
            by_copies: says what moves otherwise.
        """
        table = table_by_pages(offers, self._model.layout)
        if table is None:
            return by_copies(offers)
        names = {name for offer in offers for name in offer.kept.names}
        if len(table.kept_at(0)) < len(names) and len((copied := by_copies(offers)).kept_at(0)) > len(table.kept_at(0)):
            return copied
        try:
            self._socks = dial_doors([offer.door for offer in offers[1:]], DIAL_S)
        except OSError as error:
            _log.warning("pages_not_handed_over", stage=self._place.index, reason=str(error))
            return by_copies(offers)
        return table

    def carry_out(self, table: KvTable) -> int:
        """Let the model have this stage's layers, and KV as a table by pages says. Blocks.

        Returns:
            Pages that this stage gave, and took.

        Raises:
            PagesKeptError: no pages were handed over; the model has its layers, and blocks hold nothing.
            Exception: the model has changed half-way, or not at all; see `ElasticModel.keep_by_pages`.
        """
        stages, index = self._place.stages, self._place.index
        flows = page_flows(table, [stage.layers for stage in stages], self._model.layout)
        taken = Spans()
        for flow in flows:
            for run in flow.runs if flow.target == index else ():
                taken |= run.pages.shifted(run.shift)
        own = next((lot for lot in table.lots if index in lot.sources), None)
        in_use, by_blocks = (Spans(), 0) if own is None else (blocks_of(own.ids), shift_of(own))

        def swap_pages(swap: PageSwap) -> None:
            try:
                self._meet()
            except OSError as error:
                raise PagesKeptError(f"the leader has not come: {error}") from error
            peers = dict(enumerate(self._socks, 0 if index else 1))
            PageExchange(index, len(stages), peers, self._limit_s).carry_out(flows, swap)

        try:
            self._model.keep_by_pages(stages[index].layers, in_use, by_blocks, taken, swap_pages)
        except PagesKeptError as error:
            self.is_possible = not error.is_own
            raise
        return sum(flow.num_pages for flow in flows if flow.source == index)

    def close(self) -> None:
        """End all connections. Idempotent."""
        for sock in self._socks:
            sock.close()
        if self._door is not None:
            self._door.close()

    def _meet(self) -> None:
        if self._door is not None:
            with contextlib.closing(self._door):
                self._socks = [self._door.accept(DIAL_S)]
