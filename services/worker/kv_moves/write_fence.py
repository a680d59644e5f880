"""Whether threads may still write: from some moment on nobody begins to, and one can wait for those who have begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WritesEndedError(Exception):
    """What was to be written has come too late."""


class WriteFence:
    """Open when made. Thread-safe; writes do not wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_writing = 0
        self._is_shut = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write inside; that should not wait for anything.

        Raises:
            WritesEndedError: the fence is shut.
        """
        with self._changed:
            if self._is_shut:
                raise WritesEndedError("it has come too late")
            self._num_writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_writing -= 1
                self._changed.notify_all()

    def shut(self) -> None:
        """Let no write begin from now on. Idempotent; does not wait."""
        with self._changed:
            self._is_shut = True

    def wait(self) -> None:
        """Return when no write is under way; the fence is shut."""
        with self._changed:
            assert self._is_shut, "more may be written"
            while self._num_writing:
                self._changed.wait()
