"""A step that was launched, whose output the host may not have yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.worker.contract.batch import BatchOutput


class Launched(Protocol):
    """Where a device computes beside the host, the next step may be launched before this one ends."""

    @property
    def is_done(self) -> bool:
        """`end` has nothing to wait for."""

    def end(self) -> BatchOutput:
        """Return what the step has produced, once, in the order of the steps; from any thread.

        Raises:
            BatchFailedError: it did not finish, for whatever reason.
        """


@dataclass(frozen=True, slots=True)
class EndedStep:
    """A step whose output is known."""

    output: BatchOutput
    is_done: bool = True

    def end(self) -> BatchOutput:
        """Return the output; see `Launched`."""
        return self.output
