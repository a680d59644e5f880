"""The live bus: core NATS for messages, JetStream for key-value buckets. Implements `shared.transport.bus.Bus`.

A broken connection is mended in the background for ever; what is published meanwhile is buffered up to
`PENDING_BYTES` and may be lost, as core NATS may lose it anyway. A frozen broker counts as broken after about 3 s.

Not here: any retry or renumbering of messages. Who must not lose one asks again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import nats.errors

from shared.errors import StartupError
from shared.process.log import get_logger
from shared.transport.bus import (
    BusClosedError,
    BusError,
    BusTimeoutError,
    Endpoint,
    Handler,
    KeyValue,
    Message,
    NoRespondersError,
    ServiceInfo,
    Subscription,
    check_size,
)
from shared.transport.bus_rules import BusStats, check_bucket, check_pattern, check_subject, is_power_of_two
from shared.transport.nats_client import GuardedClient, NatsSubscription, cancellable, disconnect, drain, round_trip
from shared.transport.nats_kv import BucketShape, NatsKeyValue
from shared.transport.nats_roles import makes_buckets
from shared.transport.nats_service import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    RunningService,
    ServiceError,
    start_service,
)

PING_INTERVAL_S = 1
MAX_OUTSTANDING_PINGS = 2
RECONNECT_WAIT_S = 0.2
CONNECT_TIMEOUT_S = 5.0
"""For the first connection; later ones are tried for ever."""
FLUSH_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""How long closing waits for a broker that no longer answers."""
PENDING_BYTES = 2 * 1024 * 1024
"""Buffered for the broker; above it `publish` waits a moment, or drops while the connection is broken."""
_BACKPRESSURE_S = 0.25
_LATE_ANSWER = 'permissions violation for publish to "_inbox.'


