"""What integration tests share: a broker; of the HTTP interface a small model's folder, and its text side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from services.dispatcher.build import ModelText
from shared.transport.nats_server import EmbeddedNats
from tests.support.dispatchers import Running, Serve, load_model, running_dispatcher


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a broker for the tests of a module."""
    with EmbeddedNats() as nats:
        yield nats.start(tmp_path_factory.mktemp("nats"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that a dispatcher can serve; its weights do not exist."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def text(folder: Path) -> ModelText:
    """The same model as the dispatcher sees it, after its files were written."""
    return load_model(folder)


@pytest.fixture(scope="module")
def serve(text: ModelText, folder: Path) -> Serve:
    """Serves this model with one fake worker; arguments as for `running_dispatcher`."""
    return partial(running_dispatcher, text, folder)


@pytest_asyncio.fixture(loop_scope="module")
async def running(serve: Serve) -> AsyncIterator[Running]:
    """A dispatcher whose worker says what the test has it say."""
    async with serve() as running:
        yield running
