"""Key-value buckets on JetStream: file storage, one stream per bucket, revisions are its sequence numbers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType, StreamInfo
from nats.js.kv import KeyValue as Bucket

from shared.transport.bus import (
    BusClosedError,
    BusError,
    BusTimeoutError,
    KvEntry,
    NoBucketError,
    Subscription,
    WatchHandler,
    WrongRevisionError,
    check_size,
)
from shared.transport.bus_rules import BusStats, check_key, check_pattern, has_wildcard
from shared.transport.nats_client import cancellable
from shared.transport.nats_watch import NatsWatch

KV_TIMEOUT_S = 5.0
"""For one operation on a bucket."""
OPEN_TRIES = 3
"""Attempts at opening a bucket, each of which may take `KV_TIMEOUT_S`."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BucketShape:
    """How a bucket is created."""

    history: int = 1
    """Values that are kept of each key."""
    max_age_s: float = 0.0
    """Seconds after which a value is gone; 0: values stay."""
    replicas: int = 1
    """Servers that keep a copy; more than 1 needs a cluster of servers."""


class NatsKeyValue:
    """One bucket; implements `shared.transport.bus.KeyValue`. To be opened before anything else.

    Args:
        client: connected.
        name: of the bucket.
        shape: in which it is created if it does not exist, now or later; None: another user makes it.
        stats: of the connection.
    """

    def __init__(self, client: Client, name: str, shape: BucketShape | None, stats: BusStats) -> None:
        self.client = client
        self.name = name
        self._shape = shape
        self.stats = stats
        self.js = JetStreamContext(client, timeout=KV_TIMEOUT_S)
        self._bucket: Bucket | None = None
        self._is_sure = False
        self._watches: dict[NatsWatch, None] = {}

    async def open(self) -> None:
        """Find the bucket, or create it. May be called again.

        Raises:
            NoBucketError: it does not exist, and another user makes it.
            BusError: the broker has no JetStream, or did not answer.
        """
        with _translated(self.name):
            await cancellable(self.ensure_soon())

    async def ensure_soon(self) -> None:
        """Find or create the stream, with patience: servers of a cluster that start need seconds to elect a leader."""
        for _ in range(OPEN_TRIES - 1):
            with suppress(nats.errors.TimeoutError):
                await self.ensure()
                return
            if self.stats.refused:  # patience is of no use
                raise nats.errors.TimeoutError
        await self.ensure()

    async def ensure(self) -> Bucket:
        """Find the stream behind the bucket, or create it if that is for us to do."""
        try:
            self._bucket = await self.js.key_value(self.name)
        except nats.js.errors.BucketNotFoundError:
            if self._shape is None:
                raise
            config = KeyValueConfig(
                bucket=self.name,
                history=self._shape.history,
                ttl=self._shape.max_age_s or None,
                storage=StorageType.FILE,
                replicas=self._shape.replicas,
            )
            try:
                self._bucket = await self.js.create_key_value(config)
            except nats.js.errors.BadRequestError:  # somebody created it in between, with another history
                self._bucket = await self.js.key_value(self.name)
        self._is_sure = True
        return self._bucket

    async def find(self) -> StreamInfo:
        """See `nats_watch.Store.find`."""
        try:
            return await self.js.stream_info(f"KV_{self.name}")
        except nats.js.errors.NotFoundError:
            await self.ensure()
            return await self.js.stream_info(f"KV_{self.name}")

    async def get(self, key: str) -> KvEntry | None:
        """See `KeyValue.get`."""
        check_key(key)
        with _translated(self.name):
            try:
                entry = await self._attempt(lambda bucket: bucket.get(key))
            except nats.js.errors.KeyNotFoundError:
                return None
        assert entry.revision is not None, "a stored entry has a sequence number"
        return KvEntry(key, entry.value or b"", entry.revision)

    async def put(self, key: str, value: bytes) -> int:
        """See `KeyValue.put`."""
        return await self._write(key, value, 0, lambda bucket: bucket.put(key, value))

    async def create(self, key: str, value: bytes) -> int:
        """See `KeyValue.create`."""
        return await self._write(key, value, 0, lambda bucket: bucket.create(key, value))

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `KeyValue.update`."""
        return await self._write(key, value, revision, lambda bucket: bucket.update(key, value, last=revision))

    async def delete(self, key: str) -> None:
        """See `KeyValue.delete`."""
        check_key(key)
        with _translated(self.name):
            await self._attempt(lambda bucket: bucket.delete(key))

    async def watch(self, key: str, handler: WatchHandler) -> Subscription:
        """See `KeyValue.watch`. When it returns, the handler has seen the present values."""
        if not has_wildcard(check_pattern(key)):
            check_key(key)
        watch = await self._start_watch(key, handler)
        self._watches = {other: None for other in self._watches if not other.closed}
        self._watches[watch] = None
        return watch

    def reconnected(self) -> None:
        """Look whether the bucket is still there, and let every watch ask for what it missed."""
        self._is_sure = False
        for watch in self._watches:
            watch.renew()

    async def close(self) -> None:
        """End the watches. Idempotent."""
        for watch in list(self._watches):
            await watch.close()
        self._watches.clear()

    async def _start_watch(self, key: str, handler: WatchHandler) -> NatsWatch:
        watch = NatsWatch(self, key, handler)
        with _translated(self.name):
            try:
                await cancellable(watch.start())
            except BaseException:
                await watch.close()  # cancelled at the last moment, it may have begun
                raise
        return watch

    async def _write(self, key: str, value: bytes, expected: int, operation: Callable[[Bucket], Awaitable[int]]) -> int:
        check_size(check_key(key), value, int(self.client.max_payload), self.stats)
        with _translated(self.name):
            try:
                return await self._attempt(operation)
            except nats.js.errors.KeyWrongLastSequenceError:
                raise WrongRevisionError(key, expected) from None

    async def _attempt(self, operation: Callable[[Bucket], Awaitable[_T]]) -> _T:
        """Run the operation; if the stream is gone (a broker that lost its disk), see to it and run it again.

        With a watch somewhere nobody says that it is gone: the write is heard, and not answered.
        """
        assert self._bucket is not None, "opened"
        try:
            return await cancellable(operation(self._bucket if self._is_sure else await self.ensure()))
        except nats.js.errors.NoStreamResponseError:
            return await cancellable(operation(await self.ensure()))
        except nats.errors.TimeoutError:
            self._is_sure = False
            raise


@contextmanager
def _translated(bucket: str) -> Iterator[None]:
    """Turn nats-py's errors into the bus's."""
    try:
        yield
    except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError):
        raise BusClosedError(f"the bus is closed; bucket '{bucket}' cannot be reached") from None
    except (nats.errors.TimeoutError, nats.errors.OutboundBufferLimitError):
        raise BusTimeoutError(f"bucket '{bucket}'", KV_TIMEOUT_S) from None
    except nats.js.errors.NotFoundError:
        raise NoBucketError(bucket) from None
    except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError):
        reason = "it runs without JetStream (start it with -js), or its disk was full when it started (start it again)"
        raise BusError(f"bucket '{bucket}': the nats-server has no store: {reason}") from None
    except nats.errors.Error as error:
        raise BusError(f"bucket '{bucket}': {error}") from None
