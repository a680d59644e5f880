"""A process at the other end of a link: `python -m tests.support.link_child ADDRESS ZONE_BYTES DIES_AT`.

It dials, returns each activation of stream 1 from a thread, lands KV of stream 2 in one zone again and again, and tells
of each on stream 3 of the control class. When the KV of number DIES_AT arrives, it kills itself; -1: it never does.
For tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading

from services.worker.transfer.hello import Expected, Identity
from services.worker.transfer.inbox import Inbox
from services.worker.transfer.link import Arrival, LinkError, LinkParams, TrafficClass
from services.worker.transfer.socket_link import SocketLink
from shared.ids import Incarnation, WorkerId
from tests.support.link_roads import dial

TOKEN = b"a token of this cluster only"
PARENT, CHILD = WorkerId("parent"), WorkerId("child")
ECHO, BULK, NEWS = 1, 2, 3


def body_of(arrival: Arrival) -> bytes:
    assert arrival.body is not None
    return bytes(arrival.body)


def identity(worker_id: WorkerId, params: LinkParams | None = None) -> Identity:
    """Without params: patient, so that a busy machine ends no link."""
    return Identity(worker_id, Incarnation(7), TOKEN, params or LinkParams(ping_s=0.2, dead_after_s=15.0))


def echo(link: SocketLink, inbox: Inbox) -> None:
    """Return each activation, as the thread of a stage would pass it on."""
    with contextlib.suppress(LinkError):
        while True:
            try:
                arrival = inbox.get(1.0)
            except TimeoutError:
                continue
            assert arrival.body is not None
            link.send_from_thread(TrafficClass.ACTIVATION, ECHO, arrival.number, [arrival.body])


async def main(address: str, zone_bytes: int, dies_at: int) -> None:
    link = await dial(address, identity(CHILD), Expected(PARENT))
    echoing = threading.Thread(target=echo, args=(link, link.inbox(ECHO)), daemon=True)
    ended = asyncio.Event()
    zone = memoryview(bytearray(zone_bytes))

    def take(arrival: Arrival) -> None:
        if arrival.number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        link.release(arrival)
        link.post(BULK, arrival.number + 2, [zone])
        link.send(TrafficClass.CONTROL, NEWS, arrival.number, [arrival.checksum.to_bytes(4, "little")])

    link.post(BULK, 0, [zone])
    link.post(BULK, 1, [zone])
    link.start(take, lambda _: ended.set())
    echoing.start()
    link.send(TrafficClass.CONTROL, NEWS, 2**31, [b"ready"])
    await ended.wait()
    await link.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
