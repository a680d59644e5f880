"""The one way in which services talk: publish, request, answer, and a small key-value store. No transport here.

`NatsBus` (live) and `MemoryBus` (simulation and tests) implement these protocols; one contract suite runs on both.
Delivery is at most once and in order per publisher and subject, as with core NATS: who needs more numbers its messages
and asks for what is missing. Handlers are plain synchronous functions called on the event loop, one message at a time
and in order; whoever needs to wait starts an owned task.

    BusError
    ├── BusClosedError          the bus was closed by us, or could never connect
    ├── NoRespondersError       nobody serves this subject
    ├── BusTimeoutError         somebody may have taken the request, but no answer came in time
    ├── MessageTooLargeError    the payload exceeds the broker's limit
    ├── WrongRevisionError      the key changed in between (compare-and-set)
    └── NoBucketError           the bucket is not there, and it is not this user who makes it
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.hot import hot_dataclass
from shared.transport.bus_rules import BusStats

MAX_PAYLOAD_BYTES = 1024 * 1024
"""NATS's default limit for one message; both buses enforce it."""
WATCH_PERIOD_S = 3.0
"""How often a watch asks the store although it heard of no write: so long a lost hint delays an entry."""


class BusError(Exception):
    """Anything that can go wrong between two services."""


class BusClosedError(BusError):
    """The bus is closed; no message left."""


class NoRespondersError(BusError):
    """Nobody serves this subject now; nothing was delivered."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody answers on {subject}")
        self.subject = subject


class BusTimeoutError(BusError):
    """No answer within the time; the request may or may not have been acted on."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no answer on {subject} within {timeout_s:g} s")
        self.subject = subject
        self.timeout_s = timeout_s


class MessageTooLargeError(BusError):
    """The payload is over the limit; nothing was sent."""

    def __init__(self, subject: str, size_bytes: int, max_bytes: int) -> None:
        super().__init__(f"message of {size_bytes} bytes on {subject} is over the limit of {max_bytes}")
        self.subject = subject
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes


class WrongRevisionError(BusError):
    """The key's revision is not the expected one; nothing was written."""

    def __init__(self, key: str, expected: int) -> None:
        super().__init__(f"key '{key}' is no longer at revision {expected}")
        self.key = key
        self.expected = expected


class NoBucketError(BusError):
    """There is no such bucket, and this process signed in as a user who may not make it."""

    def __init__(self, bucket: str) -> None:
        super().__init__(f"bucket '{bucket}' is not there; the set-up user makes it: run `sluice nats-setup`")
        self.bucket = bucket


def check_size(subject: str, data: bytes, max_bytes: int, stats: BusStats) -> None:
    """Refuse a payload over the limit, and count it.

    Raises:
        MessageTooLargeError: it is.
    """
    if len(data) > max_bytes:
        stats.note_too_large(subject, len(data), max_bytes)
        raise MessageTooLargeError(subject, len(data), max_bytes)


@hot_dataclass(frozen=True, slots=True)
class Message:
    """One delivered message."""

    subject: str
    data: bytes
    reply: str = ""
    """Where an answer is expected; empty if nobody waits."""


@dataclass(frozen=True, slots=True)
class KvEntry:
    """One value of a bucket. A deletion reaches watchers as an entry with value None."""

    key: str
    value: bytes | None
    revision: int
    """Grows with every write to the bucket; never reused."""


Handler = Callable[[Message], None]
Responder = Callable[[Message], Awaitable[bytes]]
WatchHandler = Callable[[KvEntry], None]


class Subscription(Protocol):
    """A running subscription, watch or endpoint."""

    async def close(self) -> None:
        """Stop: after this returns, the handler is not called again. Idempotent."""


class KeyValue(Protocol):
    """One bucket: small values, last write wins, compare-and-set where asked for."""

    async def get(self, key: str) -> KvEntry | None:
        """Return the present value, or None if there is none or it was deleted."""

    async def put(self, key: str, value: bytes) -> int:
        """Write, and return the new revision."""

    async def create(self, key: str, value: bytes) -> int:
        """Write only if the key has no value.

        Raises:
            WrongRevisionError: it has one (expected = 0).
        """

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write only if the key is still at this revision.

        Raises:
            WrongRevisionError: it is not.
        """

    async def delete(self, key: str) -> None:
        """Remove the value; no error if there is none."""

    async def watch(self, key: str, handler: WatchHandler) -> Subscription:
        """Call the handler with the present value of each matching key, then with every change, in revision order.

        What a write tells its watchers is a hint and may be lost; the store is asked, at the latest `WATCH_PERIOD_S`
        later. A write that the store refused is never seen.

        Args:
            key: one key, or `>` for every key.
            handler: called on the event loop, one entry at a time.
        """


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One verb that a service answers by request-reply."""

    name: str
    subject: str
    responder: Responder
    """Runs in a task that the bus owns; at most `max_in_flight` at a time, more wait in order."""
    max_in_flight: int = 64
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What `$SRV.INFO` says of a service (NATS service protocol); description and string metadata are obligatory."""

    name: str
    """`[A-Za-z0-9_-]+`, for example `sluice-worker`."""
    version: str
    """Semantic version; the protocol requires one."""
    description: str
    metadata: Mapping[str, str]
    instance_id: str
    """Unique per process, for example the worker id."""


class Bus(Protocol):
    """A connection to every other service."""

    @property
    def connected(self) -> bool:
        """Whether a message published now would leave at once (a broken connection is mended in the background)."""

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that `publish` and `request` take."""

    @property
    def stats(self) -> BusStats:
        """What has gone wrong on this connection so far."""

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Hand the message to the transport. It may still be lost: see the module's first lines.

        Raises:
            MessageTooLargeError: nothing was sent.
            BusClosedError: nothing was sent.
        """

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send, and wait for the one answer.

        Raises:
            NoRespondersError: at once, when nobody subscribes.
            BusTimeoutError: when the time is over.
            MessageTooLargeError, BusClosedError: nothing was sent.
        """

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65_536
    ) -> Subscription:
        """Call the handler for each message on the subject (`*` one token, `>` the rest), one at a time, in order.

        A handler that raises is logged and counted; the subscription goes on.

        Args:
            subject: literal, or with wildcards.
            handler: called on the event loop; must not block.
            queue: members of one queue group share the messages; empty = everyone gets each.
            max_pending: messages that may wait for the handler; beyond it new ones are dropped, logged and counted.
        """

    async def serve(self, info: ServiceInfo, endpoints: Sequence[Endpoint]) -> Subscription:
        """Answer the endpoints, and the NATS service protocol (`$SRV.PING|INFO|STATS[.name[.id]]`) for them.

        A responder that raises is logged; the requester gets an answer with a `Nats-Service-Error` header, which
        `request` turns into a `BusError`.
        """

    async def key_value(self, bucket: str, *, history: int = 1, max_age_s: float = 0.0) -> KeyValue:
        """Open the bucket, and create it (file storage) if it does not exist and this user may.

        Args:
            bucket: its name.
            history: values that are kept of each key.
            max_age_s: a value that is older than this is gone; 0: values stay. Of a bucket that is created only.

        Raises:
            NoBucketError: it does not exist, and another user makes it.
        """

    async def flush(self) -> None:
        """Return when everything published so far has reached the broker."""

    async def close(self) -> None:
        """Finish the handlers that run, send what is buffered, and disconnect. Idempotent."""
