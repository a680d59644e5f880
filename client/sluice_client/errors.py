"""Everything that the SDK raises on purpose.

    SluiceClientError
    ├── APIConnectionError          no answer from the server: refused, unknown host, timeout, closed before headers
    ├── APIResponseError            the server says that it failed, in OpenAI's format
    │   ├── APIStatusError          by an HTTP status other than 200
    │   └── APIStreamError          by an error event in the middle of a stream
    ├── ConnectionLostError         the stream broke off: reset, or silent for too long
    ├── IncompleteStreamError       the stream ended in order, but without a finish reason
    └── ProtocolError               what came is not what OpenAI's protocol says (not SSE, not JSON, too large)

The last three and APIStreamError leave the text so far in the answer; a cut answer never passes for a whole one.
"""

from __future__ import annotations


class SluiceClientError(Exception):
    """Base of all errors of this package."""


class APIConnectionError(SluiceClientError):
    """No response came; the cause is chained."""


class APIResponseError(SluiceClientError):
    """The server reported an error.

    Args:
        message: the server's sentence.
        code: OpenAI's short code, such as "context_length_exceeded", if given.
        kind: OpenAI's `type`, such as "invalid_request_error", if given.
        request_id: for the operator's logs, if given.
    """

    def __init__(
        self, message: str, *, code: str | None = None, kind: str | None = None, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.kind = kind
        self.request_id = request_id


class APIStatusError(APIResponseError):
    """The server answered with an HTTP status that says no.

    Args:
        status: HTTP status.
        code: OpenAI's short code, if given.
        message: the server's sentence.
        request_id: for the operator's logs, if given.
        retry_after_s: seconds to wait before another try, if the server said so.
        kind: OpenAI's `type`, if given.
    """

    def __init__(
        self,
        *,
        status: int,
        code: str | None,
        message: str,
        request_id: str | None,
        retry_after_s: float | None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, code=code, kind=kind, request_id=request_id)
        self.status = status
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


class APIStreamError(APIResponseError):
    """The server failed in the middle of a stream and said so."""


class ConnectionLostError(SluiceClientError):
    """The connection broke, or nothing came for too long, before the answer was finished."""


class IncompleteStreamError(SluiceClientError):
    """The stream ended without a finish reason: the text is a part of the answer."""


class ProtocolError(SluiceClientError):
    """The server sent something that is not OpenAI's protocol."""
