"""The inside of the bus in memory: one ordered queue of what is on its way, and who gets what.

Nothing here depends on chance, threads, a wall clock or the order of a set.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from shared.hot import hot_dataclass
from shared.transport.bus import Message, NoRespondersError
from shared.transport.bus_rules import BusStats, has_wildcard, matches
from shared.transport.memory_link import Link
from shared.transport.nats_service import ServiceError

MAX_REMEMBERED_SUBJECTS = 1024
"""Of which it is known who wants their messages; only a matter of speed."""

_T = TypeVar("_T")


@hot_dataclass(frozen=True, slots=True)
class Delivery:
    """One message about to reach one receiver: what a `DeliveryPolicy` decides about."""

    sender: str
    """Name of the connection that published it."""
    receiver: str
    """Name of the connection that will get it."""
    subject: str
    size_bytes: int


DeliveryPolicy = Callable[[Delivery], Sequence[float]]
"""Returns the extra delay in seconds of each copy to deliver: `(0.0,)` as it is, `()` lost, `(0.0, 1.5)` doubled."""


@hot_dataclass(frozen=True, slots=True)
class Packet:
    """A message on its way."""

    message: Message
    sender: str
    error: ServiceError | None = None
    """Set in the answer of a responder that failed."""


class Inbox(Generic[_T]):
    """Calls a handler with one item after another, in order, from a callback of its own.

    Args:
        handler: one that raises is logged and counted.
        max_pending: items that may wait; more are dropped, logged and counted.
    """

    def __init__(self, label: str, handler: Callable[[_T], None], stats: BusStats, max_pending: int) -> None:
        self._label = label
        self._handler = handler
        self._stats = stats
        self._max_pending = max_pending
        self._items: deque[_T] = deque()
        self._scheduled = False
        self._context = contextvars.copy_context()  # the handler runs for whoever subscribed, not for who sends

    def put(self, item: _T) -> None:
        """Queue one item for the handler."""
        if len(self._items) >= self._max_pending:
            self._stats.note_dropped(self._label)
            return
        self._items.append(item)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.drain, context=self._context)

    def drain(self) -> None:
        """Handle everything that waits now."""
        self._scheduled = False
        while self._items:
            item = self._items.popleft()
            try:
                self._handler(item)
            except Exception as error:  # the supervisor of the handler: logged and counted
                self._stats.note_handler_error(self._label, error)

    def clear(self) -> None:
        """Forget everything that waits."""
        self._items.clear()


class Subscriber:
    """A handler and the messages that wait for it."""

    def __init__(self, name: str, link: Link, pattern: str, queue: str, inbox: Inbox[Message], router: Router) -> None:
        self.name = name
        self.link = link
        self.pattern = pattern
        self.queue = queue
        self.closed = False
        self._inbox = inbox
        self._router = router

    def take(self, packet: Packet) -> None:
        """Queue the message, unless the subscription ended while it was on its way."""
        if not self.closed:
            self._inbox.put(packet.message)

    def drain(self) -> None:
        """Handle what waits, now."""
        self._inbox.drain()

    def end(self) -> None:
        """Get nothing more, and handle nothing of what waits. Idempotent."""
        self.closed = True
        self._router.remove(self)
        self._inbox.clear()

    async def close(self) -> None:
        """See `Subscription.close`."""
        self.end()


class Asker:
    """One answer that somebody waits for."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def take(self, packet: Packet) -> None:
        """The answer; only the first one counts."""
        if packet.error is not None:
            self.fail(packet.error)
        elif not self.answer.done():
            self.answer.set_result(packet.message.data)

    def arrived(self) -> None:
        """End a wait that has no answer but its end."""
        if not self.answer.done():
            self.answer.set_result(b"")

    def fail(self, error: Exception) -> None:
        """End the wait with this error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Router:
    """Brings packets to their receivers, in the order (time of arrival, sequence number).

    Args:
        latency_s: from publisher to subscriber.
        deliver: faults; None delivers everything once.
    """

    def __init__(self, latency_s: float, deliver: DeliveryPolicy | None) -> None:
        self.latency_s = latency_s
        self.deliver = deliver
        self.askers: dict[str, Asker] = {}
        """By the inbox on which each expects its answer."""
        self._exact: dict[str, list[Subscriber]] = {}
        self._wild: list[tuple[list[str], Subscriber]] = []
        self._wanting: dict[str, list[Subscriber]] = {}  # found before, by subject; emptied when it may be wrong
        self._next_members: dict[str, int] = {}
        self._on_the_way: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = 0.0
        self._paused = False
        self._context = contextvars.copy_context()  # the broker's own, whoever sends

    def next_number(self) -> int:
        """Return a number that this router never returned before."""
        self._sequence += 1
        return self._sequence

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call the action after the delay, and after everything that was due before it."""
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        heapq.heappush(self._on_the_way, (when, self.next_number(), action))
        if self._timer is None or when < self._armed_s:
            self._arm(loop)

    def pause(self) -> None:
        """Let nothing arrive until `go_on`; what is on its way waits."""
        self._paused = True

    def go_on(self) -> None:
        """Let what has waited arrive, in its order. Idempotent."""
        self._paused = False
        if self._on_the_way:
            self._arm(asyncio.get_running_loop())

    @property
    def num_on_the_way(self) -> int:
        """Messages and timers that have not arrived."""
        return len(self._on_the_way)

    def num_subscriptions(self, name: str) -> int:
        """Return how many subscriptions the connections of a name have."""
        exact = (subscriber for subscribers in self._exact.values() for subscriber in subscribers)
        return sum(subscriber.name == name for subscriber in (*exact, *(each for _, each in self._wild)))

    def send(self, packet: Packet) -> None:
        """Let the packet travel to whoever subscribes when it arrives."""
        self.after(self.latency_s, partial(self._route, packet))

    def add(self, subscriber: Subscriber) -> None:
        """Route messages to the subscriber from now on."""
        self._wanting.clear()
        if has_wildcard(subscriber.pattern):
            self._wild.append((subscriber.pattern.split("."), subscriber))
        else:
            self._exact.setdefault(subscriber.pattern, []).append(subscriber)

    def remove(self, subscriber: Subscriber) -> None:
        """Route nothing more to the subscriber. Idempotent."""
        self._wanting.clear()
        if has_wildcard(subscriber.pattern):
            self._wild = [entry for entry in self._wild if entry[1] is not subscriber]
            return
        rest = [other for other in self._exact.pop(subscriber.pattern, []) if other is not subscriber]
        if rest:
            self._exact[subscriber.pattern] = rest

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = self._on_the_way[0][0]
        self._timer = loop.call_at(self._armed_s, self._pump, context=self._context)

    def _pump(self) -> None:
        """Do everything that is due."""
        loop = asyncio.get_running_loop()
        now_s = max(loop.time(), self._armed_s)  # a loop may run a timer up to its clock's resolution too early
        self._timer = None
        on_the_way = self._on_the_way
        while on_the_way and on_the_way[0][0] <= now_s and not self._paused:
            heapq.heappop(on_the_way)[2]()
        if on_the_way and not self._paused and self._timer is None:
            self._arm(loop)

    def _route(self, packet: Packet) -> None:
        message = packet.message
        receivers: list[Subscriber | Asker] = [*self._matching(message.subject)]
        asker = self.askers.get(message.subject)
        if asker is not None:
            receivers.append(asker)
        for receiver in receivers:
            self._hand_over(packet, receiver)
        if not receivers and message.reply and (waiting := self.askers.get(message.reply)) is not None:
            self.after(self.latency_s, partial(_fail, waiting, NoRespondersError(message.subject)))

    def _matching(self, subject: str) -> list[Subscriber]:
        """Return who gets a message: each plain subscriber, and one member of each queue group."""
        wanting = self._wanting.get(subject)
        if wanting is None:
            wanting = self._find_wanting(subject)
        found = [subscriber for subscriber in wanting if subscriber.link.is_up]
        groups: dict[str, list[Subscriber]] = {}
        for subscriber in found:
            if subscriber.queue:
                groups.setdefault(subscriber.queue, []).append(subscriber)
        if not groups:
            return found
        chosen = [subscriber for subscriber in found if not subscriber.queue]
        for queue, members in groups.items():
            index = self._next_members.get(queue, 0)
            self._next_members[queue] = index + 1
            chosen.append(members[index % len(members)])
        return chosen

    def _find_wanting(self, subject: str) -> list[Subscriber]:
        """Return whose pattern a subject matches, and remember them."""
        tokens = subject.split(".")
        found = [*self._exact.get(subject, ())]
        found += [subscriber for pattern, subscriber in self._wild if matches(pattern, tokens)]
        if len(self._wanting) >= MAX_REMEMBERED_SUBJECTS:  # every answer has a subject of its own
            self._wanting.clear()
        self._wanting[subject] = found
        return found

    def _hand_over(self, packet: Packet, receiver: Subscriber | Asker) -> None:
        if not receiver.link.receives:
            return
        if self.deliver is None:
            receiver.take(packet)
            return
        message = packet.message
        delivery = Delivery(packet.sender, receiver.name, message.subject, len(message.data))
        for extra_s in self.deliver(delivery):
            if extra_s > 0:
                self.after(extra_s, partial(_arrive_late, receiver, packet))
            else:
                receiver.take(packet)


def _arrive_late(receiver: Subscriber | Asker, packet: Packet) -> None:
    if receiver.link.receives:
        receiver.take(packet)


def _fail(asker: Asker, error: Exception) -> None:
    if asker.link.receives:
        asker.fail(error)
