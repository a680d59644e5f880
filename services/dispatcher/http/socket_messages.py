"""What goes over a WebSocket, as JSON texts; and how much of it a client may send. Pure.

client                                                             server
{"type": "request", "id": "a", "endpoint": "chat", "body": {…}}    {"type": "start", "id": "a", "request_id": "req_…"}
                                                                   {"type": "event", "id": "a", "data": {…}}  …
{"type": "cancel", "id": "a"}                                      {"type": "error", "id": "a", "error": {…}}
                                                                   {"type": "done", "id": "a"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.dispatcher.answers import event_ids, idempotency
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.http.body import parse_object
from services.dispatcher.http.errors import ApiError, error_content, invalid

MAX_NAME_CHARS: Final = 64
ENDPOINTS: Final = ("chat", "completions")
MAX_BURST: Final = 64
"""Messages that a client may send at once."""
MESSAGES_PER_S: Final = 20.0
"""Messages that it may send for long."""
_DONE: Final = b"[DONE]"
_ID: Final = b"id: "
_DATA: Final = b"data: "
_ERROR: Final = b'{"error":'
_MAX_SHORT: Final = 125
_MAX_MEDIUM: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class Request:
    """A client asks for an answer."""

    name: str
    """The client's own: every message about the answer carries it."""
    endpoint: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    """What would be headers over HTTP."""


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A client wants no more of an answer."""

    name: str


class BadMessageError(Exception):
    """A message that means nothing.

    Args:
        name: whose it was, if that could be read.
        error: what to tell the client.
    """

    def __init__(self, name: str | None, error: ApiError) -> None:
        super().__init__(error.message)
        self.name = name
        self.error = error


def parse_message(data: bytes) -> Request | Cancellation:
    """Return what a client says.

    Raises:
        BadMessageError: it is no JSON object, or not one of those above.
    """
    name: str | None = None
    try:
        message = parse_object(data)
        fields = Fields(message)
        name = _name(fields)
        kind = fields.text("type")
        if kind == "cancel":
            return Cancellation(name)
        if kind != "request":
            raise invalid("invalid_value", "type", "'type' must be 'request' or 'cancel'.")
        return _request(name, message, fields)
    except ApiError as error:
        raise BadMessageError(name, error) from None


def _name(fields: Fields) -> str:
    name = fields.text("id")
    if name is None:
        raise invalid("missing_required_parameter", "id", "Give each request an 'id' of your own.")
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        code = "string_above_max_length" if name else "string_below_min_length"
        raise invalid(code, "id", f"'id' must have 1 to {MAX_NAME_CHARS} characters.")
    return name


def _request(name: str, message: Mapping[str, Any], fields: Fields) -> Request:
    endpoint = fields.text("endpoint") or ENDPOINTS[0]
    if endpoint not in ENDPOINTS:
        raise invalid("invalid_value", "endpoint", f"'endpoint' must be one of {', '.join(ENDPOINTS)}.")
    inner = fields.mapping("body")
    if inner is None:
        raise invalid("missing_required_parameter", "body", "'body' must hold the parameters of the request.")
    if inner.values.get("stream") is False:
        raise invalid("invalid_value", "stream", "Answers over a WebSocket are always streamed.")
    headers: dict[str, str] = {}
    for header, field in ((idempotency.HEADER, "idempotency_key"), (event_ids.HEADER, "last_event_id")):
        value = fields.text(field)
        if value is not None:
            headers[header] = value
    return Request(name, endpoint, {**inner.values, "stream": True}, headers)


class MessageBudget:
    """How many messages a client may send: a bucket that fills by the second.

    Args:
        now_s: any clock's.
    """

    def __init__(self, now_s: float) -> None:
        self._left = float(MAX_BURST)
        self._filled_s = now_s

    def take(self, now_s: float) -> bool:
        """Count a message; return whether the client may send it."""
        self._left = min(float(MAX_BURST), self._left + (now_s - self._filled_s) * MESSAGES_PER_S)
        self._filled_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class MessageWriter:
    """Writes the messages about one answer.

    Args:
        name: the client's; None for what belongs to no answer.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str | None) -> None:
        self._name = json.dumps(name).encode()

    def start(self, request_id: str, *, is_resumable: bool, one_of: str | None = None) -> bytes:
        """Return the message that comes before all others; `one_of` is what the header `x-sluice-one-of` would say."""
        more = b',"resumable":true' if is_resumable else b""
        more += b"" if one_of is None else b',"one_of":%b' % json.dumps(one_of).encode()
        return b'{"type":"start","id":%b,"request_id":%b%b}' % (self._name, json.dumps(request_id).encode(), more)

    def events(self, data: bytes) -> list[bytes]:
        """Return the messages for one or more server-sent events of ours; `[DONE]` and comments have none."""
        return [self._event(block) for block in data.split(b"\n\n") if block and not block.endswith(_DONE)]

    def _event(self, block: bytes) -> bytes:
        """Return the message for one event: at most a line with an id, and one with JSON."""
        label = b""
        if block.startswith(_ID):
            event_id, _, block = block.removeprefix(_ID).partition(b"\n")
            label = b',"event_id":"%b"' % event_id
        content = block.removeprefix(_DATA)
        if content.startswith(_ERROR):
            return b'{"type":"error","id":%b,%b' % (self._name, content[1:])
        return b'{"type":"event","id":%b%b,"data":%b}' % (self._name, label, content)

    def error(self, error: ApiError) -> bytes:
        """Return the message for a request that was refused: what its HTTP response would have said."""
        content: dict[str, Any] = {"status": error.status, "error": error_content(error)}
        retry_after_ms = error.headers.get("Retry-After-Ms")
        if retry_after_ms is not None:
            content["retry_after_ms"] = int(retry_after_ms)
        if "x-should-retry" in error.headers:
            content["should_retry"] = error.headers["x-should-retry"] == "true"
        return b'{"type":"error","id":%b,%b' % (self._name, json.dumps(content).encode()[1:])

    def done(self) -> bytes:
        """Return the last message: the name may be used again."""
        return b'{"type":"done","id":%b}' % self._name


def text_frame(payload: bytes) -> bytes:
    """Return a text message as one unmasked frame (RFC 6455, section 5.2)."""
    size = len(payload)
    if size <= _MAX_SHORT:
        return bytes((0x81, size)) + payload
    if size <= _MAX_MEDIUM:
        return b"\x81\x7e" + size.to_bytes(2, "big") + payload
    return b"\x81\x7f" + size.to_bytes(8, "big") + payload
