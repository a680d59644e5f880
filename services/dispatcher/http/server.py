"""The HTTP server: routes, request ids, and one place where every failure becomes an answer.

aiohttp's low-level server is used, so that no 404, 405 or parser error of its own reaches a client as plain text.
"""

from __future__ import annotations

import asyncio
import errno
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from aiohttp import web
from aiohttp.http import HttpVersion11

from services.dispatcher.answers.generate import respond
from services.dispatcher.endpoints import models, probes
from services.dispatcher.endpoints.cancel import cancel_request, is_cancel_path
from services.dispatcher.endpoints.chat import chat_call
from services.dispatcher.endpoints.completions import completion_call
from services.dispatcher.endpoints.open_requests import list_requests
from services.dispatcher.endpoints.tokenize import detokenize, tokenize
from services.dispatcher.http.connection import ConnectionServer, bad_http, head_too_large, unsupported_coding
from services.dispatcher.http.cors import page_headers, preflight
from services.dispatcher.http.errors import HELP_PREFIX, RATE_LIMITED, ApiError, error_response, failure_error
from services.dispatcher.http.front import Front
from services.dispatcher.http.guard import authorise, receive
from services.dispatcher.http.unserved import SOCKET, no_such_url, wrong_method
from services.dispatcher.http.websocket import open_socket, wants_socket
from services.dispatcher.session.request import FailureCode
from shared.errors import StartupError
from shared.process.log import get_logger

_log = get_logger()

Endpoint = Callable[[Front, web.BaseRequest, str], Awaitable[web.StreamResponse]]
Route = Mapping[str, Endpoint]

_HARMLESS_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
CLOSE_LIMIT_S: Final = 5.0
"""Seconds that handlers get to end when the server closes."""
BACKLOG: Final = 1024
"""Connections that the system keeps for us while they wait to be accepted; it may cut this to its own limit."""


def _get(endpoint: Endpoint) -> Route:
    return {"GET": endpoint, "HEAD": endpoint}


_ROUTES: Final[dict[str, Route]] = {
    "/v1/chat/completions": {"POST": partial(respond, chat_call)},
    "/v1/completions": {"POST": partial(respond, completion_call)},
    "/v1/tokenize": {"POST": tokenize},
    "/v1/detokenize": {"POST": detokenize},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
    SOCKET: {"GET": open_socket},
    "/v1/models": _get(models.list_models),
    "/v1/cluster": _get(probes.cluster),
    "/v1/requests": _get(list_requests),
    "/live": _get(probes.live),
    "/ready": _get(probes.ready),
    "/health": _get(probes.health),
    "/version": _get(probes.version),
    "/metrics": _get(probes.metrics),
}
_PROBES: Final = frozenset({"/live", "/ready", "/health", "/metrics"})
"""Answered also where there is no place for another connection."""
_MODEL_ROUTE: Final = _get(models.get_model)
_HELP_ROUTE: Final = _get(probes.explain)
_CANCEL_ROUTE: Final[Route] = {"POST": cancel_request}


def _find(request: web.BaseRequest) -> Endpoint:
    """Return the endpoint.

    Raises:
        ApiError: 400, 404 or 405.
    """
    path = request.path
    route = _ROUTES.get(path)
    if route is None and path.startswith(models.PREFIX):
        route = _MODEL_ROUTE
    if route is None and path.startswith(HELP_PREFIX):
        route = _HELP_ROUTE
    if route is None and is_cancel_path(path):
        route = _CANCEL_ROUTE
    if route is None:
        raise no_such_url(path, _ROUTES, is_handshake=wants_socket(request))
    endpoint = route.get(request.method)
    if endpoint is None:
        raise wrong_method(route, is_handshake=wants_socket(request))
    return endpoint


class HttpServer:
    """Listens, and answers.

    Args:
        front: what the endpoints work with.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._runner: web.ServerRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port.

        Raises:
            StartupError: the address cannot be used.
        """
        front = self._front
        settings = front.settings
        limits = {"head_limit_s": settings.head_limit_s, "idle_limit_s": settings.idle_limit_s}
        server = ConnectionServer(self.handle, front.doorway, _PROBES, head_limit=settings.head_limit, **limits)
        self._runner = web.ServerRunner(server, shutdown_timeout=CLOSE_LIMIT_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise _cannot_listen(host, port, error) from None
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening, and end the connections that are left."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every failure becomes an error in OpenAI's format."""
        public_id = _public_id(request)
        try:
            response = await self._answer(request, public_id)
        except ApiError as error:
            if error.code != RATE_LIMITED:  # a tenant's has its access line, and wrong keys could fill the log
                _log.info("refused", rid=public_id, path=request.path[:100], status=error.status, code=error.code)
            response = error_response(error)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:  # the edge of the process: logged with its request id, and never shown
            _log.exception("internal_error", rid=public_id)
            if request.writer.output_size > 0:
                raise ConnectionError("the answer has begun; breaking the connection is all that is left") from None
            response = error_response(failure_error(FailureCode.INTERNAL))
        if not response.prepared:
            response.headers["x-request-id"] = public_id
            response.headers["Server"] = "sluice"
            response.headers.update(page_headers(self._front.browsers, request))
        return response

    async def _answer(self, request: web.BaseRequest, public_id: str) -> web.StreamResponse:
        front = self._front
        _check_head(request, front.settings.head_limit)
        receive(front, request)
        answer = preflight(front.browsers, request)
        if answer is not None:
            return answer
        authorise(front, request)
        return await _find(request)(front, request, public_id)


def _check_head(request: web.BaseRequest, max_bytes: int) -> None:
    """Look at what the parser lets pass; an `x-request-id` of any length is just replaced.

    Raises:
        ApiError: 431 for a head that is too large, 501 for a transfer coding, 400 for one that HTTP/1.0 does not know.
    """
    size = len(request.raw_path)
    for name, value in request.raw_headers:
        if name.lower() != b"x-request-id":
            size += len(name) + len(value) + 4  # the colon and the space, the end of the line
    if size > max_bytes:
        raise head_too_large(max_bytes)
    coding = request.headers.get("Transfer-Encoding")
    if coding is not None and coding.strip().lower() != "chunked":
        raise unsupported_coding()
    if coding is not None and request.version < HttpVersion11:
        raise bad_http()


def _public_id(request: web.BaseRequest) -> str:
    """Return the client's own request id if it is harmless, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _HARMLESS_ID.match(given) else f"req_{uuid.uuid4().hex}"


def _cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is already in use", "Choose another one with --port", "port_taken")
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} on {host} may not be used by this user", "Choose one above 1023 with --port")
    reason = error.strerror or type(error).__name__
    return StartupError(f"cannot listen on {host}, port {port} ({reason})", "Choose another address with --host")
