"""KV that comes from other workers: the blocks that are kept for it, and how rows wait for it.

An *exchange* is the KV of all, because layers have changed: at most one at a time, into blocks that are chosen before.
A *reservation* is for one request that comes from another worker with its KV: free blocks for what of it is not here,
some more for what it computes next, and pins on what is here already. Whoever made it ends it, or says that all has
come: then it lasts until the request is admitted, or ends.

When KV is there its block has its name, like any other. Whoever lacks a block of an exchange waits for that; for what
is reserved for one request nobody waits: it may take long, or not come at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.worker.blocks.block_pool import BlockPool
from services.worker.blocks.remote_kv import RemoteKv, RemoteSpan
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from shared.ids import RequestId
from shared.prefix_names import RunName

_EXCHANGE: Final = "KV that is on its way"
"""Owner of the pins, and of the names."""
FEW_BLOCKS: Final = 2
"""That any request computes again that migrates: the last one, which is not full, and one that a step has filled."""


@dataclass(slots=True)
class _Reservation:
    """For one request."""

    names: set[RunName] = field(default_factory=set)
    """Of the blocks that are kept for it, here or on their way."""
    is_whole: bool = False
    num_computed: int = 0
    """Once it is: tokens whose KV there was where it comes from."""
    is_here: bool = False
    """It has come."""


class ComingKv:
    """What comes, and what is reserved. `Sharing` owns it.

    Args:
        blocks: into which it comes.
        block_size: tokens of a block.
    """

    def __init__(self, blocks: BlockPool, block_size: int) -> None:
        self.remote: RemoteKv | None = None
        """Which of an exchange can be attended where it lies."""
        self._blocks = blocks
        self._block_size = block_size
        self._coming: dict[RunName, Hashable] = {}
        """Of blocks whose KV is on its way: for whom."""
        self._reserved: dict[RequestId, _Reservation] = {}
        self.num_recomputed_tokens = 0
        """Of requests that have come: tokens whose KV was computed again."""
        self.num_recomputed = 0
        """Of these, requests of which more than `FEW_BLOCKS` were computed again."""

    def __len__(self) -> int:
        """Return the number of blocks whose KV is on its way."""
        return len(self._coming)

    def is_awaited(self, name: RunName | None) -> bool:
        """Return whether who lacks the KV of that run waits for it: it comes with an exchange."""
        return name is not None and self._coming.get(name) == _EXCHANGE

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that are kept for KV on its way, or just arrived, and that none of the rows that are here has yet."""
        kept = self._blocks.num_only_pinned(_EXCHANGE)
        here = [request_id for request_id, reservation in self._reserved.items() if reservation.is_here]
        return kept + sum(self._blocks.num_only_pinned(_owner(request_id)) for request_id in here)

    def arrived(self, blocks: KeptKv) -> None:
        """Take note of KV that has come; it was expected."""
        index = self._blocks.index
        for name, block in zip(blocks.names, blocks.ids.tolist(), strict=True):
            owner, known = self._coming.pop(name), index.get(name)
            if known is None:
                index.add(name, block)
            elif owner != _EXCHANGE:  # somebody has computed it meanwhile
                self._blocks.pin_kept(np.array([known], dtype=np.int32), owner)
        if self.remote is not None:
            self.remote.arrived(blocks.names)

    # An exchange

    def expect(self, coming: KeptKv, spans: Sequence[RemoteSpan] = ()) -> None:
        """Let rows wait for KV that is on its way into free blocks, and keep these for it until `expect_no_more`.

        Args:
            coming: on its way.
            spans: what of it can be attended where it lies, so that rows need not wait for it.
        """
        self._blocks.reserve(coming.ids, _EXCHANGE)
        self._coming.update(dict.fromkeys(coming.names, _EXCHANGE))
        self.remote = RemoteKv(coming, spans, self._block_size) if spans else None

    def expect_no_more(self) -> None:
        """Let rows compute what of an exchange has not come; no row shares any of it. Idempotent."""
        self._forget(_EXCHANGE)
        self.remote = None
        self._blocks.unpin(_EXCHANGE)

    # Reservations

    @property
    def num_reservations(self) -> int:
        """Requests for which blocks are kept."""
        return len(self._reserved)

    def reserve(self, request_id: RequestId, names: Sequence[RunName], num_more: int, num_left: int) -> KeptKv | None:
        """Keep blocks for a request that comes, until `release`.

        Args:
            request_id: whose. It may have a reservation, which grows.
            names: of its full blocks.
            num_more: free blocks for what it computes next; of the first call.
            num_left: free blocks that stay for others.

        Returns:
            Those whose KV has to come, and where to; what comes for others is left out. None: there is no room, and
            nothing is kept for it any more.
        """
        blocks, owner = self._blocks, _owner(request_id)
        is_new = request_id not in self._reserved
        kept = self._reserved.setdefault(request_id, _Reservation()).names
        lacking = [name for name in names if name not in kept and name not in self._coming]
        found = {name: block for name in lacking if (block := blocks.index.get(name)) is not None}
        if found:
            blocks.pin_kept(np.array(list(found.values()), dtype=np.int32), owner)
        missing = tuple(name for name in lacking if name not in found)
        num_taken = len(missing) + is_new * num_more
        if blocks.num_free < num_taken + num_left:
            self.release(request_id)
            return None
        kept.update(lacking)
        self._coming.update(dict.fromkeys(missing, owner))
        if is_new and num_more:
            blocks.set_aside(num_more, _room_of(request_id))
        return KeptKv(missing, blocks.set_aside(len(missing), owner)) if missing else NOTHING_KEPT

    def is_whole(self, request_id: RequestId, num_computed: int) -> None:
        """All that comes for a request is here: nothing is written for it any more.

        Args:
            request_id: whose.
            num_computed: its tokens whose KV there was where it comes from.
        """
        assert _owner(request_id) not in self._coming.values(), "some of it is on its way"
        reservation = self._reserved[request_id]
        reservation.is_whole, reservation.num_computed = True, num_computed

    def give_room(self, request_id: RequestId) -> None:
        """The request has come: the blocks for what it computes next are free for it, if there are any."""
        if request_id in self._reserved:
            self._reserved[request_id].is_here = True
            self._blocks.unpin(_room_of(request_id), first=True)

    def has_it(self, request_id: RequestId, num_found: int | None = None, num_known: int = 0) -> None:
        """No more has to be kept for a request, unless some is being written.

        Args:
            request_id: it has found its KV, or has ended.
            num_found: tokens that it has found KV for; None: it has ended.
            num_known: all of its tokens; there was more where it was recovered from, if not all had arrived.
        """
        reservation = self._reserved.get(request_id)
        if reservation is not None and reservation.is_whole:
            self.release(request_id)
            num_lost = 0 if num_found is None else max(min(reservation.num_computed, num_known) - num_found, 0)
            self.num_recomputed_tokens += num_lost
            self.num_recomputed += num_lost > FEW_BLOCKS * self._block_size

    def release(self, request_id: RequestId) -> None:
        """Keep nothing for a request any more: what has come of its KV may be used by anybody. Idempotent.

        Nobody writes what was on its way.
        """
        if self._reserved.pop(request_id, None) is not None:
            self._forget(_owner(request_id))
            self._blocks.unpin(_owner(request_id))
            self._blocks.unpin(_room_of(request_id))

    def clear(self) -> None:
        """Expect nothing any more, and keep nothing for any request."""
        self.expect_no_more()
        for request_id in list(self._reserved):
            self.release(request_id)

    def check_invariants(self) -> None:
        """Check that names that come are somebody's; raises AssertionError naming the law that is broken."""
        owners = {_EXCHANGE, *map(_owner, self._reserved)}
        assert owners.issuperset(self._coming.values()), "KV comes for nobody"
        kept = {(_owner(request_id), name) for request_id, each in self._reserved.items() for name in each.names}
        for name, owner in self._coming.items():
            assert owner == _EXCHANGE or (owner, name) in kept, "KV comes for a request that does not know of it"

    def _forget(self, owner: Hashable) -> None:
        if self._coming:
            self._coming = {name: other for name, other in self._coming.items() if other != owner}


def _owner(request_id: RequestId) -> Hashable:
    return "KV of a request that comes", request_id


def _room_of(request_id: RequestId) -> Hashable:
    return "room of a request that comes", request_id