class NoBrokerError(BusClosedError, StartupError):
    """There is nothing to connect to; one line says where it was looked for, and what to do."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = without_credentials(url)
        if "authorization" in reason:
            what = f"the nats-server at {self.url} lets nobody in without the right password ({reason})"
            hint = "Set SLUICE_NATS_USER and SLUICE_NATS_PASSWORD, or write them into NATS_URL"
        else:
            what = f"no nats-server answers at {self.url} ({reason})"
            hint = "Start one there, or set NATS_URL to where one runs"
        StartupError.__init__(self, what, hint, "broker_unreachable")


class NotPermittedError(BusError, StartupError):
    """The broker refuses a subject to this user. Nothing else tells the caller: see `on_fatal`."""

    def __init__(self, reason: str) -> None:
        StartupError.__init__(
            self,
            f"the broker refuses this process a subject: {reason}",
            "Give it the user of its own role, or make users and permissions anew with `sluice nats-config`",
            "broker_denies",
        )


class NatsBus:
    """One connection. Made by `NatsBus.connect`.

    Attributes:
        name: of the connection, as `nats server report connections` shows it.
        stats: what went wrong so far.
        last_error: the newest error of the connection itself.
        kv_replicas: copies of each bucket that this bus creates; more than 1 needs a cluster of servers.
        makes_buckets: whether it creates a bucket that is missing (`nats_roles.makes_buckets`).
    """

    def __init__(self, name: str, on_fatal: Callable[[BusError], None] | None) -> None:
        self.name = name
        self.stats = BusStats()
        self.last_error: Exception | None = None
        self.kv_replicas = 1
        self.makes_buckets = True
        self._client = GuardedClient(self.stats)
        self._on_fatal = on_fatal
        self._was_connected = False
        self._closing = False
        self._closed = False
        self._services: list[RunningService] = []
        self._subscriptions: dict[NatsSubscription, None] = {}
        self._buckets: dict[str, NatsKeyValue] = {}

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        inbox_prefix: str | None = None,
        credentials: tuple[str, str] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        on_fatal: Callable[[BusError], None] | None = None,
    ) -> NatsBus:
        """Return a bus that is connected.

        Args:
            url: `nats://host:port`, or with `user:password@` in front of the host; several servers with commas.
            name: of the connection, for operators.
            inbox_prefix: where answers arrive; needed where users may only read inboxes of their own.
            credentials: user and password, if they are not in the url.
            connect_timeout_s: how long to try.
            on_fatal: called on the event loop when the broker refuses a subject or ends the connection for good;
                typically sets the service's stop event. Must not raise.

        Raises:
            NoBrokerError: nobody answers there, or the credentials are refused.
        """
        bus = cls(name, on_fatal)
        try:
            async with asyncio.timeout(connect_timeout_s):
                await bus.open(url, inbox_prefix or "_INBOX", credentials or (None, None), connect_timeout_s)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await bus.close()
            raise NoBrokerError(url, _reason(bus.last_error or error)) from None
        except BaseException:
            await bus.close()
            raise
        return bus

    async def open(
        self, url: str, inbox_prefix: str, credentials: tuple[str | None, str | None], timeout_s: float
    ) -> None:
        """Connect; called once, by `connect`."""
        user = credentials[0] or urlsplit(url.split(",")[0]).username
        self.makes_buckets = makes_buckets(user)
        await self._client.connect(
            servers=url.split(","),
            name=self.name,
            user=credentials[0],
            password=credentials[1],
            inbox_prefix=inbox_prefix,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            # a number makes the first connection give up; -1, set below, keeps the later ones trying
            max_reconnect_attempts=max(1, int(timeout_s / RECONNECT_WAIT_S)),
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int, used as seconds
            pending_size=PENDING_BYTES,
            flush_timeout=_BACKPRESSURE_S,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )
        self._client.options["max_reconnect_attempts"] = -1
        self._was_connected = True

    @property
    def connected(self) -> bool:
        """Whether a message published now would leave at once."""
        return bool(self._client.is_connected) and not self._closed

    @property
    def max_payload_bytes(self) -> int:
        """The limit that the broker announced."""
        return int(self._client.max_payload)

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """See `Bus.publish`. Appends to a buffer; the socket is written once per iteration of the loop."""
        await self._publish(check_subject(subject), data, reply, None)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """See `Bus.request`.

        Raises:
            ServiceError: the responder answered that it failed.
        """
        self._check_open()
        check_size(check_subject(subject), data, self.max_payload_bytes, self.stats)
        try:
            answer = await cancellable(self._client.request(subject, data, timeout=timeout_s))
        except nats.errors.NoRespondersError:
            raise NoRespondersError(subject) from None
        except (nats.errors.TimeoutError, nats.errors.OutboundBufferLimitError):
            raise BusTimeoutError(subject, timeout_s) from None
        except nats.errors.Error as error:
            raise _translated(error, self.name) from None
        headers = answer.headers
        if headers and ERROR_CODE_HEADER in headers:
            raise ServiceError(headers[ERROR_CODE_HEADER], headers.get(ERROR_HEADER, ""))
        return bytes(answer.data)

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> Subscription:
        """See `Bus.subscribe`."""
        self._check_open()
        subscription = NatsSubscription(check_pattern(subject), handler, self.stats)
        try:
            await subscription.start(self._client, queue, max_pending)
        except nats.errors.Error as error:
            raise _translated(error, self.name) from None
        self._subscriptions = {other: None for other in self._subscriptions if not other.closed}
        self._subscriptions[subscription] = None
        return subscription

    async def serve(self, info: ServiceInfo, endpoints: Sequence[Endpoint]) -> Subscription:
        """See `Bus.serve`."""
        self._check_open()
        service = await start_service(info, endpoints, self)
        self._services.append(service)
        return service

    async def key_value(self, bucket: str, *, history: int = 1, max_age_s: float = 0.0) -> KeyValue:
        """See `Bus.key_value`."""
        self._check_open()
        shape = BucketShape(history, max_age_s, self.kv_replicas) if self.makes_buckets else None
        known = self._buckets.get(check_bucket(bucket)) or NatsKeyValue(self._client, bucket, shape, self.stats)
        await known.open()
        return self._buckets.setdefault(bucket, known)

    async def flush(self) -> None:
        """See `Bus.flush`.

        Raises:
            BusTimeoutError: the broker did not answer within `FLUSH_TIMEOUT_S`.
        """
        self._check_open()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                while not await round_trip(self._client):
                    await asyncio.sleep(RECONNECT_WAIT_S)
                    self._check_open()
        except TimeoutError:
            raise BusTimeoutError("the broker", FLUSH_TIMEOUT_S) from None

    async def close(self) -> None:
        """See `Bus.close`. Waits a few seconds for responders that run, and for a broker that no longer answers."""
        if self._closing:
            return
        self._closing = True
        for service in self._services:
            await service.close()
        for bucket in self._buckets.values():
            await bucket.close()
        await drain(self._client, CLOSE_TIMEOUT_S)
        self._closed = True
        await disconnect(self._client, _closed(self.name), CLOSE_TIMEOUT_S)

    async def respond(self, message: Message, data: bytes, error: ServiceError | None = None) -> None:
        """Answer a request; with an error, the requester's call raises it."""
        headers = None if error is None else {ERROR_HEADER: error.description, ERROR_CODE_HEADER: error.code}
        await self._publish(message.reply, data, "", headers)

    def service_time_s(self) -> float:
        """Monotonic seconds, for processing times."""
        return time.perf_counter()

    def service_unix_s(self) -> float:
        """Wall time, for the `started` field."""
        return time.time()

    async def _publish(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> None:
        self._check_open()
        check_size(subject, data, self.max_payload_bytes, self.stats)
        try:
            await cancellable(self._client.publish(subject, data, reply, headers))  # it waits where the buffer is full
        except nats.errors.OutboundBufferLimitError:
            self.stats.dropped_out += 1
            if is_power_of_two(self.stats.dropped_out):
                get_logger().warning("not connected and the buffer is full, messages dropped", subject=subject)
        except nats.errors.Error as error:
            raise _translated(error, self.name) from None

    def _check_open(self) -> None:
        if self._closed:
            raise _closed(self.name)

    async def _on_error(self, error: Exception) -> None:
        if not (_is_refusal(self.last_error) and isinstance(error, OSError)):  # a refused connection is also reset
            self.last_error = error
        if isinstance(error, nats.errors.SlowConsumerError):
            self.stats.note_dropped(error.subject)
        elif _LATE_ANSWER in str(error).lower():
            # a broker with users permits answers on the connection that brought the request; who asked will ask again
            self.stats.late_answers += 1
            if is_power_of_two(self.stats.late_answers):
                get_logger().warning("answers came too late to be permitted", answers=self.stats.late_answers)
        elif "permissions violation" in str(error):
            self.stats.refused += 1
            self._report_fatal(NotPermittedError(_reason(error)))
        elif self._was_connected and not self._closing:
            self.stats.other_errors += 1
            if is_power_of_two(self.stats.other_errors):
                get_logger().warning("bus error", error=_reason(error), errors=self.stats.other_errors)

    async def _on_disconnected(self) -> None:
        if self._was_connected and not self._closing:
            self.stats.disconnects += 1
            get_logger().warning("connection to the broker lost", bus=self.name)

    async def _on_reconnected(self) -> None:
        self.stats.reconnects += 1
        get_logger().warning("connection to the broker is back", bus=self.name)
        for bucket in self._buckets.values():
            bucket.reconnected()

    async def _on_closed(self) -> None:
        if self._was_connected and not self._closing:
            reason = "unknown" if self.last_error is None else _reason(self.last_error)
            self._report_fatal(BusClosedError(f"the broker ended the connection of '{self.name}': {reason}"))

    def _report_fatal(self, error: BusError) -> None:
        if self._on_fatal is not None:
            self._on_fatal(error)
        else:
            get_logger().error("the bus failed, and nobody is told", bus=self.name, error=str(error))


def without_credentials(url: str) -> str:
    """Return the url, or the urls with commas, as it may be shown."""
    parts = [urlsplit(one) for one in url.split(",")]
    return ",".join(one._replace(netloc=one.netloc.rpartition("@")[2]).geturl() for one in parts)


def _closed(bus: str) -> BusClosedError:
    return BusClosedError(f"the bus of '{bus}' is closed")


def _translated(error: nats.errors.Error, bus: str) -> BusError:
    is_closed = isinstance(error, (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError))
    return _closed(bus) if is_closed else BusError(str(error))


def _is_refusal(error: Exception | None) -> bool:
    return error is not None and "authorization" in str(error).lower()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    text = str(error).removeprefix("nats: ").strip("'")
    return text.lower() if text else type(error).__name__
