"""How the stages of a group that forms, or dissolves, come to have all their connections: all, or none.

                 leader                 member i                               member i + 1
LEADER, KV, …      ├──── dials ─────────► is dialled
PREVIOUS           │                      dials ───────────────────────────────► is dialled
KV, ATTENTION      │                      dials all behind it ─────────────────► is dialled
welcome            ◄───── when it has all the others, it welcomes the leader
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from services.worker.kv_moves.places import GroupFailedError, GroupPlace
from services.worker.kv_moves.seats import GROUP_PURPOSES, Seats
from services.worker.peers.connect import Peers, hear_greeting, say_greeting
from services.worker.peers.frames import PeerLostError
from services.worker.peers.greeting import PeerReady, PeerRefusedError, PeerWelcome, Purpose

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeaderLinks:
    """Of stage 0."""

    members: tuple[socket.socket, ...]
    """To the stages 1 and following."""
    behind: socket.socket
    """To stage 1, for activations."""
    kv: dict[int, socket.socket]
    """By stage."""
    attention: dict[int, socket.socket]
    """By stage, for remote attention; none where there is none."""
    welcomes: tuple[PeerWelcome, ...]
    """Of the stages 1 and following."""


@dataclass(frozen=True, slots=True)
class MemberLinks:
    """Of any other stage."""

    leader: socket.socket
    previous: socket.socket
    behind: socket.socket | None
    """To the stage behind; None: this is the last one."""
    kv: dict[int, socket.socket]
    """By stage."""
    attention: dict[int, socket.socket]
    """By stage, for remote attention; none where there is none."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """A stage that connects with the others of its group."""

    peers: Peers
    place: GroupPlace
    sockets: contextlib.ExitStack
    """Closes the connections, unless somebody takes them out."""
    limit_s: float
    """Seconds for all of it."""

    async def dial(self, index: int, purpose: Purpose) -> tuple[socket.socket, PeerWelcome]:
        """Return a connection to a stage that welcomes this one, and what it said.

        Raises:
            GroupFailedError: nobody is there, or this worker is not wanted.
        """
        stage = self.place.stages[index]
        try:
            sock, welcome = await self.peers.dial(stage.worker_id, stage.address, purpose, self.place.plan_id, index)
        except (PeerLostError, PeerRefusedError) as error:
            raise GroupFailedError(f"{stage.worker_id} at {stage.address}: {error}") from error
        return self.sockets.enter_context(sock), welcome

    @contextlib.contextmanager
    def expecting(self, seats: Seats) -> Iterator[Seats]:
        """Let the others dial this one meanwhile."""
        self.sockets.callback(seats.close)
        self.peers.expect(GROUP_PURPOSES, self.place.plan_id, seats.take)
        try:
            yield seats
        finally:
            self.peers.forget(seats.take)

    async def welcome(self, sock: socket.socket, welcome: PeerWelcome, index: int) -> None:
        """Welcome a stage that has dialled this one.

        Raises:
            GroupFailedError: it has gone.
        """
        try:
            await say_greeting(sock, welcome)
        except PeerLostError as error:
            raise GroupFailedError(f"{self.place.stages[index].worker_id} is gone: {error}") from error

    def pairs(
        self, purpose: Purpose, found: dict[int, socket.socket], dialled: tuple[Seats, PeerWelcome] | None = None
    ) -> dict[str, Awaitable[None]]:
        """Return what connects a stage with each other one, by a name: whoever is before in the pipeline dials.

        Args:
            purpose: of the connections.
            found: gets them, by stage.
            dialled: where the stages before dial a stage that does not lead, and what it says to them.
        """

        async def call(index: int) -> None:
            found[index] = (await self.dial(index, purpose))[0]

        async def be_called(seats: Seats, welcome: PeerWelcome, index: int) -> None:
            sock = await seats.of(purpose, index)
            await self.welcome(sock, welcome, index)
            found[index] = sock

        parts: dict[str, Awaitable[None]] = {}
        for index, stage in enumerate(self.place.stages):
            name = f"{stage.worker_id} for {'attention' if purpose is Purpose.ATTENTION else 'KV'}"
            if index > self.place.index:
                parts[name] = call(index)
            elif dialled is not None and index < self.place.index:
                parts[name] = be_called(*dialled, index)
        return parts


async def gather_as_leader(at: Gathering, *, attending: bool = False) -> LeaderLinks:
    """Dial all members of a group.

    Args:
        at: the leader.
        attending: there are connections for remote attention.

    Raises:
        GroupFailedError: somebody is missing, or wants another group.
    """
    stages = at.place.stages
    num_members = len(stages) - 1
    kv: dict[int, socket.socket] = {}
    attention: dict[int, socket.socket] = {}
    calls: dict[str, Awaitable[Any]] = {
        str(stages[i].worker_id): at.dial(i, Purpose.LEADER) for i in range(1, len(stages))
    }
    calls[f"{stages[1].worker_id} as the next stage"] = at.dial(1, Purpose.PREVIOUS)
    calls |= at.pairs(Purpose.KV, kv)
    if attending:
        calls |= at.pairs(Purpose.ATTENTION, attention)
    members = await together(calls, at.limit_s)
    behind, _ = members[num_members]
    socks, welcomes = zip(*members[:num_members], strict=True)
    return LeaderLinks(socks, behind, kv, attention, welcomes)


async def gather_as_member(at: Gathering, welcome: PeerWelcome, *, attending: bool = False) -> MemberLinks:
    """Be dialled by the stages before, and dial those behind; then welcome the leader.

    Args:
        at: the member.
        welcome: what it says.
        attending: as in `gather_as_leader`.

    Raises:
        GroupFailedError: somebody is missing, or wants another group.
    """
    place, next_index = at.place, at.place.index + 1
    kv: dict[int, socket.socket] = {}
    attention: dict[int, socket.socket] = {}
    with at.expecting(Seats(place, attending=attending)) as seats:

        async def be_dialled_by_previous() -> None:
            await at.welcome(await seats.previous, welcome, place.index - 1)

        parts: dict[str, Awaitable[Any]] = {
            f"the leader, {place.stages[0].worker_id}": seats.leader,
            f"{place.stages[place.index - 1].worker_id} as the stage before": be_dialled_by_previous(),
        }
        has_next = next_index < len(place.stages)
        if has_next:
            parts[f"{place.stages[next_index].worker_id} as the next stage"] = at.dial(next_index, Purpose.PREVIOUS)
        parts |= at.pairs(Purpose.KV, kv, (seats, welcome))
        if attending:
            parts |= at.pairs(Purpose.ATTENTION, attention, (seats, welcome))
        found = await together(parts, at.limit_s)
        await at.welcome(seats.leader.result(), welcome, 0)
    behind = found[2][0] if has_next else None
    return MemberLinks(seats.leader.result(), seats.previous.result(), behind, kv, attention)


async def gather_for_kv(at: Gathering, purpose: Purpose, welcome: PeerWelcome) -> dict[int, socket.socket]:
    """Connect every stage of a group that stands with every other; return the connections by stage.

    Args:
        at: one of the stages.
        purpose: to dissolve the group (`PARTING`), or to copy KV before (`AHEAD`).
        welcome: as in `gather_as_member`.

    Raises:
        GroupFailedError: somebody does not come.
    """
    found: dict[int, socket.socket] = {}
    if not at.place.index:  # nobody dials the leader
        await together(at.pairs(purpose, found), at.limit_s)
        return found
    with at.expecting(Seats(at.place, purpose=purpose)) as seats:
        await together(at.pairs(purpose, found, (seats, welcome)), at.limit_s)
    return found


async def all_ready(place: GroupPlace, links: LeaderLinks, limit_s: float) -> None:
    """Wait until all members can compute.

    Raises:
        GroupFailedError: one has gone, or takes too long.
    """

    async def wait(index: int) -> None:
        try:
            await hear_greeting(links.members[index - 1], PeerReady)
        except (PeerLostError, PeerRefusedError) as error:
            who = place.stages[index].worker_id
            raise GroupFailedError(f"{who} has left before the first step: {error}") from error

    waiting = {str(place.stages[i].worker_id): wait(i) for i in range(1, len(place.stages))}
    await together(waiting, limit_s)


async def together(parts: Mapping[str, Awaitable[T]], limit_s: float) -> list[T]:
    """Await things side by side and return their results, in order. When it returns or raises, none of them runs.

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
