"""The bus in memory: the semantics of the live one, on any event loop, without threads, wall clock or chance.

Every message passes one queue of the broker, ordered by (time of arrival, sequence number), so a run in virtual time
has one trace. A message takes `latency_s` from publisher to subscriber; who receives it is decided on arrival, as a
broker does it. Of a queue group one member after the other hears (a real broker draws one by chance).

A `deliver` policy may lose, delay or double each delivery; it is asked once per message and receiver, in order. Writes
to a key-value bucket are not subject to it, as the live ones are acknowledged; the hints that their watches get are,
and one that is lost is made good `WATCH_PERIOD_S` later. Each connection's `link` can be cut
(`shared.transport.memory_link`), and the broker can be down or hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.subjects import check_token
from shared.transport.bus import (
    MAX_PAYLOAD_BYTES,
    BusClosedError,
    BusTimeoutError,
    Endpoint,
    Handler,
    KeyValue,
    Message,
    ServiceInfo,
    Subscription,
    check_size,
)
from shared.transport.bus_rules import BusStats, check_bucket, check_pattern, check_subject
from shared.transport.memory_kv import MemoryBucket, MemoryKeyValue, MemoryWatch
from shared.transport.memory_link import NOTICE_S, Link
from shared.transport.memory_router import Asker, Delivery, DeliveryPolicy, Inbox, Packet, Router, Subscriber
from shared.transport.nats_service import RunningService, ServiceError, start_service

__all__ = ["Delivery", "DeliveryPolicy", "MemoryBroker", "MemoryBus"]

LATENCY_S = 90e-6
"""Publisher to subscriber, as measured over loopback with one idle broker."""

OUTAGE_TIMEOUT_S = 5.0
"""How long a flush or a write to a bucket waits for a broker that is down."""


class MemoryBroker:
    """What the connections of one simulated cluster meet in.

    Args:
        latency_s: from publisher to subscriber.
        deliver: faults; None delivers everything once.
    """

    def __init__(self, latency_s: float = LATENCY_S, deliver: DeliveryPolicy | None = None) -> None:
        self.available = True
        """False is a broker that is down: what is published is lost, requests and writes time out."""
        self.is_silent = False
        """True is a broker that has not answered for so long that its clients know it."""
        self.router = Router(latency_s, deliver)
        self.buckets: dict[str, MemoryBucket] = {}
        self._hangs = 0

    def hang(self) -> None:
        """Stand still until `go_on`: what is sent waits; after `NOTICE_S` the clients count as disconnected."""
        self._hangs += 1
        self.router.pause()
        asyncio.get_running_loop().call_later(NOTICE_S, self._give_up, self._hangs)

    def go_on(self) -> None:
        """End the hang. Idempotent."""
        self._hangs += 1
        self.is_silent = False
        self.router.go_on()

    def _give_up(self, hang: int) -> None:
        self.is_silent = self.is_silent or hang == self._hangs

    def connect(self, name: str) -> MemoryBus:
        """Return a new connection.

        Args:
            name: of the connection, for fault plans and inboxes; 1 to 64 letters, digits, `_` and `-`.
        """
        return MemoryBus(self, check_token(name))


class MemoryBus:
    """One connection to a `MemoryBroker`; implements `shared.transport.bus.Bus`. Made by `MemoryBroker.connect`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.name = name
        self.stats = BusStats()
        self.link = Link(broker.router.after)
        self._broker = broker
        self._router = broker.router
        self._closing = False
        self._closed = False
        # dicts as ordered sets: a set of objects has another order in each process
        self._subscriptions: dict[Subscriber, None] = {}
        self._services: dict[RunningService, None] = {}
        self._watches: dict[MemoryWatch, None] = {}
        self._waiters: dict[Asker, None] = {}

    @property
    def connected(self) -> bool:
        """Whether a message published now would leave."""
        return self._reaches and not self._closed

    @property
    def _reaches(self) -> bool:
        return self._broker.available and not self._broker.is_silent and self.link.is_up

    @property
    def max_payload_bytes(self) -> int:
        """The broker's limit."""
        return MAX_PAYLOAD_BYTES

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """See `Bus.publish`."""
        self._send(Message(check_subject(subject), data, reply))

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """See `Bus.request`.

        Raises:
            ServiceError: the responder answered that it failed.
        """
        reply = f"_INBOX.{self.name}.{self._router.next_number()}"
        waiter = Asker(self.name, self.link)
        self._waiters[waiter] = None
        self._router.askers[reply] = waiter
        try:
            self._send(Message(check_subject(subject), data, reply))
            async with asyncio.timeout(timeout_s):
                return await waiter.answer
        except TimeoutError:
            raise BusTimeoutError(subject, timeout_s) from None
        finally:
            del self._router.askers[reply]
            del self._waiters[waiter]

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> Subscription:
        """See `Bus.subscribe`."""
        self._check_open()
        inbox = Inbox(check_pattern(subject), handler, self.stats, max_pending)
        subscription = Subscriber(self.name, self.link, subject, queue, inbox, self._router)
        self._router.add(subscription)
        self._subscriptions = {other: None for other in self._subscriptions if not other.closed}
        self._subscriptions[subscription] = None
        return subscription

    async def serve(self, info: ServiceInfo, endpoints: Sequence[Endpoint]) -> Subscription:
        """See `Bus.serve`."""
        self._check_open()
        service = await start_service(info, endpoints, self)
        self._services[service] = None
        return service

    async def key_value(self, bucket: str, *, history: int = 1, max_age_s: float = 0.0) -> KeyValue:
        """See `Bus.key_value`. Only newest values can be read, whatever the history."""
        await self.trip("the key-value store")
        found = self._broker.buckets.get(check_bucket(bucket))
        if found is None:
            assert history >= 1, "a bucket keeps at least the newest value"
            found = self._broker.buckets[bucket] = MemoryBucket(bucket, self._router, max_age_s)
        return MemoryKeyValue(found, self)

    async def flush(self) -> None:
        """See `Bus.flush`."""
        await self.trip("the broker")

    async def close(self) -> None:
        """See `Bus.close`."""
        if self._closing:
            return
        self._closing = True
        for service in list(self._services):
            await service.close()
        if self._reaches and self.link.carries_out:
            await self.trip("the broker")
        for subscription in list(self._subscriptions):
            subscription.drain()
            await subscription.close()
        for watch in list(self._watches):
            await watch.close()
        self._closed = True
        for waiter in list(self._waiters):
            waiter.fail(self._closed_error())

    def abort(self) -> None:
        """Be gone without a word, as when the process was killed: the broker forgets every subscription. Idempotent."""
        self._closing = self._closed = True
        for subscription in self._subscriptions:
            subscription.end()
        for watch in self._watches:
            watch.end()

    async def trip(self, what: str, *, back: bool = False) -> None:
        """Return when everything sent so far has arrived at the broker, or (back) what the broker answered is here.

        Raises:
            BusTimeoutError: the broker is down or cannot be reached, and stays so for `OUTAGE_TIMEOUT_S`.
            BusClosedError: this connection is closed.
        """
        self._check_open()
        waiter = Asker(self.name, self.link)
        if self._reaches and (self.link.carries_in if back else self.link.carries_out):
            self._router.after(self._router.latency_s, waiter.arrived)
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(OUTAGE_TIMEOUT_S):
                await waiter.answer
        except TimeoutError:
            raise BusTimeoutError(what, OUTAGE_TIMEOUT_S) from None
        finally:
            del self._waiters[waiter]

    def own(self, watch: MemoryWatch) -> None:
        """Close the watch with the bus."""
        self._watches[watch] = None

    async def respond(self, message: Message, data: bytes, error: ServiceError | None = None) -> None:
        """Answer a request; with an error, the requester's call raises it."""
        self._send(Message(message.reply, data), error)

    def service_time_s(self) -> float:
        """Virtual seconds, for processing times."""
        return asyncio.get_running_loop().time()

    def service_unix_s(self) -> float:
        """Virtual seconds too: a wall clock would make runs differ."""
        return asyncio.get_running_loop().time()

    def _send(self, message: Message, error: ServiceError | None = None) -> None:
        if self._closed:
            raise self._closed_error()
        check_size(message.subject, message.data, MAX_PAYLOAD_BYTES, self.stats)
        if not self._reaches:
            self.stats.dropped_out += 1
        elif self.link.carries_out:
            self._router.send(Packet(message, self.name, error))

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> BusClosedError:
        return BusClosedError(f"the bus of '{self.name}' is closed")
