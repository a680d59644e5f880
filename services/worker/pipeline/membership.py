"""A worker that computes some layers for the leader of a group, until the pipeline ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from services.worker.peers.link_priority import LinkPriority
from services.worker.peers.threads import in_thread
from services.worker.pipeline.channel import SocketChannel
from services.worker.pipeline.stage import StageDevice
from services.worker.pipeline.thread_stage import StageServer

SILENCE_S = 30.0
"""After so long without a word the leader counts as lost: it says every `ALIVE_PERIOD_S` that it is there, but a step
that it computes comes first."""


class Membership:
    """A `StageServer` that says on the event loop when it has ended.

    Args:
        device: of the stage; owned.
        leader: connection to the leader; owned, as the others.
        previous: to the stage before.
        to_next: to the stage behind; None: this is the last one.
        on_end: called once on the running loop at the end, with the reason if the pipeline is broken, None if the
            leader has closed it; never after `leave`.
        priority: of this worker's connections; None: it has no others.
    """

    def __init__(
        self,
        device: StageDevice,
        leader: socket.socket,
        previous: socket.socket,
        to_next: socket.socket | None,
        on_end: Callable[[str | None], None],
        priority: LinkPriority | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_end: Callable[[str | None], None] | None = on_end
        ahead = SocketChannel(leader, priority, silence_s=SILENCE_S), SocketChannel(previous, priority)
        behind = () if to_next is None else (SocketChannel(to_next, priority),)
        self._channels = (*ahead, *behind)
        self._server = StageServer(device, *ahead, behind[0] if behind else None)
        self._watcher = threading.Thread(target=self._watch, name="stage watcher", daemon=True)
        self._watcher.start()

    async def leave(self) -> None:
        """Leave the pipeline, which breaks it unless it has ended, and wait for the threads. Idempotent."""
        self._on_end = None
        await in_thread(self._break, "stage leaving")

    def _break(self) -> None:
        for channel in self._channels:
            channel.close()  # first: it wakes whoever sends to a stage that takes nothing
        self._server.close()
        self._watcher.join()

    def _watch(self) -> None:
        """Body of the thread."""
        self._server.join()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            self._loop.call_soon_threadsafe(self._say_end)

    def _say_end(self) -> None:
        if self._on_end is not None:
            self._on_end(self._server.reason)
