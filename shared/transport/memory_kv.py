"""Key-value buckets in memory, with the revisions, conflicts and watches of the live ones.

What a write sends to its watches is a hint (`shared.transport.nats_watch`): the bus's policy may lose or delay it. One
that arrives brings its entry along, in the order of revisions; the way to the store and back is not modelled.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from shared.transport.bus import WATCH_PERIOD_S, KvEntry, Subscription, WatchHandler, WrongRevisionError, check_size
from shared.transport.bus_rules import BusStats, check_key, check_pattern, has_wildcard, matches
from shared.transport.memory_link import Link
from shared.transport.memory_router import Delivery, Inbox, Router

_MAX_PENDING = 65_536


class KvTransport(Protocol):
    """What a bucket's client needs of its bus."""

    name: str
    stats: BusStats
    link: Link

    @property
    def max_payload_bytes(self) -> int:
        """The largest value."""

    async def trip(self, what: str, *, back: bool = False) -> None:
        """Take the time of one way to the broker, or back; raise if it cannot be reached."""

    def own(self, watch: MemoryWatch) -> None:
        """Close the watch with the bus."""


class MemoryBucket:
    """The broker's side of one bucket. A deleted key keeps its revision, as a marker does in the live one."""

    def __init__(self, name: str, router: Router, max_age_s: float = 0.0) -> None:
        self.name = name
        self.router = router
        self.entries: dict[str, KvEntry] = {}
        self._written_s: dict[str, float] = {}
        self._max_age_s = max_age_s
        self._revision = 0
        self._watches: dict[MemoryWatch, None] = {}

    def write(self, key: str, value: bytes | None, writer: str) -> int:
        """Store the value (None = deleted), tell whoever watches who (by connection) wrote it; return its revision."""
        self._revision += 1
        entry = KvEntry(key, value, self._revision)
        self.entries[key] = entry
        self._written_s[key] = asyncio.get_running_loop().time()
        for watch in list(self._watches):
            if watch.wants(key):
                self.router.after(self.router.latency_s, partial(watch.hear, entry, writer))
        return self._revision

    def find(self, key: str) -> KvEntry | None:
        """Return the key's entry; None if it has no value, or one that is too old."""
        entry = self.entries.get(key)
        if entry is None or entry.value is None or not self._is_young(key):
            return None
        return entry

    def _is_young(self, key: str) -> bool:
        age_s = asyncio.get_running_loop().time() - self._written_s[key]
        return not self._max_age_s or age_s < self._max_age_s

    def revision_of(self, key: str) -> int:
        """Return the revision of the key's last write or deletion; 0 if there never was one."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.revision

    def present(self) -> list[KvEntry]:
        """Return the entries that have a value, oldest revision first."""
        entries = [entry for key, entry in self.entries.items() if entry.value is not None and self._is_young(key)]
        return sorted(entries, key=lambda entry: entry.revision)

    def add(self, watch: MemoryWatch) -> None:
        """Send every later write to the watch."""
        self._watches[watch] = None

    def remove(self, watch: MemoryWatch) -> None:
        """Send nothing more to the watch. Idempotent."""
        self._watches.pop(watch, None)


class MemoryKeyValue:
    """One connection's view of a bucket; implements `shared.transport.bus.KeyValue`. Each call takes one round trip."""

    def __init__(self, bucket: MemoryBucket, transport: KvTransport) -> None:
        self._bucket = bucket
        self._transport = transport

    async def get(self, key: str) -> KvEntry | None:
        """See `KeyValue.get`."""
        check_key(key)
        await self._go(key)
        entry = self._bucket.find(key)
        await self._go(key, back=True)
        return entry

    async def put(self, key: str, value: bytes) -> int:
        """See `KeyValue.put`."""
        return await self._write(key, value, None)

    async def create(self, key: str, value: bytes) -> int:
        """See `KeyValue.create`."""
        self._check(key, value)
        await self._go(key)
        if self._bucket.find(key) is not None:
            raise WrongRevisionError(key, 0)
        return await self._apply(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `KeyValue.update`."""
        return await self._write(key, value, revision)

    async def delete(self, key: str) -> None:
        """See `KeyValue.delete`."""
        await self._write(key, None, None)

    async def watch(self, key: str, handler: WatchHandler) -> Subscription:
        """See `KeyValue.watch`. When it returns, the handler has seen the present values."""
        if not has_wildcard(check_pattern(key)):
            check_key(key)
        await self._go(key)
        watch = MemoryWatch(key, handler, self._bucket, self._transport)
        for entry in self._bucket.present():
            if watch.wants(entry.key):
                watch.take(entry)
        self._bucket.add(watch)
        self._transport.own(watch)
        try:
            await self._go(key, back=True)
        except BaseException:
            watch.end()
            raise
        watch.drain()
        return watch

    async def _write(self, key: str, value: bytes | None, expected: int | None) -> int:
        self._check(key, value)
        await self._go(key)
        if expected is not None and self._bucket.revision_of(key) != expected:
            raise WrongRevisionError(key, expected)
        return await self._apply(key, value)

    async def _apply(self, key: str, value: bytes | None) -> int:
        revision = self._bucket.write(key, value, self._transport.name)
        await self._go(key, back=True)
        return revision

    def _check(self, key: str, value: bytes | None) -> None:
        check_size(check_key(key), value or b"", self._transport.max_payload_bytes, self._transport.stats)

    async def _go(self, key: str, *, back: bool = False) -> None:
        await self._transport.trip(f"the key-value store, key '{key}'", back=back)


class MemoryWatch:
    """A running watch. Newest values make good what it misses: a lost hint later, a cut link when it is mended."""

    def __init__(self, pattern: str, handler: WatchHandler, bucket: MemoryBucket, transport: KvTransport) -> None:
        self._pattern = pattern.split(".")
        self._bucket = bucket
        self._name = transport.name
        self._link = transport.link
        self._closed = False
        self._seen_revision = 0
        self._inbox = Inbox(f"watch {pattern}", handler, transport.stats, _MAX_PENDING)
        self._link.on_mend(self._catch_up)

    def wants(self, key: str) -> bool:
        """Return whether the key matches."""
        return matches(self._pattern, key.split("."))

    def hear(self, entry: KvEntry, writer: str) -> None:
        """Take the entry of a write by way of its hint, which the bus's policy may lose, delay or double."""
        if self._closed or not self._link.receives:
            return
        router = self._bucket.router
        delivery = Delivery(writer, self._name, f"$KV.{self._bucket.name}.{entry.key}", len(entry.value or b""))
        delays_s = (0.0,) if router.deliver is None else router.deliver(delivery)
        for delay_s in delays_s or (WATCH_PERIOD_S,):
            if delay_s > 0:
                router.after(delay_s, self._catch_up)
            else:
                self._arrive(entry)

    def _arrive(self, entry: KvEntry) -> None:
        """Take an entry, if the link carries it and no newer one came first."""
        if self._link.receives and entry.revision > self._seen_revision:
            self.take(entry)

    def take(self, entry: KvEntry) -> None:
        """Queue one entry for the handler."""
        if not self._closed:
            self._seen_revision = max(self._seen_revision, entry.revision)
            self._inbox.put(entry)

    def drain(self) -> None:
        """Hand over what waits, now."""
        self._inbox.drain()

    def end(self) -> None:
        """Get nothing more, and handle nothing of what waits. Idempotent."""
        self._closed = True
        self._bucket.remove(self)
        self._link.forget(self._catch_up)
        self._inbox.clear()

    async def close(self) -> None:
        """See `Subscription.close`."""
        self.end()

    def _catch_up(self) -> None:
        if not self._link.receives:
            return
        for entry in sorted(self._bucket.entries.values(), key=lambda entry: entry.revision):
            if entry.revision > self._seen_revision and self.wants(entry.key):
                self.take(entry)
