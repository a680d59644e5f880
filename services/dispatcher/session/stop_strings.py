"""Stop strings in a text that comes piece by piece: what may be shown, and where it ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Ends the text just before the stop string that is completed first; of two completed together, the longer one.

    How the text is cut into pieces makes no difference. The end of a piece that could be the beginning of a stop string
    is held back until it is decided.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string ended it."""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        num_held = self._num_undecided(text)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return what was held back; the text ends here."""
        text, self._held = self._held, ""
        return text

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
