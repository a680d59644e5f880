"""Server-sent events from bytes, as WHATWG HTML section 9.2 defines them.

Takes chunks with borders anywhere, inside a line end or a code point too. Deviations: an event that the end of the
stream cuts off is dispatched (some servers leave out the last blank line; what is cut inside is not valid JSON and
fails there), bytes that are not UTF-8 are an error, and sizes are limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sluice_client.errors import ProtocolError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CR, _LF = 13, 10


class SseEvent(NamedTuple):
    """One dispatched event."""

    data: str
    event: str = "message"
    id: str = ""


class SseDecoder:
    """Turns chunks of bytes into events.

    Args:
        max_event_bytes: largest line, and largest sum of data lines of one event.
    """

    def __init__(self, max_event_bytes: int = 1 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._skip_lf = False
        self._is_first_line = True
        self._data: list[str] = []
        self._data_bytes = 0
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> Iterator[SseEvent]:
        """The events that `chunk` completes, in order; to be iterated to its end.

        Raises:
            ProtocolError: a line or an event is too large, or not UTF-8.
        """
        start = 0
        if self._skip_lf and chunk:
            start = int(chunk[0] == _LF)
            self._skip_lf = False
        while (end := _line_end(chunk, start)) >= 0:
            self._keep(chunk[start:end])
            yield from self._take_line()
            start = end + 1
            if chunk[end] == _CR:
                self._skip_lf = start == len(chunk)
                start += int(chunk[start : start + 1] == b"\n")
        self._keep(chunk[start:])

    def close(self) -> Iterator[SseEvent]:
        """The stream has ended: the event that was under way, if any."""
        if self._line:
            yield from self._take_line()
        yield from self._dispatch()

    def _keep(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > self._max_event_bytes:
            raise ProtocolError(f"a line of the event stream is longer than {self._max_event_bytes} bytes")

    def _take_line(self) -> Iterator[SseEvent]:
        raw = bytes(self._line)
        self._line.clear()
        if self._is_first_line:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
            self._is_first_line = False
        if not raw:
            yield from self._dispatch()
            return
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("a line of the event stream is not UTF-8") from error
        name, _, value = line.partition(":")
        self._set_field(name, value.removeprefix(" "), len(raw))

    def _set_field(self, name: str, value: str, num_bytes: int) -> None:
        if name == "data":
            self._data.append(value)
            self._data_bytes += num_bytes
            if self._data_bytes > self._max_event_bytes:
                raise ProtocolError(f"an event of the stream is larger than {self._max_event_bytes} bytes")
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        # a comment (empty name), `retry` (we never reconnect) or an unknown field says nothing

    def _dispatch(self) -> Iterator[SseEvent]:
        data, event = self._data, self._event
        self._data, self._data_bytes, self._event = [], 0, ""
        if data:
            yield SseEvent("\n".join(data), event or "message", self._id)


def _line_end(chunk: bytes, start: int) -> int:
    """Position of the first CR or LF from `start`, -1 if there is none."""
    lf = chunk.find(b"\n", start)
    cr = chunk.find(b"\r", start, lf if lf >= 0 else len(chunk))
    return cr if cr >= 0 else lf
