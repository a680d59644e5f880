"""An operator has a worker give its requests to others and end."""

from __future__ import annotations

from typing import Literal

from shared.ids import Incarnation
from shared.messages.base import ControlMessage


class Drain(ControlMessage):
    """Drain and end, as SIGTERM has it; refused by any other process of that worker."""

    kind: Literal["drain"] = "drain"
    incarnation: Incarnation
    """As the worker's reports say it."""
