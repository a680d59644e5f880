"""A few workers with agents, memory and links on the virtual clock, and what may go wrong between them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from services.worker.transfer.agent import Move, MoveAgent, MoveRequest
from services.worker.transfer.link import Arrival, Buffer, LinkError, LinkParams, Sending, TrafficClass
from services.worker.transfer.modelled_link import LinkEnd, ModelledLink, ModelledWire, WireModel
from services.worker.transfer.session import MoveParams, Outcome
from shared.ids import Incarnation, RequestId, WorkerId
from shared.layers import LayerRange
from sim.faults.process import SimProcess
from sim.virtual_time import VirtualTimeLoop
from tests.support.fake_memory import FakeMemory

PARAMS = MoveParams(retry_s=0.5, silent_s=5.0, limit_s=120.0, max_active=3)
MODEL = WireModel(rate_bytes_per_s=20_000, latency_s=0.002, notice_s=3.0)
"""Slow: a chunk of some blocks takes tens of milliseconds."""


class ShakyLink:
    """A link whose control messages are lost, doubled and reordered; implements `Link`."""

    def __init__(self, link: ModelledLink, random: np.random.Generator, ratio: Callable[[], float]) -> None:
        self._link = link
        self._random = random
        self._ratio = ratio
        self._released: dict[int, Arrival] = {}
        self.peer_id, self.peer_incarnation, self.params = link.peer_id, link.peer_incarnation, link.params

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def start(self, on_arrival: Callable[[Arrival], None], on_end: Callable[[LinkError], None]) -> None:
        self._link.start(partial(self._take, on_arrival), on_end)

    def _take(self, on_arrival: Callable[[Arrival], None], arrival: Arrival) -> None:
        ratio = self._ratio()
        if arrival.traffic is not TrafficClass.CONTROL or not ratio:
            on_arrival(arrival)
            return
        self._link.release(arrival)
        self._released[id(arrival)] = arrival
        loop = asyncio.get_running_loop()
        copies = 0 if self._random.random() < ratio / 2 else 2 if self._random.random() < ratio else 1
        for _ in range(copies):
            late_s = float(self._random.exponential(0.5)) if self._random.random() < ratio else 0.0
            loop.call_later(late_s, on_arrival, arrival)

    def release(self, arrival: Arrival) -> None:
        if id(arrival) not in self._released:
            self._link.release(arrival)

    def send(self, traffic: TrafficClass, stream: int, number: int, parts: Sequence[Buffer]) -> Sending:
        return self._link.send(traffic, stream, number, parts)

    def post(self, stream: int, number: int, zones: Sequence[memoryview]) -> None:
        self._link.post(stream, number, zones)

    def withdraw(self, stream: int) -> None:
        self._link.withdraw(stream)

    async def close(self) -> None:
        await self._link.close()


class FakeWorker:
    """One worker: a process of its own, which may die."""

    def __init__(self, worker_id: str, random: np.random.Generator, *, is_staged: bool, num_blocks: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.worker_id = WorkerId(worker_id)
        self.process = SimProcess(worker_id, loop)
        self.memory = FakeMemory(random, is_staged=is_staged, num_blocks=num_blocks)
        self.agent = MoveAgent(self.worker_id, Incarnation(1), self.memory, self.memory, PARAMS)
        self.is_dead = False

    async def act(self, action: Callable[[], None]) -> None:
        """Do something in this worker's process."""

        async def call() -> None:
            action()

        if not self.is_dead:
            await self.process.start(call(), name=f"act of {self.worker_id}")


