"""Connections between the stages of a group: a listener for as long as the worker lives, and dialling.

    stage 0 ── leader ───► stage 1        every member is dialled by the leader, for batches and tokens,
       │ └──── previous ──►  │  │         and by the stage before it, for activations
       │                     │  └─ previous ─┐
       └────── leader ───► stage 2 ◄─────────┘

Each member is also dialled by every stage before it for KV, when the group forms, when KV is copied ahead, and when it
dissolves (`gather.py`).
While a group stands, any of its stages is dialled by the others for parameters (`parameter_lending.py`).
Members are told of a plan at different times, so who dials may be early: the listener keeps a connection for a plan
that it has not heard of for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from services.worker.peers.door import GREETING_S, Door, resolve, split_address, watch, what_failed
from services.worker.peers.greeting import (
    StageHello,
    StageRefusedError,
    StageRole,
    StageWelcome,
    hello,
    read_greeting,
    refused,
    why_refused,
)
from services.worker.peers.messages import hear, say
from services.worker.roles.device import GroupFailedError, GroupPlace
from shared.ids import WorkerId

T = TypeVar("T")


class Seats:
    """The connections that a member of a group waits for. `StageListener.expect` makes them.

    Args:
        place: of the member.
        purpose: of the connections for KV: the group is about to form (`KV`), or it stands, and KV is copied ahead
            (`AHEAD`) or it is about to dissolve (`PARTING`).
        attending: of a group that forms, there are connections for remote attention.
    """

    def __init__(self, place: GroupPlace, *, purpose: StageRole = StageRole.KV, attending: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.place = place
        before = [stage.worker_id for stage in place.stages[: place.index]]
        due = [(purpose, worker_id) for worker_id in before]
        if attending:
            due += [(StageRole.ATTENTION, worker_id) for worker_id in before]
        if purpose is StageRole.KV:
            due += [(StageRole.LEADER, before[0]), (StageRole.PREVIOUS, before[-1])]
        self._seats: dict[tuple[StageRole, WorkerId], asyncio.Future[socket.socket]] = {
            key: loop.create_future() for key in due
        }

    @property
    def leader(self) -> asyncio.Future[socket.socket]:
        """Of the group that forms."""
        return self.of(StageRole.LEADER, 0)

    @property
    def previous(self) -> asyncio.Future[socket.socket]:
        """The stage before, in the group that forms."""
        return self.of(StageRole.PREVIOUS, self.place.index - 1)

    def of(self, role: StageRole, stage: int) -> asyncio.Future[socket.socket]:
        """Return the connection that is due from a stage."""
        return self._seats[role, self.place.stages[stage].worker_id]

    def take(self, said: StageHello, sock: socket.socket) -> None:
        """Give a connection to whoever waits for it, who welcomes and owns it.

        Raises:
            StageRefusedError: nobody waits for it.
        """
        reason = why_refused(said, self.place)
        seat = self._seats.get((said.role, said.sender))
        if reason is None and seat is None:
            reason = f"no connection of the role {said.role} is due now"
        if reason is None and seat is not None and seat.done():
            reason = f"a connection of the {said.role} is there already"
        if reason is not None or seat is None:
            raise StageRefusedError(reason or "")
        seat.set_result(sock)

    def close(self) -> None:
        """Close what has come."""
        for seat in self._seats.values():
            if seat.done() and not seat.cancelled():
                seat.result().close()
            seat.cancel()


class StageListener:
    """Where other stages reach this worker. `open` makes one.

    Args:
        door: at which they call; owned.
        host: under which others reach it.
        wait_s: how long a connection for a plan that is not known is kept.
    """

    def __init__(self, door: Door, host: str, wait_s: float) -> None:
        self._door = door
        self._host = host
        self._wait_s = wait_s
        self._expected: dict[int, Seats] = {}
        self._lenders: dict[int, tuple[GroupPlace, Callable[[socket.socket], None]]] = {}
        self._changed = asyncio.Event()

    @classmethod
    async def open(
        cls, host: str = "127.0.0.1", port: int = 0, *, advertise: str = "", wait_s: float = 5.0
    ) -> StageListener:
        """Listen at an address.

        Args:
            host: of this machine.
            port: 0: any that is free.
            advertise: the name or address that others are told; empty: `host`.
            wait_s: see the class.

        Raises:
            OSError: the address is not this machine's, or taken.
        """
        listener = cls(await Door.open(host, port, "stage"), advertise or host, wait_s)
        listener._door.start(listener._greet)
        return listener

    @property
    def address(self) -> str:
        """`host:port` for others to dial."""
        port = self._door.port
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    @property
    def num_greeted(self) -> int:
        """Connections that are greeted, or kept for a plan that is not known, now."""
        return self._door.num_greeted

    @property
    def num_refused(self) -> int:
        """Connections that came to nothing."""
        return self._door.num_refused

    def expect(self, place: GroupPlace, *, purpose: StageRole = StageRole.KV, attending: bool = False) -> Seats:
        """Let in the connections of a group from now on, those that came early first; the rest as for `Seats`."""
        seats = self._expected[place.plan_id] = Seats(place, purpose=purpose, attending=attending)
        self._wake()
        return seats

    def forget(self, seats: Seats) -> None:
        """Let in no more connections of a group. Idempotent."""
        if self._expected.get(seats.place.plan_id) is seats:
            del self._expected[seats.place.plan_id]

    def lend(self, place: GroupPlace, take: Callable[[socket.socket], None]) -> None:
        """Let in the stages of a group that stands who want parameters, from now on.

        Args:
            place: in the group.
            take: is given each connection, which it welcomes and owns.
        """
        self._lenders[place.plan_id] = place, take
        self._wake()

    def lend_no_more(self, place: GroupPlace) -> None:
        """Let in nobody any more who wants parameters. Idempotent."""
        self._lenders.pop(place.plan_id, None)

    async def close(self) -> None:
        """Listen no more; connections that were welcome stay. Idempotent."""
        await self._door.close()

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            watch(sock)
            async with asyncio.timeout(GREETING_S):
                said = read_greeting(await hear(sock), StageHello)
            if said.role is StageRole.PARAMETERS:
                await self._give_to_lender(said, sock)
            else:
                (await self._known(self._expected, said.plan_id)).take(said, sock)
        except (OSError, TimeoutError, StageRefusedError) as error:
            await self._refuse(sock, address, str(error) or "no greeting in time")

    async def _refuse(self, sock: socket.socket, address: str, reason: str) -> None:
        self._door.refuse(address, reason)
        with sock, contextlib.suppress(OSError, TimeoutError):  # it has gone
            async with asyncio.timeout(GREETING_S):
                await say(sock, refused(reason))

    async def _give_to_lender(self, said: StageHello, sock: socket.socket) -> None:
        place, take = await self._known(self._lenders, said.plan_id)
        reason = why_refused(said, place)
        if reason is not None:
            raise StageRefusedError(reason)
        take(sock)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _known(self, by_plan: Mapping[int, T], plan_id: int) -> T:
        """Return what there is for a plan, which may come a little later."""
        try:
            async with asyncio.timeout(self._wait_s):
                while plan_id not in by_plan:
                    await self._changed.wait()
        except TimeoutError:
            raise StageRefusedError(f"this worker has not joined plan {plan_id} within {self._wait_s:g} s") from None
        return by_plan[plan_id]


async def dial(
    place: GroupPlace, index: int, role: StageRole, sockets: contextlib.ExitStack
) -> tuple[socket.socket, StageWelcome]:
    """Return a connection to a stage that welcomes this one, and what it said.

    Args:
        place: of this worker.
        index: of the stage that is dialled.
        role: of this worker there.
        sockets: closes the connection, unless somebody takes it out.

    Raises:
        GroupFailedError: nobody is there, or this worker is not wanted.
    """
    stage = place.stages[index]
    try:
        family, kind, protocol, where = await resolve(*split_address(stage.address))
        sock = sockets.enter_context(socket.socket(family, kind, protocol))
        sock.settimeout(0)
        watch(sock)
        await asyncio.get_running_loop().sock_connect(sock, where)
        await say(sock, hello(place, index, role))
        return sock, read_greeting(await hear(sock), StageWelcome)
    except (OSError, ValueError) as error:
        raise GroupFailedError(f"{stage.worker_id} at {stage.address}: {what_failed(error)}") from error
    except StageRefusedError as error:
        raise GroupFailedError(f"{stage.worker_id} at {stage.address}: {error}") from None


async def together(parts: Mapping[str, Coroutine[Any, Any, T]], limit_s: float) -> list[T]:
    """Run coroutines side by side and return their results, in order. When it returns or raises, none of them runs.

    Args:
        parts: by the name of whom each waits for.
        limit_s: for all of them.

    Raises:
        GroupFailedError: one has failed, or they were not done in time; names them.
    """
    tasks = {name: asyncio.ensure_future(part) for name, part in parts.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        late = [name for name, task in tasks.items() if not task.done()]
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    for task in tasks.values():
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    if late:
        raise GroupFailedError(f"{', '.join(late)} did not come within {limit_s:g} s")
    return [task.result() for task in tasks.values()]
