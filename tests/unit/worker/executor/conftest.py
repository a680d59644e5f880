"""Models in pages that are closed when a test ends, and processes in which nothing was computed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context

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


@pytest.fixture
def fresh_process() -> Iterator[ProcessPoolExecutor]:
    """One that measures memory as a worker that starts does: no holes in the heap, no buffers that others left."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool
