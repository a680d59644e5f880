"""KV moved between two processes whose pages are lent to each other: bytes, cancellation in transfer, deaths."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.transfer.agent import Move, MoveAgent
from services.worker.transfer.fd_connect import listen
from services.worker.transfer.fd_link import FdLink, PageSharing
from services.worker.transfer.link import Arrival, TrafficClass
from shared.ids import Incarnation, RequestId
from tests.support.link_child import CHILD, PARENT, body_of, identity
from tests.support.link_ends import LIMIT_S
from tests.support.shared_kv import ASK, BLOCK_BYTES, LAYERS, SharedKv, request
from tests.support.waiting import until

NUM_BLOCKS = 120


class Pair:
    """This process's agent and memory, and what the other process says of its own."""

    def __init__(self, memory: SharedKv, link: FdLink, process: asyncio.subprocess.Process) -> None:
        self.memory, self.link, self.process = memory, link, process
        self.agent = MoveAgent(PARENT, Incarnation(7), memory, memory)
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.agent.attach(link, self._take)

    def _take(self, arrival: Arrival) -> None:
        self._said.put_nowait(json.loads(body_of(arrival)))
        self.link.release(arrival)

    def move(self, name: str, num_blocks: int) -> tuple[Move, str]:
        """Begin to move new KV to the other process; return the move, and a hash of what it moves."""
        blocks = self.memory.fill(name, num_blocks)
        contents = hashlib.sha256(self.memory.contents(blocks, LAYERS)).hexdigest()
        return self.agent.move(request(RequestId(name), self.link, blocks)), contents

    def ask(self, what: str) -> None:
        self.link.send(TrafficClass.CONTROL, ASK, 0, [what.encode()])

    async def state(self) -> dict[str, Any]:
        """Return what the other process says when no move is under way there."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                self.ask("state")
                said = await self._said.get()
                if not said["moves"] and not said["held"]:
                    return said
                await asyncio.sleep(0.05)


@asynccontextmanager
async def two_processes() -> AsyncIterator[Pair]:
    memory = SharedKv(np.random.default_rng(1), NUM_BLOCKS)
    made: asyncio.Queue[FdLink] = asyncio.Queue()
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        path = Path(folder) / "link"
        listener = await listen(path, identity(PARENT), PageSharing(memory.shared.lent), made.put_nowait)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.shared_kv", str(path), "2", str(NUM_BLOCKS))
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                pair = Pair(memory, await made.get(), process)
            yield pair
            await pair.agent.close()
            await pair.link.close()
            memory.check()
            assert not memory.pins
            assert not memory.held
            async with asyncio.timeout(LIMIT_S):
                assert await process.wait() in {0, -9}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await listener.close()
    memory.close()


async def test_kv_moves_both_ways_at_once_and_its_bytes_are_the_same() -> None:
    async with two_processes() as pair:
        moves = [pair.move(f"there-{number}", 9 + number) for number in range(4)]
        for number in range(4):
            pair.ask(f"send back-{number} {7 + number}")
        async with asyncio.timeout(LIMIT_S):
            outcomes = [await move.done for move, _ in moves]
        assert all(outcome.is_committed for outcome in outcomes), outcomes
        await until(lambda: len(pair.memory.committed) == 4)
        said = await pair.state()
        assert said["committed"] == {f"there-{number}": contents for number, (_, contents) in enumerate(moves)}
        mine = {spec.request_id: pair.memory.digest(name) for name, (spec, _) in pair.memory.committed.items()}
        assert mine == said["sent"]
        num_blocks = sum(9 + number for number in range(4))
        assert pair.link.num_lent_bytes == num_blocks * 2 * len(LAYERS) * BLOCK_BYTES, "none of it went inline"


async def test_a_move_that_is_cancelled_in_transfer_leaves_nothing_and_its_blocks_serve_again() -> None:
    async with two_processes() as pair:
        move, _ = pair.move("first", 100)
        await until(lambda: pair.link.num_lent_bytes > 0)
        move.cancel("the reader has gone")
        async with asyncio.timeout(LIMIT_S):
            assert not (await move.done).is_committed
        assert not pair.memory.pins
        pair.memory.release("first")
        assert (await pair.state())["committed"] == {}
        second, contents = pair.move("second", 110)  # in the same blocks, by the same descriptors
        async with asyncio.timeout(LIMIT_S):
            assert (await second.done).is_committed
        assert (await pair.state())["committed"] == {"second": contents}


async def test_when_the_target_dies_the_source_keeps_what_it_had() -> None:
    async with two_processes() as pair:
        move, contents = pair.move("r", 100)
        await until(lambda: pair.link.num_lent_bytes > 0)
        pair.process.kill()
        await until(lambda: not pair.link.is_up)
        assert not move.done.done(), "whether the worker is gone for good is not the link's to say"
        pair.agent.peer_died(CHILD)
        async with asyncio.timeout(LIMIT_S):
            outcome = await move.done
        assert not outcome.is_committed
        assert outcome.num_freed_blocks == 0
        held = tuple(block for block, owner in pair.memory.owner.items() if owner == "r")
        assert hashlib.sha256(pair.memory.contents(held, LAYERS)).hexdigest() == contents


async def test_when_the_source_dies_the_target_gives_its_room_back_and_maps_nothing_of_it() -> None:
    async with two_processes() as pair:
        own = num_memory_files()
        pair.ask("send r 100")
        await until(lambda: pair.link._borrowed.num_pages > 0)
        assert num_memory_files() > own
        pair.process.kill()
        await until(lambda: not pair.link.is_up)
        pair.agent.peer_died(CHILD)
        await until(lambda: not pair.memory.held)
        assert pair.memory.committed == {}
        assert len(pair.memory.free_blocks) == NUM_BLOCKS
        await pair.link.close()
        assert num_memory_files() == own


def num_memory_files() -> int:
    """Return how many memory files this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:sluice" in line})
