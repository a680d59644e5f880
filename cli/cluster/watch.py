"""Tells the person what happens to a cluster that runs: hears its events, and asks what became of answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from cli.cluster.cluster import Cluster
from cli.cluster.dump import Losses, ask_dispatcher
from cli.cluster.news import ClusterNews, WorkerReturn, describe_plan
from shared.messages.event import Event
from shared.messages.plan import PLAN_KEY, Plan, PlanPhase
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError, Message
from shared.wire import WireError, decode_json

LOOK_S: Final = 0.25
SETTLE_LIMIT_S: Final = 5.0
"""In which answers of a worker that is back have found a place, or are said to wait."""


class _Watch:
    def __init__(self, cluster: Cluster, bus: Bus, tasks: TaskOwner) -> None:
        self._cluster = cluster
        self._bus = bus
        self._tasks = tasks
        self._news = ClusterNews()
        self._told: dict[str, Losses] = {}
        """Of each worker, what has been said of its answers."""

    def on_end(self, name: str) -> None:
        if name in self._cluster.plan.worker_names():
            self._news.ended(name, asyncio.get_running_loop().time())

    def on_event(self, message: Message) -> None:
        try:
            event = decode_json(message.data, Event)
        except WireError:
            return
        if event.name == "plan_done":
            self._tasks.start(self._tell_plan(), name="plan")
        said = self._news.take(event, asyncio.get_running_loop().time())
        if isinstance(said, WorkerReturn):
            self._tasks.start(self._tell_return(said), name="return")
        elif said is not None:
            self._cluster.show(said)

    async def _tell_plan(self) -> None:
        """Say what the plan has done that is done now."""
        try:
            plans = await self._bus.key_value(Subjects(self._cluster.plan.settings.cluster).plan_bucket())
            entry = await plans.get(PLAN_KEY)
            plan = None if entry is None or entry.value is None else decode_json(entry.value, Plan)
        except (BusError, WireError):  # its store is full or away, and the broker's care says so
            return
        said = None if plan is None or plan.phase is not PlanPhase.DONE else describe_plan(plan)
        if said is not None:
            self._cluster.show(said)

    async def _tell_return(self, found: WorkerReturn) -> None:
        """Say it once the answers of the worker have found a place, or after a while."""
        losses: Losses | None = None
        told = self._told.get(found.worker_id, Losses())
        for _ in range(int(SETTLE_LIMIT_S / LOOK_S)):
            await asyncio.sleep(LOOK_S)  # the dispatcher has the view in which it is back
            dump = await ask_dispatcher(self._bus, self._cluster.plan.settings.cluster)
            if dump is not None:
                total = dump.losses.get(found.worker_id, Losses())
                losses, self._told[found.worker_id] = total.since(told), total
                if not losses.num_under_way:
                    break
        self._cluster.show(found.describe(losses))


@asynccontextmanager
async def watched(cluster: Cluster) -> AsyncIterator[None]:
    """Tell what happens for as long as the block lasts; the cluster is ready."""
    tasks = TaskOwner(cluster.supervisor.fail_by)
    async with cluster.plan.broker.connect("watch") as bus:
        watch = _Watch(cluster, bus, tasks)
        await bus.subscribe(Subjects(cluster.plan.settings.cluster).all_events(), watch.on_event)
        cluster.supervisor.on_end = watch.on_end
        try:
            yield
        finally:
            cluster.supervisor.on_end = None
            await tasks.close()
