"""The one wait of a step: everything that the host must know of it comes from the device together."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.engine.types import I64


def fetch(*columns: torch.Tensor) -> list[I64]:
    """Return small columns [n] of numbers or of truths on the host, when all that was begun before them is done.

    On a GPU they come in one transfer, to pinned memory. On the CPU they are there already, and a column of 64-bit
    numbers is not copied.
    """
    device = columns[0].device
    if device.type == "cpu":
        return [np.asarray(column.numpy(), dtype=np.int64) for column in columns]
    packed = torch.cat([column.to(torch.int64) for column in columns])
    host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    ends = np.cumsum([len(column) for column in columns])
    return np.split(host.numpy(), ends[:-1])


def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a host's array on the device; it is on its way there, and nobody waits for what was begun before."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
