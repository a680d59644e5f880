"""A whole dispatcher over a bus in memory, with a real HTTP port, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from services.dispatcher.build import Dispatcher, ModelText, load_text
from services.dispatcher.config import DispatcherSettings
from shared.transport.memory_bus import MemoryBroker, MemoryBus
from tests.support.fake_worker import FakeWorker, Script, make_status, publish_view
from tests.support.text_models import write_model_folder


@dataclass(slots=True)
class Running:
    """A dispatcher that serves."""

    dispatcher: Dispatcher
    broker: MemoryBroker
    bus: MemoryBus
    """A connection for the test itself."""
    worker: FakeWorker
    url: str
    http: aiohttp.ClientSession
    failures: list[str]

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Send a request to the model and return status and JSON."""
        async with self.http.post(self.url + path, json={"model": "tiny", **body}) as response:
            return response.status, await response.json()

    def encode(self, text: str) -> list[int]:
        """Return the ids of an answer's text."""
        ids: list[int] = self.dispatcher.front.codec.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def make_settings(folder: Path, **fields: Any) -> DispatcherSettings:
    """Return settings for a test: a free port, the model's name `tiny`."""
    return DispatcherSettings.model_validate(
        {"model": folder, "served_model_name": "tiny", "port": 0, "instance_id": "d0", **fields}
    )


def load_model(folder: Path) -> ModelText:
    """Write a model folder and return its texts."""
    return load_text(make_settings(write_model_folder(folder)))


def end_id(text: ModelText) -> int:
    """Return the token that ends an answer."""
    token_id = text.codec.tokenizer.token_to_id("<|im_end|>")
    assert token_id is not None
    return token_id


@asynccontextmanager
async def running_dispatcher(
    text: ModelText, folder: Path, script: Script | None = None, *, ready: bool = True, **fields: Any
) -> AsyncIterator[Running]:
    """Serve with one fake worker until the block ends."""
    broker = MemoryBroker()
    bus, own = broker.connect("dispatcher"), broker.connect("test")
    failures: list[str] = []
    dispatcher = Dispatcher(
        make_settings(folder, **fields), bus, text, lambda name, error: failures.append(f"{name}: {error!r}")
    )
    port = await dispatcher.start()
    worker = FakeWorker(own, script=script)
    await worker.start()
    if ready:
        await publish_view(own, make_status())
    async with aiohttp.ClientSession() as http:
        try:
            yield Running(dispatcher, broker, own, worker, f"http://127.0.0.1:{port}", http, failures)
        finally:
            await dispatcher.stop()
            await worker.stop()
            await bus.close()
            await own.close()
    assert not failures
