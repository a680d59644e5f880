"""Makes a leader's sequences do with fewer KV blocks before their memory goes, while they run.

    limit n ──► blocks with id >= n go to nobody ──► the next steps copy what lies there ──► within the limit

Source: KunServe v1, section 4.2 (before parameters come back, the KV cache gives their memory up).
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable

from services.worker.engine.engine import Engine

LOOK_S = 0.005
"""Between two looks: a step takes longer."""


class BlocksNeededError(Exception):
    """What sequences hold, or will, does not fit below the limit."""


class BlockLimit:
    """Of one engine; see the module.

    Args:
        engine: whose blocks they are.
        wake: looks at the engine again.
    """

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._wake = wake
        self._kept: int | None = None
        self._now: int | None = None

    async def reach(self, num_blocks: int, given_up: Future[bool]) -> None:
        """Return when only the first blocks are in use, or `given_up` is done. `keep` or `go_back` comes next.

        Raises:
            BlocksNeededError: nothing has changed.
        """
        try:
            self._set(num_blocks)
        except ValueError as error:
            raise BlocksNeededError(str(error)) from error
        while not (self._engine.blocks.is_within_limit or given_up.done()):
            await asyncio.sleep(LOOK_S)

    def keep(self) -> None:
        """The memory is gone: the limit stays."""
        self._kept = self._now

    def go_back(self) -> None:
        """The memory stays: so does the limit of before, if there was one. Idempotent."""
        if self._now != self._kept:
            self._set(self._kept)

    def lift(self) -> None:
        """There is memory behind all blocks again."""
        self._kept = None
        self.go_back()

    def forget(self) -> None:
        """The engine has other blocks now, without a limit."""
        self._kept = self._now = None

    def _set(self, num_blocks: int | None) -> None:
        self._engine.memory.limit(num_blocks)
        self._now = num_blocks
        self._wake()
