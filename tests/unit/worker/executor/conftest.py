"""Models in pages that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from services.worker.executor.elastic_model import ElasticModel
from tests.support.live_groups import SHAPES, open_elastic_model

ModelOf = Callable[..., ElasticModel]


@pytest.fixture
def model_of() -> Iterator[ModelOf]:
    """Return what opens a model in pages by the name of its shape; else as `open_elastic_model`."""
    with ExitStack() as models:

        def opening(name: str, *args: object, **changes: object) -> ElasticModel:
            model = open_elastic_model(SHAPES[name], *args, **changes)  # type: ignore[arg-type]
            models.callback(model.close)
            return model

        yield opening
