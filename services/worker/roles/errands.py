"""The kinds of errands that a worker does: one line each.

To add one: a message that is an `Errand` (`shared.messages.errand`), what does it, a line here. It needs no gate and
takes its time: others, and changes, are under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.worker.roles.queue import WaitingQueue
from services.worker.roles.role_keeper import RoleKeeper
from shared.messages.base import ControlMessage
from shared.messages.errand import Errand
from shared.messages.queue import ListQueued, MoveQueued

Errands = Mapping[type[Errand], Callable[[Any], Awaitable[ControlMessage]]]
"""By the type of a message: what does it, and returns the answer."""


def make_errands(keeper: RoleKeeper) -> Errands:
    """Return what a worker does for planners beside changes."""
    queue = WaitingQueue(keeper.worker_id, keeper.machine.engine, keeper.machine.loop.flush, keeper.now)
    return {
        ListQueued: queue.list,
        MoveQueued: queue.move,
    }
