"""Brings KV of a prompt from another worker that has it, where that is quicker than computing it.

A request that has just come is in no step meanwhile. What comes is a cached prefix when it is there, whoever asks for
it, and what does not come is computed: a source that is lost, has less by now, or refuses costs no more than the wait,
which is bounded by the time of the computing that it was to save.

    ASKED      a connection to the source; which of the blocks that lack here are there? They are kept there meanwhile
    RESERVED   blocks for them
    COPYING    piece by piece, as long as the rest comes sooner than it could be computed

Source: the project's own design; `fetching.py` brings whole requests in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.worker.engine.demand import count_promised_blocks
from services.worker.engine.engine import Engine
from services.worker.migration.fetching import FIRST_BLOCKS, PIECE_BLOCKS, KvFetching
from services.worker.migration.kv_link import KvLink, KvNetwork
from services.worker.migration.kv_messages import FindKv, KvListed, pack_names, unpack_names
from services.worker.migration.shared_prefixes import find_prefix
from services.worker.peers.frames import PeerLostError
from services.worker.peers.greeting import PeerRefusedError
from services.worker.sequences.table import Hold, Status
from shared.errors import WireError
from shared.ids import RequestId
from shared.messages.fetch import FetchOutcome, FetchReason
from shared.messages.request import PrefixSource
from shared.prefix_names import RunName
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner

MAX_AT_ONCE: Final = 4
"""Requests whose prefixes come at a time; others compute theirs."""
FADING: Final = 0.8
"""What is left of the time that asking took, each time that nobody is asked because of it."""
_log = get_logger()


@dataclass(slots=True)
class _Pull:
    """One on its way."""

    request_id: RequestId
    source: PrefixSource
    names: tuple[RunName, ...]
    """That lack here, in order."""
    num_here: int
    """Blocks before them."""
    began_s: float
    waiting: list[RequestId] = field(default_factory=list)
    """Requests that wait for it, the one that it is for among them."""
    num_blocks: int = 0
    """That have come."""
    num_bytes: int = 0
    copying_s: float = 0.0
    has_answer: bool = False
    """The source has said what it has."""
    outcome: FetchOutcome = FetchOutcome.LOST


class PrefixPulls:
    """Of one worker.

    Args:
        engine: of this worker.
        network: the way to others.
        fetching: counts what comes.
        wake: lets its step loop look at the engine again.
        refusal: returns why nothing comes now; empty: something may.
        now: the worker's clock, seconds.
        tasks: owns what is under way.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        engine: Engine,
        network: KvNetwork,
        fetching: KvFetching,
        *,
        wake: Callable[[], None],
        refusal: Callable[[], str],
        now: Callable[[], float],
        tasks: TaskOwner,
    ) -> None:
        self._engine = engine
        self._network = network
        self._fetching = fetching
        self._wake = wake
        self._refusal = refusal
        self._now = now
        self._tasks = tasks
        self._under_way: dict[RequestId, asyncio.Task[None]] = {}
        self._pulls: dict[RunName, _Pull] = {}
        """By the first name that comes."""
        self._block_bytes = 0.0
        """Of what came last; 0: nothing has."""
        self._asking_s = 0.0
        """How long it took of late until a source had said what it has; it fades while nobody is asked for that."""

    def __len__(self) -> int:
        """Return how many are under way."""
        return len(self._under_way)

    @property
    def token_s(self) -> float:
        """Seconds in which a token comes, at the rate that is known; 0: none has come, or none may now."""
        rate = self._fetching.rate.bytes_per_s
        return self._block_bytes / self._engine.config.block_size / rate if rate and not self._refusal() else 0.0

    def begin(self, row: int, source: PrefixSource | None) -> None:
        """Bring what lacks of the prompt of a row that has just come, if that pays; it is in no step meanwhile.

        Args:
            row: of the engine's table.
            source: has more of it; None: nobody is known to, but it may come for somebody else.
        """
        if source is None and not self._pulls:
            return
        table, request_id = self._engine.table, self._engine.table.sequence(row).key[0]
        if table.status[row] != Status.WAITING or table.hold[row] or request_id in self._under_way:
            return
        names = self._engine.sharing.shareable(row)
        num_here = len(find_prefix(self._engine, names))
        joined = self._pulls.get(names[num_here]) if num_here < len(names) else None
        if joined is not None:
            joined.waiting.append(request_id)
            table.hold[row] |= Hold.PULLING
        elif source is not None and len(self) < MAX_AT_ONCE and not self._refusal():
            named = tuple(names[num_here : source.num_tokens // self._engine.config.block_size])
            pull = _Pull(request_id, source, named, num_here, self._now(), [request_id])
            saved_s = self._computed_s(pull)
            if named and self._asking_s + self._comes_s(pull) >= saved_s:
                self._asking_s *= FADING
            elif named:
                table.hold[row] |= Hold.PULLING
                self._pulls[named[0]] = pull
                task = self._tasks.start(self._pull(pull, saved_s), name=f"prefix-{request_id}")
                task.add_done_callback(lambda _: self._end(pull, named[0]))
                self._under_way[request_id] = task

    async def stop(self) -> None:
        """End all that are under way; nothing is written when it returns."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _computed_s(self, pull: _Pull) -> float:
        """Return how long computing takes what has yet to come."""
        cost, size = self._engine.cost.now, self._engine.config.block_size
        if cost is None:
            return 0.0
        first = (pull.num_here + pull.num_blocks) * size
        return cost.chunk_s(first, (len(pull.names) - pull.num_blocks) * size)

    def _comes_s(self, pull: _Pull) -> float:
        """Return how long what has yet to come takes once it is asked for, at the rate that is known; 0: none is."""
        rate = pull.num_bytes / pull.copying_s if pull.copying_s else self._fetching.rate.bytes_per_s
        return (len(pull.names) - pull.num_blocks) * self._block_bytes / rate if rate else 0.0

    async def _pull(self, pull: _Pull, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                pull.outcome = await self._bring(pull)
        except TimeoutError:
            pull.outcome = FetchOutcome.LATE
        except PeerRefusedError:
            pull.outcome = FetchOutcome.REFUSED
        except (PeerLostError, WireError) as error:
            _log.info("prefix_lost", rid=pull.request_id, source=pull.source.worker_id, reason=str(error))

    def _end(self, pull: _Pull, first: RunName) -> None:
        """Let go on who waits for it. It may have been cancelled before it began."""
        if not pull.has_answer:
            self._asking_s = max(self._asking_s, self._now() - pull.began_s)
        del self._under_way[pull.request_id], self._pulls[first]
        rows = [self._engine.registry.newest_row(request_id) for request_id in pull.waiting]
        self._engine.sharing.coming.release(pull.request_id)  # what has come is cached, for anybody
        self._engine.table.hold[[row for row in rows if row is not None]] &= ~Hold.PULLING
        self._fetching.count(FetchReason.PREFIX, pull.outcome, pull.num_bytes, self._now() - pull.began_s)
        self._fetching.rate.note(pull.num_bytes / pull.copying_s if pull.copying_s else 0.0)
        self._wake()

    async def _bring(self, pull: _Pull) -> FetchOutcome:
        """Return what came of it; raises PeerLostError, PeerRefusedError, WireError."""
        link = await self._network.connect(pull.source.worker_id, pull.source.address)
        try:
            found = await link.ask(FindKv(names=pack_names(pull.names)))
            pull.has_answer, self._asking_s = True, self._now() - pull.began_s
            if not isinstance(found, KvListed):
                return FetchOutcome.REFUSED
            pull.names = unpack_names(found.names)
            if not pull.names:
                return FetchOutcome.GONE
            return await self._copy(pull, link)
        finally:
            await link.close()

    async def _copy(self, pull: _Pull, link: KvLink) -> FetchOutcome:
        coming = self._engine.sharing.coming
        missing = coming.reserve(pull.request_id, pull.names, 0, count_promised_blocks(self._engine))
        if missing is None:
            return FetchOutcome.FULL
        first, size = 0, FIRST_BLOCKS
        while first < len(missing):
            if self._comes_s(pull) >= self._computed_s(pull):
                return FetchOutcome.LATE
            piece = missing.only(range(first, min(first + size, len(missing))))
            first, size = first + len(piece), min(2 * size, PIECE_BLOCKS)
            began_s = self._now()
            num_bytes = await link.get(piece)
            pull.copying_s += self._now() - began_s
            pull.num_bytes += num_bytes
            pull.num_blocks += len(piece)
            self._block_bytes = num_bytes / len(piece)
            coming.arrived(piece)
        return FetchOutcome.MOVED