class MoveCluster:
    """Workers, a wire between each two of them, and every move that was begun."""

    def __init__(self, seed: int, *, num_workers: int = 2, num_blocks: int = 40) -> None:
        self.random = np.random.default_rng(seed)
        names = [f"w{i}" for i in range(num_workers)]
        is_staged = self.random.random(num_workers) < 0.5
        self.workers = [
            FakeWorker(name, self.random, is_staged=bool(staged), num_blocks=num_blocks)
            for name, staged in zip(names, is_staged, strict=True)
        ]
        self.wires: dict[tuple[int, int], ModelledWire] = {}
        self.moves: list[tuple[FakeWorker, Move, bytes]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.shake_ratio = 0.0
        self.numbers = itertools.count()

    async def connect(self) -> None:
        """Make a wire wherever there is none that works, and both ends are alive."""
        for i, j in itertools.combinations(range(len(self.workers)), 2):
            one, other = self.workers[i], self.workers[j]
            wire = self.wires.get((i, j))
            works = wire is not None and all(end.is_up for end in wire.ends)
            if works or one.is_dead or other.is_dead:
                continue
            ends = LinkEnd(one.worker_id, Incarnation(1)), LinkEnd(other.worker_id, Incarnation(1))
            wire = ModelledWire(*ends, MODEL, LinkParams(rate_bytes_per_s=MODEL.rate_bytes_per_s, frame_s=0.01))
            self.wires[i, j] = wire
            for worker, end in zip((one, other), wire.ends, strict=True):
                link = ShakyLink(end, self.random, lambda: self.shake_ratio)
                await worker.act(partial(worker.agent.attach, link))

    async def begin(
        self, source: int, target: int, count: int, *, by_chunk: bool = False, epoch: int = 1, slack_s: float = 0.0
    ) -> Move | None:
        """Begin to move a new request's KV, if the source has blocks for it."""
        worker = self.workers[source]
        if count > len(worker.memory.free_blocks) or worker.is_dead:
            return None
        request_id = RequestId(f"r{next(self.numbers)}")
        first = int(self.random.integers(0, 3))
        layers = LayerRange(first, int(self.random.integers(first + 1, 5)))
        blocks = worker.memory.fill(request_id, count)
        request = MoveRequest(
            request_id,
            self.workers[target].worker_id,
            layers,
            blocks,
            epoch,
            int(self.random.integers(1, 6)),
            by_chunk=by_chunk,
            slack_s=slack_s,
        )
        contents = worker.memory.contents(blocks, layers)
        await worker.act(lambda: self._begin(worker, request, contents))
        return self.moves[-1][1]

    def _begin(self, worker: FakeWorker, request: MoveRequest, contents: bytes) -> None:
        move = worker.agent.move(request)
        self.moves.append((worker, move, contents))
        move.done.add_done_callback(lambda done: self._ended(move, done))

    def _ended(self, move: Move, done: asyncio.Future[Outcome]) -> None:
        assert move.spec.session_id not in self.outcomes
        self.outcomes[move.spec.session_id] = done.result()

    def kill(self, index: int) -> None:
        """A worker's process dies; its links break, and the others are not told yet."""
        worker = self.workers[index]
        worker.is_dead = True
        for (i, j), wire in self.wires.items():
            if index in {i, j}:
                wire.kill(0 if index == i else 1)
        worker.process.kill()

    async def tell_of_deaths(self) -> None:
        for dead in [worker for worker in self.workers if worker.is_dead]:
            for worker in self.workers:
                await worker.act(partial(worker.agent.peer_died, dead.worker_id))

    async def settle(self, *, limit_s: float = 400.0) -> None:
        """Let everything work, and return when every move of a living worker has ended everywhere."""
        self.shake_ratio = 0.0
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while True:
            for wire in self.wires.values():
                wire.heal()
            await self.connect()
            await self.tell_of_deaths()
            alive = [worker for worker in self.workers if not worker.is_dead]
            for worker in alive:
                worker.agent.check_invariants()
                worker.memory.check()
            if not any(worker.agent.num_moves for worker in alive):
                return
            assert loop.time() < end_s, f"moves do not end: {[worker.agent.num_moves for worker in alive]}"
            await asyncio.sleep(0.5)

    def judge(self) -> None:
        """Check that nothing is left, both ends agree, and what has moved is what was sent."""
        for worker in self.workers:
            if not worker.is_dead:
                assert not worker.memory.pins, "something is still pinned"
                assert not worker.memory.held, "something is still reserved"
                assert not worker.memory.num_touching
                assert not worker.process.task_names, "a task is left"
        by_id = {worker.worker_id: worker for worker in self.workers}
        for source, move, contents in self.moves:
            spec, target = move.spec, by_id[move.spec.target_id]
            outcome = self.outcomes.get(spec.session_id)
            assert outcome is not None or source.is_dead, f"{spec.session_id} has not ended"
            landed = target.memory.committed.get(spec.session_id)
            if outcome is not None and not target.is_dead:
                assert outcome.is_committed == (landed is not None), f"the ends of {spec.session_id} disagree"
            if landed is not None and not target.is_dead:
                assert target.memory.contents(landed[1], spec.layers) == contents, "other bytes arrived"
            freed = len(source.memory.freed.get(spec.session_id, []))
            if outcome is not None:
                assert freed == outcome.num_freed_blocks
                assert not (freed and not outcome.is_committed and not spec.by_chunk)
