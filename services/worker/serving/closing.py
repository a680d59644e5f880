"""Whether this worker is closing: whoever empties it has it refuse new requests, each time for a while.

    Close, begins ─► closing ─► Close again, before the time is over ─► … ─► Close for 0 s: open
                        └─ a submission that finds no room elsewhere, or nobody who says it again: open

So nothing has to be undone for who has died, and a need of the moment comes before what fewer workers would save.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.ids import WorkerId
from shared.messages.fetch import Close, Closed
from shared.process.log import get_logger

_log = get_logger()


class Closing:
    """See the module.

    Args:
        now: the worker's clock, seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.open_worker: WorkerId | None = None
        """One that takes requests, as far as is known to who had this one closed."""
        self._now = now
        self._until_s = float("-inf")
        self._why = ""

    @property
    def why(self) -> str:
        """Why nothing new is taken now, in words; empty: it is."""
        return self._why if self._now() < self._until_s else ""

    def answer(self, asked: Close) -> Closed:
        """Do what is asked, unless it goes on with what is over."""
        if asked.for_s and (asked.begins or self.why):
            self.open_worker, self._why = asked.open_worker, asked.why or "its requests are to leave"
            self._until_s = self._now() + asked.for_s
        else:
            self.reopen()
        return Closed(is_closing=bool(self.why))

    def reopen(self) -> None:
        """Take requests again. Idempotent."""
        if self.why:
            _log.info("open_again", was=self._why)
        self._until_s = float("-inf")
