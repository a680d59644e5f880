"""What a session's worker is asked about tokens that may be lost, and when next. Only its methods change it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Questions:
    """Of the present attempt."""

    asked_s: float
    """When its worker was last asked, or the attempt began."""
    silence_s: float = 0.0
    """Seconds of silence before the next question; doubles with each."""
    is_suspect: bool = False
    """A message of its worker was lost; one of its tokens may have been in it."""
    num_lost_replies: int = 0
    """Questions in a row to which no token came."""
    is_open: bool = False
    """It is being asked."""

    def begin(self, now_s: float) -> None:
        """An attempt begins, without the faults of the one before."""
        self.num_lost_replies = 0
        self.is_suspect = False
        self.asked_s = now_s

    def accept(self, silence_s: float, *, is_behind: bool) -> None:
        """A worker runs the attempt.

        Args:
            silence_s: before the first question.
            is_behind: it has more tokens than are here.
        """
        self.silence_s = silence_s
        self.is_suspect = is_behind

    def suspect(self) -> None:
        """A token may have been lost."""
        self.is_suspect = True

    def open(self, now_s: float) -> None:
        """Its worker is asked for all that is not here."""
        self.is_open = True
        self.is_suspect = False
        self.asked_s = now_s

    def close(self) -> None:
        """It has answered, or will not."""
        self.is_open = False

    def answer(self) -> None:
        """It has said what it has."""
        self.num_lost_replies = 0

    def miss(self) -> int:
        """It had nothing to say; return how often in a row."""
        self.num_lost_replies += 1
        return self.num_lost_replies

    def hurry(self, silence_s: float) -> None:
        """Ask after so much silence, whatever was before."""
        self.silence_s = silence_s

    def slow_down(self, longest_s: float) -> None:
        """Ask after twice the silence, at most after the longest."""
        self.silence_s = min(self.silence_s * 2, longest_s)
