"""What a worker does of one step of a plan. Each kind has a file beside this one, and a line in `changes.py`.

refusal ─► make_ready, while it serves ─► the gate ─► refusal_at_gate ─► commit ─► carry_out ─► go_back
                                   └─ abort, silence, anything else ──────────────────────────►

A change that is not carried out leaves the worker as it was.
"""

from __future__ import annotations

from abc import abstractmethod
from asyncio import Future
from typing import ClassVar, Protocol

from shared.messages.plan import PreparePlan


class Change(Protocol):
    """Made for one `PreparePlan`, when it comes."""

    done_event: ClassVar[str] = "role_changed"
    """What is logged when it is done."""
    readying: ClassVar[str] = ""
    """What `make_ready` does, in words."""

    @abstractmethod
    def refusal(self) -> str | None:
        """Return why this worker, as it is now, does not take its part; None: it does."""

    def refusal_at_gate(self) -> str | None:
        """The same once the gate is held: its group may have ended meanwhile."""
        return self.refusal()

    async def make_ready(self, limit_s: float, given_up: Future[bool]) -> bool:
        """Do what can be done while the worker serves; `go_back` comes in the end, whatever becomes of the plan.

        Args:
            limit_s: that the plan has.
            given_up: done when it is over.

        Returns:
            Whether that took time.

        Raises:
            BlocksNeededError: it cannot be; nothing has changed.
        """
        del limit_s, given_up
        return False

    @abstractmethod
    async def carry_out(self, asked: PreparePlan) -> int:
        """Take the part that was prepared; the gate is held. Return the KV blocks that there are for its layers then.

        Raises:
            GroupFailedError: it did not come about; the worker has to be made whole.
        """

    def go_back(self) -> None:
        """Give back what was made ready, as far as it was not used. Idempotent."""
