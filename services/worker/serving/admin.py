"""What an operator may ask a worker by request-reply: JSON in, JSON out, nothing that changes anything."""

from __future__ import annotations

import asyncio
import json

from services.worker.engine.describe import describe
from services.worker.engine.engine import Engine
from services.worker.serving.leases import Leases
from services.worker.serving.reporter import Reporter
from shared.transport.bus import Message


class Admin:
    """Read-only endpoints."""

    def __init__(self, engine: Engine, reporter: Reporter, leases: Leases) -> None:
        self._engine = engine
        self._leases = leases
        self._reporter = reporter

    async def dump(self, message: Message) -> bytes:
        """Answer with what the worker holds: sequences by ids and counts, never tokens or text; tasks."""
        del message
        content = {
            "phase": self._reporter.phase,
            "num_tasks": len(asyncio.all_tasks()),
            "leases": self._leases.describe(),
            "sequences": describe(self._engine),
        }
        return json.dumps(content).encode()
