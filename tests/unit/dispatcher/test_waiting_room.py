"""The queue: urgent tiers first, in order within one, and nobody is forgotten."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.limits.waiting_room import WaitingRoom
from shared.api_keys import Tier

pytestmark = pytest.mark.virtual_time
ENTRIES = st.lists(st.tuples(st.sampled_from(Tier), st.booleans()), max_size=30)
"""Requests by tier, and whether they have begun."""


@given(ENTRIES)
def test_what_has_begun_goes_first_and_then_the_order_is_by_tier_and_arrival(entries: list[tuple[Tier, bool]]) -> None:
    """Among those that have begun it is that of arrival alone."""
    room = WaitingRoom()
    tickets = [room.enter(tier, f"t{at % 3}", first=has_begun) for at, (tier, has_begun) in enumerate(entries)]
    order = []
    while len(room):
        room.signal()
        (first,) = [ticket for ticket in tickets if ticket.event.is_set()]
        order.append(tickets.index(first))
        first.event.clear()
        room.leave(first)
        for ticket in tickets:
            ticket.event.clear()
    ranks = [(not has_begun, 0 if has_begun else -tier) for tier, has_begun in entries]
    assert order == sorted(range(len(entries)), key=lambda index: (ranks[index], index))
    assert [room.num_of(f"t{index}") for index in range(3)] == [0, 0, 0]


@given(ENTRIES, st.integers(1, 8))
def test_a_full_queue_sends_away_the_last_of_the_least_urgent(entries: list[tuple[Tier, bool]], most: int) -> None:
    """What is left is what would be first in a queue without a limit; only what has begun may exceed it."""
    room = WaitingRoom()
    tickets = []
    for tier, has_begun in entries:
        tickets.append(room.enter(tier, first=has_begun))
        room.shrink(most)
    num_begun = sum(has_begun for _, has_begun in entries)
    order = sorted(range(len(entries)), key=lambda index: (not entries[index][1], -entries[index][0], index))
    left = set(order[: max(most, num_begun)])
    assert {index for index, ticket in enumerate(tickets) if not ticket.was_sent_away} == left
    assert len(room) == len(left)
    for tier in Tier:
        before = [index for index in left if entries[index][1] or entries[index][0] >= tier]
        assert room.num_before(tier) == len(before)


async def test_one_that_is_sent_away_is_told_at_once() -> None:
    room = WaitingRoom()
    flex = room.enter(Tier.FLEX, "a")
    waiting = asyncio.create_task(room.turn(flex, 100.0))
    await asyncio.sleep(1.0)
    room.enter(Tier.DEFAULT)
    room.shrink(1)
    assert not await waiting
    assert asyncio.get_running_loop().time() == 1.0
    assert room.num_of("a") == 0
    room.leave(flex)


async def test_one_that_overtakes_while_the_first_tries_is_called_when_that_one_leaves() -> None:
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


async def test_a_turn_that_does_not_come_ends_with_the_time() -> None:
    room = WaitingRoom()
    room.enter(Tier.PRIORITY)
    late = room.enter(Tier.FLEX)
    room.signal()
    assert not await room.turn(late, 5.0)
    assert asyncio.get_running_loop().time() == 5.0
