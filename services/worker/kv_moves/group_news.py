"""What comes to a group, as its leader's part of an exchange hears of it: from its own stage, and from each other one.

stages ──KvProgress──► GroupNews: what is complete everywhere ──► Arrivals, on the event loop
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.arrivals import Arrivals, Arrived
from services.worker.kv_moves.kv_progress import Complete
from services.worker.kv_moves.kv_table import KvTable
from services.worker.kv_moves.kv_wire import KvProgress
from shared.layers import LayerRange


class GroupNews:
    """Of one exchange.

    Args:
        table: what moves.
        wanted: by stage: layers after the change.
        pair_bytes: of a block's keys and values in one layer.
    """

    def __init__(self, table: KvTable, wanted: Sequence[LayerRange], pair_bytes: int) -> None:
        self._table = table
        self._wanted = wanted
        self._pair_bytes = pair_bytes
        self._complete = Complete(table)
        self.is_due = self._complete.is_due
        """Whether something has not come to a stage yet. In any thread."""
        self._arrived: asyncio.Queue[tuple[KeptKv, int] | None] = asyncio.Queue()
        """Blocks, and how many bytes of them moved; None: no more come."""
        self._loop = asyncio.get_running_loop()

    @property
    def lacks_live(self) -> bool:
        """Not all has come everywhere that sequences may go on without."""
        return any(lot.is_live and not self._complete.is_whole(index) for index, lot in enumerate(self._table.lots))

    def note(self, stage: int, progress: KvProgress) -> None:
        """A stage says what is complete there. In any thread; raises `WireError` if that cannot be."""
        found = self._complete.note(stage, progress)
        if found is not None:
            index, first, end = found
            lot = self._table.lots[index]
            num_layers = self._table.link_layers(lot, self._wanted).total
            news = lot.part(first, end), (end - first) * num_layers * self._pair_bytes
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, news)

    def end(self) -> None:
        """Let `arrivals` end: no more comes."""
        self._arrived.put_nowait(None)

    def arrivals(self, num_blocks: int) -> Arrivals | None:
        """Return what comes; None: nothing does. Once."""
        num_bytes = self._table.wire_bytes(self._wanted, self._pair_bytes)
        return Arrivals.of(self._table, num_bytes, self._news(num_blocks), num_blocks, num_blocks)

    async def _news(self, num_blocks: int) -> AsyncIterator[Arrived]:
        while (found := await self._arrived.get()) is not None:
            yield Arrived(found[0], num_blocks, found[1])
