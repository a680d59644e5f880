"""Everything that goes wrong, in OpenAI's format, through one function.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "n", "code": "integer_above_max_value",
               "help": "/errors/integer_above_max_value"}}

`help` is ours: where this server says more of the code (`docs/troubleshooting.md`).

Messages name parameters and limits, never paths, subjects, hosts or the text of an exception.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from services.dispatcher.session.request import FailureCode

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RATE_LIMITED: Final = "rate_limit_exceeded"
HELP_PREFIX: Final = "/errors/"
"""Below it there is a page for each code."""
_MAX_MESSAGE_CHARS: Final = 500


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        code: machine-readable, with a section of its own in `docs/troubleshooting.md`; None: none fits.
        message: one or two sentences for a person.
        param: path of the parameter, such as `messages.0.role`.
        headers: besides the usual ones, such as `Allow`.
        retry_after_s: when another try makes sense; None: nothing is said of it, but in `headers`.
        close: the connection cannot be used further (an unread body).
    """

    def __init__(  # noqa: PLR0913  each is a field of the answer
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message[:_MAX_MESSAGE_CHARS]
        self.param = param
        self.headers = dict(headers or {})
        self.close = close
        if retry_after_s is not None:
            self.headers["x-should-retry"] = "true"
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
            self.headers["Retry-After-Ms"] = str(max(1, math.ceil(retry_after_s * 1000)))

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


def invalid(code: str, param: str | None, message: str) -> ApiError:
    """Return the 400 for a bad parameter."""
    return ApiError(400, code, message, param=param)


def unsupported(param: str, message: str = "") -> ApiError:
    """Return the 400 for a parameter that has a meaning, but not here."""
    return invalid("unsupported_parameter", param, message or f"Unsupported parameter: '{param}' is not supported.")


def error_body(error: ApiError) -> bytes:
    """Return the JSON of an error; also the data of an error event in a stream."""
    return json.dumps({"error": error_content(error)}).encode()


def error_content(error: ApiError) -> dict[str, str | None]:
    """Return OpenAI's error object, and where to read more."""
    page = None if error.code is None else HELP_PREFIX + error.code
    return {"message": error.message, "type": error.type, "param": error.param, "code": error.code, "help": page}


def error_response(error: ApiError, request_id: str = "") -> web.Response:
    """Return the answer; the only place where an error becomes one."""
    headers = dict(error.headers)
    if request_id:
        headers["x-request-id"] = request_id
    response = web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=headers
    )
    if error.close:
        response.force_close()
    return response


def error_bytes(error: ApiError, request_id: str) -> bytes:
    """Return the whole answer as it goes over a connection on which no request has been read."""
    body = error_body(error)
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        "Server": "sluice",
        "x-request-id": request_id,
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


_FAILURES: Final[dict[FailureCode, tuple[int, str, float | None]]] = {
    FailureCode.DRAINING: (503, "The server is shutting down. Try again, or another server.", 5.0),
    FailureCode.MODEL_LOADING: (503, "The model is still loading. Try again soon.", 5.0),
    FailureCode.NO_CAPACITY: (503, "No worker can take the request now. Try again soon.", 5.0),
    FailureCode.QUEUE_FULL: (429, "Too many requests are waiting. Try again soon.", 2.0),
    FailureCode.RESOURCE_UNAVAILABLE: (
        429,
        "Resource Unavailable: as many 'flex' requests wait as may. Try again later, or with another 'service_tier'.",
        10.0,
    ),
    FailureCode.TOO_LONG: (400, "The prompt and max_tokens together are longer than the model can hold.", None),
    FailureCode.SUPERSEDED: (409, "The same request, by its idempotency key, goes on over a newer connection.", None),
    FailureCode.REQUEST_FAILED: (500, "The request failed while it was generated.", None),
    FailureCode.TIMED_OUT: (504, "The request took longer than the server allows.", None),
    FailureCode.CANCELLED: (409, "The request was cancelled.", None),
    FailureCode.RESUME_MISMATCH: (
        409,
        "The answer, made anew, does not continue what was sent of it. Ask again, with another Idempotency-Key.",
        None,
    ),
    FailureCode.INTERNAL: (500, "The server failed to handle the request.", None),
}


_NOT_TO_RETRY: Final = (
    FailureCode.REQUEST_FAILED,
    FailureCode.TIMED_OUT,
    FailureCode.CANCELLED,
    FailureCode.SUPERSEDED,
    FailureCode.RESUME_MISMATCH,
)
"""It would cost as much again and end alike, or undo what somebody wants."""


def failure_error(code: FailureCode, prefix: str = "") -> ApiError:
    """Return the error of a request that has no (whole) answer; `prefix` says what part of it failed."""
    status, message, retry_after_s = _FAILURES[code]
    headers = {"x-should-retry": "false"} if code in _NOT_TO_RETRY else {}
    return ApiError(status, code.value, prefix + message, retry_after_s=retry_after_s, headers=headers)
