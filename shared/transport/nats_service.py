"""Answering requests: bounded concurrency per endpoint, and the NATS service protocol (`$SRV.PING|INFO|STATS`).

Works over any transport that can subscribe and answer, so that the live bus and the one in memory show operators the
same JSON. `nats.micro` is not used: it runs one callback at a time per endpoint, so that one slow answer would hold up
all others; it cannot run in virtual time; and its answers would have to be rebuilt for the bus in memory anyway.

Shapes: NATS architecture decision record 32, types `io.nats.micro.v1.{ping,info,stats}_response`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from shared.errors import WireError
from shared.process.log import get_logger
from shared.transport.bus import BusError, Endpoint, Handler, Message, MessageTooLargeError, ServiceInfo, Subscription
from shared.transport.bus_rules import BusStats, is_power_of_two

ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"
QUEUE_GROUP = "q"
"""The group of every endpoint: of several services with one subject, one answers."""

INBOXES = "_INBOX."
"""Under which answers go. Where who asks could name any subject, it would have the service speak there for it."""

MAX_WAITING = 1024
"""Requests of one endpoint that wait for a free place; more are answered with an error at once."""

CLOSE_GRACE_S = 5.0
"""How long closing waits for responders that run, before it cancels them."""

_MAX_ERROR_TEXT = 200
_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")
_INSTANCE = re.compile(r"[^\s.*>]+\Z")
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?\Z")


class ServiceError(BusError):
    """The responder answered that it failed. A responder may raise it to choose the code.

    Args:
        code: `400` for a request that is wrong, `500` for a failure, `503` for "not now".
        description: for people; cut to one line.
    """

    def __init__(self, code: str, description: str) -> None:
        description = " ".join(description.split())[:_MAX_ERROR_TEXT]
        super().__init__(f"{code}: {description}")
        self.code = code
        self.description = description


class ServiceTransport(Protocol):
    """What a service needs of its bus."""

    stats: BusStats

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> Subscription:
        """As `Bus.subscribe`."""

    async def respond(self, message: Message, data: bytes, error: ServiceError | None = None) -> None:
        """Answer the message; with an error, the requester's call raises it."""

    def service_time_s(self) -> float:
        """Monotonic seconds, for processing times."""

    def service_unix_s(self) -> float:
        """Wall time, for the `started` field."""


