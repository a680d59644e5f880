"""One dispatcher's life below HTTP: subscriptions, the view, the sweep, drain and stop; also in simulation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict

from services.dispatcher.config import DispatcherSettings
from services.dispatcher.limits.waiting_room import RoomLimits
from services.dispatcher.policy.placement import PLACEMENTS, Placement, place_prefix_aware
from services.dispatcher.session.calls import WorkerCalls
from services.dispatcher.session.owners import Owners
from services.dispatcher.session.request import FailureCode, Sender
from services.dispatcher.session.sessions import SessionLimits, Sessions
from services.dispatcher.state import ClusterState
from shared.cluster_views import ViewFeed
from shared.host import process_facts
from shared.ids import NOBODY, DispatcherId, Incarnation
from shared.messages.plan import FILLING_KEY, Filling
from shared.messages.report import ClusterView, DispatcherReport
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.systems import find_system
from shared.token_batch import TokenBatch
from shared.transport.buckets import open_bucket
from shared.transport.bus import Bus, BusError, Endpoint, KvEntry, Message, ServiceInfo, Subscription
from shared.transport.bus_rules import is_power_of_two
from shared.version import VERSION
from shared.wire import WireError, decode_json, encode_json

_log = get_logger()

DESCRIPTION = "Takes requests over HTTP, places them on workers, and streams their answers"
REPORT_PERIOD_S = 0.5
"""Between two reports of what waits; a worker's default."""
IDLE_POLL_S = 0.05
"""How often a draining dispatcher looks whether its last request has ended."""


