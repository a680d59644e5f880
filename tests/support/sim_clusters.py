"""Whole simulated clusters: how they are made, asked and listened to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from shared.cost import load_profile
from shared.messages.event import Event
from shared.subjects import Subjects
from shared.transport.bus import Bus
from shared.wire import decode_json
from sim.cluster import ClusterParams, SimCluster
from sim.requests import SimAnswer, SimRequest
from sim.worker import SimWorkerParams

COST = load_profile("llama-3-8b-tp1-a100").cost


def cluster_of(num_workers: int, num_blocks: int, *, system: str = "fcfs-chunked", **params: Any) -> ClusterParams:
    """Workers of that many blocks each, named w0 and following."""
    workers = (SimWorkerParams(f"w{i}", COST, num_blocks, system=system, **params) for i in range(num_workers))
    return ClusterParams(tuple(workers), system=system)


async def ask_all(cluster: SimCluster, requests: Iterable[SimRequest]) -> list[SimAnswer]:
    """Return the answers to requests that come at once, each of which is what it is alone."""
    answers = await asyncio.gather(*map(cluster.ask, requests))
    check_answers(cluster, answers)
    return answers


def check_answers(cluster: SimCluster, answers: Iterable[SimAnswer]) -> None:
    """Check that each answer is what it is alone."""
    for answer in answers:
        assert answer.failure is None, answer.request.request_id
        assert answer.tokens == cluster.undisturbed(answer.request), answer.request.request_id


async def ask_planner(cluster: SimCluster, verb: str, *names: str) -> dict[str, Any]:
    """Ask the planner by hand for something, of workers of these names or whichever it takes; return its answer."""
    bus, question = cluster.broker.connect(f"person-{verb}"), json.dumps({"workers": names} if names else {}).encode()
    data = await bus.request(Subjects().admin("planner", "planner", verb), question, timeout_s=30)
    answer: dict[str, Any] = json.loads(data)
    return answer


async def hear_events(bus: Bus) -> list[Event]:
    """Return a list that grows with each event that anybody tells."""
    events: list[Event] = []
    await bus.subscribe("sluice.*.event.>", lambda message: events.append(decode_json(message.data, Event)))
    return events


def reasons(events: Iterable[Event], name: str) -> list[str]:
    """Return the reasons of those events that have a name."""
    return [event.reason for event in events if event.name == name]
