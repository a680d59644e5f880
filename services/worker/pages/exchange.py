"""The stages of a group that forms on one device hand over pages: all of them, or none.

    stage 0, the leader               stages 1 and following
    dials each door ────────────────► each waits at a door of its own, a socket of the file system
    flow by flow, in one order for all:  descriptors, at most `BATCH_PAGES` at a time, each batch answered;
                                         between two others they go through the leader
    maps what has come                maps what has come
                    ◄──── mapped ────
    all have?       ──── commit ───►  keeps it, forgets what it gave
    else            ───── undo ────►  all is as it was

A stage that has said `mapped` does what the leader says. If the leader's process is gone by then, a group of two undoes
it: nobody else has these pages. In a larger one others may have been told to commit, so pages might be in use twice:
their memory counts as lost, and the worker has to start anew. So it is if the leader says nothing for long.

Source: KunServe v2, section 4.2; the hand-over and its agreement (two-phase commit) are ours.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from services.worker.memory.change import MemoryLostError
from services.worker.memory.page_swap import PagesKeptError, PageSwap
from services.worker.memory.pool import Place
from services.worker.memory.ranges import PageHandle
from services.worker.pages.flows import PageFlow
from services.worker.pages.wire import BATCH_PAGES, PageSocket
from services.worker.peers.frames import FrameKind, PeerLostError
from shared.errors import WireError

DECISION_S: Final = 5.0
"""How much longer a stage waits for what the leader decides than the leader may take."""


class PageExchange:
    """One stage's part. All calls are made in one thread.

    Args:
        stage: this one; 0 leads.
        num_stages: of the group.
        socks: of the leader to all others by stage, of another stage to the leader.
        limit_s: seconds for all of it.
    """

    def __init__(self, stage: int, num_stages: int, socks: dict[int, PageSocket], limit_s: float) -> None:
        self._stage = stage
        self._num_stages = num_stages
        self._socks = socks
        self._limit_s = limit_s

    def carry_out(self, flows: Sequence[PageFlow], swap: PageSwap) -> None:
        """Hand pages over, and commit the swap.

        Args:
            flows: of all stages, the same at each of them.
            swap: of this stage's memory.

        Raises:
            PagesKeptError: nobody has handed over anything.
            MemoryLostError: it cannot be known whether the others have.
        """
        self._limit(self._limit_s)
        (self._lead if self._stage == 0 else self._follow)(flows, swap)

    def _lead(self, flows: Sequence[PageFlow], swap: PageSwap) -> None:
        try:
            self._move(flows, swap)
            swap.apply()
            for sock in self._socks.values():
                sock.expect(FrameKind.PAGES_MAPPED)
            self._limit(DECISION_S)
            self._commit()
        except BaseException as error:
            self._limit(DECISION_S)
            for sock in self._socks.values():
                with contextlib.suppress(OSError):  # it has gone: nobody is left there to do anything
                    sock.say(FrameKind.PAGES_UNDO)
            raise self._undone(swap, error) from error
        swap.commit()

    def _follow(self, flows: Sequence[PageFlow], swap: PageSwap) -> None:
        leader = self._socks[0]
        try:
            self._move(flows, swap)
            swap.apply()
            leader.say(FrameKind.PAGES_MAPPED)
        except BaseException as error:
            leader.close()
            raise self._undone(swap, error) from error
        self._limit(self._limit_s + 2 * DECISION_S)
        try:
            word = leader.expect(FrameKind.PAGES_COMMIT, FrameKind.PAGES_UNDO)
        except PeerLostError as error:
            if self._num_stages > 2:
                raise MemoryLostError("the leader has gone, and may have told others to keep pages") from error
            raise self._undone(swap, error) from error
        except (OSError, WireError) as error:
            raise MemoryLostError(f"the leader does not say who keeps which pages: {error}") from error
        if word is FrameKind.PAGES_COMMIT:
            swap.commit()
        else:
            raise self._undone(swap, PagesKeptError("another stage could not"))

    def _move(self, flows: Sequence[PageFlow], swap: PageSwap) -> None:
        """Send and receive what is this stage's part; the leader passes on what is between others."""
        for flow in flows:
            if flow.source == self._stage:
                self._give(self._socks[flow.target if self._stage == 0 else 0], flow, swap.export)
            elif flow.target == self._stage:
                self._take(self._socks[flow.source if self._stage == 0 else 0], flow, swap.adopt)
            elif self._stage == 0:
                self._pass_on(flow)

    def _give(self, sock: PageSocket, flow: PageFlow, export: Callable[[Place | None], PageHandle]) -> None:
        for places in _batches(flow.at_source):
            handles: list[PageHandle] = []
            try:
                for place in places:
                    handles.append(export(place))  # one by one: what is open when one fails is to be closed
                sock.give(handles)
            finally:
                for handle in handles:
                    os.close(handle.descriptor)

    def _take(self, sock: PageSocket, flow: PageFlow, adopt: Callable[[Place | None, PageHandle], None]) -> None:
        for places in _batches(flow.at_target):
            with sock.taking(len(places)) as handles:
                for place, handle in zip(places, handles, strict=True):
                    adopt(place, handle)

    def _pass_on(self, flow: PageFlow) -> None:
        for places in _batches(flow.at_source):
            with self._socks[flow.source].taking(len(places)) as handles:
                self._socks[flow.target].give(handles)

    def _limit(self, limit_s: float) -> None:
        for sock in self._socks.values():
            sock.deadline_s = time.monotonic() + limit_s

    def _commit(self) -> None:
        """Tell the others to keep what they have; if the first one cannot be told, nobody is, and it raises."""
        is_told = False
        for sock in self._socks.values():
            try:
                sock.say(FrameKind.PAGES_COMMIT)
                is_told = True
            except OSError:
                sock.close()  # so that it does not wait
                if not is_told:
                    raise

    def _undone(self, swap: PageSwap, error: BaseException) -> BaseException:
        """Undo a swap, and return what is raised then; `MemoryLostError` is raised."""
        if isinstance(error, MemoryLostError):
            return error
        swap.undo()
        if not isinstance(error, Exception):
            return error
        is_own = not isinstance(error, PeerLostError | TimeoutError | WireError | PagesKeptError)
        return PagesKeptError(f"{type(error).__name__}: {error}", is_own=is_own)


def _batches(places: Iterable[Place | None]) -> Iterator[list[Place | None]]:
    rest = iter(places)
    while batch := list(islice(rest, BATCH_PAGES)):
        yield batch
