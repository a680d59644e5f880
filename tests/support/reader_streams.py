"""Healthy streams that go on while something is done to the server, and what their readers saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Readers:
    """What was seen, by the index of the stream."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    """Whole texts, one after the other."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two events with text, of all streams."""
    errors: list[str] = field(default_factory=list)

    def percentile_s(self, share: float) -> float:
        """Return a quantile of the gaps."""
        ordered = sorted(self.gaps_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def read_stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any], seen: Readers) -> str:
    """Return the text of one streamed completion.

    Raises:
        AssertionError: it has an error, or did not end in an orderly way.
    """
    pieces: list[str] = []
    ended, last_s = False, None
    now = asyncio.get_running_loop().time
    async with http.post(url + "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                ended = True
                continue
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            pieces.append("".join(choice["text"] for choice in event["choices"]))
            if last_s is not None:
                seen.gaps_s.append(now() - last_s)
            last_s = now()
    assert ended, "the stream broke off"
    return "".join(pieces)


async def read_once(http: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]]) -> Readers:
    """Read all of them at once, to their ends."""
    seen = Readers()
    texts = await asyncio.gather(*(read_stream(http, url, body, seen) for body in bodies))
    seen.texts = {index: [text] for index, text in enumerate(texts)}
    return seen


@asynccontextmanager
async def reading(http: aiohttp.ClientSession, url: str, bodies: Sequence[dict[str, Any]]) -> AsyncIterator[Readers]:
    """Read all of them at once, each again when it has ended, until the block ends; then to their ends."""
    seen, stopping = Readers(texts={index: [] for index in range(len(bodies))}), asyncio.Event()

    async def read(index: int) -> None:
        try:
            while not stopping.is_set():
                seen.texts[index].append(await read_stream(http, url, bodies[index], seen))
        except (AssertionError, aiohttp.ClientError) as error:
            seen.errors.append(f"stream {index}: {error!r}")

    tasks = [asyncio.create_task(read(index)) for index in range(len(bodies))]
    try:
        yield seen
    finally:
        stopping.set()
        await asyncio.wait(tasks)
