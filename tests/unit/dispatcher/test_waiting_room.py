"""The queue: urgent tiers first, in order within one, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.limits.waiting_room import Claimant, WaitingRoom
from shared.api_keys import Tier

pytestmark = pytest.mark.virtual_time
ENTRIES = st.lists(st.tuples(st.sampled_from(Tier), st.booleans()), max_size=30)
"""Requests by tier, and whether they have begun."""


@given(ENTRIES)
def test_what_has_begun_goes_first_and_then_the_order_is_by_tier_and_arrival(entries: list[tuple[Tier, bool]]) -> None:
    """Among those that have begun it is that of arrival alone."""
    room = WaitingRoom()
    tickets = [room.enter(Claimant(tier, has_begun=has_begun)) for at, (tier, has_begun) in enumerate(entries)]
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
    assert room.num_of("") == 0


@given(ENTRIES, st.integers(1, 8))
def test_a_full_queue_sends_away_the_last_of_the_least_urgent(entries: list[tuple[Tier, bool]], most: int) -> None:
    """What is left is what would be first in a queue without a limit; only what has begun may exceed it."""
    room = WaitingRoom()
    tickets = []
    for tier, has_begun in entries:
        tickets.append(room.enter(Claimant(tier, has_begun=has_begun)))
        room.shrink(most)
    num_begun = sum(has_begun for _, has_begun in entries)
    order = sorted(range(len(entries)), key=lambda index: (not entries[index][1], -entries[index][0], index))
    left = set(order[: max(most, num_begun)])
    assert {index for index, ticket in enumerate(tickets) if not ticket.was_sent_away} == left
    assert len(room) == len(left)
    for tier in Tier:
        before = [index for index in left if entries[index][1] or entries[index][0] >= tier]
        assert room.num_before(tier) == len(before)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60))
def test_tenants_that_wait_are_served_in_turn(requests: list[tuple[str, int]]) -> None:
    """Of two that both wait, neither has been served more than the other but for one request."""
    room = WaitingRoom()
    tickets = {room.enter(Claimant(tenant=tenant)): size for tenant, size in requests}
    largest = 2 * max(size for _, size in requests)
    served: Counter[str] = Counter()
    while len(room):
        backlog = {ticket.claimant.tenant for ticket in tickets}
        assert max(served[name] for name in backlog) - min(served[name] for name in backlog) <= largest
        first = room.first()
        assert first is not None
        served[first.claimant.tenant] += 2 * tickets[first]
        room.serve(first.claimant.tenant, 0, tickets.pop(first))
        room.leave(first)


def test_who_comes_later_has_no_claim_for_the_time_in_which_it_asked_for_nothing() -> None:
    room = WaitingRoom()
    for _ in range(4):
        room.enter(Claimant(tenant="a"))
    room.serve("a", 1000, 1000)
    for _ in range(4):
        room.enter(Claimant(tenant="b"))
    order = []
    while (first := room.first()) is not None:
        order.append(first.claimant.tenant)
        room.serve(first.claimant.tenant, 10, 0)
        room.leave(first)
    assert order == ["a", "b"] * 4


def test_a_full_queue_sends_away_who_has_most_waiting_and_refuses_who_has_as_many_as_others() -> None:
    room = WaitingRoom()
    greedy = [room.enter(Claimant(tenant="greedy")) for _ in range(6)]
    kept = [room.enter(Claimant(Tier.PRIORITY, "urgent"))]
    for _ in range(3):
        assert room.num_before(Tier.DEFAULT, "modest") < 7
        kept.append(room.enter(Claimant(tenant="modest")))
        room.shrink(7)
    assert [ticket.was_sent_away for ticket in greedy] == [False] * 3 + [True] * 3
    assert not any(ticket.was_sent_away for ticket in kept)
    assert room.num_before(Tier.DEFAULT, "modest") == 7


async def test_one_for_which_there_is_no_room_does_not_hold_up_another() -> None:
    room = WaitingRoom(lambda claimant: claimant.tenant != "large")
    large, small = room.enter(Claimant(Tier.PRIORITY, "large")), room.enter(Claimant(tenant="small"))
    room.signal()
    assert await room.turn(small, 1.0)
    assert not large.event.is_set()


async def test_one_that_is_sent_away_is_told_at_once() -> None:
    room = WaitingRoom()
    flex = room.enter(Claimant(Tier.FLEX, "a"))
    waiting = asyncio.create_task(room.turn(flex, 100.0))
    await asyncio.sleep(1.0)
    room.enter(Claimant(Tier.DEFAULT))
    room.shrink(1)
    assert not await waiting
    assert asyncio.get_running_loop().time() == 1.0
    assert room.num_of("a") == 0
    room.leave(flex)


async def test_one_that_overtakes_while_the_first_tries_is_called_when_that_one_leaves() -> None:
    room = WaitingRoom()
    flex = room.enter(Claimant(Tier.FLEX))
    room.signal()
    assert await room.turn(flex, 1.0)
    urgent = room.enter(Claimant(Tier.PRIORITY, "a"))
    assert room.num_of("a") == 1
    room.leave(flex)
    room.leave(flex)
    assert await room.turn(urgent, 1.0)
    room.leave(urgent)
    assert len(room) == 0


async def test_a_turn_that_does_not_come_ends_with_the_time() -> None:
    room = WaitingRoom()
    room.enter(Claimant(Tier.PRIORITY))
    late = room.enter(Claimant(Tier.FLEX))
    room.signal()
    assert not await room.turn(late, 5.0)
    assert asyncio.get_running_loop().time() == 5.0
