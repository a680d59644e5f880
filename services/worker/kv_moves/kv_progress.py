"""How far lots of KV have come: at one stage, from all of its sources; in a group, at all of its stages. Thread-safe.

sources ──pieces──► ArrivedKv (a stage) ──KvProgress──► Complete (the leader) ──► GroupNews ──► Arrivals, on the loop
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.arrivals import Arrivals, Arrived
from services.worker.kv_moves.kv_table import KvTable
from services.worker.kv_moves.kv_wire import KvProgress
from shared.errors import WireError
from shared.layers import LayerRange


class _Lowest:
    """Counts per lot by several parties, of which the lowest matters."""

    def __init__(self, parties: list[tuple[int, ...]]) -> None:
        self._counts = [dict.fromkeys(each, 0) for each in parties]
        self._lowest = [0] * len(parties)
        self._lock = threading.Lock()

    def note(self, lot: int, party: int, count: int) -> tuple[int, int] | None:
        """Take note of a count; return the lowest one before and now if it has grown."""
        with self._lock:
            self._counts[lot][party] = count
            before, now = self._lowest[lot], min(self._counts[lot].values())
            self._lowest[lot] = now
        return (before, now) if now > before else None

    def lowest(self, lot: int) -> int:
        """Return the lowest count of a lot."""
        return self._lowest[lot]

    def of(self, lot: int, party: int) -> int | None:
        """Return a party's count, None if it has none."""
        return self._counts[lot].get(party)


class ArrivedKv:
    """What has come to one stage.

    Args:
        table: what moves.
        stage: that it comes to.
        wanted: its layers after the change.
    """

    def __init__(self, table: KvTable, stage: int, wanted: LayerRange) -> None:
        sources = [
            tuple(i for i in lot.sources if table.held[i].overlap(wanted) is not None) if stage in lot.targets else ()
            for lot in table.lots
        ]
        self._counts = _Lowest(sources)

    def note(self, lot: int, source: int, count: int) -> KvProgress | None:
        """A source's part of the first blocks of a lot is here; return what the leader should hear of, if anything."""
        grown = self._counts.note(lot, source, count)
        return None if grown is None else KvProgress(lot, grown[1])


class Complete:
    """What has come to all stages that it was for.

    Args:
        table: what moves.
    """

    def __init__(self, table: KvTable) -> None:
        self._table = table
        self._counts = _Lowest([lot.targets for lot in table.lots])

    def note(self, stage: int, progress: KvProgress) -> tuple[int, int, int] | None:
        """Take note of what a stage says; return the lot and its blocks [first, end) that are complete now, if any are.

        Raises:
            WireError: it cannot be.
        """
        lot, count, lots = progress.lot, progress.count, self._table.lots
        before = self._counts.of(lot, stage) if lot < len(lots) else None
        if before is None or not before < count <= len(lots[lot].ids):
            raise WireError(f"stage {stage} has {count} blocks of lot {lot}, which cannot be")
        grown = self._counts.note(lot, stage, count)
        return None if grown is None else (lot, *grown)

    def is_due(self, stage: int) -> bool:
        """Something has not come to a stage yet."""
        counts = [self._counts.of(lot, stage) for lot in range(len(self._table.lots))]
        return any(
            count is not None and count < len(lot.ids) for count, lot in zip(counts, self._table.lots, strict=True)
        )

    def is_whole(self, lot: int) -> bool:
        """All stages that it was for have all of a lot."""
        return self._counts.lowest(lot) == len(self._table.lots[lot].ids)


class GroupNews:
    """What comes to a group, as the leader's part of an exchange hears of it.

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
