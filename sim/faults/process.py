"""A process on the virtual clock: it can stand still, go on, or be gone from one moment to the next.

What belongs to a process is what descends from its first task: each callback, timer and task inherits the context in
which it was made, and the process is a variable of that context. So the services need not know.

    running ──freeze──► frozen: what falls due is kept, in order    (SIGSTOP)
       ▲                   │ thaw: it runs, late
       └───────────────────┘
    either ──kill──► dead: nothing of it runs again                 (SIGKILL)
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import Any, TypeVar

from sim.virtual_time import GATE, VirtualTimeLoop

_T = TypeVar("_T")
_MAX_CLOSINGS = 8
"""Times that a coroutine may go on waiting while it is closed."""


class ProcessState(Enum):
    """What a process does."""

    RUNNING = auto()
    FROZEN = auto()
    DEAD = auto()


class SimProcess:
    """One process; implements `sim.virtual_time.Gate`.

    Args:
        name: for traces.
        loop: the run's.
    """

    def __init__(self, name: str, loop: VirtualTimeLoop) -> None:
        self.name = name
        self.state = ProcessState.RUNNING
        self.on_death: dict[Callable[[], None], None] = {}
        """Called, outside of any process, when it is killed."""
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(GATE.set, self)
        self._kept: list[asyncio.Handle] = []

    def start(self, coroutine: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
        """Run the coroutine in this process."""
        assert self.state is not ProcessState.DEAD, f"{self.name} is dead"
        return self._loop.create_task(coroutine, name=name, context=self._context.copy())

    def admits(self, handle: asyncio.Handle) -> bool:
        """See `Gate`."""
        if self.state is ProcessState.FROZEN:
            self._kept.append(handle)
        return self.state is ProcessState.RUNNING

    @property
    def is_open(self) -> bool:
        """See `Gate`."""
        return self.state is ProcessState.RUNNING

    def freeze(self) -> None:
        """Stand still from now on. Idempotent."""
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.FROZEN

    def thaw(self) -> None:
        """Go on with what fell due meanwhile, in its order. Idempotent."""
        if self.state is ProcessState.FROZEN:
            self.state = ProcessState.RUNNING
            kept, self._kept = self._kept, []
            self._loop.resume(kept)

    def kill(self) -> None:
        """Be gone: nothing of this process runs again. Called from outside. Idempotent."""
        if self.state is ProcessState.DEAD:
            return
        assert GATE.get() is not self, "a process cannot outlive its own end"
        self.state = ProcessState.DEAD
        self._kept.clear()
        while tasks := self._loop.tasks_behind(self):
            self._loop.abandon(self)
            for task in tasks:  # which may make others
                self._context.copy().run(_close, task.get_coro())
        self._loop.abandon(self)
        for action in list(self.on_death):
            action()
        self.on_death.clear()

    @property
    def task_names(self) -> list[str]:
        """Names of its tasks that have not ended, sorted."""
        return sorted(task.get_name() for task in self._loop.tasks_behind(self))


def _close(coroutine: Any) -> None:
    """End a coroutine where it stands. What it does on its way out meets a process and a bus that are dead."""
    for _ in range(_MAX_CLOSINGS):
        try:
            coroutine.close()
        except Exception:  # noqa: S112  nobody is left to hear of it
            continue
        return
    raise AssertionError(f"{coroutine} cannot be closed")
