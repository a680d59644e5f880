"""Has requests go from worker to worker at the moments that a seed names; says what came upon which state of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from shared.ids import RequestId, WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Close, Closed, Fetch, Fetched, FetchReason
from shared.subjects import Subjects
from shared.transport.bus import BusError
from shared.transport.memory_bus import MemoryBroker
from shared.wire import WireError, decode, encode
from sim.faults.kinds import Fault, Move
from sim.faults.nodes import WorkerNode


@dataclass(frozen=True, slots=True)
class _UnderWay:
    request_id: RequestId
    source: WorkerNode
    target: WorkerNode


class Movers:
    """Of one run.

    Args:
        broker: of the cluster.
        workers: by name.
        say: told what happens, line by line.
    """

    def __init__(self, broker: MemoryBroker, workers: Mapping[str, WorkerNode], say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        """How moves ended, and what came upon them."""
        self._bus = broker.connect("mover")
        self._workers = workers
        self._say = say
        self._under_way: set[_UnderWay] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, move: Move) -> None:
        """Have another worker fetch a request that one runs now, if it runs any; now and then it is asked twice.

        Some go as tokens.
        """
        source, others = self._workers[move.source], [name for name in self._workers if name != move.source]
        if source.worker is None or not others:
            return
        target = self._workers[others[move.choice % len(others)]]
        if move.closes_s:
            self._start(self._close(move, WorkerId(target.name)))
        keys = sorted(source.worker.service.engine.registry.row_of)
        if not keys:
            return
        request_id, attempt = keys[move.choice // len(others) % len(keys)]
        address = WorkerId(move.source)
        fetch = Fetch(
            request_id=request_id,
            attempt=attempt,
            source=address,
            source_address=address,
            reason=FetchReason.BALANCE,
            as_tokens=move.choice % 5 == 1,
        )
        for _ in range(1 + move.is_twice):
            self._start(self._fetch(fetch, _UnderWay(request_id, source, target)))

    def note(self, fault: Fault) -> None:
        """Hear of a fault that begins now."""
        for move in self._under_way:
            side = {move.source.name: "source", move.target.name: "target"}.get(fault.target, fault.target)
            if fault.target not in self._workers or side != fault.target:
                self.counts[f"struck {_state(move)}"] += 1
                self.counts[f"{fault.kind.value} of {side}"] += 1

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, move: Move, open_worker: WorkerId) -> None:
        close = Close(begins=True, for_s=move.closes_s, open_worker=open_worker)
        try:
            subject = Subjects().fetch(WorkerId(move.source))
            answer = decode(await self._bus.request(subject, encode(close), timeout_s=FETCH_LIMIT_S), Closed)
        except (BusError, WireError) as error:
            self.counts["close silent"] += 1
            self._say(f"close    {move.source}: {error}")
        else:
            self.counts["close done"] += answer.is_closing
            self._say(f"close    {move.source} for {move.closes_s} s; open is {open_worker}")

    async def _fetch(self, fetch: Fetch, move: _UnderWay) -> None:
        self._under_way.add(move)
        try:
            subject = Subjects().fetch(WorkerId(move.target.name))
            answer = decode(await self._bus.request(subject, encode(fetch), timeout_s=FETCH_LIMIT_S), Fetched)
        except (BusError, WireError) as error:
            self.counts["fetch silent"] += 1
            self._say(f"move     {fetch.request_id} from {fetch.source} to {move.target.name}: {error}")
        else:
            self.counts[f"fetch {answer.outcome.value}"] += 1
            said = f"{answer.outcome.value} {answer.detail}, {answer.num_blocks} blocks"
            self._say(f"move     {fetch.request_id} from {fetch.source} to {move.target.name}: {said}")
        finally:
            self._under_way.discard(move)


def _state(move: _UnderWay) -> str:
    """Return how far a move is at its target."""
    worker = move.target.worker
    migration = None if worker is None else worker.service.migration
    return "asked" if migration is None else migration.fetching.state_of(move.request_id)
