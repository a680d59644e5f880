"""POST /v1/requests/{id}/cancel: stop a request whose connection cannot, or should not, be closed."""

from __future__ import annotations

import json
from typing import Final

from aiohttp import web

from services.dispatcher.http.errors import ApiError
from services.dispatcher.http.front import Front
from services.dispatcher.http.guard import grant_of

PREFIX: Final = "/v1/requests/"
_SUFFIX: Final = "/cancel"


def is_cancel_path(path: str) -> bool:
    """Return whether the path is that of a cancellation."""
    return path.startswith(PREFIX) and path.endswith(_SUFFIX) and len(path) > len(PREFIX) + len(_SUFFIX)


async def cancel_request(front: Front, request: web.BaseRequest, _public_id: str) -> web.Response:
    """Cancel what the caller calls by this name; doing so again says the same. The body is not read."""
    name = request.path.removeprefix(PREFIX).removesuffix(_SUFFIX)
    state = front.live.cancel(grant_of(request).identity, name)
    if state is None:
        raise ApiError(404, "not_found", "There is no such request. It may run on another server, or be long gone.")
    content = {"id": name, "object": "request.cancellation", "status": state.value}
    return web.Response(body=json.dumps(content).encode(), content_type="application/json")
