"""A watch on a key-value bucket that survives broken connections and restarted brokers.

nats-py's own watcher is not used: it resets itself in tasks that nobody owns, does not try again when that fails, and
notices a restarted broker only after ten seconds. This one owns a push consumer and one supervising task. Whenever an
entry is missing (numbers with a gap, no heartbeats, a new connection) it makes a new consumer that starts behind the
last revision that was handed over.

A bucket keeps `history` values of each key. A watch that falls further behind, or was away for longer, skips those in
between and goes on with what is kept: the newest value of each key is always seen, older ones perhaps not.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared.process.log import get_logger
from shared.transport.bus import KvEntry, WatchHandler
from shared.transport.bus_rules import BusStats
from shared.transport.nats_client import STATUS_HEADER, cancellable, end_tasks, unsubscribe

HEARTBEAT_S = 1.0
MAX_SILENCE_S = 3.0
RETRY_S = 0.5
START_TIMEOUT_S = 5.0
KEEP_CONSUMER_S = 30.0
"""After this long without us the broker forgets the consumer."""

_OPERATION_HEADER = "KV-Operation"
_MARKER_HEADER = "Nats-Marker-Reason"
_LAST_HEADER = "Nats-Last-Consumer"


class NatsWatch:
    """Calls the handler with present values, then with every change, in revision order."""

    def __init__(
        self,
        client: Client,
        js: JetStreamContext,
        bucket: str,
        key: str,
        handler: WatchHandler,
        stats: BusStats,
    ) -> None:
        self.closed = False
        self._client = client
        self._js = js
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._key = key
        self._handler = handler
        self._stats = stats
        self._revision = 0
        self._shown: set[str] = set()
        self._present_done = asyncio.Event()
        self._renew = asyncio.Event()
        self._heard = False
        self._generation = 0
        self._expected = 1
        self._inner: Subscription | None = None
        self._consumer = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when the handler has seen the present values.

        Raises:
            nats.errors.Error: the broker did not answer.
        """
        try:
            await self._open(ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT))
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._present_done.wait()
        except TimeoutError:
            await self.close()
            raise nats.errors.TimeoutError from None
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._supervise(), name=f"watch {self._prefix}{self._key}")

    def renew(self) -> None:
        """Ask for what was missed; returns at once."""
        self._renew.set()

    async def close(self) -> None:
        """See `Subscription.close`."""
        if self.closed:
            return
        self.closed = True
        if self._task is not None:
            await end_tasks([self._task])
        await self._leave()
        if self._consumer and self._client.is_connected:
            with suppress(nats.errors.Error, TimeoutError):  # else the broker forgets it by itself
                async with asyncio.timeout(RETRY_S):
                    await self._js.delete_consumer(self._stream, self._consumer)

    async def _supervise(self) -> None:
        while not self.closed:
            self._heard = False
            try:
                async with asyncio.timeout(MAX_SILENCE_S):
                    await self._renew.wait()
            except TimeoutError:
                if self._heard:
                    continue
            self._renew.clear()
            await self._reopen()

    async def _reopen(self) -> None:
        while not self.closed:
            await self._leave()
            try:
                await cancellable(self._open(await self._resume()))
            except (nats.errors.Error, OSError) as error:
                get_logger().debug("watch not renewed yet", stream=self._stream, error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _resume(self) -> ConsumerConfig:
        """Return where to go on: behind the last revision, or from the start if the broker lost its disk."""
        info = await self._js.stream_info(self._stream)
        if info.state.last_seq < self._revision:
            self._revision = 0
        if self._revision == 0:
            return ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT)
        return ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self._revision + 1)

    async def _open(self, start: ConsumerConfig) -> None:
        self._generation += 1
        self._expected = 1
        inbox = self._client.new_inbox()
        self._inner = await self._client.subscribe(inbox, cb=partial(self._take, self._generation))
        config = start.evolve(
            deliver_subject=inbox,
            filter_subject=f"{self._prefix}{self._key}",
            ack_policy=AckPolicy.NONE,
            idle_heartbeat=HEARTBEAT_S,
            inactive_threshold=KEEP_CONSUMER_S,
            mem_storage=True,
            num_replicas=1,
        )
        info = await self._js.add_consumer(self._stream, config)
        self._consumer = info.name
        if not info.num_pending and (info.delivered is None or info.delivered.consumer_seq == 0):
            self._present_done.set()

    async def _leave(self) -> None:
        """Stop listening to the present consumer."""
        self._generation += 1
        if self._inner is not None:
            await unsubscribe(self._inner)
            self._inner = None

    async def _take(self, generation: int, msg: Msg) -> None:
        if generation != self._generation:
            return
        self._heard = True
        headers = msg.headers or {}
        if STATUS_HEADER in headers:
            if int(headers.get(_LAST_HEADER, 0)) >= self._expected:
                self._renew.set()  # the newest entries never came
            return
        metadata = msg.metadata
        if metadata.sequence.consumer != self._expected:
            self._generation += 1  # nothing more from this consumer: order before speed
            self._renew.set()
            return
        self._expected += 1
        self._hand_over(msg, metadata.sequence.stream)
        if metadata.num_pending == 0:
            self._present_done.set()
            self._shown.clear()

    def _hand_over(self, msg: Msg, revision: int) -> None:
        if revision <= self._revision:
            return
        self._revision = revision
        key = msg.subject[len(self._prefix) :]
        headers = msg.headers or {}
        deleted = _OPERATION_HEADER in headers or _MARKER_HEADER in headers
        if not self._present_done.is_set():
            if deleted and key not in self._shown:
                return  # was deleted before the watch began: there is no present value
            self._shown.add(key)
        try:
            self._handler(KvEntry(key, None if deleted else msg.data, revision))
        except Exception as error:  # the supervisor of the handler: logged and counted
            self._stats.note_handler_error(msg.subject, error)
