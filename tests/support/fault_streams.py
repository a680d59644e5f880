"""Readers of streams: what was asked, what each reader was told and when, and whether two answers are the same."""

from __future__ import annotations

import asyncio
import io
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import aiohttp

from tests.support.fault_cluster import MODEL_NAME, Cluster, http_session, until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ANSWER_LIMIT_S: Final = 90.0
LASTING_TOKENS: Final = 400
_STORY: Final = "The fox and the old owl went down to the river to look for the lost boat. "


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    path: str
    body: Mapping[str, Any]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))

    @property
    def is_lasting(self) -> bool:
        """Whether its answer is long enough to be struck."""
        return int(self.body["max_tokens"]) >= LASTING_TOKENS


def ask(name: str, path: str, *, stream: bool = True, **more: Any) -> Ask:
    """Return a request for a long answer."""
    said: dict[str, Any]
    if path == CHAT:
        said = {"messages": [{"role": "user", "content": more.pop("prompt", f"Tell me a story about a {name}.")}]}
    else:
        said = {"prompt": more.pop("prompt", f"Once there was a {name}. ")}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"model": MODEL_NAME, "max_tokens": LASTING_TOKENS, "ignore_eos": True, "temperature": 0, "stream": stream}
    return Ask(name, path, {**body, **options, **said, **more})


def mixed_load() -> list[Ask]:
    """Return requests that use everything that a continuation elsewhere must carry on."""
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
    penalised: dict[str, Any] = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.1}
    return [
        ask("fox", CHAT),
        ask("owl", COMPLETIONS),
        ask("king", CHAT, seed=1, **sampled),
        ask("cat", COMPLETIONS, seed=2, **sampled, **penalised),
        ask("boat", CHAT, seed=3, logprobs=True, top_logprobs=3, temperature=0.8),
        ask("tree", COMPLETIONS, seed=4, logprobs=2, temperature=0.9, min_p=0.02, logit_bias={"100": 1.5}),
        ask("lamp", CHAT, seed=5, n=2, temperature=1.2),
        ask("dog", COMPLETIONS, seed=6, temperature=0.9, stop=["zebra crossing", "\n\n\n\n\n"], min_tokens=100),
        ask("hen", CHAT, seed=8, temperature=0.9, structured_outputs={"regex": "[A-Za-z ,.\n]+~{400}"}, logprobs=True),
        ask("bird", COMPLETIONS, seed=7, stream=False, **sampled),
    ]


def long_prompts(count: int = 10, num_repeats: int = 22) -> list[Ask]:
    """Return requests whose prompts take many steps; no two begin alike, and none is in a cache already."""
    salt = uuid.uuid4().hex
    return [
        ask(
            f"long-{index}",
            COMPLETIONS,
            prompt=f"Part {index}. {_STORY * num_repeats}",
            max_tokens=60,
            seed=index,
            cache_salt=salt,
        )
        for index in range(count)
    ]


