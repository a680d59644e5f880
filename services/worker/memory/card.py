"""Which device a memory's pages are of, so that workers can tell whether theirs are of the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def card_of(device: torch.device) -> str:
    """Return the same for two processes if, and only if, their memory is that of one device of one running system.

    Empty: it cannot be told.
    """
    try:
        machine = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    if device.type == "cpu":
        return f"{machine}/cpu"
    unit = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if unit is None else f"{machine}/{unit}"
