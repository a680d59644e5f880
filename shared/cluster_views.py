"""How the monitor's view reaches its readers: published to those who listen, stored for those who come later.

The store is a disk's and may be full or slow; the cluster is run from what is published. Either way a view travels in
parts, and the facts of its workers apart (`shared.view_parts`); a reader takes a whole view or keeps the older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Final, Protocol

from pydantic import Field, TypeAdapter

from shared.messages.report import ClusterView, ViewFacts
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.transport.buckets import open_bucket
from shared.transport.bus import Bus, BusError, KeyValue, KvEntry, Message, Subscription
from shared.view_parts import FactsPages, ViewAssembly, encode_parts
from shared.wire import WireError, decode_union_json

VIEW_KEY: Final = "cluster"
"""Key of the newest view's first part in `Subjects.view_bucket`; `cluster.1` is the next one's, and so on."""
FACTS_KEY: Final = "facts"
"""Page 3 of the facts has the key `facts.3`."""
FACTS_PERIOD_S: Final = 10.0
"""After which a page that has not changed is told again, one with each view: for whoever missed it."""
STORE_PART_S: Final = 0.5
"""Time between two stored views, for each part but the first: a large cluster's view is not written to disk each
time. It may be so much older; who finds it hears a newer one at once."""
_MESSAGES: Final[TypeAdapter[ClusterView | ViewFacts]] = TypeAdapter(
    Annotated[ClusterView | ViewFacts, Field(discriminator="kind")]
)


def _part_key(part: int) -> str:
    return f"{VIEW_KEY}.{part}" if part else VIEW_KEY


class ViewWriter:
    """Publishes and stores views; the monitor's.

    Args:
        bus: connected.
        subjects: of the cluster.
        bucket: `Subjects.view_bucket`.
    """

    def __init__(self, bus: Bus, subjects: Subjects, bucket: KeyValue) -> None:
        self._bus = bus
        self._subject = subjects.view()
        self._bucket = bucket
        self._pages = FactsPages()
        self._parts: list[bytes] = []
        self._told: dict[int, tuple[str, float]] = {}
        """Of each page the name under which it was told last, and when."""
        self._unstored: dict[int, None] = {}
        self._next_store_s = float("-inf")

    async def publish(self, view: ClusterView) -> None:
        """Tell those who listen.

        Raises:
            BusError: the bus is closed.
            WireSizeError: a worker's row is larger than a message can be.
        """
        self._pages.take(view.workers)
        names = self._pages.names()
        self._parts = encode_parts(view, names)
        for page in self._due(names):
            await self._bus.publish(self._subject, self._pages.encode(page))
        for data in self._parts:
            await self._bus.publish(self._subject, data)

    async def store(self) -> None:
        """Keep the view that was published last for those who come later, and the pages of facts that changed.

        Raises:
            BusError: the store is full, or does not answer; the next call goes on with what is left.
        """
        now_s = asyncio.get_running_loop().time()
        pages = list(self._unstored)
        parts = (
            self._parts if pages or now_s >= self._next_store_s else []
        )  # pages are of use with the view they are of
        puts = [self._bucket.put(f"{FACTS_KEY}.{page}", self._pages.encode(page)) for page in pages]
        puts += [self._bucket.put(_part_key(part), data) for part, data in enumerate(parts)]
        done = await asyncio.gather(*puts, return_exceptions=True)
        for page, answer in zip(pages, done, strict=False):
            if not isinstance(answer, BaseException):
                del self._unstored[page]
        for answer in done:
            if isinstance(answer, BaseException):
                raise answer
        if parts:
            self._next_store_s = now_s + STORE_PART_S * (len(parts) - 1)

    def _due(self, names: tuple[str, ...]) -> list[int]:
        """Return the pages that have changed, and the one that was told longest ago."""
        now_s = asyncio.get_running_loop().time()
        told = {page: self._told.get(page, ("", 0.0)) for page in range(len(names))}
        due = [page for page, (name, _) in told.items() if name != names[page]]
        oldest = min(told, key=lambda page: told[page][1], default=None)
        if not due and oldest is not None and now_s - told[oldest][1] >= FACTS_PERIOD_S:
            due = [oldest]
        self._told = told | {page: (names[page], now_s) for page in due}
        self._unstored = {page: None for page in self._unstored if page < len(names)} | dict.fromkeys(due)
        return due


class OnView(Protocol):
    """Takes a view."""

    def __call__(self, view: ClusterView, *, is_fresh: bool) -> None:
        """`is_fresh`: it was made just now; the one found in the store may have lain there for days."""


class ViewFeed:
    """The views of a cluster, whole, in the order in which they come.

    Args:
        bus: connected.
        subjects: of the cluster.
        on_view: called with each view.
        on_malformed: called with where it came from and the error of each message that is no view.
    """

    def __init__(
        self, bus: Bus, subjects: Subjects, on_view: OnView, on_malformed: Callable[[str, WireError], None]
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._on_view = on_view
        self._on_malformed = on_malformed
        self._assembly = ViewAssembly()
        self._bucket: KeyValue | None = None
        self._open: list[Subscription] = []
        self._tasks = TaskOwner()
        self._fetching: asyncio.Task[None] | None = None
        self._is_stored = False
        """Whether the view on its way was found in the store."""
        self._is_told = False
        self._has_stored = False

    async def start(self) -> None:
        """Hear views from now on, the stored one first unless a newer one is quicker.

        Raises:
            BusError: the broker does not answer.
        """
        self._open.append(await self._bus.subscribe(self._subjects.view(), self._on_published))
        self._bucket = await open_bucket(self._bus, self._subjects.view_bucket())
        self._open.append(await self._bucket.watch(VIEW_KEY, self._on_stored))

    async def close(self) -> None:
        """Hear none any more."""
        while self._open:
            await self._open.pop().close()
        await self._tasks.close()

    def _on_published(self, message: Message) -> None:
        self._take(message.subject, message.data, is_stored=False)

    def _on_stored(self, entry: KvEntry) -> None:
        if entry.value is not None and not self._is_told:  # what is published is the same, and sooner
            self._take(entry.key, entry.value, is_stored=True)

    def _take(self, where: str, data: bytes, *, is_stored: bool) -> None:
        try:
            message = decode_union_json(data, _MESSAGES)
        except WireError as error:
            self._on_malformed(where, error)
            return
        begins = isinstance(message, ClusterView) and not message.part
        if begins:
            self._is_stored = is_stored
        view = self._assembly.take(message)
        if view is not None:
            self._hand_over(view)
        elif begins and (is_stored or self._assembly.missing) and (self._fetching is None or self._fetching.done()):
            self._fetching = self._tasks.start(self._fetch(), name="the rest of a view")

    def _hand_over(self, view: ClusterView) -> None:
        is_fresh = self._has_stored or not self._is_stored
        self._has_stored = self._has_stored or self._is_stored
        self._is_told = self._is_told or not self._is_stored
        self._on_view(view, is_fresh=is_fresh)

    async def _fetch(self) -> None:
        """Read from the store what the view on its way lacks: pages that were told before this process listened."""
        if self._bucket is None:
            return  # it is not there yet; pages are told again
        keys = [f"{FACTS_KEY}.{page}" for page in self._assembly.missing]
        if self._is_stored:
            keys += map(_part_key, range(1, self._assembly.num_parts))
        try:
            entries = await asyncio.gather(*map(self._bucket.get, keys))
        except BusError as error:
            get_logger().warning("rest_of_view_not_read", error=str(error))  # all of it is told again soon
            return
        for key, entry in zip(keys, entries, strict=True):
            if entry is not None and entry.value is not None:
                self._take(key, entry.value, is_stored=True)
