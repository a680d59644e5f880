"""Who may call what: every path needs a key, except those that are named here. No key configured: everybody may.

Whom a stranger's page sends is turned away before that, on every path and by every method.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from services.dispatcher.access.access import Denial, Denied
from services.dispatcher.access.grants import Grant
from services.dispatcher.http.errors import HELP_PREFIX, RATE_LIMITED, ApiError
from services.dispatcher.http.front import Front
from shared.api_keys import Scope

_GRANT: Final = web.RequestKey("grant", Grant)
_OPEN: Final = frozenset({"/live", "/ready", "/health"})
"""What orchestrators ask, who have no keys."""
_ANY_KEY: Final = frozenset({"/version", "/v1/models"})
_SCOPES: Final = {"/metrics": Scope.METRICS, "/v1/cluster": Scope.METRICS, "/v1/requests": Scope.METRICS}
_PREFIXES: Final = (("/admin/", Scope.ADMIN), ("/v1/files", Scope.BATCH), ("/v1/batches", Scope.BATCH))
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="sluice"'}


def receive(front: Front, request: web.BaseRequest) -> None:
    """Let the request come near.

    Raises:
        ApiError: 403, a page sends it that may not.
    """
    foreign = front.browsers.judge(request.raw_path, request.headers)
    if foreign is not None:
        front.metrics.denied(foreign.value)
        raise ApiError(403, foreign.value, foreign.message)


def authorise(front: Front, request: web.BaseRequest) -> None:
    """Let the request in and note its grant, or refuse it before its body is read.

    Raises:
        ApiError: 401, 403, 429 after many wrong keys, or 503 while no key is known.
    """
    path = request.path
    if path in _OPEN or path.startswith(HELP_PREFIX):  # whose key is wrong may read what that means
        return
    outcome = front.access.authenticate(request.headers.get("Authorization", ""), request.remote or "")
    if isinstance(outcome, Denied):
        front.metrics.denied(outcome.reason.value)
        raise _refusal(outcome)
    scope = _needed(path)
    if scope is not None and scope not in outcome.scopes:
        front.metrics.denied("missing_scope")
        raise ApiError(403, "insufficient_permissions", f"This key does not have the scope '{scope.value}'.")
    request[_GRANT] = outcome


def grant_of(request: web.BaseRequest) -> Grant:
    """Return what the sender may do; the request was let in by `authorise`."""
    return request[_GRANT]


def _needed(path: str) -> Scope | None:
    """Return the scope that a path needs; None: any key will do."""
    if path in _ANY_KEY:
        return None
    for prefix, scope in _PREFIXES:
        if path.startswith(prefix):
            return scope
    return _SCOPES.get(path, Scope.INFER)


def _refusal(denied: Denied) -> ApiError:
    if denied.reason is Denial.TOO_MANY_WRONG_KEYS:
        message = "Too many wrong keys came from this address. Wait before the next one."
        return ApiError(429, RATE_LIMITED, message, retry_after_s=denied.wait_s)
    if denied.reason is Denial.KEYS_UNKNOWN:
        message = "This server cannot read its file of keys, so it lets nobody in. The operator must mend the file."
        return ApiError(503, "keys_unknown", message, retry_after_s=denied.wait_s)
    if denied.reason is Denial.NO_KEY:
        message = "This server asks for a key. Send it as 'Authorization: Bearer <key>'."
    else:
        message = "This key is not known here. Check it, or ask the operator for another one."
    return ApiError(401, "invalid_api_key", message, headers=_CHALLENGE)
