"""Hidden states of a stage's steps between its device and the host, where they are arrays in the model's type.

    the stage before ──► array ─copy─► piece ─ ─► device: layers ─ ─► piece ──► socket ──► the next stage
                                  2 of them, read                2 of them, written by the device,
                                  by the device                  read by the socket

Where a device computes beside the host, the dashed copies are only begun, and go in the order of the steps; the pieces
are pinned host memory, beside the device's budget. Elsewhere arrays and tensors share memory.

bfloat16, which numpy does not have, is its bits in uint16.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from services.worker.memory.host_link import DeviceEvent, PinnedRing, begin_copy, is_beside
from services.worker.pipeline.stage import MAX_LAUNCHED, Ended, StageStep
from services.worker.pipeline.stage_messages import Hidden


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """Of hidden states [t, hidden_size]."""

    max_tokens: int
    """t at most."""
    hidden_size: int
    dtype: torch.dtype
    """float32 or bfloat16."""

    def check(self, hidden: Hidden, num_tokens: int) -> None:
        """Raise ValueError unless these are hidden states of so many tokens."""
        dtype = np.dtype(np.float32 if self.dtype == torch.float32 else np.uint16)
        if hidden.dtype != dtype or hidden.shape != (num_tokens, self.hidden_size):
            raise ValueError(f"hidden states {hidden.dtype} {hidden.shape} do not fit the model")

    def pieces(self, device: torch.device) -> list[torch.Tensor]:
        """Return host memory [max_tokens, hidden_size] for each step that may be launched, pinned for a GPU."""
        shape, is_pinned = (self.max_tokens, self.hidden_size), device.type == "cuda"
        return [torch.empty(shape, dtype=self.dtype, pin_memory=is_pinned) for _ in range(MAX_LAUNCHED)]


class HiddenLink:
    """See the module. Called from the thread that launches.

    Args:
        shape: of the largest batch.
        device: of the stage.
        arrive: there is a stage before; else no memory is taken for what it would say.
        leave: there is a stage behind; likewise.
    """

    def __init__(self, shape: HiddenShape, device: torch.device, *, arrive: bool, leave: bool) -> None:
        self._shape = shape
        self._device = device
        beside = is_beside(device)
        self._arriving = PinnedRing(shape.pieces(device), device) if beside and arrive else None
        self._leaving = deque(shape.pieces(device)) if beside and leave else None
        """Pieces that nobody writes or reads."""

    def to_device(self, hidden: Hidden, num_tokens: int) -> torch.Tensor:
        """Return what the stage before says of so many tokens, on the device, or on its way there.

        Args:
            hidden: read before this returns, unless the device is the host.
            num_tokens: of the step.

        Raises:
            ValueError: it is something else.
        """
        self._shape.check(hidden, num_tokens)
        if self._arriving is None:
            given = hidden if hidden.flags.writeable else hidden.copy()  # torch wants memory that it may write
            if self._shape.dtype == torch.float32:
                return torch.from_numpy(given).to(self._device)
            return torch.from_numpy(given.view(np.int16)).view(self._shape.dtype).to(self._device)
        piece = self._arriving.take()[:num_tokens]
        as_numpy(piece)[:] = hidden
        on_device = torch.empty_like(piece, device=self._device)
        begin_copy(piece, on_device)
        self._arriving.sent()
        return on_device

    def to_host(self, hidden: torch.Tensor) -> StageStep:
        """Return the step whose hidden states [t, hidden_size] these are; the device may still compute them.

        The tensor is not kept: what the device does with its memory later, it does behind the copy.
        """
        if self._leaving is None:
            return Ended(as_numpy(hidden))
        assert self._leaving, "more steps are launched than may be"
        piece = self._leaving.popleft()
        free = partial(self._leaving.append, piece)
        try:
            part = piece[: len(hidden)]
            return _Leaving(as_numpy(part), begin_copy(hidden, part), free)
        except BaseException:
            free()
            raise


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A step whose hidden states are on their way to the host; see `StageStep`."""

    hidden: Hidden
    """Of a piece."""
    copied: DeviceEvent | None
    free: Callable[[], None]
    is_done: bool = False

    def end(self) -> Hidden:
        """Wait for them; see `StageStep`."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.hidden


def as_numpy(hidden: torch.Tensor) -> Hidden:
    """Return hidden states as an array: float32, or the bits of bfloat16 as uint16. Host memory is shared."""
    if hidden.dtype == torch.float32:
        array: Hidden = hidden.cpu().numpy()
        return array
    bits: Hidden = hidden.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits
