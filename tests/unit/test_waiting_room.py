"""The queue: urgent tiers first, in order within one, and nobody is forgotten."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.limits.waiting_room import WaitingRoom
from shared.api_keys import Tier
from sim.virtual_time import run


@given(st.lists(st.sampled_from(Tier), max_size=30))
def test_the_order_is_by_tier_and_then_by_arrival(tiers: list[Tier]) -> None:
    room = WaitingRoom()
    tickets = [room.enter(tier, f"t{index % 3}") for index, tier in enumerate(tiers)]
    expected = sorted(range(len(tiers)), key=lambda index: (-tiers[index], index))
    order = []
    while len(room):
        room.signal()
        (first,) = [ticket for ticket in tickets if ticket.event.is_set()]
        order.append(tickets.index(first))
        first.event.clear()
        room.leave(first)
        for ticket in tickets:
            ticket.event.clear()
    assert order == expected
    assert [room.num_of(f"t{index}") for index in range(3)] == [0, 0, 0]


def test_what_has_begun_goes_before_the_most_urgent_and_in_its_own_order() -> None:
    room = WaitingRoom()
    tickets = [room.enter(Tier.PRIORITY), room.enter(Tier.FLEX, first=True), room.enter(Tier.DEFAULT, first=True)]
    order = []
    while len(room):
        room.signal()
        (first,) = [ticket for ticket in tickets if ticket.event.is_set()]
        order.append(tickets.index(first))
        room.leave(first)
        for ticket in tickets:
            ticket.event.clear()
    assert order == [1, 2, 0]


def test_one_that_overtakes_while_the_first_tries_is_called_when_that_one_leaves() -> None:
    async def main() -> None:
        room = WaitingRoom()
        flex = room.enter(Tier.FLEX)
        room.signal()
        assert await room.turn(flex, 1.0)
        urgent = room.enter(Tier.PRIORITY, "a")
        assert room.num_of("a") == 1
        room.leave(flex)
        room.leave(flex)
        assert await room.turn(urgent, 1.0)
        room.leave(urgent)
        assert len(room) == 0

    run(main())


def test_a_turn_that_does_not_come_ends_with_the_time() -> None:
    async def main() -> None:
        room = WaitingRoom()
        room.enter(Tier.PRIORITY)
        late = room.enter(Tier.FLEX)
        room.signal()
        assert not await room.turn(late, 5.0)
        assert asyncio.get_running_loop().time() == 5.0

    run(main())
