"""The source's side of a migration: what is kept for whoever fetches a request, and when that may leave.

    ListKv ──► names of its full blocks, which stay as they are    GetKv ──► they are read    LetGo ──► it is released

Who asks is a worker of the cluster that has greeted, and has `LEASE_S` for each next question. Whatever ends the
connection ends the lease: the blocks are let go, and a request that has not left goes on here. Nothing else has changed
by then, so nothing has to be undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import numpy as np

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv, as_host_id
from services.worker.engine.engine import Engine
from services.worker.migration.kv_messages import (
    FindKv,
    GetKv,
    HasLeft,
    KvListed,
    LetGo,
    ListKv,
    NotHere,
    pack_names,
    unpack_names,
)
from services.worker.migration.shared_prefixes import find_prefix, shared_prefix
from services.worker.sequences.sequence import SequenceKey
from services.worker.sequences.table import Hold, Status
from shared.api_keys import Tier
from shared.errors import WireError
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import ListRunning, RunningList, RunningPart
from shared.prefix_names import RunName
from shared.process.log import get_logger

LEASE_S: Final = 5.0
"""For which blocks are kept for who asks nothing more."""
MAX_DEPARTURES: Final = 64
"""Requests that are fetched from one worker at a time."""
_log = get_logger()


class Departures:
    """Of one worker.

    Args:
        engine: of this worker.
        wake: lets its step loop look at the engine again, and pass on what has happened.
        refusal: returns why no request leaves now; empty: they may.
    """

    def __init__(self, engine: Engine, wake: Callable[[], None], refusal: Callable[[], str]) -> None:
        self.engine = engine
        self.wake = wake
        self.refusal = refusal
        self.num_left = 0
        """Requests that have left since the start."""
        self._open: set[Departure] = set()
        self._num_opened = 0

    def __len__(self) -> int:
        """Return how many connections there are."""
        return len(self._open)

    def open(self, target: WorkerId, end: Callable[[], None]) -> Departure | None:
        """Return the lease of a worker that has connected; None: there are too many.

        Args:
            target: that worker.
            end: lets the connection end soon; called when the lease is over.
        """
        if len(self._open) >= MAX_DEPARTURES:
            return None
        self._num_opened += 1
        departure = Departure(self, target, self._num_opened, end)
        self._open.add(departure)
        return departure

    def running(self, asked: ListRunning) -> RunningList:
        """Return which requests could leave: of which no choice waits here, or has its prompt computed."""
        if self.refusal():
            return RunningList()
        table = self.engine.table
        rows = table.running.view
        is_free = (table.hold[rows] & ~Hold.IN_FLIGHT) == 0
        decodes = table.num_known[rows] - table.num_computed[rows] <= self.engine.config.block_size
        stay = np.concatenate([rows[~(is_free & decodes)], table.waiting.view, table.preempted.view])
        staying = {table.sequence(row).first_choice for row in stay.tolist()}
        order = np.lexsort((table.order[rows], table.num_known[rows], table.tier[rows]))
        choices: dict[RequestId, list[int]] = {}
        for row in rows[order].tolist():
            if (first_choice := table.sequence(row).first_choice) not in staying:
                choices.setdefault(first_choice, []).append(row)
        requests: list[RunningPart] = []
        for found in choices.values():
            if len(requests) < asked.limit and self._num_held(found) <= asked.most_blocks:
                requests.append(self._part(found))
        return RunningList(requests=tuple(requests))

    def _num_held(self, rows: list[int]) -> int:
        """Return how many blocks rows hold together."""
        held = [self.engine.blocks.block_table[row, : self.engine.table.held_blocks[row]] for row in rows]
        return np.unique(np.concatenate(held)).size

    def _part(self, rows: list[int]) -> RunningPart:
        """Return what is said of a request, by the rows of its choices."""
        table = self.engine.table
        prefix = shared_prefix(self.engine, rows)
        return RunningPart(
            choices=tuple(table.sequence(row).key for row in rows),
            tier=Tier(int(table.tier[rows[0]])),
            num_tokens=int(table.num_known[rows].max()),
            num_blocks=int(self.engine.blocks.freeable(np.array(rows, dtype=np.int32)).sum()),
            num_held_blocks=self._num_held(rows),
            prefix=prefix.name if prefix else "",
            num_prefix_blocks=prefix.num_blocks if prefix else 0,
        )

    def forget(self, departure: Departure) -> None:
        """Forget a lease that is closed."""
        self._open.discard(departure)

    def close(self) -> None:
        """Let all leases end, and their connections soon: the blocks are about to be others."""
        for departure in list(self._open):
            departure.expire()


class Departure:
    """The lease of one connection. On the event loop."""

    def __init__(self, departures: Departures, target: WorkerId, number: int, end: Callable[[], None]) -> None:
        self._departures = departures
        self._engine = departures.engine
        self._target = target
        self._owner = "KV that is fetched", number
        self._end = end
        self._key: SequenceKey | None = None
        self._ids: dict[RunName, int] = {}
        """Of what was listed."""
        self._leaving: asyncio.Future[int | None] | None = None
        self._is_closed = False
        self._timer = asyncio.get_running_loop().call_later(LEASE_S, self.expire)

    def renew(self) -> None:
        """Who asks is there."""
        self._timer.cancel()
        if not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(LEASE_S, self.expire)

    async def answer(self, asked: ListKv | FindKv | LetGo) -> KvListed | HasLeft | NotHere:
        """Answer a question; what `ids_of` reads is asked for apart."""
        self.renew()
        if isinstance(asked, FindKv):
            return self._find(unpack_names(asked.names))
        return self._list(asked) if isinstance(asked, ListKv) else await self._let_go()

    def ids_of(self, asked: GetKv) -> I32:
        """Return the blocks that hold what is asked for, as in `KeptKv`.

        Raises:
            WireError: something was not listed.
        """
        self.renew()
        names = unpack_names(asked.names)
        if self._is_closed or not all(name in self._ids for name in names):
            raise WireError("blocks that were not listed")
        return np.array([self._ids[name] for name in names], dtype=np.int32)

    def expire(self) -> None:
        """Let the lease and its connection end."""
        if not self._is_closed:
            self.close()
            self._end()

    def close(self) -> None:
        """Keep nothing any more; what has not left goes on here. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        row = self._row
        if self._leaving is not None and not self._leaving.done() and row is not None:
            self._engine.registry.leaving.stay(row)
        self._engine.blocks.unpin(self._owner)
        if self._engine.swapping is not None:
            self._engine.swapping.host.unpin(self._owner)
        self._ids.clear()
        self._departures.forget(self)
        self._departures.wake()

    @property
    def _row(self) -> int | None:
        return None if self._key is None else self._engine.registry.row_of.get(self._key)

    def _find(self, names: tuple[RunName, ...]) -> KvListed | NotHere:
        if reason := self._refusal():
            return NotHere(detail=reason, is_refused=True)
        kept = find_prefix(self._engine, names)
        self._keep(kept)
        return KvListed(names=pack_names(kept.names))

    def _refusal(self) -> str:
        return "the lease is over" if self._is_closed else self._departures.refusal()

    def _list(self, asked: ListKv) -> KvListed | NotHere:
        key = (asked.request_id, asked.attempt)
        if reason := self._refusal():
            return NotHere(detail=reason, is_refused=True)
        if self._key is None:
            self._key = key
        row = self._row
        if row is None or key != self._key:
            return NotHere(detail="it is not here, or no longer")
        engine = self._engine
        runs = engine.table.status[row] == Status.RUNNING
        kept = engine.sharing.computed([row]) if runs else engine.kept([row])
        self._keep(kept)
        num_left = int(engine.table.num_known[row] - engine.table.num_computed[row])
        is_prefilling = bool(runs) and num_left > engine.config.block_size
        return KvListed(names=pack_names(kept.names), is_prefilling=is_prefilling)

    def _keep(self, kept: KeptKv) -> None:
        """Keep blocks for who asks, as far as they are not."""
        new = [place for place, name in enumerate(kept.names) if name not in self._ids]
        if new:
            self._pin(kept.ids[new])
            self._ids.update((kept.names[place], int(kept.ids[place])) for place in new)

    def _pin(self, ids: I32) -> None:
        """Let blocks, named as in `KeptKv`, stay as they are, on the device and on the host."""
        on_host, engine = ids < 0, self._engine
        if not on_host.all():
            engine.blocks.pin_kept(ids[~on_host], self._owner)
        if on_host.any():
            assert engine.swapping is not None, "nothing is on a host"
            engine.swapping.host.pin_kept(as_host_id(ids[on_host]), self._owner)

    async def _let_go(self) -> HasLeft | NotHere:
        row = self._row
        if row is None or self._is_closed or self._leaving is not None:
            return NotHere(detail="it is not here, or no longer")
        if reason := self._departures.refusal():
            return NotHere(detail=reason, is_refused=True)
        leaving: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        if not self._engine.registry.leaving.begin(row, self._target, leaving.set_result):
            return NotHere(detail="it leaves already, for another worker", is_refused=True)
        self._leaving = leaving
        self._departures.wake()
        num_computed = await asyncio.shield(leaving)
        if num_computed is None:
            return NotHere(detail="it has ended, or goes on here")
        self._departures.num_left += 1
        _log.info("request_left", rid=self._key and self._key[0], target=self._target)
        return HasLeft(num_computed=num_computed)
