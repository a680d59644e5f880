"""Which KV a sequence need not compute: blocks of sequences that began alike, and the prompt of the one that it forks.

Names (`row_names.py`) of a row's full blocks are made when it is added, for its known tokens, and when it gives its
blocks up, for its outputs; so a step of decodes costs nothing here. A block gets its name once a step that computed it
has succeeded, or its KV has come from the host. Between its admission and that moment a row *claims* the names of its
blocks: others that lack the same block can wait for it instead of computing or bringing it too. For a block whose KV is
on its way from another worker everybody waits; it is reserved from the beginning, so nobody else takes its room, and
named when its KV is there. If that KV can be attended where it lies (`remote_kv.py`), rows share such a block before it
is there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from services.worker.blocks.coming_kv import ComingKv
from services.worker.blocks.forks import Forks
from services.worker.blocks.kept_blocks import kept_blocks
from services.worker.blocks.manager import BlockManager
from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.blocks.row_names import RowNames
from services.worker.blocks.run_ends import RunEnds
from services.worker.contract.arrays import EMPTY_I32, I32, AnyRows
from services.worker.contract.kept_kv import KeptKv
from services.worker.scheduling.view import NOTHING_CACHED, CachedPrefix
from services.worker.sequences.table import SequenceTable, Status
from shared.prefix_names import RunName


@dataclass(slots=True)
class _Chain:
    """What has become of the names of a row's full blocks."""

    num_settled: int = 0
    """Leading blocks of the row's table that are shared or have been named (or whose name another block had)."""
    num_claimed: int = 0
    """Full blocks of the known tokens at admission; 0 once all of them are settled."""


@dataclass(frozen=True, slots=True)
class _Match:
    """What a row can share."""

    ids: list[int] = field(default_factory=list)
    """Full blocks, in sequence order."""
    partial: int | None = None
    """A block of which the row needs a copy."""
    num_tokens: int = 0


