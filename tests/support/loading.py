"""What `load_executor` returns, given back."""

from __future__ import annotations

from services.worker.load import Loaded


async def close_loaded(loaded: Loaded) -> None:
    """Close all of it, as a worker does that stops."""
    if loaded.network is not None:
        await loaded.network.close()
    await loaded.executor.close()
    if loaded.device is not None:
        await loaded.device.close()
