"""Control messages as bytes: typed, size-limited msgpack; JSON for what operators read. The only codec of the project.

Whatever arrives, `decode` either returns a message that passed every check of its model or raises `WireError`: no other
exception, no class looked up by a name on the wire, no memory beyond a small multiple of the size limit. In order:

    size ─► checksum (msgpack) ─► msgpack or JSON under limits ─► a map ─► version (same major) ─► kind ─► the model

Version and kind come before the model, so that a message of another major version, whose fields may mean anything, is
refused by its version. Unknown fields are ignored at every depth (also inside values whose own model refuses them), so
that a newer minor version may add some. Values are read leniently where nothing is lost (1.0 for 1); what comes out has
the declared types.

    submit (msgpack): {"version": 3, "kind": "submit", "request_id": "r-1", "stream": 7, …, "sampling": {…}}

Msgpack ends with a checksum (`shared.checksum`). JSON has none: people read and write it, and no answer is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from shared.checksum import check_seal, seal
from shared.errors import WireError, WireSizeError, WireVersionError
from shared.messages.base import PROTOCOL_VERSION, ControlMessage
from shared.reading import parse_json
from shared.transport.bus import MAX_PAYLOAD_BYTES

__all__ = [
    "MAX_MESSAGE_BYTES",
    "WireError",
    "WireSizeError",
    "WireVersionError",
    "decode",
    "decode_json",
    "decode_union",
    "decode_union_json",
    "encode",
    "encode_json",
    "encode_json_rows",
    "pack_rows",
    "read_fields",
    "read_index",
]

MAX_MESSAGE_BYTES: Final = MAX_PAYLOAD_BYTES
"""Largest encoded message, in both directions; what the broker carries."""
MAX_CONTAINERS: Final = 4096
"""Most maps and arrays in one msgpack message: an empty map is one byte on the wire and 64 in memory."""
MAX_DEPTH: Final = 16
"""Deepest nesting of maps and arrays in msgpack (JSON: the parser's own limit of about 200)."""
_MAX_STR_BYTES: Final = 64 * 1024
_MAX_ARRAY_ITEMS: Final = 65_536
_MAX_MAP_ITEMS: Final = 1024

M = TypeVar("M", bound=ControlMessage)
T = TypeVar("T")


def encode(message: ControlMessage, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the message as msgpack.

    Args:
        message: for the bus, or for workers' connections to each other, which carry larger ones.
        max_bytes: that it may have.

    Raises:
        WireSizeError: it would be larger.
        WireError: it has an integer that msgpack cannot carry (over 64 bits; JSON can).
    """
    name = type(message).__name__
    try:
        data = seal(msgpack.packb(message.model_dump(), use_bin_type=True))
    except OverflowError:
        raise WireError(f"{name} has an integer of more than 64 bits") from None
    return _check_size(data, name, max_bytes)


def decode(data: bytes, kind: type[M], max_bytes: int = MAX_MESSAGE_BYTES) -> M:
    """Return the message of this type that the msgpack bytes hold; `max_bytes` as in `encode`.

    Raises:
        WireError: they hold anything else; the reason names it without repeating the contents.
    """
    return _validate(_unpack(_check_size(data, kind.__name__, max_bytes), kind.__name__), kind)


def decode_union(data: bytes, adapter: TypeAdapter[T], max_bytes: int = MAX_MESSAGE_BYTES) -> T:
    """Return the message that the msgpack bytes hold, of whichever type of the adapter's union its `kind` says.

    `max_bytes` as in `encode`. Raises `WireError` as `decode`.
    """
    return _validate_union(_unpack(_check_size(data, "message", max_bytes), "message"), adapter)


def encode_json(message: ControlMessage) -> bytes:
    """Return the message as JSON (UTF-8, one line).

    Raises:
        WireSizeError: it would be over `MAX_MESSAGE_BYTES`.
        WireError: it has a field that JSON cannot carry (bytes that are no text).
    """
    name = type(message).__name__
    try:
        data = message.model_dump_json().encode()
    except PydanticSerializationError:
        raise WireError(f"{name} has a field that JSON cannot carry") from None
    return _check_size(data, name)


def encode_json_rows(message: ControlMessage, field: str, rows: Sequence[bytes]) -> bytes:
    """Return the message as JSON with rows that are JSON already as its list of this name, whatever it holds itself.

    Raises:
        WireSizeError: it would be over `MAX_MESSAGE_BYTES`.
    """
    head = message.model_dump_json(exclude={field}).encode().removesuffix(b"}")
    return _check_size(b'%b,"%b":[%b]}' % (head, field.encode(), b",".join(rows)), type(message).__name__)


def pack_rows(rows: Sequence[bytes], max_bytes: int) -> list[Sequence[bytes]]:
    """Return the rows in their order, in as few lists as hold so many bytes each; of a row that is larger one alone.

    There is always a first list; it is empty if there are no rows.
    """
    starts, num_bytes = [0], 0
    for index, row in enumerate(rows):
        num_bytes += len(row) + 1  # the comma
        if num_bytes > max_bytes and index > starts[-1]:
            starts.append(index)
            num_bytes = len(row) + 1
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def decode_json(data: bytes, kind: type[M], max_bytes: int = MAX_MESSAGE_BYTES) -> M:
    """Return the message of this type that the JSON bytes hold.

    Args:
        data: of one message of the bus; of an HTTP answer, which may be larger, with its own limit.
        kind: of the message.
        max_bytes: most bytes that are read.

    Raises:
        WireError: as `decode`.
    """
    return _validate(_parse_json(_check_size(data, kind.__name__, max_bytes)), kind)


def decode_union_json(data: bytes, adapter: TypeAdapter[T]) -> T:
    """Return the message that the JSON bytes hold, of whichever type of the adapter's union its `kind` says.

    Raises:
        WireError: as `decode`.
    """
    return _validate_union(_parse_json(_check_size(data, "message")), adapter)


def read_fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a message, msgpack or JSON, of any version and kind: for tools that show what they see.

    The limits of `decode` hold; nothing is checked beyond them.

    Raises:
        WireError: the bytes hold no map of fields within the limits.
    """
    _check_size(data, "message")
    return _parse_json(data) if data[:1] == b"{" else _unpack(data, "message")


def read_index(data: bytes) -> int:
    """Return the number that an operator asks for: decimal digits, or nothing for 0.

    Raises:
        WireError: the payload is neither.
    """
    text = data.strip()
    if text and not (text.isdigit() and len(text) < 20):
        raise WireError("expected a number in decimal digits, or nothing")
    return int(text or b"0")


def _check_size(data: bytes, what: str, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    if len(data) > max_bytes:
        raise WireSizeError(what, len(data), max_bytes)
    return data


class _ContainerCount:
    """Counts maps and arrays while a message is unpacked, and stops it at the limit."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, container: Any) -> Any:
        self.count += 1
        if self.count > MAX_CONTAINERS:
            raise WireError(f"more than {MAX_CONTAINERS} maps and arrays")
        return container


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} is not part of the protocol")


def _unpack(data: bytes, what: str) -> dict[str, Any]:
    body = check_seal(data, what)
    count = _ContainerCount()
    try:
        fields = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_hook=count,
            list_hook=count,
            ext_hook=_refuse_extension,
            max_str_len=_MAX_STR_BYTES,
            max_bin_len=len(data),
            max_array_len=_MAX_ARRAY_ITEMS,
            max_map_len=_MAX_MAP_ITEMS,
            max_ext_len=0,
        )
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack within the limits ({type(error).__name__})") from None
    if count.count > MAX_DEPTH:  # fewer containers cannot nest deeper
        _check_depth(fields, MAX_DEPTH)
    return _require_map(fields)


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(data)
    except ValueError:
        raise WireError("not JSON within the limits") from None
    return _require_map(fields)


def _check_depth(value: Any, max_depth: int) -> None:
    if max_depth == 0:
        raise WireError(f"maps and arrays nest deeper than {MAX_DEPTH}")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            _check_depth(item, max_depth - 1)


def _require_map(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise WireError(f"a message is a map of fields, this is a {type(fields).__name__}")
    return fields


def _check_version(fields: dict[str, Any]) -> None:
    version = fields.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise WireError("the message has no version")
    if version != PROTOCOL_VERSION:
        raise WireVersionError(_short(version), PROTOCOL_VERSION)


def _short(value: object) -> str:
    """Return at most 40 printable characters of something that a stranger sent."""
    text = str(value) if not isinstance(value, int) or abs(value) < 2**64 else "with a huge number"
    return "".join(char if char.isprintable() else "?" for char in text[:40])


def _validate(fields: dict[str, Any], kind: type[M]) -> M:
    _check_version(fields)
    declared = kind.model_fields.get("kind")
    if declared is not None:
        _check_kind(fields, expected=str(declared.default))
    return _run_model(lambda: kind.model_validate(fields, extra="ignore"), kind.__name__)


def _check_kind(fields: dict[str, Any], expected: str) -> None:
    found = fields.get("kind")
    if not isinstance(found, str):
        raise WireError(f"the message has no kind, expected '{expected}'")
    if found != expected:
        raise WireError(f"expected a message of kind '{expected}', got '{_short(found)}'")


def _validate_union(fields: dict[str, Any], adapter: TypeAdapter[T]) -> T:
    _check_version(fields)
    found = fields.get("kind")
    if not isinstance(found, str):
        raise WireError("the message has no kind")
    return _run_model(lambda: adapter.validate_python(fields, extra="ignore"), f"message of kind '{_short(found)}'")


def _run_model(validate: Callable[[], T], what: str) -> T:
    try:
        return validate()
    except ValidationError as error:
        # "from None": pydantic's text repeats the input, which may be a person's prompt
        raise WireError(_describe(error, what)) from None


def _describe(error: ValidationError, what: str) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(_short(part) for part in first["loc"])
    at = f", field '{where}'" if where else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{what}{at}: {first['type'].replace('_', ' ')}{more}"
