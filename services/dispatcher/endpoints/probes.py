"""What orchestrators, scrapers and operators ask: /live /ready /health /version /metrics /errors/… /v1/cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from pydantic.main import IncEx

from services.dispatcher.http.errors import HELP_PREFIX, ApiError
from services.dispatcher.http.front import Front
from shared.troubleshooting import sections
from shared.version import VERSION

_WORKERS_AT_ONCE: Final = 128
"""Rows of `/v1/cluster` that are made in one turn of the event loop."""
_UNTOLD_OF_REPORT: Final[Mapping[str, IncEx | bool]] = {"prefixes": True, "migration": {"shared_prefixes"}}
"""Made of prompts: who guesses one, of whatever tenant, could see that it was there."""


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=json.dumps(content).encode(), content_type="application/json")


def _not_ready_because(front: Front) -> str:
    """Return why requests cannot be served now; "" if they can."""
    sessions = front.sessions
    if sessions.draining:
        return "draining"
    if not front.access.knows_keys:
        return "the file of keys cannot be used"
    if not front.bus.connected:
        return "the broker cannot be reached"
    if sessions.cluster.num_ready == 0:
        return "the model is loading" if sessions.cluster.num_loading else "no worker is alive"
    return ""


async def live(_front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Answer at all: the event loop responds."""
    return _json({"status": "live"})


async def ready(front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Say whether new requests would be served, and what the workers are doing."""
    reason = _not_ready_because(front)
    workers = [
        {
            "worker_id": status.report.worker_id,
            "phase": status.report.phase.value,
            "liveness": status.liveness.value,
            "progress_ratio": status.report.progress_ratio,
            "progress_text": status.report.progress_text,
        }
        for status in front.sessions.cluster.statuses
    ]
    return _json({"ready": not reason, "reason": reason, "workers": workers}, 503 if reason else 200)


async def health(front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Answer 200 or 503 as `ready` does, without details."""
    reason = _not_ready_because(front)
    return _json({"status": reason or "ok"}, 503 if reason else 200)


async def version(_front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return the version of this release."""
    return _json({"version": VERSION})


async def explain(_front: Front, request: web.BaseRequest, _public_id: str) -> web.Response:
    """Say what an error means, how to see why it came, and what to do.

    Raises:
        ApiError: 404, no error has this name.
    """
    text = sections().get(request.path.removeprefix(HELP_PREFIX))
    if text is None:
        raise ApiError(404, "not_found", "No error has this name. `sluice explain` lists those that there are.")
    return web.Response(text=text, content_type="text/markdown", charset="utf-8")


async def metrics(front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return everything that is counted, in Prometheus's text format."""
    num_cut = front.streams.num_cut + front.sockets.num_cut
    is_ready = not _not_ready_because(front)
    body, content_type = front.metrics.render(
        front.sessions, front.bus, front.doorway, num_cut, front.now(), is_ready=is_ready
    )
    return web.Response(body=body, headers={"Content-Type": content_type})


async def cluster(front: Front, _request: web.BaseRequest, _public_id: str) -> web.Response:
    """Return the monitor's last view, its age, and this dispatcher's own counts."""
    state = front.sessions.cluster
    view = state.view
    head = {} if view is None else view.model_dump(mode="json", exclude={"workers", "part", "num_parts", "facts"})
    workers = () if view is None else view.workers
    own = {
        "instance_id": front.settings.instance_id,
        "model": front.model,
        "draining": front.sessions.draining,
        "broker_connected": front.bus.connected,
        "num_requests": len(front.sessions.table),
        "num_queued": front.sessions.num_queued,
        "num_streams": len(front.streams),
        "num_connections": front.doorway.num_open,
    }
    age_s = None if view is None else round(front.now() - state.viewed_s, 3)
    content = {**head, "cluster": front.settings.cluster, "age_s": age_s, "dispatcher": own}
    rows: list[bytes] = []
    for index, status in enumerate(workers, start=1):
        rows.append(status.model_dump_json(exclude={"report": _UNTOLD_OF_REPORT}).encode())
        if index % _WORKERS_AT_ONCE == 0:
            await asyncio.sleep(0)
    body = b'%b,"workers":[%b]}' % (json.dumps(content).encode().removesuffix(b"}"), b",".join(rows))
    return web.Response(body=body, content_type="application/json")
