"""Where sequences that gave up their blocks ended: who goes on with one of them finds everything before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from shared.prefix_names import RunName

MAX_ENDS: Final = 4096
"""That are remembered, whether their blocks are still there or not."""


class RunEnds:
    """The newest of them."""

    def __init__(self) -> None:
        self._ends: dict[RunName, None] = {}
        """The newest last."""

    def note(self, names: Sequence[RunName]) -> None:
        """A sequence with these full blocks gives them up; where others ended within it is no end any more."""
        for name in names:
            self._ends.pop(name, None)
        if names:
            self._ends[names[-1]] = None
            if len(self._ends) > MAX_ENDS:
                del self._ends[next(iter(self._ends))]

    def newest(self, most: int, is_held: Callable[[RunName], bool]) -> list[RunName]:
        """Return so many of those that are held, the newest first."""
        return list(islice(filter(is_held, reversed(self._ends)), most))