class DispatcherService:
    """The dispatcher on the bus.

    Args:
        settings: checked; the model's folder is not read here.
        bus: connected; the caller closes it.
        on_failure: called with a task's name and error when one of the dispatcher's own tasks dies.
        incarnation: of this process among those that go by the same instance id.
        placement: which worker gets a request; None: as the system has it.
    """

    def __init__(
        self,
        settings: DispatcherSettings,
        bus: Bus,
        on_failure: Callable[[str, BaseException], None],
        *,
        incarnation: Incarnation = NOBODY,
        placement: Placement | None = None,
    ) -> None:
        self.bus = bus
        self.num_malformed = 0
        """Messages that could not be decoded."""
        self._settings = settings
        self._subjects = Subjects(settings.cluster)
        self._dispatcher_id = DispatcherId(settings.instance_id)
        self._tasks = TaskOwner(on_failure)
        self._open: list[Subscription] = []
        self._views = ViewFeed(bus, self._subjects, self._on_view, self._on_malformed)
        self._now = asyncio.get_running_loop().time
        chosen = placement or PLACEMENTS[find_system(settings.system).placement]
        self.sessions = Sessions(
            sender=Sender(self._dispatcher_id, incarnation),
            calls=WorkerCalls(bus, self._subjects, settings.submit_limit_s),
            owners=Owners(bus, self._subjects),
            cluster=ClusterState(
                settings.model_name(),
                settings.step_limit_s,
                self._dispatcher_id,
                asks_prefixes=chosen is place_prefix_aware,
            ),
            placement=chosen,
            limits=SessionLimits(
                max_requests=settings.max_requests,
                queues=RoomLimits(settings.max_queued, settings.max_queued_flex, settings.flex_memory),
                queue_limit_s=settings.queue_limit_s,
                silence_s=settings.silence_s,
                lost_after_s=settings.lost_after_s,
            ),
            now=self._now,
            tasks=self._tasks,
        )

    async def start(self) -> None:
        """Hear tokens and views from now on, and answer operators."""
        self._open.append(await self.bus.subscribe(self._subjects.tokens(self._dispatcher_id), self._on_tokens))
        await self._views.start()
        if find_system(self._settings.system).placement == "by-class":
            plans = await open_bucket(self.bus, self._subjects.plan_bucket())
            self._open.append(await plans.watch(FILLING_KEY, self._on_filling))
        subject = self._subjects.admin("dispatcher", self._dispatcher_id, "dump")
        dump = Endpoint("dump", subject, self._dump, metadata={"format": "json"})
        self._open.append(await self.bus.serve(self._info(), [dump]))
        self.sessions.run()
        self._tasks.start(self._report_waiting(), name="waiting")

    def _info(self) -> ServiceInfo:
        return ServiceInfo(
            name="sluice-dispatcher",
            version=VERSION,
            description=DESCRIPTION,
            metadata={
                "cluster": self._settings.cluster,
                "model": self._settings.model_name(),
                **process_facts(),
            },
            instance_id=self._dispatcher_id,
        )

    async def _report_waiting(self) -> None:
        """Tell the monitor what waits here, while something does, and once that nothing does."""
        is_told = False
        while True:
            waiting = self.sessions.waiting()
            if waiting or is_told:
                report = DispatcherReport(dispatcher_id=self._dispatcher_id, waiting=waiting)
                try:
                    await self.bus.publish(self._subjects.waiting(self._dispatcher_id), encode_json(report))
                except BusError as error:
                    _log.warning("report_not_sent", error=str(error))
            is_told = bool(waiting)
            await asyncio.sleep(REPORT_PERIOD_S)

    def _on_tokens(self, message: Message) -> None:
        try:
            batch = TokenBatch.unpack(message.data)
        except WireError as error:
            self._on_malformed(message.subject, error)
            return
        self.sessions.on_tokens(batch)

    def _on_view(self, view: ClusterView, *, is_fresh: bool) -> None:
        del is_fresh  # what is wrong in an old one the next one mends
        self.sessions.on_view(view)

    def _on_filling(self, entry: KvEntry) -> None:
        try:
            filling = Filling() if entry.value is None else decode_json(entry.value, Filling)
        except WireError as error:
            self._on_malformed(FILLING_KEY, error)
            return
        self.sessions.cluster.note_filling(filling)

    def _on_malformed(self, where: str, error: WireError) -> None:
        self.num_malformed += 1
        if is_power_of_two(self.num_malformed):  # a flood does not fill the log
            _log.warning("malformed_message", subject=where, reason=error.reason, num_malformed=self.num_malformed)

    async def _dump(self, _message: Message) -> bytes:
        sessions, counters = self.sessions, self.sessions.table.counters
        return json.dumps(
            {
                "draining": sessions.draining,
                "num_requests": len(sessions.table),
                "num_queued": sessions.num_queued,
                "num_tasks": len(asyncio.all_tasks()),
                "num_tokens": counters.num_tokens,
                "num_ignored_rows": counters.num_ignored,
                "num_lost_messages": counters.num_lost_messages,
                "num_replays": sessions.replays.num_asked,
                "num_drops": sessions.num_drops,
                "num_lost": dict(sessions.recovery.num_lost),
                "num_recovered": sessions.recovery.num_recovered,
                "num_poison": sessions.recovery.num_poison,
                "workers": {name: asdict(losses) for name, losses in sessions.recovery.by_worker.items()},
                "num_malformed": self.num_malformed,
            }
        ).encode()

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests; return when the running ones have ended. At the limit the rest ends with an error."""
        self.sessions.draining = True
        try:
            async with asyncio.timeout(limit_s):
                while len(self.sessions.table):
                    await asyncio.sleep(IDLE_POLL_S)
        except TimeoutError:
            _log.warning("drain_limit_reached", num_left=len(self.sessions.table), limit_s=limit_s)
            self.sessions.fail_all(FailureCode.DRAINING)

    async def stop(self) -> None:
        """Leave the bus. Requests must have been released; their cancellations are sent, if the broker is there."""
        try:
            await self._views.close()
            for subscription in reversed(self._open):
                await subscription.close()
            await asyncio.sleep(0)  # cancellations that were started just now begin with sending
            await self.bus.flush()
        except BusError as error:
            _log.warning("left_without_goodbye", error=str(error))
        self._open.clear()
        await self._tasks.close()
