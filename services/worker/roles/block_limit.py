"""Makes a leader's sequences do with fewer KV blocks before their memory goes, while they run.

    limit n ──► blocks with id >= n go to nobody ──► the next steps copy what lies there ──► within the limit
       └─ too much is in use: best effort gives up its KV, if the policy has it give way, else it cannot be

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
        self._has_shed = False
        """Best effort was told to hold no blocks, and no limit has been set since."""
        self._kept: int | None = None
        self._now: int | None = None

    async def reach(self, num_blocks: int, given_up: Future[bool]) -> None:
        """Return when only the first blocks are in use, or `given_up` is done. `keep` or `go_back` comes next.

        Best effort that gives way does so.

        Raises:
            BlocksNeededError: nothing has changed.
        """
        while not self._try(num_blocks):
            await asyncio.sleep(LOOK_S)
            if given_up.done():
                return
        while not (self._engine.blocks.is_within_limit or given_up.done()):
            await asyncio.sleep(LOOK_S)

    def keep(self) -> None:
        """The memory is gone: the limit stays."""
        self._kept = self._now

    def go_back(self) -> None:
        """The memory stays: so does the limit of before, if there was one. Idempotent."""
        if self._now != self._kept or self._has_shed:
            self._set(self._kept)

    def lift(self) -> None:
        """There is memory behind all blocks again."""
        self._kept = None
        self.go_back()

    def forget(self) -> None:
        """The engine has other blocks now, without a limit."""
        self._kept = self._now = None

    def _try(self, num_blocks: int) -> bool:
        """Return whether the limit is set; if not, best effort is about to make room."""
        try:
            self._set(num_blocks)
        except ValueError as error:
            if self._engine.best_effort_gives_way and self._engine.memory.shed(num_blocks):
                self._has_shed = True
                self._wake()
                return False
            self.go_back()
            raise BlocksNeededError(str(error)) from error
        return True

    def _set(self, num_blocks: int | None) -> None:
        self._engine.memory.limit(num_blocks)
        self._now, self._has_shed = num_blocks, False
        self._wake()