class EndpointRunner:
    """Runs one endpoint's responder in tasks of its own, at most `max_in_flight` at a time, others in order."""

    def __init__(self, endpoint: Endpoint, transport: ServiceTransport) -> None:
        if endpoint.max_in_flight < 1:
            raise ValueError(f"endpoint '{endpoint.name}': max_in_flight must be at least 1")
        self.endpoint = endpoint
        self._transport = transport
        self._running: dict[asyncio.Task[None], Message] = {}
        self._refusing: dict[asyncio.Task[None], None] = {}
        self._waiting: deque[Message] = deque()
        self._closing = False
        self._num_requests = 0
        self._num_errors = 0
        self._last_error = ""
        self._busy_s = 0.0

    def take(self, message: Message) -> None:
        """Start answering, or let the request wait; refuse it if too many do, drop it if its answer is for no inbox."""
        self._num_requests += 1
        if message.reply and not message.reply.startswith(INBOXES):
            self._note_failure(ServiceError("400", f"'{message.reply[:80]}' is no inbox for an answer"))
        elif self._closing:
            self._refuse(message, "closing")
        elif len(self._running) < self.endpoint.max_in_flight:
            self._start(message)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
        else:
            self._refuse(message, f"{MAX_WAITING} requests are waiting already")

    def stats(self) -> dict[str, Any]:
        """Return the figures of `$SRV.STATS` for this endpoint; times in nanoseconds."""
        busy_ns = round(self._busy_s * 1e9)
        num_done = self._num_requests - len(self._running) - len(self._waiting)
        return {
            **self.identity(),
            "num_requests": self._num_requests,
            "num_errors": self._num_errors,
            "last_error": self._last_error,
            "processing_time": busy_ns,
            "average_processing_time": busy_ns // num_done if num_done else 0,
            "data": {"running": len(self._running), "waiting": len(self._waiting)},
        }

    def identity(self) -> dict[str, Any]:
        """Return what names this endpoint."""
        return {"name": self.endpoint.name, "subject": self.endpoint.subject, "queue_group": QUEUE_GROUP}

    async def close(self, caller: asyncio.Task[Any] | None) -> None:
        """Refuse what waits, let running responders end within the grace, then cancel them. Idempotent.

        Args:
            caller: the task that wants this; if it is a responder of ours, it is not waited for.
        """
        self._closing = True
        while self._waiting:
            self._refuse(self._waiting.popleft(), "closing")
        await self._wait(caller)
        for task, message in list(self._running.items()):
            if task is not caller:
                task.cancel()
                self._refuse(message, "closing")
        await self._wait(caller)
        for task in self._running:
            if task is not caller:
                get_logger().error("responder ignores its cancellation", task=task.get_name())

    async def _wait(self, caller: asyncio.Task[Any] | None) -> None:
        tasks = [task for task in (*self._running, *self._refusing) if task is not caller]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_GRACE_S)
            await asyncio.sleep(0)  # their callbacks

    def _start(self, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(message), name=f"endpoint {self.endpoint.name}")
        self._running[task] = message
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # only the bus itself can have failed here: a responder's exception was answered
            self._note_error(error)
        if self._waiting and not self._closing:
            self._start(self._waiting.popleft())

    async def _answer(self, message: Message) -> None:
        started_s = self._transport.service_time_s()
        data, failure = b"", None
        try:
            data = await self.endpoint.responder(message)
        except ServiceError as error:
            failure = error
            self._note_failure(failure)
        except WireError as error:  # what came is no message of ours; its sender is wrong, not this process
            failure = ServiceError("400", error.reason)
            self._note_failure(failure)
            if is_power_of_two(self._num_errors):
                get_logger().warning("message_refused", subject=message.subject, reason=error.reason)
        except Exception as error:  # the supervisor of the endpoint: logged, counted, and answered
            failure = ServiceError("500", f"{type(error).__name__}: {error}")
            self._note_failure(failure)
            self._transport.stats.note_handler_error(message.subject, error)
        finally:
            self._busy_s += self._transport.service_time_s() - started_s
        if message.reply:
            await self._respond(message, data, failure)

    async def _respond(self, message: Message, data: bytes, failure: ServiceError | None) -> None:
        try:
            await self._transport.respond(message, data, failure)
        except MessageTooLargeError as error:
            self._note_error(error)
            await self._transport.respond(message, b"", ServiceError("500", str(error)))

    def _refuse(self, message: Message, reason: str) -> None:
        failure = ServiceError("503", reason)
        self._note_failure(failure)
        if message.reply and len(self._refusing) < MAX_WAITING:
            refusal: Coroutine[Any, Any, None] = self._transport.respond(message, b"", failure)
            task = asyncio.get_running_loop().create_task(refusal, name=f"refusal {self.endpoint.name}")
            self._refusing[task] = None
            task.add_done_callback(self._refused)

    def _refused(self, task: asyncio.Task[None]) -> None:
        self._refusing.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_error(error)

    def _note_failure(self, failure: ServiceError) -> None:
        self._num_errors += 1
        self._last_error = str(failure)

    def _note_error(self, error: BaseException) -> None:
        self._num_errors += 1
        self._last_error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_TEXT]
        get_logger().warning("answer not sent", subject=self.endpoint.subject, error=self._last_error)


