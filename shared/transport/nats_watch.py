"""A watch on a key-value bucket that asks the store, and survives broken connections and restarted brokers.

    core message on the bucket's subject ──► a hint: somebody wants to write ──┐
    the start, a new connection, every WATCH_PERIOD_S ─────────────────────────┴──► the store is asked ──► handler

No consumer: who may create one may have the broker say anything on any subject. A hint proves nothing, as a write that
the store refuses is heard too, and may be lost like any message. So nothing of it is used but that it came; what the
store returns, by rising revision, is handed over. A hint may overtake its write: a watch that finds fewer entries than
it heard of looks again, soon at first and then more seldom.

A bucket keeps `history` values of each key. A watch that falls further behind, or was away for longer, skips those in
between and goes on with what is kept: the newest value of each key is always seen, older ones perhaps not.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Protocol

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg, StreamInfo

from shared.process.log import get_logger
from shared.transport.bus import WATCH_PERIOD_S, KvEntry, Message, NoBucketError, WatchHandler
from shared.transport.bus_rules import BusStats, is_power_of_two
from shared.transport.nats_client import NatsSubscription, cancellable, end_tasks

FIRST_LOOK_S = 0.02
"""Pause before the store is asked again for a write that was heard of and is not there yet."""
LOOK_GROWTH = 4.0
"""Factor from one such pause to the next, up to `WATCH_PERIOD_S`."""
MAX_HINTS = 1024
"""Hints that may wait to be taken; those beyond it are lost, which harms nobody."""

_OPERATION_HEADER = "KV-Operation"
_MARKER_HEADER = "Nats-Marker-Reason"


class Store(Protocol):
    """The bucket that a watch asks."""

    name: str
    client: Client
    js: JetStreamContext
    stats: BusStats

    async def find(self) -> StreamInfo:
        """Return what the broker says of the stream behind the bucket.

        Raises:
            nats.js.errors.NotFoundError: there is none.
            nats.errors.Error: the broker did not answer.
        """


class NatsWatch:
    """Calls the handler with present values, then with every change, in revision order."""

    def __init__(self, store: Store, key: str, handler: WatchHandler) -> None:
        self.closed = False
        self._store = store
        self._prefix = f"$KV.{store.name}."
        self._subject = f"{self._prefix}{key}"
        self._handler = handler
        self._hints = NatsSubscription(self._subject, self._on_hint, store.stats)
        self._num_owed = 0
        self._num_missing = 0
        self._created: datetime | None = None
        self._revision = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the handler has seen the present values.

        Raises:
            nats.errors.Error: the broker did not answer, or there is no such bucket.
        """
        try:
            await self._hints.start(self._store.client, "", MAX_HINTS)  # before the look, so that nothing is missed
            newest: dict[str, KvEntry] = {}
            await self._look(newest)
            for entry in sorted(newest.values(), key=lambda entry: entry.revision):
                if entry.value is not None:
                    self._hand_over(entry)
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"watch {self._subject}")

    def renew(self) -> None:
        """Ask for what was missed; returns at once."""
        self._wake.set()

    async def close(self) -> None:
        """See `Subscription.close`."""
        if self.closed:
            return
        self.closed = True
        if self._task is not None:
            await end_tasks([self._task])
        await self._hints.close()

    def _on_hint(self, _message: Message) -> None:
        self._num_owed += 1
        self._wake.set()

    async def _follow(self) -> None:
        pause_s = WATCH_PERIOD_S
        while not self.closed:
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
                pause_s = FIRST_LOOK_S
            except TimeoutError:
                pause_s = min(pause_s * LOOK_GROWTH, WATCH_PERIOD_S)
            self._wake.clear()
            try:
                await cancellable(self._look())
            except nats.js.errors.NotFoundError:
                self._note_missing()
            except (nats.errors.Error, OSError) as error:
                self._num_owed += 1
                get_logger().debug("watch not renewed yet", bucket=self._store.name, error=str(error))
            if self._num_owed == 0 or pause_s >= WATCH_PERIOD_S:
                self._num_owed, pause_s = 0, WATCH_PERIOD_S

    def _note_missing(self) -> None:
        """Look again soon, and say what is to be done."""
        self._num_owed += 1
        self._num_missing += 1
        if is_power_of_two(self._num_missing):
            get_logger().warning("bucket_missing", error=str(NoBucketError(self._store.name)))

    async def _look(self, newest: dict[str, KvEntry] | None = None) -> None:
        """Take what the store has behind the last revision, or all of it if the broker lost its disk.

        Args:
            newest: where entries are put, by key, instead of being handed over.
        """
        info = await self._store.find()
        if info.created != self._created:
            self._created, self._revision = info.created, 0
        while self._revision < info.state.last_seq and not self.closed:
            found = await self._next()
            if found is None:
                self._revision = info.state.last_seq  # what is left is of other keys
                return
            entry = self._entry(found)
            self._revision = entry.revision
            self._num_owed = max(0, self._num_owed - 1)
            if newest is None:
                self._hand_over(entry)
            else:
                newest[entry.key] = entry

    async def _next(self) -> RawStreamMsg | None:
        """Return the oldest message of the watched keys behind the last revision."""
        try:
            stream, after = f"KV_{self._store.name}", self._revision
            return await self._store.js.get_msg(stream, seq=after + 1, subject=self._subject, next=True)
        except nats.js.errors.NotFoundError:
            return None

    def _entry(self, found: RawStreamMsg) -> KvEntry:
        assert found.subject is not None, "the store says where a message was written"
        assert found.seq is not None, "a stored message has a sequence number"
        headers = found.headers or {}
        deleted = _OPERATION_HEADER in headers or _MARKER_HEADER in headers
        return KvEntry(found.subject.removeprefix(self._prefix), None if deleted else found.data or b"", found.seq)

    def _hand_over(self, entry: KvEntry) -> None:
        try:
            self._handler(entry)
        except Exception as error:  # the supervisor of the handler: logged and counted
            self._store.stats.note_handler_error(f"{self._prefix}{entry.key}", error)