class Sharing:
    """Names, claims and forks of all rows. Answers policies as their `BlockFacts`; only the engine changes it."""

    def __init__(self, table: SequenceTable, blocks: BlockManager, names: RowNames) -> None:
        self.forks = Forks(table)
        self.ends = RunEnds()
        self.prefix_caching = names.are_shared
        self._table = table
        self._blocks = blocks
        self._names = names
        self._chains: dict[int, _Chain] = {}
        self._claims: dict[RunName, int] = {}
        self._unsettled: dict[int, _Chain] = {}
        """Rows with claims."""
        self.coming = ComingKv(blocks, blocks.block_size)
        """KV that is on its way from other workers."""

    # What policies ask

    def freeable(self, rows: AnyRows) -> I32:
        """Return [n]: blocks that become free when rows[i:] give up theirs, beyond those that rows[i + 1:] free."""
        return self._blocks.freeable(rows)

    def cached(self, row: int) -> CachedPrefix:
        """Return what a waiting or preempted row would share if it were admitted now."""
        match, following = self._match(row), None
        if self.prefix_caching and match.partial is None and len(match.ids) < self._num_shareable(row):
            following = self._names.of(row, len(match.ids) + 1)[-1]
            if following in self._claims or self.coming.is_awaited(following):
                return CachedPrefix(match.num_tokens, 0, following, is_coming=True)
        if not match.num_tokens and following is None:
            return NOTHING_CACHED
        ids = match.ids[int(self._blocks.held[row]) :]
        num_shared = self._blocks.in_use(np.array(ids, dtype=np.int32)) if ids else 0
        return CachedPrefix(match.num_tokens, num_shared, following)

    def shareable(self, row: int) -> list[RunName]:
        """Return the names of all full blocks of a row that it could share, wherever they are."""
        return self._names.of(row, self._num_shareable(row))

    # Rows come, run and go

    def add(self, row: int, salt: str, parent: int | None) -> None:
        """Take in a new row, which may fork another one."""
        self._names.add(row, salt, parent)
        if parent is not None:
            self.forks.add(row, parent, has_prompt=self._goes_on(row))
        if self.prefix_caching:
            self._chains[row] = _Chain()
            self._names.of(row, int(self._table.num_known[row]) // self._blocks.block_size)
            self.coming.give_room(self._table.sequence(row).key[0])

    def admit(self, rows: list[int], owner: Hashable, leaving: I32) -> list[int]:
        """Give rows that are admitted what they can share.

        Args:
            rows: parked; what they hold of their first blocks they keep.
            owner: pins the sources of copies until the next batch has come back.
            leaving: rows that give up their blocks before that batch.

        Returns:
            For each row its tokens whose KV exists then: as `cached` has said, or less if its parent leaves.
        """
        matches = [self._match(row, leaving) for row in rows]  # all of them before anything changes
        for row, match in zip(rows, matches, strict=True):
            ids = np.array(match.ids[int(self._blocks.held[row]) :], dtype=np.int32)
            self._blocks.share(row, ids, match.partial, owner)
            if self.prefix_caching:
                self._claim(row, self._chains[row], len(match.ids))
                request_id, num_known = self._table.sequence(row).key[0], int(self._table.num_known[row])
                self.coming.has_it(request_id, match.num_tokens, num_known)
        return [match.num_tokens for match in matches]

    def comes_back(self, row: int) -> None:
        """Name the full blocks that a row has, and let others wait for the next: it brings them, or computes them.

        To be called when it begins to bring them from the host, and when they are there.
        """
        if self.prefix_caching:
            num_full = int(self._table.num_computed[row]) // self._blocks.block_size
            self._settle(row, self._chains[row], num_full)
            self._claim(row, self._chains[row], num_full)

    def landed(self) -> None:
        """Name the blocks that a step has completed, and let go on who waits for them."""
        if self._unsettled:
            for row, chain in list(self._unsettled.items()):
                num_full = int(self._table.num_computed[row]) // self._blocks.block_size
                if num_full > chain.num_settled:
                    self._settle(row, chain, min(num_full, chain.num_claimed))
        self.forks.review()

    def kept(self, rows: Iterable[int], on_host: PrefixIndex | None = None) -> KeptKv:
        """Return the first full blocks of parked rows, as far as their contents are here.

        Args:
            rows: the first ones first.
            on_host: of host blocks, which go on where the device has no more of a row, and come last; None: of none.
        """
        names = [self._names.made(row) for row in rows] if self.prefix_caching else []
        return kept_blocks(names, self._blocks.block_size, self._blocks.index, on_host)

    def computed(self, rows: Iterable[int]) -> KeptKv:
        """Return the full blocks of running rows, as far as they are computed, each name once; rows go on as before."""
        found: dict[RunName, int] = {}
        for row in rows if self.prefix_caching else ():
            num_full = int(self._table.num_computed[row]) // self._blocks.block_size
            blocks = self._blocks.block_table[row, :num_full].tolist()
            for name, block in zip(self._names.of(row, num_full), blocks, strict=True):
                found.setdefault(name, block)
        return KeptKv(tuple(found), np.array(list(found.values()), dtype=np.int32))

    def awaits_coming(self, row: int) -> bool:
        """Return whether a waiting or preempted row is not admitted because KV for it is on its way from a worker."""
        return self.coming.is_awaited(self.cached(row).next_block)

    # Rows give up their blocks

    def release(self, row: int, num_kept: int = 0, *, is_sound: bool = True) -> None:
        """Take blocks from a row and keep the contents of those that are full.

        Args:
            row: not in flight.
            num_kept: of its first blocks, which are full, that it goes on holding.
            is_sound: the contents may be used again; those of a row that failed may not.
        """
        self.forks.let_go(row)
        if self.prefix_caching:
            chain = self._chains[row]
            num_full = int(self._table.num_computed[row]) // self._blocks.block_size
            if is_sound:
                self._settle(row, chain, num_full)
                self.ends.note(self._names.of(row, num_full))
            else:
                self._blocks.index.forget(self._blocks.block_table[row, : self._blocks.held[row]])
            self._drop_claims(row, chain)
            chain.num_settled = num_kept
        self._blocks.release(row, num_kept)

    def forget(self, row: int) -> None:
        """Forget a row that ends; its blocks are released."""
        self.forks.forget(row)
        self._names.forget(row)
        self._chains.pop(row, None)
        self.coming.has_it(self._table.sequence(row).key[0])

    def check_invariants(self) -> None:
        """Check claims, names and forks; raises AssertionError naming the law that is broken."""
        self.forks.check_invariants()
        self.coming.check_invariants()
        assert len(self._names) == self._table.num_sequences, "each sequence has its names"
        for name, row in self._claims.items():
            assert row in self._unsettled, "a claim that nobody works on"
            assert name in self._names.made(row)[self._unsettled[row].num_settled :], "a claim without a claimant"
        for row, chain in self._chains.items():
            is_open = chain.num_claimed > chain.num_settled
            assert (row in self._unsettled) == is_open, "claims differ from what is open"
            assert self._table.status[row] == Status.RUNNING or not chain.num_claimed, "only running rows claim"

    # Inside

    def _goes_on(self, row: int) -> bool:
        """Return whether a row goes on after text, and finds the KV of its prompt."""
        if not self.prefix_caching or not self._table.num_output[row]:
            return False
        names = self._names.of(row, int(self._table.num_prompt[row]) // self._blocks.block_size)
        return len(self._blocks.index.find(names)) == len(names)

    def _num_shareable(self, row: int) -> int:
        """Return how many full blocks the row can share: at least one token is left to compute."""
        return (int(self._table.num_known[row]) - 1) // self._blocks.block_size

    def _match(self, row: int, leaving: I32 = EMPTY_I32) -> _Match:
        ids: list[int] = self._blocks.block_table[row, : self._blocks.held[row]].tolist()
        if self.prefix_caching:
            shareable = self._names.of(row, self._num_shareable(row))
            ids += self._blocks.index.find(shareable[len(ids) :])
            if self.coming.remote is not None:
                ids = self.coming.remote.extend(shareable, ids, self._blocks.index)
        found = _Match(ids, None, len(ids) * self._blocks.block_size)
        parent = self.forks.ready_parent(row)
        num_tokens = min(int(self._table.num_prompt[row]), int(self._table.num_known[row]) - 1)
        if parent is None or parent in leaving or found.num_tokens >= num_tokens:
            return found
        return max(found, self._of_parent(row, parent, num_tokens), key=lambda match: match.num_tokens)

    def _of_parent(self, row: int, parent: int, num_tokens: int) -> _Match:
        num_full, rest = divmod(num_tokens, self._blocks.block_size)
        ids = self._blocks.block_table[parent, : num_full + 1].tolist()
        if self.coming.remote is not None:
            num_usable = self.coming.remote.num_usable(ids[: num_full + bool(rest)], num_full)
            if num_usable <= num_full:
                return _Match(ids[:num_usable], None, num_usable * self._blocks.block_size)
        partial = ids[num_full] if rest and self._blocks.goes_on(row, parent, ids[num_full]) else None
        return _Match(ids[:num_full], partial, num_tokens - rest * (partial is None))

    def _claim(self, row: int, chain: _Chain, num_shared: int) -> None:
        chain.num_settled = num_shared
        num_full = int(self._table.num_known[row]) // self._blocks.block_size
        if num_full > num_shared:
            chain.num_claimed = num_full
            self._unsettled[row] = chain
            for name in self._names.of(row, num_full)[num_shared:]:
                self._claims.setdefault(name, row)

    def _settle(self, row: int, chain: _Chain, num_full: int) -> None:
        """Give the row's first blocks, which are computed, their names."""
        begin = chain.num_settled
        names = self._names.of(row, num_full)[begin:]
        for name, block in zip(names, self._blocks.block_table[row, begin:num_full].tolist(), strict=True):
            self._blocks.index.add(name, block)
            if self._claims.get(name) == row:
                del self._claims[name]
        chain.num_settled = num_full
        if chain.num_settled >= chain.num_claimed:
            self._drop_claims(row, chain)

    def _drop_claims(self, row: int, chain: _Chain) -> None:
        for name in self._names.of(row, chain.num_claimed)[chain.num_settled :]:
            if self._claims.get(name) == row:
                del self._claims[name]
        chain.num_claimed = 0
        self._unsettled.pop(row, None)
