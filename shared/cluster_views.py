"""How the monitor's view reaches its readers: published to those who listen, stored for those who come later.

The store is a disk's and may be full or slow; the cluster is run from what is published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from shared.messages.report import ClusterView
from shared.subjects import Subjects
from shared.transport.buckets import open_bucket
from shared.transport.bus import Bus, KvEntry, Message, Subscription
from shared.wire import WireError, decode_json

VIEW_KEY: Final = "cluster"
"""Key of the newest view in `Subjects.view_bucket`."""


class OnView(Protocol):
    """Takes a view."""

    def __call__(self, view: ClusterView, *, is_fresh: bool) -> None:
        """`is_fresh`: it was made just now; the one found in the store may have lain there for days."""


class ViewFeed:
    """The views of a cluster, in the order in which they come.

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
        self._open: list[Subscription] = []
        self._is_told = False
        self._has_stored = False

    async def start(self) -> None:
        """Hear views from now on, the stored one first.

        Raises:
            BusError: the broker does not answer.
        """
        self._open.append(await self._bus.subscribe(self._subjects.view(), self._on_published))
        bucket = await open_bucket(self._bus, self._subjects.view_bucket())
        self._open.append(await bucket.watch(VIEW_KEY, self._on_stored))

    async def close(self) -> None:
        """Hear none any more."""
        while self._open:
            await self._open.pop().close()

    def _on_published(self, message: Message) -> None:
        self._is_told = self._take(message.subject, message.data, is_fresh=True) or self._is_told

    def _on_stored(self, entry: KvEntry) -> None:
        if entry.value is None or self._is_told:  # what is published is the same, and sooner
            return
        self._has_stored = self._take(entry.key, entry.value, is_fresh=self._has_stored) or self._has_stored

    def _take(self, where: str, data: bytes, *, is_fresh: bool) -> bool:
        try:
            view = decode_json(data, ClusterView)
        except WireError as error:
            self._on_malformed(where, error)
            return False
        self._on_view(view, is_fresh=is_fresh)
        return True
