"""Chats that stream from live dispatchers while something is disturbed, for tests without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tests.support.fault_cluster import http_session, until
from tests.support.fault_streams import CHAT, Ask, Reader, all_read, ask
from tests.support.waiting import rounds

_WHO = ("a fox", "a hare", "the sea", "a king", "snow", "a mill", "an owl", "a boat")
PROMPTS = [f"Tell me a {kind} story about {who}." for kind in ("short", "long") for who in _WHO]
MAX_TOKENS = 900
"""So many that a disturbance comes long before the end."""
READ_LIMIT_S = 240.0


def read_all(
    urls: Sequence[str], disturb: Callable[[], None] | None = None, *, count: int = 8, max_tokens: int = MAX_TOKENS
) -> list[Reader]:
    """Stream so many prompts at once, in turn from each URL; disturb while all stream; return when all have ended.

    Each is sampled under a seed of its own. Where one has ended before the last has begun, all are asked anew.

    Raises:
        AssertionError: an answer had ended before the disturbance each time.
    """
    asks = [
        ask(f"chat-{seed}", CHAT, prompt=prompt, seed=seed, temperature=0.8, max_tokens=max_tokens)
        for seed, prompt in enumerate(PROMPTS[:count])
    ]
    return asyncio.run(_read_all(urls, asks, disturb))


async def _read_all(urls: Sequence[str], asks: Sequence[Ask], disturb: Callable[[], None] | None) -> list[Reader]:
    for _ in rounds("all stream, and none has ended: ask for more tokens"):
        async with http_session(READ_LIMIT_S) as http:
            async with http.get(f"{urls[0]}/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
            named = [replace(asked, body={**asked.body, "model": model}) for asked in asks]
            readers = [Reader(http, urls[index % len(urls)], asked, {}) for index, asked in enumerate(named)]
            is_met = disturb is None
            if disturb is not None:
                await until(partial(_all_stream, readers), "all stream", 60)
                if not any(reader.told.finish for reader in readers):
                    await asyncio.to_thread(disturb)
                    is_met = True
            await all_read(readers)
        if is_met:
            return readers
    raise AssertionError("rounds have an end")


def _all_stream(readers: Sequence[Reader]) -> bool:
    return all(reader.told.num_events or reader.task.done() for reader in readers)


def texts_of(readers: Sequence[Reader]) -> list[str]:
    """Return the texts of answers that came whole.

    Raises:
        AssertionError: one did not.
    """
    for reader in readers:
        told = reader.told
        assert (told.is_whole, told.error, told.finish) == (True, None, {0: "length"}), (reader.asked.name, told)
    return [reader.told.texts[0] for reader in readers]
