"""Which blocks of a group's KV go to which of its workers when it dissolves, from the first copy to the last.

    sequences ──oldest first──► a worker each, for good          blocks of a sequence, as they are computed
                                                                    │ not copied yet: the next round, to free places
                                                                    └ copied: they count as there, unless their id
                                                                      was given to another block since

Best effort is shared out after all others. The leader's engine serves meanwhile: sequences come, grow and end. Source:
KunServe v1, section 4.2 (live KV restore).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.engine import Engine
from services.worker.kv_moves.parting import share_out
from services.worker.kv_moves.placed_kv import PlacedKv, Places
from services.worker.sequences.sequence import SequenceKey
from shared.api_keys import Tier

FIRST_BLOCKS: Final = 32
"""Of the first round; the others are larger or smaller, so that they take about `ROUND_S`."""
ROUND_S: Final = 0.25
MAX_GROWTH: Final = 8
"""Of a round over the last one."""
FEW_PER_SEQUENCE: Final = 2
"""So many new blocks of each sequence are worth no further round: one comes with every 16 tokens or so."""
_COPYING: Final = "KV that is copied ahead"
"""Owner of the pins."""


class KvShares:
    """Of one leader, from the first round on; it holds no block once `let_go` was called.

    Args:
        engine: whose sequences are shared out.
        capacity: KV blocks of each worker when it is alone.
        ahead_blocks: by stage: how many of these have memory for all layers now.
        most_copied: blocks of a round.
        limit_s: after so many seconds no further round begins.
        now: the worker's clock, seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        capacity: int,
        ahead_blocks: Sequence[int],
        most_copied: int,
        limit_s: float,
        now: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._num_stages = num_stages = len(ahead_blocks)
        self._capacity = capacity
        self._most_copied = most_copied
        self._until_s = now() + limit_s
        self._now = now
        self._stage_of: dict[SequenceKey, int] = {}
        self._copied: list[dict[int, tuple[bytes, int]]] = [{} for _ in range(num_stages)]
        """By stage: name and place of what was copied, by id."""
        self._places = [Places(count) for count in ahead_blocks]
        """By stage."""
        self._copying: Sequence[PlacedKv] = ()
        self._num_left = [0] * num_stages
        self._num_blocks = FIRST_BLOCKS
        """Of the next round."""
        self._began_s: float | None = None
        """When the last round did."""

    def next_shares(self) -> Sequence[PlacedKv]:
        """Take note that the last round is there; return the next one, see `NextShares`."""
        arrived, self._copying = self._copying, ()
        for copied, share in zip(self._copied, arrived, strict=False):
            copied.update(_by_id(share))
        self.let_go()
        now_s, table = self._now(), self._engine.table
        running = [(key, row) for key, row in self._engine.registry.row_of.items() if table.num_computed[row]]
        if now_s >= self._until_s or not running:
            return ()
        by_stage = self._share_out()
        rows = dict(running)
        not_copied = [
            self._not_copied(stage, [rows[key] for key in keys if key in rows]) for stage, keys in enumerate(by_stage)
        ]
        self._num_left = [len(share) for share in not_copied]
        is_first = self._began_s is None
        if self._began_s is not None:
            growth = min(ROUND_S / max(now_s - self._began_s, 1e-6), MAX_GROWTH)
            self._num_blocks = max(int(self._num_blocks * growth), self._num_stages)
        if not is_first and sum(map(len, not_copied)) <= FEW_PER_SEQUENCE * len(running):
            return ()
        cut = _cut(not_copied, min(self._num_blocks, self._most_copied))
        shares = [self._place(stage, share) for stage, share in enumerate(cut)]
        if not sum(map(len, shares)):
            return ()
        for share in shares:
            self._engine.blocks.pin(share.ids, _COPYING)
        self._copying, self._began_s = shares, now_s
        return shares

    def let_go(self) -> None:
        """Let the blocks of the last round be reused; if that has not come to its end, it counts for nothing."""
        broken_off, self._copying = self._copying, ()
        for places, share in zip(self._places, broken_off, strict=False):
            places.give_back(share.places.tolist())
        self._engine.blocks.unpin(_COPYING)

    @property
    def num_copied(self) -> list[int]:
        """By stage: blocks that were copied."""
        return [len(copied) for copied in self._copied]

    @property
    def num_left(self) -> list[int]:
        """By stage: full blocks that were not copied when the last round was chosen."""
        return self._num_left

    @property
    def there(self) -> tuple[PlacedKv, ...]:
        """By stage: all that was copied."""
        found = []
        for copied in self._copied:
            names, places = zip(*copied.values(), strict=True) if copied else ((), ())
            found.append(PlacedKv(names, np.array(list(copied), dtype=np.int32), np.array(places, dtype=np.int32)))
        return tuple(found)

    def final(self) -> list[list[SequenceKey]]:
        """Return which sequences go on at which stage's worker, the leader's first."""
        return self._share_out()

    def _share_out(self) -> list[list[SequenceKey]]:
        """Let every sequence that is here have a worker, those of before the same one."""
        table, row_of = self._engine.table, self._engine.registry.row_of

        def claim(key: SequenceKey) -> tuple[bool, float, int]:
            row = row_of[key]
            return bool(table.tier[row] == Tier.FLEX), float(table.arrival_s[row]), int(table.order[row])

        keys = sorted(row_of, key=claim)
        sizes = -(-table.num_known[[row_of[key] for key in keys]] // self._engine.config.block_size)
        fixed = {key: stage for key, stage in self._stage_of.items() if key in row_of}
        shares = share_out(keys, sizes.tolist(), self._num_stages, self._capacity, fixed)
        self._stage_of = {key: stage for stage, share in enumerate(shares) for key in share}
        return shares

    def _not_copied(self, stage: int, rows: Sequence[int]) -> KeptKv:
        """Return what is to come to a stage yet; places of what is of no use any more are free then."""
        found = self._engine.sharing.computed(rows)
        ids, copied = found.ids.tolist(), self._copied[stage]
        wanted = dict(zip(ids, found.names, strict=True))
        for block in [block for block, (name, _) in copied.items() if wanted.get(block) != name]:
            self._places[stage].give_back([copied.pop(block)[1]])
        chosen = [i for i, block in enumerate(ids) if block not in copied]
        return KeptKv(tuple(found.names[i] for i in chosen), found.ids[chosen])

    def _place(self, stage: int, share: KeptKv) -> PlacedKv:
        """Return the first of some blocks with places for them, as many as there are."""
        places = np.array(self._places[stage].take(share.ids.tolist()), dtype=np.int32)
        return PlacedKv(share.names[: len(places)], share.ids[: len(places)], places)


def _by_id(share: PlacedKv) -> dict[int, tuple[bytes, int]]:
    return dict(zip(share.ids.tolist(), zip(share.names, share.places.tolist(), strict=True), strict=True))


def _cut(shares: Sequence[KeptKv], most: int) -> list[KeptKv]:
    """Return the first blocks of each share, so many in all at most, and of each in proportion."""
    total = sum(map(len, shares))
    if total <= most:
        return list(shares)
    ends = np.cumsum([0, *map(len, shares)]) * most // total
    counts = np.diff(ends).tolist()
    return [KeptKv(share.names[:n], share.ids[:n]) for share, n in zip(shares, counts, strict=True)]
