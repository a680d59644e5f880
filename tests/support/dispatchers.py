"""A whole dispatcher over a bus in memory, with a real HTTP port, for tests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from services.dispatcher.build import Dispatcher, ModelText, load_text
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.http.front import Front
from services.dispatcher.session.table import SessionTable
from shared.api_keys import hash_key
from shared.messages.report import WorkerStatus
from shared.messages.request import Submit
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from shared.types import FinishReason
from tests.support import fake_worker
from tests.support.fake_worker import FakeWorker, Script, make_status, publish_view
from tests.support.text_models import write_model_folder
from tests.support.waiting import until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
HELLO: Final = [{"role": "user", "content": "hi"}]
TEXT: Final = "Hello 🦊 world, 你好! The end."


@dataclass(slots=True)
class Running:
    """A dispatcher that serves the model `tiny`."""

    dispatcher: Dispatcher
    broker: MemoryBroker
    bus: MemoryBus
    """A connection for the test itself."""
    worker: FakeWorker
    url: str
    http: aiohttp.ClientSession
    num_views: int = 0

    @property
    def front(self) -> Front:
        """The parts that endpoints use."""
        return self.dispatcher.front

    @property
    def end_id(self) -> int:
        """The token that ends an answer."""
        token_id = self.front.codec.tokenizer.token_to_id("<|im_end|>")
        assert token_id is not None
        return int(token_id)

    @property
    def table(self) -> SessionTable:
        """Requests under way."""
        return self.dispatcher.service.sessions.table

    def ask(self, path: str = CHAT, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
        """Return a request to the model, a greeting by itself: an asynchronous context, or to be awaited."""
        what = {"messages": HELLO} if path == CHAT else {"prompt": "once"} if path == COMPLETIONS else {}
        return self.http.post(self.url + path, json={"model": "tiny", **what, **body}, headers=headers)

    async def post(self, path: str = CHAT, **body: Any) -> tuple[int, Any]:
        """Send a request to the model and return status and JSON."""
        async with self.ask(path, **body) as response:
            return response.status, await response.json()

    async def stream(self, path: str = CHAT, **body: Any) -> list[Any]:
        """Return the events of a streamed answer that ends in an orderly way, as JSON."""
        async with self.ask(path, stream=True, **body) as response:
            return events_of(response, await response.text())

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Return status and JSON."""
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    async def samples(self, **headers: str) -> list[Sample]:
        """Return what `/metrics` says."""
        async with self.http.get(self.url + "/metrics", headers=headers) as response:
            families = list(text_string_to_metric_families(await response.text()))
        return [sample for family in families for sample in family.samples]

    async def view(self, *statuses: WorkerStatus) -> None:
        """Write a view as the monitor does, and have the dispatcher take it."""
        self.num_views += 1
        await publish_view(self.bus, *statuses, number=self.num_views)
        await asyncio.sleep(0.01)

    def encode(self, text: str) -> list[int]:
        """Return the ids of an answer's text."""
        ids: list[int] = self.front.codec.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def begun(self, count: int = 1) -> list[fake_worker.Running]:
        """Return what the worker runs, once it runs so many requests, in the order in which it took them."""
        await until(lambda: len(self.worker.running) >= count)
        return list(self.worker.running.values())

    async def end(self, item: fake_worker.Running, words: str = "") -> None:
        """Have the worker end an answer with these words."""
        await self.worker.emit(item, [*self.encode(words), self.end_id], FinishReason.STOP)

    async def until_nothing_is_left(self) -> None:
        """Return when nothing of any request is left, here and at the worker."""
        front, items = self.front, self.worker.running
        await until(lambda: not (len(self.table) or len(front.live) or len(front.streams)))
        await until(lambda: all(item.finish for item in items.values()))
        assert front.sessions.num_queued == 0


Serve = Callable[..., AbstractAsyncContextManager[Running]]
"""`running_dispatcher` of a model that is loaded."""


def events_of(response: aiohttp.ClientResponse, raw: str) -> list[Any]:
    """Return the events of a whole stream but its `[DONE]`, as JSON.

    Raises:
        AssertionError: it is none, or did not end in an orderly way.
    """
    assert response.status == 200, raw
    assert response.content_type == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line and not line.startswith(":")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def texts_of(events: Iterable[Any], count: int = 1) -> list[str]:
    """Return the text of each choice."""
    texts = [""] * count
    for event in events:
        for choice in event.get("choices", ()):
            texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return texts


def usage_of(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    """Return what an answer says of its tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def index_of(submit: Submit) -> int:
    """Return which choice of its request a submission is for."""
    return int(submit.request_id.partition("-")[2] or 0)


def hold_tokenizer(running: Running, monkeypatch: pytest.MonkeyPatch, method: str) -> Callable[[], None]:
    """Have a method of the codec wait for at most 5 s until the returned function is called."""
    leave = threading.Event()
    work = getattr(running.front.codec, method)

    def slow(*args: object, **options: object) -> object:
        leave.wait(5)
        return work(*args, **options)

    monkeypatch.setattr(running.front.codec, method, slow)
    return leave.set


def write_keys(path: Path, keys: Mapping[str, tuple[str, ...]], limits: Mapping[str, str] | None = None) -> Path:
    """Write a file of keys.

    Args:
        path: of the file.
        keys: the tenant of each, and its scopes.
        limits: lines about tenants.
    """
    lines = [
        f"[tenants.{tenant}]\n{(limits or {}).get(tenant, '')}"
        for tenant in dict.fromkeys(who[0] for who in keys.values())
    ]
    for key, (tenant, *scopes) in keys.items():
        lines += ["[[keys]]", f'sha256 = "{hash_key(key)}"', f'tenant = "{tenant}"', f"scopes = {json.dumps(scopes)}"]
    path.write_text("\n".join(lines))
    return path


def make_settings(folder: Path, **fields: Any) -> DispatcherSettings:
    """Return settings for a test: a free port, the model's name `tiny`."""
    return DispatcherSettings.model_validate(
        {"model": folder, "served_model_name": "tiny", "port": 0, "instance_id": "d0", **fields}
    )


def load_model(folder: Path) -> ModelText:
    """Write a model folder and return its texts."""
    return load_text(make_settings(write_model_folder(folder)))


@asynccontextmanager
async def running_dispatcher(
    text: ModelText, folder: Path, script: Script | str | None = None, *, ready: bool = True, **fields: Any
) -> AsyncIterator[Running]:
    """Serve with one fake worker until the block ends; a script that is a text is its answer to every request."""
    broker = MemoryBroker()
    bus, own = broker.connect("dispatcher"), broker.connect("test")
    failures: list[str] = []
    dispatcher = Dispatcher(
        make_settings(folder, **fields), bus, text, lambda name, error: failures.append(f"{name}: {error!r}")
    )
    port = await dispatcher.start()
    worker = FakeWorker(own)
    await worker.start()
    async with aiohttp.ClientSession() as http:
        running = Running(dispatcher, broker, own, worker, f"http://127.0.0.1:{port}", http)
        words = [*running.encode(script), running.end_id] if isinstance(script, str) else []
        worker.script = (lambda _: words) if isinstance(script, str) else script
        try:
            if ready:
                await running.view(make_status())
            yield running
        finally:
            await dispatcher.stop()
            await worker.stop()
            await bus.close()
            await own.close()
    assert not failures
