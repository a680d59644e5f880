"""Workers whose hosts keep no copy of the parameters: of every layer the planner leaves two copies in workers' memory.

Real workers, monitor and planner on the virtual clock, by need and by hand; the layers are watched at every instant.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shared.messages.event import Event
from shared.subjects import Subjects
from shared.transport.bus import Message
from shared.wire import decode_json
from sim.cluster import ClusterParams, SimCluster
from sim.virtual_time import VirtualTimeLoop, run
from tests.support.group_room import draw_requests, elastic_facts, group_params
from tests.support.layer_watch import LayerWatch

SUBJECTS = Subjects()
REFUSAL = "a layer would be left without a second copy"


@dataclass
class Seen:
    """A cluster, and what was told there."""

    cluster: SimCluster
    watch: LayerWatch = field(default_factory=LayerWatch)
    events: list[Event] = field(default_factory=list)
    fewest_groups: int = 1024

    def look(self) -> None:
        """Look at the layers and the groups at this instant."""
        self.watch.look(self.cluster)
        names = [group or f"alone {index}" for index, group in enumerate(self.groups())]
        self.fewest_groups = min(self.fewest_groups, len(set(names)))

    def on_event(self, message: Message) -> None:
        self.events.append(decode_json(message.data, Event))

    def reasons(self, name: str) -> list[str]:
        return [event.reason for event in self.events if (event.service, event.name) == ("planner", name)]

    def groups(self) -> list[str]:
        """The group of each worker; empty: it is alone."""
        return [worker.service.agent.role.group for worker in self.cluster.workers if worker.service.agent is not None]

    async def drop(self, *names: str) -> dict[str, Any]:
        """Ask the planner by hand."""
        bus, question = self.cluster.broker.connect("person"), json.dumps({"workers": names} if names else {}).encode()
        data = await bus.request(SUBJECTS.admin("planner", "planner", "drop"), question, timeout_s=30)
        await asyncio.sleep(2.0)  # reports show it
        answer: dict[str, Any] = json.loads(data)
        return answer


def params(has_copy: Sequence[bool]) -> ClusterParams:
    """Workers w0 and following; of each whether its host has a copy."""
    common = group_params(len(has_copy), system="kunserve")
    facts = [elastic_facts().model_copy(update={"has_host_copy": each}) for each in has_copy]
    workers = tuple(replace(worker, elastic=own) for worker, own in zip(common.workers, facts, strict=True))
    return replace(common, workers=workers)


def in_cluster(test: Callable[[Seen], Awaitable[None]], *has_copy: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        async with SimCluster(params(has_copy)) as cluster:
            seen = Seen(cluster)
            await cluster.broker.connect("watch").subscribe("sluice.*.event.>", seen.on_event)
            loop.on_instant = seen.look
            await asyncio.sleep(1.0)
            await test(seen)
            loop.on_instant = None
            assert seen.watch.num_places

    run(main(), allow_leaks=True)


async def run_short(seen: Seen) -> None:
    """Ask for several times the memory that there is, and check every answer."""
    asked = [asyncio.ensure_future(seen.cluster.ask(request)) for request in draw_requests(5, 60)]
    for answer in await asyncio.gather(*asked):
        assert answer.tokens == seen.cluster.undisturbed(answer.request)


@pytest.mark.parametrize(("num_workers", "num_groups"), [(2, 2), (3, 2), (5, 2)])
def test_however_short_memory_is_two_groups_remain(num_workers: int, num_groups: int) -> None:
    """Each group is one copy. Of two workers none may drop; of three two may."""

    async def main(seen: Seen) -> None:
        await run_short(seen)
        told = [reason for name in ("plan_refused", "plan_done") for reason in seen.reasons(name)]
        assert any(REFUSAL in reason for reason in told), told
        assert seen.fewest_groups == num_groups

    in_cluster(main, *[False] * num_workers)


def test_where_hosts_have_copies_all_may_become_one_group() -> None:
    async def main(seen: Seen) -> None:
        await run_short(seen)
        assert any("2 of 2 instances form 1 group" in reason for reason in seen.reasons("plan_done")), seen.events
        assert not any(REFUSAL in reason for reason in seen.reasons("plan_refused"))

    in_cluster(main, True, False)


@pytest.mark.parametrize("names", [("w0", "w1", "w2", "w3"), ()])
def test_by_hand_the_last_two_groups_are_not_made_one_and_an_event_says_why(names: tuple[str, ...]) -> None:
    async def main(seen: Seen) -> None:
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

    in_cluster(main, False, False, False, False)


def test_a_host_that_has_a_copy_lets_a_person_make_one_group_of_two() -> None:
    async def main(seen: Seen) -> None:
        for pair in (("w0", "w1"), ("w2", "w3"), ("w0", "w1", "w2", "w3")):
            answer = await seen.drop(*pair)
            assert answer["done"], answer
        assert len(set(seen.groups())) == 1
        assert seen.watch.num_places[2], "one on the host, one in the group"

    in_cluster(main, True, False, False, False)
