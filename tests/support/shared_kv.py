"""A worker's KV memory in pages that can be lent, and a process with such a memory at the other end of a link.

`python -m tests.support.shared_kv ADDRESS SEED NUM_BLOCKS` dials, and takes in moves. On the control stream `ASK` it
does what it is asked: `state` tells how its memory stands, `send REQUEST NUM_BLOCKS` fills blocks and moves them back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys

import numpy as np

from services.worker.transfer.agent import MoveAgent, MoveRequest
from services.worker.transfer.fd_link import PageSharing
from services.worker.transfer.hello import Expected
from services.worker.transfer.link import Arrival, TrafficClass
from services.worker.transfer.socket_link import SocketLink
from shared.ids import Incarnation, RequestId
from shared.layers import LayerRange
from tests.support.fake_memory import FakeMemory
from tests.support.link_child import CHILD, PARENT, body_of, identity
from tests.support.link_roads import PAGE_BYTES, SharedBytes, dial

ASK = 7
BLOCK_BYTES = 20 * 1024
"""No divisor of a page: blocks lie across its borders."""
NUM_LAYERS = 4
LAYERS = LayerRange(1, 3)
CHUNK_BLOCKS = 4


class SharedKv(FakeMemory):
    """A `FakeMemory` whose bytes lie in lent pages."""

    def __init__(self, random: np.random.Generator, num_blocks: int) -> None:
        super().__init__(random, num_layers=NUM_LAYERS, num_blocks=num_blocks)
        num_bytes = NUM_LAYERS * 2 * num_blocks * BLOCK_BYTES
        self.shared = SharedBytes(num_pages=-(-num_bytes // PAGE_BYTES), seed=int(random.integers(1000)))
        self.data = self.shared.bytes[:num_bytes].reshape(NUM_LAYERS, 2, num_blocks, BLOCK_BYTES)

    def digest(self, session_id: str) -> str:
        """Return a hash of what was committed."""
        return hashlib.sha256(self.contents(self.committed[session_id][1], LAYERS)).hexdigest()

    def close(self) -> None:
        del self.data
        self.shared.memory.close()


def request(request_id: RequestId, target: SocketLink, blocks: tuple[int, ...]) -> MoveRequest:
    return MoveRequest(request_id, target.peer_id, LAYERS, blocks, 1, CHUNK_BLOCKS)


async def main(address: str, seed: int, num_blocks: int) -> None:
    memory = SharedKv(np.random.default_rng(seed), num_blocks)
    agent = MoveAgent(CHILD, Incarnation(7), memory, memory)
    link = await dial(address, identity(CHILD), Expected(PARENT), PageSharing(memory.shared.lent))

    def on_ask(arrival: Arrival) -> None:
        what, *arguments = body_of(arrival).decode().split()
        link.release(arrival)
        if what == "state":
            committed = {spec.request_id: memory.digest(name) for name, (spec, _) in memory.committed.items()}
            memory.check()
            said = {"held": len(memory.held), "moves": agent.num_moves, "committed": committed, "sent": sent}
            link.send(TrafficClass.CONTROL, ASK, arrival.number, [json.dumps(said).encode()])
        else:
            name = RequestId(arguments[0])
            blocks = memory.fill(name, int(arguments[1]))
            sent[name] = hashlib.sha256(memory.contents(blocks, LAYERS)).hexdigest()
            agent.move(request(name, link, blocks))

    sent: dict[RequestId, str] = {}
    agent.attach(link, on_ask)
    while link.is_up:
        await asyncio.sleep(0.05)
    await agent.close()
    await link.close()
    memory.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
