"""Type and memory of a worker whose settings name none: chosen as `sluice up` chooses them. Loads no torch."""

from __future__ import annotations

from services.worker.config import Dtype, ExecutorKind, WorkerSettings
from shared.host import free_memory_here
from shared.model_sizes import read_sizes
from shared.process.config_fields import AUTO
from shared.process.log import get_logger
from shared.sizing import Cards, Sizes, find_cards, size


def with_sizes(settings: WorkerSettings) -> WorkerSettings:
    """Return the settings with `dtype` and `memory`, by the model and what is free here, and log what was chosen.

    Raises:
        StartupError: the model does not fit.
    """
    is_named = {name: name in settings.model_fields_set for name in ("dtype", "memory")}
    if all(is_named.values()) or settings.executor is ExecutorKind.MODELLED:
        return settings
    named = Sizes(
        settings.device,
        settings.dtype.value if is_named["dtype"] else AUTO,
        settings.memory if is_named["memory"] else None,
    )
    cards = Cards() if settings.device == "cpu" else find_cards()
    sizes, told = size(named, settings.host_workers, read_sizes(settings.model), free_memory_here(), cards)
    get_logger().info("sizes", told=told)
    return settings.model_copy(update={"dtype": Dtype(sizes.dtype), "memory": sizes.memory})
