"""GET /v1/models and /v1/models/{id}: answered from memory, also while workers load."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from services.dispatcher.http.arrival import unknown_model
from services.dispatcher.http.front import Front

PREFIX = "/v1/models/"


def _model(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created_unix_s,
        "owned_by": "sluice",
        "root": front.model,
        "max_model_len": front.max_request_tokens,
    }


async def list_models(front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return the one model that is served, under each of its names."""
    return _json({"object": "list", "data": [_model(front, name) for name in front.models]})


async def get_model(front: Front, request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return a model by name; names may contain `/`."""
    name = request.path.removeprefix(PREFIX)
    if name not in front.models:
        raise unknown_model(name)
    return _json(_model(front, name))


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), content_type="application/json")
