"""What an operator may ask a worker by request-reply: JSON in, JSON out, nothing that changes anything."""

from __future__ import annotations

import json
from dataclasses import asdict

from services.worker.engine.describe import describe
from services.worker.engine.engine import Engine
from services.worker.leases import Leases
from services.worker.reporter import Reporter
from shared.bus import Message


class Admin:
    """Read-only endpoints."""

    def __init__(self, engine: Engine, reporter: Reporter, leases: Leases) -> None:
        self._engine = engine
        self._leases = leases
        self._reporter = reporter

    async def dump(self, message: Message) -> bytes:
        """Answer with the sequences that the engine holds: ids and counts, never tokens or text."""
        del message
        sequences = [asdict(sequence) for sequence in describe(self._engine)]
        leases = self._leases.describe()
        return json.dumps({"phase": self._reporter.phase, "leases": leases, "sequences": sequences}).encode()
