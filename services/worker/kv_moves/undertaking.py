"""Work in parts, each in a thread and in a limited time: once a part has failed, no other one begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.worker.peers.threads import in_thread
from shared.process.log import get_logger

_log = get_logger()


class Undertaking:
    """A stage's part of an exchange of KV; on the event loop where nothing else is said.

    Args:
        stage: for the log.
        limit_s: after so many seconds a part is given up.
        shut: lets what is under way end soon; in any thread.
    """

    def __init__(self, stage: int, limit_s: float, shut: Callable[[], None]) -> None:
        self._stage = stage
        self._limit_s = limit_s
        self._shut = shut
        self._begun_s = 0.0
        self.failure: str | None = None
        """Why it has failed, once that is so."""

    async def do(self, work: Callable[[], None]) -> None:
        """Do a part, unless an earlier one has failed."""
        if self.failure is not None:
            return
        limit = asyncio.create_task(self._limit(), name="kv-exchange-limit")
        try:
            await in_thread(work, "KV exchange", interrupt=self._shut)
        except Exception as error:  # whatever network, peers and torch come up with: the group goes on without KV
            self.give_up(f"{type(error).__name__}: {error}")
        finally:
            limit.cancel()

    def give_up(self, reason: str) -> None:
        """Let it fail, if it has not, and what is under way end soon. In any thread."""
        if self.failure is None:
            self.failure = reason
            _log.warning("kv_not_exchanged", stage=self._stage, reason=reason)
        self._shut()

    def extend(self) -> None:
        """Let what is under way take as long as the limit from now on. In any thread."""
        self._begun_s = time.monotonic()

    async def _limit(self) -> None:
        self.extend()
        while (left_s := self._begun_s + self._limit_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        self.give_up(f"it took longer than {self._limit_s:g} s")
