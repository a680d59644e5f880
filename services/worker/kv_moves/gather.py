"""How the stages of a group that forms, or dissolves, come to have all their connections: all, or none.

                 leader                 member i                               member i + 1
LEADER, KV, …      ├──── dials ─────────► is dialled
PREVIOUS           │                      dials ───────────────────────────────► is dialled
KV, ATTENTION      │                      dials all behind it ─────────────────► is dialled
welcome            ◄───── when it has all the others, it welcomes the leader
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from services.worker.peers.connect import Seats, dial, together
from services.worker.peers.door import what_failed
from services.worker.peers.greeting import StageReady, StageRefusedError, StageRole, StageWelcome, read_greeting
from services.worker.peers.messages import hear, say
from services.worker.roles.device import GroupFailedError, GroupPlace


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
    welcomes: tuple[StageWelcome, ...]
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


async def gather_as_leader(
    place: GroupPlace, limit_s: float, sockets: contextlib.ExitStack, *, attending: bool = False
) -> LeaderLinks:
    """Dial all members of a group.

    Args:
        place: of the leader.
        limit_s: seconds for all of it.
        sockets: closes the connections, unless somebody takes them out.
        attending: there are connections for remote attention.

    Raises:
        GroupFailedError: somebody is missing, or wants another group.
    """
    calls = {
        str(place.stages[i].worker_id): dial(place, i, StageRole.LEADER, sockets) for i in range(1, len(place.stages))
    }
    calls[f"{place.stages[1].worker_id} as the next stage"] = dial(place, 1, StageRole.PREVIOUS, sockets)
    for i in range(1, len(place.stages)):
        calls[f"{place.stages[i].worker_id} for KV"] = dial(place, i, StageRole.KV, sockets)
    for i in range(1, len(place.stages)) if attending else ():
        calls[f"{place.stages[i].worker_id} for attention"] = dial(place, i, StageRole.ATTENTION, sockets)
    num_members = len(place.stages) - 1
    found = await together(calls, limit_s)
    members, behind, rest = found[:num_members], found[num_members], found[num_members + 1 :]
    kv, attention = rest[:num_members], rest[num_members:]
    return LeaderLinks(
        tuple(sock for sock, _ in members),
        behind[0],
        {i: sock for i, (sock, _) in enumerate(kv, 1)},
        {i: sock for i, (sock, _) in enumerate(attention, 1)},
        tuple(welcome for _, welcome in members),
    )


async def gather_as_member(
    place: GroupPlace,
    seats: Seats,
    welcome: StageWelcome,
    limit_s: float,
    sockets: contextlib.ExitStack,
    *,
    attending: bool = False,
) -> MemberLinks:
    """Be dialled by the stages before, and dial those behind; then welcome the leader.

    Args:
        place: of the member.
        seats: where it waits for the others; closed by the caller if this raises.
        welcome: what it says.
        limit_s: seconds for all of it.
        sockets: as in `gather_as_leader`; the seats' are not among them.
        attending: as there, and as the seats were made.

    Raises:
        GroupFailedError: somebody is missing, or wants another group.
    """
    behind: list[socket.socket] = []

    async def be_dialled_by_previous() -> None:
        await _welcome(await seats.previous, welcome, place, place.index - 1)

    async def be_dialled_by_leader() -> None:
        await seats.leader

    async def dial_next() -> None:
        sock, _ = await dial(place, place.index + 1, StageRole.PREVIOUS, sockets)
        behind.append(sock)

    kv: dict[int, socket.socket] = {}
    attention: dict[int, socket.socket] = {}
    parts: dict[str, Coroutine[Any, Any, None]] = {
        f"the leader, {place.stages[0].worker_id}": be_dialled_by_leader(),
        f"{place.stages[place.index - 1].worker_id} as the stage before": be_dialled_by_previous(),
    }
    if place.index + 1 < len(place.stages):
        parts[f"{place.stages[place.index + 1].worker_id} as the next stage"] = dial_next()
    parts |= _pairs(place, StageRole.KV, seats, welcome, sockets, kv)
    if attending:
        parts |= _pairs(place, StageRole.ATTENTION, seats, welcome, sockets, attention)
    await together(parts, limit_s)
    leader = seats.leader.result()
    await _welcome(leader, welcome, place, 0)
    return MemberLinks(leader, seats.previous.result(), behind[0] if behind else None, kv, attention)


async def gather_for_kv(
    place: GroupPlace,
    purpose: StageRole,
    seats: Seats | None,
    welcome: StageWelcome,
    limit_s: float,
    sockets: contextlib.ExitStack,
) -> dict[int, socket.socket]:
    """Connect every stage of a group that stands with every other; return the connections by stage.

    Args:
        place: in the group.
        purpose: to dissolve it (`PARTING`), or to copy KV before (`AHEAD`).
        seats: for this purpose; None: of the leader, whom nobody dials. Else as in `gather_as_member`.
        welcome: as there.
        limit_s: as there.
        sockets: as there.

    Raises:
        GroupFailedError: somebody does not come.
    """
    found: dict[int, socket.socket] = {}
    await together(_pairs(place, purpose, seats, welcome, sockets, found), limit_s)
    return found


async def all_ready(place: GroupPlace, links: LeaderLinks, limit_s: float) -> None:
    """Wait until all members can compute.

    Raises:
        GroupFailedError: one has gone, or takes too long.
    """

    async def wait(index: int) -> None:
        try:
            read_greeting(await hear(links.members[index - 1]), StageReady)
        except (OSError, StageRefusedError) as error:
            said = what_failed(error)
            raise GroupFailedError(f"{place.stages[index].worker_id} has left before the first step: {said}") from error

    waiting = {str(place.stages[i].worker_id): wait(i) for i in range(1, len(place.stages))}
    await together(waiting, limit_s)


def _pairs(
    place: GroupPlace,
    role: StageRole,
    seats: Seats | None,
    welcome: StageWelcome,
    sockets: contextlib.ExitStack,
    found: dict[int, socket.socket],
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return what connects a stage with each other one, by a name: whoever is before in the pipeline dials."""

    async def call(index: int) -> None:
        found[index] = (await dial(place, index, role, sockets))[0]

    async def be_called(seats: Seats, index: int) -> None:
        sock = await seats.of(role, index)
        await _welcome(sock, welcome, place, index)
        found[index] = sock

    parts = {}
    for index, stage in enumerate(place.stages):
        name = f"{stage.worker_id} for {'attention' if role is StageRole.ATTENTION else 'KV'}"
        if index > place.index:
            parts[name] = call(index)
        elif seats is not None and index < place.index:
            parts[name] = be_called(seats, index)
    return parts


async def _welcome(sock: socket.socket, welcome: StageWelcome, place: GroupPlace, index: int) -> None:
    try:
        await say(sock, welcome)
    except OSError as error:
        raise GroupFailedError(f"{place.stages[index].worker_id} is gone: {what_failed(error)}") from error
