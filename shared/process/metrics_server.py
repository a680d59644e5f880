"""`GET /metrics` of a service that has no other HTTP: for a scraper inside of one's own network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from shared.addresses import host_and_port
from shared.browsers import BrowserRules
from shared.errors import StartupError


@asynccontextmanager
async def serve_metrics(
    host: str, port: int, render: Callable[[], tuple[bytes, str]], *, names: Iterable[str] = ()
) -> AsyncIterator[int]:
    """Answer scrapers until the end of the context; nobody else, nothing else, and without a key.

    Args:
        host: address to listen at.
        port: there; 0: one that is free.
        render: returns the text and its content type (`Metrics.render`).
        names: by which scrapers may ask, besides `host`, addresses and localhost.

    Yields:
        The port.

    Raises:
        StartupError: the address cannot be had.
    """
    browsers = BrowserRules((host, *names))

    async def answer(request: web.Request) -> web.Response:
        foreign = browsers.judge(request.raw_path, request.headers)
        if foreign is not None:
            known = "by address, as localhost or by a name of --metrics-allow-host, and from no other page"
            raise web.HTTPForbidden(text=f"{foreign.value}: ask {known}\n")
        body, content_type = render()
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application(client_max_size=1024)
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise StartupError(
                f"cannot listen at {host_and_port(host, port)} for metrics: {error.strerror or error}",
                "Choose another --metrics-port, or 0 for none",
            ) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
