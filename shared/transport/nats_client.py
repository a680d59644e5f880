"""What the bus needs of nats-py beyond its public interface, all in one place, with the reason for each."""

# ruff: noqa: SLF001  (the whole file reaches into nats-py 2.16, whose version is bounded in pyproject.toml)

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from shared.process.log import get_logger
from shared.transport.bus import BusError, Handler, Message
from shared.transport.bus_rules import BusStats, is_stray

PENDING_IN_BYTES = 64 * 1024 * 1024
"""Most bytes that wait for one handler."""

STATUS_HEADER = "Status"
"""Marks what the broker itself says."""

_LOOK_S = 0.25
_MAX_CANCELLATIONS = 4
_T = TypeVar("_T")


async def cancellable(operation: Awaitable[_T]) -> _T:
    """Await something of nats-py; if that swallowed a cancellation of this task, raise it after all.

    It happens: Python 3.11's `wait_for` returns the result if both come in one turn of the loop, and nats-py drops a
    cancellation while it flushes. A task that nobody can cancel would keep its owner from closing.
    """
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    before = task.cancelling()
    result = await operation
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


class GuardedClient(Client):
    """nats-py's client, but that it drops strays: the one place that subscriptions, endpoints and answers share."""

    def __init__(self, bus_stats: BusStats) -> None:
        super().__init__()
        self._bus_stats = bus_stats

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        if subscription is None:
            return
        try:
            if not is_stray(subscription.subject, subject.decode(), headers):
                await super()._process_msg(sid, subject, reply, data, headers)
                return
        except (UnicodeDecodeError, IndexError):  # no text, or no headers: nats-py would read nothing more
            pass
        self._bus_stats.note_stray(subject.decode(errors="replace"))


class NatsSubscription:
    """A running subscription: calls the handler, one message at a time."""

    def __init__(self, pattern: str, handler: Handler, stats: BusStats) -> None:
        self.closed = False
        self._pattern = pattern
        self._handler = handler
        self._stats = stats
        self._inner: ClientSubscription | None = None

    async def start(self, client: Client, queue: str, max_pending: int) -> None:
        """Subscribe."""
        self._inner = await client.subscribe(
            self._pattern,
            queue=queue,
            cb=self._take,
            pending_msgs_limit=max_pending,
            pending_bytes_limit=PENDING_IN_BYTES,
        )

    async def close(self) -> None:
        """See `Subscription.close`."""
        if self.closed:
            return
        self.closed = True
        if self._inner is not None:
            await unsubscribe(self._inner)

    async def _take(self, msg: Msg) -> None:
        # a message with a status is the broker's ("no responders" on a reply subject), not another service's
        if self.closed or (msg.headers and STATUS_HEADER in msg.headers):
            return
        try:
            self._handler(Message(msg.subject, msg.data, msg.reply))
        except Exception as error:  # the supervisor of the handler: logged and counted
            self._stats.note_handler_error(msg.subject, error)


async def unsubscribe(inner: ClientSubscription) -> None:
    """End the subscription and its task, which nats-py cancels but does not await."""
    with suppress(nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError):  # ended with the connection
        await inner.unsubscribe()
    await end_tasks([inner._wait_for_msgs_task])


async def round_trip(client: Client) -> bool:
    """Return True when everything published so far has reached the broker; False if the connection broke meanwhile.

    Client.flush() is not used: its ping overtakes what is still in the client's buffer, and if it is cancelled the
    late answer kills the client's reading task.
    """
    if not client.is_connected:
        return False
    reconnects = client.stats["reconnects"]
    if client.pending_data_size > 0:
        await cancellable(client._flush_pending(force_flush=True))
    pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    await client._send_ping(pong)
    while not pong.done():
        await asyncio.wait([pong], timeout=_LOOK_S)  # asyncio.wait never cancels what it waits for
        if _broke(client, reconnects):
            return False
    return True


def _broke(client: Client, reconnects: int) -> bool:
    return not client.is_connected or client.stats["reconnects"] != reconnects


async def drain(client: Client, timeout_s: float) -> None:
    """Let the handlers see what has arrived, and the broker what was published; give up after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            if await round_trip(client):
                for subscription in list(client._subs.values()):
                    if subscription._cb is not None:
                        await subscription._pending_queue.join()
                await round_trip(client)
    except TimeoutError:
        get_logger().warning("the broker does not answer, closing without it")


async def disconnect(client: Client, error: BusError, timeout_s: float) -> None:
    """End the connection, every task of the client, and with this error every request that still waits."""
    tasks = list(_tasks(client))
    for answer in client._resp_map.values():
        if not answer.done():
            answer.set_exception(error)
    if not client.is_connected:  # what is buffered can no longer leave, and close() would fail trying
        client._pending.clear()
        client._pending_data_size = 0
    # a task of its own: nats-py's close() swallows cancellations on its way, so a timeout around it may never end
    closing = asyncio.get_running_loop().create_task(client.close(), name="close nats")
    try:
        await asyncio.wait([closing], timeout=timeout_s)
    finally:
        if not closing.done() or closing.cancelled() or closing.exception() is not None:
            get_logger().warning("connection dropped without a goodbye")
            _abort(client)
        tasks.append(closing)
    await end_tasks(tasks)


def _tasks(client: Client) -> Iterator[asyncio.Task[Any] | None]:
    yield from (client._reading_task, client._ping_interval_task, client._flusher_task, client._reconnection_task)
    for subscription in client._subs.values():
        yield subscription._wait_for_msgs_task


async def end_tasks(tasks: list[asyncio.Task[Any] | None]) -> None:
    """Cancel the tasks if they still run, and wait until they have ended; they may swallow it a few times."""
    left = [task for task in tasks if task is not None and task is not asyncio.current_task() and not task.done()]
    for _ in range(_MAX_CANCELLATIONS):
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_LOOK_S)
        left = [task for task in left if not task.done()]


def _abort(client: Client) -> None:
    """Drop the socket at once: a broker that does not read would keep a polite close waiting for ever."""
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
