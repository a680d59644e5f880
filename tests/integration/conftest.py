"""What the tests of the HTTP interface share: a small model's folder, and its text side."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.dispatcher.build import ModelText
from tests.support.dispatchers import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that a dispatcher can serve; its weights do not exist."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def text(folder: Path) -> ModelText:
    """The same model as the dispatcher sees it, after its files were written."""
    return load_model(folder)
