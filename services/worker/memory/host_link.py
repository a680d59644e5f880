"""What goes between host and device in a step: one wait at most, and nothing sent from memory that is being read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from services.worker.contract.arrays import I64

T = TypeVar("T")
BESIDE = ("cuda",)
"""Devices that compute beside the host: to ask them something is to wait."""


def is_beside(device: torch.device) -> bool:
    """Return whether a device computes beside the host."""
    return device.type in BESIDE


class DeviceEvent(Protocol):
    """What a device gets to in its own time."""

    def synchronize(self) -> None:
        """Wait until it has; from any thread."""


def mark(device: torch.device) -> DeviceEvent | None:
    """Return what comes behind all that this thread has begun on a device; None: that is done already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def begin_copy(source: torch.Tensor, target: torch.Tensor) -> DeviceEvent | None:
    """Begin to copy between a device and pinned host memory, behind what was begun there; return what comes then.

    The host's side must stay as it is until then.
    """
    target.copy_(source, non_blocking=True)
    return mark(source.device if target.device.type == "cpu" else target.device)


class Fetching:
    """Small columns [n] of numbers or of truths on their way to the host.

    From a device beside the host they come in one transfer, to pinned memory, when all that was begun before them is
    done; they may change as soon as this is made. On another they are there already, and a column of 64-bit numbers is
    not copied.
    """

    def __init__(self, *columns: torch.Tensor) -> None:
        self._done: DeviceEvent | None = None
        device = columns[0].device
        if not is_beside(device):
            self._columns = [np.asarray(column.numpy(), dtype=np.int64) for column in columns]
            return
        packed = torch.cat([column.to(torch.int64) for column in columns])
        host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._done = begin_copy(packed, host)
        ends = np.cumsum([len(column) for column in columns])
        self._columns = np.split(host.numpy(), ends[:-1])

    def end(self) -> list[I64]:
        """Wait for them, and return them; from any thread."""
        if self._done is not None:
            self._done.synchronize()
        return self._columns


def fetch(*columns: torch.Tensor) -> list[I64]:
    """Return what `Fetching` does, at once."""
    return Fetching(*columns).end()


def send(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a host's array on the device; it is on its way there, and nobody waits for what was begun before."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class PinnedRing(Generic[T]):
    """Pieces of host memory from which a device copies, used in turn: one is there again when it has been read.

    Args:
        pieces: as many as are read at once, so that nobody waits.
        device: which reads them.
    """

    def __init__(self, pieces: Sequence[T], device: torch.device) -> None:
        self._pieces = pieces
        self._device = device
        self._read: list[DeviceEvent | None] = [None] * len(pieces)
        self._at = 0

    def take(self) -> T:
        """Return the next piece, to be written."""
        self._at = (self._at + 1) % len(self._pieces)
        read = self._read[self._at]
        if read is not None:
            read.synchronize()
        return self._pieces[self._at]

    def sent(self) -> None:
        """All copies from the piece that was taken last have begun."""
        self._read[self._at] = mark(self._device)
