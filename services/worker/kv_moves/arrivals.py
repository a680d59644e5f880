"""KV that comes to a group while it serves already: sequences go on as theirs arrives, one after the other.

    device ── Arrived, Arrived, … ──► ArrivingKv ── blocks, room ──► engine ──► the step loop lets sequences in

Source: KunServe v2, section 4.2: only requests whose KV is on its way stall.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from services.worker.blocks.remote_kv import RemoteSpan
from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.engine import Engine
from services.worker.kv_moves.kv_table import KvTable, mode_of
from services.worker.kv_moves.transfers import TransferFacts, TransferMeter, Transfers
from shared.messages.report import TransferKind
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Arrived:
    """Some KV is where it is needed, on every stage."""

    blocks: KeptKv
    num_blocks: int
    """KV blocks that there is memory for by now; never fewer than before."""
    num_bytes: int = 0
    """Of these blocks, that came from one worker to another."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """KV on its way into the blocks of a group, as its leader hears of it."""

    coming: KeptKv
    """All of it, in the order in which it travels."""
    num_blocks: int
    """KV blocks that there is memory for at the beginning, those that wait for KV among them."""
    news: AsyncIterator[Arrived]
    """Ends when no more comes, all or not."""
    num_blocks_then: int
    """KV blocks that there is memory for when it has ended."""
    spans: tuple[RemoteSpan, ...] = ()
    """What of it the stages can attend where it lies, until it is here."""
    num_bytes: int = 0
    """That go from one worker to another."""
    sources: tuple[int, ...] = ()
    """Stages whose workers have it."""
    mode: str = ""
    """How it moves, in one word (`kv_table.mode_of`)."""

    @classmethod
    def of(
        cls, table: KvTable, num_bytes: int, news: AsyncIterator[Arrived], num_blocks: int, num_blocks_then: int
    ) -> Arrivals | None:
        """Return what a table lets come to a group; None: nothing does. All but the table as the fields say."""
        coming = table.kept_at(0)
        if not coming:
            return None
        return cls(
            coming,
            num_blocks,
            news,
            num_blocks_then,
            tuple(lot.span for lot in table.lots if lot.is_live),
            num_bytes,
            sources=tuple(sorted({source for lot in table.lots for source in lot.sources})),
            mode=mode_of([lot.is_live for lot in table.lots]),
        )


class ArrivingKv:
    """Tells an engine what has arrived. At most one exchange is under way.

    Args:
        engine: has entered the group's executor with `coming` before `begin`.
        wake: looks at the engine again.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
        moves: tells of it.
    """

    def __init__(
        self, engine: Engine, wake: Callable[[], None], now: Callable[[], float], tasks: TaskOwner, moves: Transfers
    ) -> None:
        self._engine = engine
        self._moves = moves
        self._meter: TransferMeter | None = None
        self._wake = wake
        self._now = now
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        """KV is still expected."""
        return self._task is not None and not self._task.done()

    def begin(self, arrivals: Arrivals, sources: tuple[str, ...] = ()) -> None:
        """Take in what arrives, until no more does or `stop`.

        Args:
            arrivals: of the group that this worker leads.
            sources: names of the workers that have it.
        """
        assert not self.is_under_way, "the exchange before is not over"
        facts = TransferFacts(TransferKind.KV_EXCHANGE, arrivals.num_bytes, sources, arrivals.mode)
        meter = self._meter = self._moves.begin(facts)
        self._task = self._tasks.start(self._take_in(arrivals, meter), name="arriving-kv")

    def stop(self) -> None:
        """Take in nothing more: the group is over. The engine leaves its executor next. Idempotent."""
        if self.is_under_way and self._meter is not None:
            num_lost = len(self._engine.sharing.coming)
            _log.info("kv_given_up", num_lost=num_lost)
            self._moves.end(self._meter, f"given up with the group; {num_lost} blocks are computed again")
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def over(self, given_up: Future[bool]) -> None:
        """Return when no KV is expected any more, or `given_up` is done."""
        if self._task is not None:
            both: list[Future[None] | Future[bool]] = [self._task, given_up]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)

    async def _take_in(self, arrivals: Arrivals, meter: TransferMeter) -> None:
        began_s, count, num_blocks = self._now(), 0, arrivals.num_blocks
        async for arrived in arrivals.news:
            self._engine.sharing.coming.arrived(arrived.blocks)
            count += len(arrived.blocks)
            meter.reach(meter.num_moved_bytes + arrived.num_bytes, self._now())
            num_blocks = self._grow(num_blocks, arrived.num_blocks)
            self._wake()
        self._engine.sharing.coming.expect_no_more()
        self._grow(num_blocks, arrivals.num_blocks_then)
        self._wake()
        took_s = round(self._now() - began_s, 4)
        num_lost = len(arrivals.coming) - count
        _log.info("kv_arrived", num_blocks=count, num_lost=num_lost, took_s=took_s)
        self._moves.end(meter, f"{num_lost} blocks are computed again" if num_lost else f"all {count} blocks are there")

    def _grow(self, before: int, now: int) -> int:
        if now > before:
            self._engine.memory.grow(before, now)
        return max(before, now)