@dataclass
class Told:
    """What a reader got."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """Tokens of prompt and answer."""
    error: Mapping[str, Any] | None = None
    is_whole: bool = False
    """It ended as its protocol says."""
    broken_by: str = ""
    """How the connection ended otherwise."""
    created_unix_s: float = 0.0
    """When the server says that it was asked."""
    last_event_id: str = ""
    times_s: list[float] = field(default_factory=list)
    """When each event with text arrived."""

    @property
    def num_events(self) -> int:
        """Events with text so far."""
        return len(self.times_s)

    @property
    def gaps_s(self) -> list[float]:
        """Pauses between two events with text."""
        return [after_s - before_s for before_s, after_s in pairwise(self.times_s)]

    @property
    def longest_gap_s(self) -> float:
        """Longest pause between two events with text."""
        return max(self.gaps_s, default=0.0)

    def answer(self) -> dict[str, Any]:
        """Return everything that must not depend on what happened meanwhile."""
        names = ("status", "error", "texts", "logprobs", "finish", "usage", "is_whole")
        return {name: getattr(self, name) for name in names}


class Reader:
    """Asks, and reads in a task of its own."""

    def __init__(self, http: aiohttp.ClientSession, url: str, asked: Ask, headers: Mapping[str, str]) -> None:
        self.asked = asked
        self.earlier: list[Told] = []
        """What it was told before, where it has asked more than once."""
        self._http = http
        self._url = url
        self._headers = headers
        self._ask()

    def _ask(self) -> None:
        self.told = Told()
        self.task = asyncio.create_task(self._run(), name=f"reader {self.asked.name}")

    def ask_anew(self) -> None:
        """Ask for the same once more; the answer has come, whole.

        Raises:
            AssertionError: it is not whole, or would not be given anew.
        """
        assert self.told.is_whole, f"{self.asked.name} was told {self.told}"
        assert "Idempotency-Key" not in self._headers, f"{self.asked.name} ended before the fault: ask for more tokens"
        self.earlier.append(self.told)
        self._ask()

    async def _run(self) -> None:
        try:
            body = io.BytesIO(json.dumps(self.asked.body).encode())  # aiohttp warns of large bodies that are bytes
            headers = {"content-type": "application/json", **self._headers}
            async with self._http.post(self._url + self.asked.path, data=body, headers=headers) as response:
                self.told.status, self.told.headers = response.status, response.headers
                await self._read(response)
        except (aiohttp.ClientError, ConnectionError) as error:
            self.told.broken_by = type(error).__name__

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        if response.content_type != "text/event-stream":
            body = await response.json()
            self._take(body)
            self.told.is_whole = response.status == 200
            return
        async for raw in response.content:
            line = raw.rstrip(b"\r\n")
            if line == b"data: [DONE]":
                self.told.is_whole = True
            elif line.startswith(b"id: "):
                self.told.last_event_id = line[4:].decode()
            elif line.startswith(b"data: "):
                assert not self.told.is_whole, "an event after the end"
                self._take(json.loads(line[6:]))

    def _take(self, content: dict[str, Any]) -> None:
        told = self.told
        if "error" in content:
            told.error = content["error"]
            return
        told.created_unix_s = content["created"]
        for choice in content["choices"]:
            self._take_choice(choice)
        if (usage := content.get("usage")) is not None:
            told.usage = (usage["prompt_tokens"], usage["completion_tokens"])

    def _take_choice(self, choice: dict[str, Any]) -> None:
        told, index = self.told, choice["index"]
        shown = choice.get("delta") or choice.get("message") or choice
        text = shown.get("text", shown.get("content")) or ""
        if text:
            told.times_s.append(time.monotonic())
        told.texts[index] = told.texts.get(index, "") + text
        if choice.get("logprobs") is not None:
            told.logprobs.setdefault(index, []).append(choice["logprobs"])
        if choice.get("finish_reason") is not None:
            assert index not in told.finish, "finished twice"
            told.finish[index] = choice["finish_reason"]


@asynccontextmanager
async def reading(
    cluster: Cluster,
    asks: Sequence[Ask],
    *,
    dispatcher: str = "dispatcher-0",
    url: str = "",
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[list[Reader]]:
    """Send every request at once; readers that still read at the end are cancelled, which closes their connections."""
    async with http_session(ANSWER_LIMIT_S) as http:
        readers = [Reader(http, url or cluster.url(dispatcher), asked, headers or {}) for asked in asks]
        try:
            yield readers
        finally:
            for reader in readers:
                reader.task.cancel()
            await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)


@asynccontextmanager
async def always_reading(cluster: Cluster) -> AsyncIterator[None]:
    """Somebody reads at every moment, however long the caller takes: one request after the other."""
    begun = asyncio.Event()

    async def read_on() -> None:
        while True:
            async with reading(cluster, [ask("lighthouse", COMPLETIONS)]) as readers:
                await until(lambda: readers[0].told.num_events >= 1, "it reads", 30)
                begun.set()
                await readers[0].task

    task = asyncio.create_task(read_on(), name="always reading")
    try:
        await asyncio.wait_for(begun.wait(), ANSWER_LIMIT_S)
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def seen(readers: Sequence[Reader], num_events: int) -> None:
    """Return when every streaming reader of a lasting answer has got so many events with text, and none has all.

    One that has all before another has so many asks anew: the worker of the other one may be late.
    """
    streaming = [reader for reader in readers if reader.asked.is_streamed and reader.asked.is_lasting]

    def have_read() -> bool:
        for reader in streaming:
            if reader.task.done():
                reader.ask_anew()
        return all(reader.told.num_events >= num_events for reader in streaming)

    await until(have_read, f"every reader has {num_events} events", 30)


def longest_gap_s(readers: Sequence[Reader]) -> float:
    """Return the longest pause that a reader of a stream saw."""
    return max(reader.told.longest_gap_s for reader in readers if reader.asked.is_streamed)


async def all_read(readers: Sequence[Reader]) -> None:
    """Wait until every reader has read to the end."""
    await asyncio.gather(*(reader.task for reader in readers))


async def answers(readers: Sequence[Reader]) -> dict[str, dict[str, Any]]:
    """Wait for every reader; return its answer by its name."""
    await all_read(readers)
    return {reader.asked.name: joined(reader.told.answer()) for reader in readers}


def joined(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with the log-probabilities of each choice as one list: how tokens share events is no matter."""
    whole: dict[int, Any] = {}
    for index, parts in answer["logprobs"].items():
        keys = [key for key, value in parts[0].items() if isinstance(value, list)]
        whole[index] = {key: [item for part in parts for item in part[key] or ()] for key in keys}
    return {**answer, "logprobs": whole}


async def undisturbed(cluster: Cluster, asks: Sequence[Ask]) -> dict[str, dict[str, Any]]:
    """Return the answers of a run without faults; each is whole."""
    async with reading(cluster, asks) as readers:
        found = await answers(readers)
    for name, answer in found.items():
        assert (answer["status"], answer["error"], answer["is_whole"]) == (200, None, True), (name, answer)
    return found
