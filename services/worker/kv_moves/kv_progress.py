"""How far lots of KV have come: at one stage, from all of its sources; in a group, at all of its stages. Thread-safe.

sources ──pieces──► Landed (of a stage) ──KvProgress──► Complete (of the leader) ──► blocks that can be read
"""

from __future__ import annotations

import threading

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
