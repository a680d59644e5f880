"""What integration tests share: a broker; of the HTTP interface a small model's folder, and its text side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.dispatcher.build import ModelText
from shared.transport.nats_server import EmbeddedNats
from tests.support.dispatchers import load_model


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
