"""The JSON body of a request, under limits: size, time, depth, and what JSON is."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.web_protocol import RequestPayloadError

from services.dispatcher.http.errors import ApiError, invalid
from shared.reading import TooManyPartsError, parse_json

MAX_TOP_LEVEL_NAMES: Final = 1000
"""Parameters of one request."""
MAX_PARTS: Final = 200_000
"""Arrays, objects and strings (names too) in one body. Each costs an allocation while every thread stands still."""


async def read_body(request: web.BaseRequest, max_bytes: int, limit_s: float) -> bytes:
    """Return the body, which claims to be JSON.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, "request_timeout", f"The request body did not arrive within {limit_s:g} s.", close=True
        ) from None
    except RequestPayloadError:
        raise ApiError(400, "invalid_body", "The request body is not valid HTTP.", close=True) from None


def _check_headers(request: web.BaseRequest, max_bytes: int) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = "Compressed request bodies are not supported."
        raise ApiError(415, "unsupported_content_encoding", message, close=True)
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = "Send the parameters as JSON, with 'Content-Type: application/json'."
        raise ApiError(415, "unsupported_content_type", message, close=True)
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: web.BaseRequest, max_bytes: int) -> bytes:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        transport = request.transport
        if transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts: list[bytes] = []
    size = 0
    while part := await request.content.readany():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    message = f"The request body is larger than {max_bytes} bytes."
    return ApiError(413, "request_too_large", message, close=True)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object. Strict: UTF-8 without BOM, no NaN or Infinity, no lone surrogates, bounded depth.

    Raises:
        ApiError: 400.
    """
    try:
        value = parse_json(data, max_parts=MAX_PARTS)
    except TooManyPartsError:
        message = f"The request has more than {MAX_PARTS} arrays, objects and strings."
        raise invalid("request_too_large", None, message) from None
    except ValueError as error:
        raise _parse_error(data, str(error)) from None
    if not isinstance(value, dict):
        raise invalid("invalid_json", None, "The request body must be a JSON object.")
    if len(value) > MAX_TOP_LEVEL_NAMES:
        message = f"The request has more than {MAX_TOP_LEVEL_NAMES} parameters."
        raise invalid("request_too_large", None, message)
    return value


def _parse_error(data: bytes, reason: str) -> ApiError:
    if "number out of range" in reason:
        return invalid("integer_above_max_value", None, "The request body has a number with too many digits.")
    if "hex escape" in reason and (path := _surrogate_path(data)) is not None:
        return invalid("invalid_value", path, "A text has half of a surrogate pair, which is no character.")
    if not data:
        return invalid("invalid_json", None, "The request body is empty; send a JSON object.")
    return invalid("invalid_json", None, "The request body is not valid JSON (UTF-8, RFC 8259).")


def _surrogate_path(data: bytes) -> str | None:
    """Return where a text with half of a surrogate pair stands, such as `messages.0.content`.

    By Python's parser, which takes such a text; the parts have been counted.
    """
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, dict):
            pending += [(f"{path}.{str(key)[:64]}", inner) for key, inner in item.items()]
        elif isinstance(item, list):
            pending += [(f"{path}.{index}", inner) for index, inner in enumerate(item)]
        elif isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
            return path.removeprefix(".")
    return None
