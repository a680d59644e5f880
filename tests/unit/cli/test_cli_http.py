"""Small questions to a dispatcher, whose answers may be large."""

from __future__ import annotations

import aiohttp
import pytest

from cli.bench.server import BenchServer
from cli.exit_codes import CommandError
from cli.http import ask, read_body
from cli.status import run_status
from shared.browsers import Foreign
from tests.support.openai_server import Server, running, say

BODY = bytes(range(256)) * 4096
"""1 MiB, which no single read gives."""


async def test_an_answer_of_many_packets_is_read_to_its_end() -> None:
    async with running(Server(say(BODY))) as url:
        found = await ask(f"{url}/v1/cluster")
    assert (found.status, found.body == BODY) == (200, True)


@pytest.mark.parametrize("limit", [1, 100_000, len(BODY), len(BODY) + 1])
async def test_no_more_is_read_than_allowed(limit: int) -> None:
    async with running(Server(say(BODY))) as url, aiohttp.ClientSession() as session, session.get(url) as response:
        assert await read_body(response, limit) == BODY[:limit]


@pytest.mark.parametrize(
    ("code", "hint"),
    [(Foreign.HOST, "Ask by its address, or start the server with --allow-host"), ("invalid_api_key", "Give a key ")],
)
async def test_who_asks_by_a_name_that_the_server_does_not_know_is_not_sent_for_a_key(code: str, hint: str) -> None:
    no = say({"error": {"code": code}}, 403)
    async with running(Server(no, models=no)) as url, aiohttp.ClientSession() as session:
        with pytest.raises(CommandError, match=rf"403.*{hint}"):
            await run_status(url, as_json=False)
        with pytest.raises(CommandError, match=rf"403.*{hint}"):
            await BenchServer.find(session, url, "", "chat")
