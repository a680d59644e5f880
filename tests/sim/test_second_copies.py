"""Workers whose hosts keep no copy of the parameters: of every layer the planner leaves two copies in workers' memory.

Real workers, monitor and planner on the virtual clock, by need and by hand; the layers are watched at every instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shared.messages.event import Event
from sim.cluster import SimCluster
from sim.virtual_time import VirtualTimeLoop
from tests.support.group_room import draw_requests, group_params
from tests.support.layer_watch import LayerWatch
from tests.support.sim_clusters import ask_all, ask_planner, hear_events, reasons

pytestmark = pytest.mark.virtual_time

REFUSAL = "a layer would be left without a second copy"
SHORT = draw_requests(5, 60)
"""They ask for several times the memory that there is."""


class Seen:
    """A cluster, and what was told there."""

    def __init__(self, cluster: SimCluster, events: list[Event]) -> None:
        self.cluster = cluster
        self.watch = LayerWatch()
        self.events = events
        self.fewest_groups = 1024

    def look(self) -> None:
        """Look at the layers and the groups at this instant."""
        self.watch.look(self.cluster)
        names = [group or f"alone {index}" for index, group in enumerate(self.groups())]
        self.fewest_groups = min(self.fewest_groups, len(set(names)))

    def reasons(self, name: str) -> list[str]:
        return reasons((event for event in self.events if event.service == "planner"), name)

    def groups(self) -> list[str]:
        """The group of each worker; empty: it is alone."""
        return [worker.service.agent.role.group for worker in self.cluster.workers if worker.service.agent is not None]

    async def drop(self, *names: str) -> dict[str, Any]:
        """Ask the planner by hand."""
        answer = await ask_planner(self.cluster, "drop", *names)
        await asyncio.sleep(2.0)  # reports show it
        return answer


@asynccontextmanager
async def watched(num_workers: int, num_copies: int = 0) -> AsyncIterator[Seen]:
    """Look at every instant at a cluster of workers, the hosts of the first `num_copies` of which have copies."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with SimCluster(group_params(num_workers, system="kunserve", num_copies=num_copies)) as cluster:
        seen = Seen(cluster, await hear_events(cluster.broker.connect("watch")))
        loop.on_instant = seen.look
        await asyncio.sleep(1.0)
        yield seen
        loop.on_instant = None
        assert seen.watch.num_places


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "num_groups"), [(2, 2), (3, 2), (5, 2)])
async def test_however_short_memory_is_two_groups_remain(num_workers: int, num_groups: int) -> None:
    """Each group is one copy. Of two workers none may drop; of three two may."""
    async with watched(num_workers) as seen:
        await ask_all(seen.cluster, SHORT)
        told = [reason for name in ("plan_refused", "plan_done") for reason in seen.reasons(name)]
        assert any(REFUSAL in reason for reason in told), told
        assert seen.fewest_groups == num_groups


@pytest.mark.slow
async def test_where_hosts_have_copies_all_may_become_one_group() -> None:
    async with watched(2, num_copies=1) as seen:
        await ask_all(seen.cluster, SHORT)
        assert any("2 of 2 instances form 1 group" in reason for reason in seen.reasons("plan_done")), seen.events
        assert not any(REFUSAL in reason for reason in seen.reasons("plan_refused"))


@pytest.mark.parametrize("names", [("w0", "w1", "w2", "w3"), ()])
async def test_by_hand_the_last_two_groups_are_not_made_one_and_an_event_says_why(names: tuple[str, ...]) -> None:
    async with watched(4) as seen:
        for pair in (("w0", "w1"), ("w2", "w3")):
            answer = await seen.drop(*pair)
            assert answer["done"], answer
        groups = seen.groups()
        assert len(set(groups)) == 2
        answer = await seen.drop(*names)
        assert not answer["done"]
        assert REFUSAL in answer["reason"]
        assert seen.groups() == groups
        asked = f"drop {'+'.join(names)}" if names else "drop"
        (event,) = seen.reasons("plan_refused")
        assert f": {asked}, asked by hand: " in event
        assert REFUSAL in event
        assert seen.watch.num_places[2], "two copies were enough"


async def test_a_host_that_has_a_copy_lets_a_person_make_one_group_of_two() -> None:
    async with watched(4, num_copies=1) as seen:
        for pair in (("w0", "w1"), ("w2", "w3"), ("w0", "w1", "w2", "w3")):
            answer = await seen.drop(*pair)
            assert answer["done"], answer
        assert len(set(seen.groups())) == 1
        assert seen.watch.num_places[2], "one on the host, one in the group"
