"""Every asyncio task has an owner that awaits it and hears when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shared.process.log import get_logger

R = TypeVar("R")


class TaskOwner:
    """Starts tasks, keeps them until they end, and cancels and awaits those that are left when it is closed.

    A task that raises is logged with its traceback and reported once to `on_failure(name, error)`, on the event loop;
    returning and being cancelled are not failures. Tasks are cancelled in the order in which they started.

    Args:
        on_failure: called for each task that died; typically sets the service's stop event. Must not raise.
        max_tasks: most tasks at a time; a start beyond it is a bug in the caller's own limits.
    """

    def __init__(
        self, on_failure: Callable[[str, BaseException], None] | None = None, *, max_tasks: int = 16_384
    ) -> None:
        self._on_failure = on_failure
        self._max_tasks = max_tasks
        self._tasks: dict[asyncio.Task[Any], None] = {}  # a dict keeps the order of starts; a set of tasks has none
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> TaskOwner:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    def start(self, coroutine: Coroutine[Any, Any, R], *, name: str) -> asyncio.Task[R]:
        """Run the coroutine as a task of this owner.

        Raises:
            RuntimeError: the owner is closed, or already owns `max_tasks`; the coroutine was not started.
        """
        if self._closed or len(self._tasks) >= self._max_tasks:
            coroutine.close()
            reason = "its owner is closed" if self._closed else f"its owner already has {self._max_tasks} tasks"
            raise RuntimeError(f"task '{name}' was not started: {reason}")
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    async def close(self) -> None:
        """Cancel every task that is left and return when all have ended. Idempotent.

        If the caller is cancelled meanwhile, the tasks are still awaited, and then the cancellation goes on.
        """
        self._closed = True
        assert asyncio.current_task() not in self._tasks, "a task cannot close its own owner: it would await itself"
        cancelled: asyncio.CancelledError | None = None
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            try:
                await asyncio.wait(list(self._tasks))
                await asyncio.sleep(0)  # lets the callbacks of the ended tasks run
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        get_logger().error("task died", task=task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)


async def ends_before(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do the work; return whether it came to its end. It is cancelled when somebody wants a stop before."""
    working = asyncio.create_task(work, name="work")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
