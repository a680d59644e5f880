"""What a browser is told so that pages of other origins, of those that may ask, can send requests and read answers.

    preflight   OPTIONS, with what the page wants to send and without a key ─► 204: it may
    every answer, also an error or a stream                                 ─► who may read it, and which headers

Source: the Fetch standard, "HTTP-CORS protocol". No cookies take part: answers are for pages that send their key.
"""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from services.dispatcher.limits.tenants import UsageLimit
from shared.browsers import EVERYBODY, BrowserRules

_METHODS: Final = "GET, HEAD, POST"
_MAX_AGE_S: Final = 7200
"""For which a browser remembers a preflight; Chromium's own limit."""
_RATES: Final = (UsageLimit.REQUESTS, UsageLimit.TOKENS)
EXPOSED: Final = (
    *("x-request-id", "x-sluice-one-of", "idempotency-key", "retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{what}-{rate}" for what in ("limit", "remaining", "reset") for rate in _RATES),
    *("allow", "www-authenticate"),
)
"""Headers of answers that mean something to their reader, besides those that every page may read."""
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def page_headers(rules: BrowserRules, request: web.BaseRequest) -> dict[str, str]:
    """Return what an answer says to the page that asked; nothing where pages of other origins may not ask."""
    if not rules.origins:
        return {}
    headers = {"Vary": "Origin"}
    origin = request.headers.get("Origin")
    if origin is not None and rules.allows(origin):
        headers["Access-Control-Allow-Origin"] = EVERYBODY if EVERYBODY in rules.origins else origin
        headers["Access-Control-Expose-Headers"] = ", ".join(EXPOSED)
    return headers


def preflight(rules: BrowserRules, request: web.BaseRequest) -> web.Response | None:
    """Return the answer to a preflight of a page that may ask; None: it is none. `page_headers` come on top.

    It is the same for every path, so that it tells nobody without a key which there are.
    """
    origin = request.headers.get("Origin")
    is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_preflight or origin is None or not rules.allows(origin):
        return None
    wanted = request.headers.get("Access-Control-Request-Headers", "").split(",")
    names = [name.strip() for name in wanted if _TOKEN.fullmatch(name.strip())]
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_S)}
    if names:
        headers["Access-Control-Allow-Headers"] = ", ".join(names)
    return web.Response(status=204, headers=headers)
