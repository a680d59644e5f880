"""Requests that wait for memory go where there is some, and their texts are as undisturbed."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import numpy as np
import pytest

from services.dispatcher.session.leases import Loss
from services.worker.engine.invariants import check_engine
from shared.ids import WorkerId
from shared.messages.base import ControlMessage
from shared.messages.queue import ListQueued, MoveQueued, QueueList, QueueMove, QueueMoved
from shared.subjects import Subjects
from shared.wire import decode_json, encode_json
from sim.requests import SimRequest
from tests.support.group_room import Room, draw_requests, group_params, open_room, room_test

M = TypeVar("M", bound=ControlMessage)


def uneven_load(count: int) -> list[SimRequest]:
    """Every other request is long, so that what is dealt out evenly is soon uneven."""
    rng = np.random.default_rng(4)
    return [SimRequest(f"r{i}", rng.integers(300, 30_000, 60), 3 if i % 2 else 250, seed=i) for i in range(count)]


async def serve(system: str) -> tuple[float, int]:
    """Return when the last request had its first token, and how many were moved.

    From the two workers nothing may be dropped: no layer would have a second copy.
    """
    async with open_room(group_params(system=system, num_copies=0)) as room:
        began_s = asyncio.get_running_loop().time()
        room.ask(*uneven_load(24))
        await room.check()
        answers = [answer.result() for answer in room.answers]
        first_s = max(answer.arrival_s + answer.delivered_s[0] for answer in answers) - began_s
    return first_s, room.cluster.dispatcher.sessions.recovery.num_lost[Loss.RELEASED]


@pytest.mark.slow
@pytest.mark.virtual_time
async def test_who_waits_for_memory_goes_where_there_is_some() -> None:
    stayed_s, none = await serve("fcfs-chunked")
    moved_s, num_moved = await serve("kunserve")
    assert none == 0
    assert num_moved > 0
    assert moved_s < 0.8 * stayed_s


@room_test(group_params())
async def test_only_who_has_not_begun_is_moved_and_never_twice(room: Room) -> None:
    """A worker is asked to let everybody go: those that run, or did, stay, and all texts are as undisturbed."""
    room.ask(*draw_requests(7, 40))
    await asyncio.sleep(0.4)
    agent = room.agent()
    engine = agent.keeper.machine.engine
    listed = {part.request_id for part in (await asked(room, ListQueued(epoch=99), QueueList)).requests}
    waiting = {str(engine.table.sequence(row).key[0]) for row in engine.table.waiting.view.tolist()}
    assert listed
    assert listed <= waiting
    keys = list(engine.registry.row_of)
    moves = tuple(QueueMove(request_id=key[0], attempt=key[1], target=WorkerId("w1")) for key in keys)
    moved = await asked(room, MoveQueued(epoch=99, moves=moves), QueueMoved)
    assert moved.num_moved == len(listed)
    assert {key[0] for key in engine.registry.row_of} == {key[0] for key in keys} - listed
    again = await asked(room, MoveQueued(epoch=99, moves=moves), QueueMoved)
    assert again.num_moved == 0
    check_engine(engine)
    await room.check()


async def asked(room: Room, message: ControlMessage, kind: type[M]) -> M:
    subject = Subjects("default").plan(WorkerId("w0"))
    bus = room.cluster.broker.connect("asks")
    return decode_json(await bus.request(subject, encode_json(message), timeout_s=1.0), kind)
