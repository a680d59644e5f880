"""The connections that a member of a group waits for, and whose they may be.

    stage 0 ── leader ───► stage 1        every member is dialled by the leader, for batches and tokens,
       │ └──── previous ──►  │  │         and by the stage before it, for activations
       │                     │  └─ previous ─┐
       └────── leader ───► stage 2 ◄─────────┘

Each member is also dialled by every stage before it for KV, when the group forms, when KV is copied ahead, and when it
dissolves (`gather.py`). While a group stands, any of its stages is dialled by the others for parameters
(`parameter_peers.py`).
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from services.worker.kv_moves.places import GroupPlace
from services.worker.peers.greeting import PeerHello, PeerRefusedError, Purpose
from shared.ids import WorkerId

GROUP_PURPOSES: Final = frozenset(Purpose) - {Purpose.PARAMETERS, Purpose.FETCH}
"""Of connections for which a member waits."""


class Seats:
    """See the module. Made on the running loop; `Peers.expect` lets connections `take` them.

    Args:
        place: of the member.
        purpose: of the connections for KV: the group is about to form (`KV`), or it stands, and KV is copied ahead
            (`AHEAD`) or it is about to dissolve (`PARTING`).
        attending: of a group that forms, there are connections for remote attention.
    """

    def __init__(self, place: GroupPlace, *, purpose: Purpose = Purpose.KV, attending: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.place = place
        before = [stage.worker_id for stage in place.stages[: place.index]]
        due = [(purpose, worker_id) for worker_id in before]
        if attending:
            due += [(Purpose.ATTENTION, worker_id) for worker_id in before]
        if purpose is Purpose.KV:
            due += [(Purpose.LEADER, before[0]), (Purpose.PREVIOUS, before[-1])]
        self._seats: dict[tuple[str, WorkerId], asyncio.Future[socket.socket]] = {
            key: loop.create_future() for key in due
        }

    @property
    def leader(self) -> asyncio.Future[socket.socket]:
        """Of the group that forms."""
        return self.of(Purpose.LEADER, 0)

    @property
    def previous(self) -> asyncio.Future[socket.socket]:
        """The stage before, in the group that forms."""
        return self.of(Purpose.PREVIOUS, self.place.index - 1)

    def of(self, purpose: Purpose, stage: int) -> asyncio.Future[socket.socket]:
        """Return the connection that is due from a stage."""
        return self._seats[purpose, self.place.stages[stage].worker_id]

    def take(self, said: PeerHello, sock: socket.socket) -> None:
        """Give a connection to whoever waits for it, who welcomes and owns it.

        Raises:
            PeerRefusedError: nobody waits for it.
        """
        check_place(said, self.place)
        seat = self._seats.get((said.purpose, said.worker_id))
        if seat is None:
            raise PeerRefusedError(f"no connection for '{said.purpose}' is due now")
        if seat.done():
            raise PeerRefusedError(f"a connection for '{said.purpose}' is there already")
        seat.set_result(sock)

    def close(self) -> None:
        """Close what has come."""
        for seat in self._seats.values():
            if seat.done() and not seat.cancelled():
                seat.result().close()
            seat.cancel()


def check_place(said: PeerHello, place: GroupPlace) -> None:
    """Return if whoever is at a place wants a connection.

    Args:
        said: for the plan of this place.
        place: of who listens.

    Raises:
        PeerRefusedError: it does not.
    """
    if said.index != place.index:
        raise PeerRefusedError(f"stage {said.index} was dialled, and this is stage {place.index}")
    ids, index = [stage.worker_id for stage in place.stages], place.index
    others = {
        Purpose.PARAMETERS: [*ids[:index], *ids[index + 1 :]],
        Purpose.LEADER: ids[: min(index, 1)],
        Purpose.PREVIOUS: ids[max(index - 1, 0) : index],
    }
    if said.worker_id not in others.get(Purpose(said.purpose), ids[:index]):
        raise PeerRefusedError(f"stage {index} wants no connection for '{said.purpose}' from {said.worker_id}")
