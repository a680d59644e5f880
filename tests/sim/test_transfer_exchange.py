"""An exchange in which both sides are full ends, whatever the sizes, as long as the rules of `exchange` are kept."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from services.worker.transfer.agent import Move, MoveRequest
from services.worker.transfer.exchange import (
    Ongoing,
    StageRoom,
    Waiting,
    choose_victim,
    exchange_order,
    grants,
    max_chunk_blocks,
    may_admit,
)
from shared.ids import RequestId
from shared.layers import LayerRange
from sim.virtual_time import run
from tests.support.move_cluster import FakeWorker, MoveCluster

LAYERS = LayerRange(0, 2)


class Exchange:
    """Two workers, every block but a few in use; all requests of one have to move to the other, and the reverse."""

    def __init__(self, seed: int, *, keeps_rule: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.num_blocks = int(self.random.integers(6, 40))
        self.cluster = MoveCluster(seed, num_blocks=self.num_blocks)
        self.keeps_rule = keeps_rule
        self.moves: list[tuple[int, int, Move]] = []
        """(source, blocks, move)"""
        self.num_admitted = 0
        self.living: list[str] = []

    async def begin(self) -> None:
        random, workers = self.random, self.cluster.workers
        await self.cluster.connect()
        left = [int(random.integers(0, min(5, self.num_blocks))) for _ in range(2)]
        left[int(random.integers(2))] += 1  # one block is free somewhere
        size = min(int(random.integers(1, 8)), max_chunk_blocks(sum(left), 2))
        for source, worker in enumerate(workers):
            while (room := len(worker.memory.free_blocks) - left[source]) > 0:
                count = min(int(random.integers(1, 12)), room)
                name = RequestId(f"old{source}.{len(self.moves)}")
                blocks = worker.memory.fill(name, count)
                target = workers[1 - source].worker_id
                slack_s = float(random.normal())
                request = MoveRequest(name, target, LAYERS, blocks, 1, size, by_chunk=True, slack_s=slack_s)
                contents = worker.memory.contents(blocks, LAYERS)
                self.moves.append((source, count, await self._move(worker, request, contents)))

    async def _move(self, worker: FakeWorker, request: MoveRequest, contents: bytes) -> Move:
        await worker.act(partial(self.cluster._begin, worker, request, contents))
        return self.cluster.moves[-1][1]

    def rooms(self) -> list[StageRoom]:
        """What each worker has free, and what still has to come to it."""
        arriving = [0, 0]
        for source, count, move in self.moves:
            target = self.cluster.workers[1 - source]
            known = target.agent._incoming.runs.get(move.spec.session_id)
            reserved = known.end.num_reserved if known is not None else 0
            arriving[1 - source] += 0 if move.done.done() else count - reserved
        return [
            StageRoom(len(worker.memory.free_blocks), max(waiting, 0))
            for worker, waiting in zip(self.cluster.workers, arriving, strict=True)
        ]

    async def admit(self) -> None:
        """A queued request takes blocks on both, if it may; an admitted one may end."""
        random = self.random
        count = int(random.integers(1, 6))
        rooms = self.rooms()
        fits = all(room.free_blocks >= count for room in rooms)
        if fits and (may_admit(rooms, count) or not self.keeps_rule):
            self.num_admitted += 1
            self.living.append(f"new{self.num_admitted}")
            for worker in self.cluster.workers:
                worker.memory.fill(self.living[-1], count)

    async def run(self, *, limit_s: float) -> bool:
        """Return whether every request has moved within the limit."""
        await self.begin()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while not all(move.done.done() for *_, move in self.moves):
            if loop.time() > end_s:
                return False
            await self.admit()
            for worker in self.cluster.workers:
                await worker.act(worker.agent.room_changed)
                worker.memory.check()
            await asyncio.sleep(0.05)
        return True


def test_two_full_workers_exchange_everything() -> None:
    """Sizes, slacks, chunks, the blocks that are free (one or more) and the queued requests are random."""

    async def main(seed: int) -> int:
        exchange = Exchange(seed, keeps_rule=True)
        assert await exchange.run(limit_s=110.0), "a deadlock"
        assert all(move.done.result().is_committed for *_, move in exchange.moves)
        await exchange.cluster.settle()
        exchange.cluster.judge()
        return exchange.num_admitted

    admitted = 0
    for seed in range(48):
        try:
            admitted += run(main(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert admitted, "the rule does not turn everybody away"


def test_without_the_rule_both_sides_wait_for_each_other() -> None:
    """The same loads, but queued requests take whatever is free: then some exchange never ends."""

    async def main(seed: int) -> bool:
        exchange = Exchange(seed, keeps_rule=False)
        ended = await exchange.run(limit_s=20.0)
        for worker in exchange.cluster.workers:
            await worker.process.start(worker.agent.close(), name="close")
        return ended

    assert not all(run(main(seed)) for seed in range(8))


# More stages, and pages of several blocks: a literal model of who holds what


class Pages:
    """Stages whose sources give memory back in pages of several blocks only.

    A unit is the KV of one block in one stage's layers. A request of n blocks at its source holds n units for each
    stage; those of the others have to go there. A page of the source holds units of `page` consecutive blocks for one
    other stage, and is free when all of them have gone.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self.num_stages = int(random.integers(2, 5))
        self.page = int(random.integers(1, 5))
        self.free = [int(random.integers(0, 6)) for _ in range(self.num_stages)]
        self.free[int(random.integers(self.num_stages))] += 1
        self.total = sum(self.free)
        self.requests: dict[str, tuple[int, list[int], float]] = {}
        self.pages: dict[tuple[int, int, int], set[tuple[str, int]]] = {}
        """(source, other stage, page): units that lie in it."""
        self.to_go: dict[tuple[str, int], int] = {}
        """(request, stage): blocks that still have to go there."""
        for source in range(self.num_stages):
            ids = random.permutation(int(random.integers(1, 30))).tolist()
            while ids:
                count = min(int(random.integers(1, 9)), len(ids))
                mine, ids = ids[:count], ids[count:]
                self._add(f"r{len(self.requests)}", source, mine, float(random.normal()))
        self.num_victims = 0
        going = [0] * self.num_stages
        for (name, stage), count in self.to_go.items():
            going[stage] -= count
            going[self.requests[name][0]] += count
        self.fits = all(free + more >= 0 for free, more in zip(self.free, going, strict=True))
        """Every stage has room for what comes once everything has gone."""

    def _add(self, name: str, source: int, blocks: list[int], slack_s: float) -> None:
        self.requests[name] = (source, blocks, slack_s)
        for other in range(self.num_stages):
            if other == source:
                continue
            self.to_go[name, other] = len(blocks)
            for index, block in enumerate(blocks):
                self.pages.setdefault((source, other, block // self.page), set()).add((name, index))

    def _gone(self, name: str, other: int, indices: range) -> None:
        source, blocks, _ = self.requests[name]
        for index in indices:
            key = (source, other, blocks[index] // self.page)
            self.pages[key].remove((name, index))
            if not self.pages[key]:
                del self.pages[key]
                self.free[source] += self.page

    def step(self) -> bool:
        """Give room and move what has it; False if nothing has."""
        size = max_chunk_blocks(self.total, self.num_stages)
        moved = False
        for stage in range(self.num_stages):
            names = [name for (name, other), left in self.to_go.items() if other == stage and left]
            total = {name: len(self.requests[name][1]) for name in names}
            done = {name: total[name] - self.to_go[name, stage] for name in names}
            waiting = [
                Waiting(self.requests[name][2], self.to_go[name, stage], done[name], min(size, total[name]))
                for name in names
            ]
            for name, share in zip(names, grants(self.free[stage], waiting), strict=True):
                if share:
                    moved = True
                    self.free[stage] -= share
                    self.to_go[name, stage] -= share
                    self._gone(name, stage, range(done[name], done[name] + share))
        return moved

    def drop_victim(self) -> None:
        """Compute one request again: all that it holds anywhere is free."""
        unmoved = [
            Ongoing(RequestId(name), slack_s, len(blocks))
            for name, (_, blocks, slack_s) in self.requests.items()
            if any(self.to_go.get((name, stage), 0) for stage in range(self.num_stages))
        ]
        victim = choose_victim(exchange_order(unmoved))
        assert victim is not None
        name = str(victim.request_id)
        source, blocks, _ = self.requests[name]
        self.free[source] += len(blocks)  # of its own stage's layers
        for stage in range(self.num_stages):
            if stage != source:
                left = self.to_go.pop((name, stage))
                self.free[stage] += len(blocks) - left
                self._gone(name, stage, range(len(blocks) - left, len(blocks)))
        del self.requests[name]
        self.num_victims += 1

    def run(self) -> None:
        while any(self.to_go.values()):
            if not self.step():
                self.drop_victim()
            assert min(self.free) >= 0


def test_among_several_stages_and_with_pages_every_exchange_ends() -> None:
    victims, num_plain = {1: 0, 2: 0}, 0
    for seed in range(1200):
        model = Pages(np.random.default_rng(seed))
        plain = model.num_stages == 2 and model.page == 1 and model.fits
        num_plain += plain
        model.run()
        assert not (plain and model.num_victims), f"seed {seed}: two stages need no victim"
        victims[1 if model.page == 1 else 2] += model.num_victims
    assert num_plain > 10
    assert victims[2], "the model reaches the case that needs a victim"
