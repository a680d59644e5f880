"""Ends of steps that a device computes beside the host: a thread waits for them, in the order of the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class StepEnds:
    """What is to be done at the end of steps. Called from one thread, which launches them; that one closes it.

    Where a step is done when it is launched, and so are all before it, its end is seen to at once: on a device that
    does not compute beside the host there is no other thread.

    Args:
        name: of the thread.
        on_failure: called in the thread with whatever an end raises; the ends behind it are seen to all the same.
    """

    def __init__(self, name: str, on_failure: Callable[[Exception], None]) -> None:
        self._name = name
        self._on_failure = on_failure
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        """Steps whose ends have not been seen to."""
        self._thread: threading.Thread | None = None

    def put(self, end: Callable[[], None], *, is_done: bool) -> None:
        """Have the end of the next step seen to, behind those before it.

        Args:
            end: waits for the step.
            is_done: there is nothing to wait for.

        Raises:
            Exception: what `end` raises, if it is called at once.
        """
        with self._changed:
            if not (is_done and self._num_left == 0):
                self._num_left += 1
                self._queue.put(end)
                self._begin()
                return
        end()

    def wait(self, num_left: int = 0) -> None:
        """Return when at most so many steps are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_left <= num_left)

    def close(self) -> None:
        """Return when all ends are seen to and the thread has ended. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """Body of the thread."""
        while (end := self._queue.get()) is not None:
            try:
                end()
            except Exception as error:  # the thread's supervisor: whoever launches hears of it
                self._on_failure(error)
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