class RunningService:
    """A service that answers; made by `start_service`, ended by `close`."""

    def __init__(self, info: ServiceInfo, endpoints: Sequence[Endpoint], transport: ServiceTransport) -> None:
        check_service(info, endpoints)
        self._info = info
        self._transport = transport
        self._runners = [EndpointRunner(endpoint, transport) for endpoint in endpoints]
        self._control = [
            EndpointRunner(Endpoint(verb, subject, responder), transport)
            for verb, responder in (("PING", self._ping), ("INFO", self._describe), ("STATS", self._figures))
            for subject in _control_subjects(verb, info)
        ]
        self._subscriptions: list[Subscription] = []
        self._started = datetime.fromtimestamp(transport.service_unix_s(), UTC)

    async def start(self) -> None:
        """Subscribe the endpoints, then the service protocol: who is announced can be asked."""
        for runner in self._runners:
            subject = runner.endpoint.subject
            self._subscriptions.append(await self._transport.subscribe(subject, runner.take, queue=QUEUE_GROUP))
        for runner in self._control:
            self._subscriptions.append(await self._transport.subscribe(runner.endpoint.subject, runner.take))

    async def close(self) -> None:
        """Stop: take no more requests, and end those that run (see `CLOSE_GRACE_S`). Idempotent."""
        for subscription in reversed(self._subscriptions):
            await subscription.close()
        self._subscriptions.clear()
        caller = asyncio.current_task()
        await asyncio.gather(*(runner.close(caller) for runner in (*self._control, *self._runners)))

    def _identity(self, kind: str) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{kind}_response",
            "name": self._info.name,
            "id": self._info.instance_id,
            "version": self._info.version,
            "metadata": dict(self._info.metadata),
        }

    async def _ping(self, _message: Message) -> bytes:
        return _json(self._identity("ping"))

    async def _describe(self, _message: Message) -> bytes:
        endpoints = [{**runner.identity(), "metadata": dict(runner.endpoint.metadata)} for runner in self._runners]
        return _json({**self._identity("info"), "description": self._info.description, "endpoints": endpoints})

    async def _figures(self, _message: Message) -> bytes:
        started = self._started.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        endpoints = [runner.stats() for runner in self._runners]
        return _json({**self._identity("stats"), "started": started, "endpoints": endpoints})


async def start_service(
    info: ServiceInfo, endpoints: Sequence[Endpoint], transport: ServiceTransport
) -> RunningService:
    """Return a service that answers on the transport.

    Raises:
        ValueError: the NATS tools would not show such a service.
    """
    service = RunningService(info, endpoints, transport)
    try:
        await service.start()
    except BaseException:
        await service.close()
        raise
    return service


def check_service(info: ServiceInfo, endpoints: Sequence[Endpoint]) -> None:
    """Refuse what the NATS tools hide without a word.

    Raises:
        ValueError: a name, version, description, metadata or id that the service protocol does not allow.
    """
    if not _NAME.match(info.name):
        raise ValueError(f"service name '{info.name}': use letters, digits, '_' and '-'")
    if not _VERSION.match(info.version):
        raise ValueError(f"service '{info.name}': version '{info.version}' is not a semantic version")
    if not info.description:
        raise ValueError(f"service '{info.name}' needs a description")
    if not _INSTANCE.match(info.instance_id):
        raise ValueError(f"service '{info.name}': '{info.instance_id}' cannot be part of a subject")
    for endpoint in endpoints:
        if not _NAME.match(endpoint.name):
            raise ValueError(f"endpoint name '{endpoint.name}': use letters, digits, '_' and '-'")
    for metadata in (info.metadata, *(endpoint.metadata for endpoint in endpoints)):
        items: dict[Any, Any] = dict(metadata)
        if not all(isinstance(text, str) for pair in items.items() for text in pair):
            raise ValueError(f"service '{info.name}': metadata must be strings, not {items}")


def _control_subjects(verb: str, info: ServiceInfo) -> tuple[str, str, str]:
    return f"$SRV.{verb}", f"$SRV.{verb}.{info.name}", f"$SRV.{verb}.{info.name}.{info.instance_id}"


def _json(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()
