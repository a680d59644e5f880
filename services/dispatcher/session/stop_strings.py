"""Stop strings in a text that comes piece by piece: what may be shown, and where it ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Ends the text just before the stop string that is completed first; of two completed together, the longer one.

    How the text is cut into pieces makes no difference. The end of a piece that could be the beginning of a stop string
    is held back until it is decided.
    """

    __slots__ = ("_held", "_longest", "_num_spared", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        # characters at the beginning of what is held: a stop string complete by there ends nothing
        self._num_spared = 0

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string ended it.

        Args:
            text: the next piece.
            may_end: False while the answer must go on: what is complete by the end of this piece ends nothing, but what
                began there may.
        """
        text = self._held + text
        if not may_end:
            self._num_spared = len(text)
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop, self._first_place(stop))) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        num_held = self._num_undecided(text)
        cut = len(text) - num_held
        self._held = text[cut:]
        self._num_spared = max(0, self._num_spared - cut)
        return text[:cut], False

    def flush(self) -> str:
        """Return what was held back; the text ends here."""
        text, self._held = self._held, ""
        return text

    def _first_place(self, stop: str) -> int:
        """Return where the stop string may begin: its last character must stand behind what is spared."""
        return max(0, self._num_spared - len(stop) + 1)

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
