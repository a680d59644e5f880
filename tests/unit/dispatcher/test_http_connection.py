"""One connection, fed by hand: what several reads bring before its request has begun."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from services.dispatcher.http.connection import ConnectionServer
from services.dispatcher.http.doorway import Doorway

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n"


class Line(asyncio.Transport):
    """A client that is never there; says whether it would be heard."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.7", 1)})
        self.is_heard = True

    def pause_reading(self) -> None:
        self.is_heard = False

    def resume_reading(self) -> None:
        self.is_heard = True

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        return


@pytest.mark.parametrize("behind", [POST + b" " * 600_000, GET * 60], ids=["a body", "60"])
async def test_what_stands_behind_a_request_before_it_begins_does_not_hide_its_clients_end(behind: bytes) -> None:
    """uvloop reads several times before anything else runs."""
    begun = asyncio.Event()

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled")

    line = Line()
    connection = ConnectionServer(answer, Doorway(1, 1), (), head_limit=8192, head_limit_s=60.0, idle_limit_s=60.0)()
    connection.connection_made(line)
    connection.data_received(GET)
    connection.data_received(behind)
    await begun.wait()
    assert line.is_heard
    connection.connection_lost(None)
