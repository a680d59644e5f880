"""What an operator may ask a worker by request-reply, answered in JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from services.worker.engine.describe import describe
from services.worker.engine.engine import Engine
from services.worker.serving.leases import Leases
from services.worker.serving.reporter import Reporter
from shared.messages.drain import Drain
from shared.transport.bus import Message
from shared.wire import WireError, decode_json, pack_rows, read_index

MAX_PAGE_BYTES = 512 * 1024
"""Of the sequences in an answer: some 1 300."""


class Admin:
    """Of one worker.

    Args:
        engine: of this worker.
        reporter: knows its phase.
        leases: of dispatchers.
        now: the worker's clock, seconds.
        end: has the process drain and end; None: there is no process.
    """

    def __init__(
        self,
        engine: Engine,
        reporter: Reporter,
        leases: Leases,
        now: Callable[[], float],
        end: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self.end = end
        self._now = now
        self._reporter = reporter

    async def dump(self, message: Message) -> bytes:
        """Answer with what the worker holds: sequences by ids and counts, never tokens or text; tasks.

        Of the sequences as many as fit, from a number on: the payload is it in decimal digits, or empty for 0.

        Raises:
            WireError: the payload is no number.
        """
        first = read_index(message.data)
        sequences = describe(self._engine, self._now())
        rows = [json.dumps(sequence).encode() for sequence in sequences[first:]]
        end = first + len(pack_rows(rows, MAX_PAGE_BYTES)[0])
        content = {
            "phase": self._reporter.phase,
            "num_tasks": len(asyncio.all_tasks()),
            "leases": self._leases.describe(),
            "num_sequences": len(sequences),
            "next_sequence": end if end < len(sequences) else None,
            "sequences": sequences[first:end],
        }
        return json.dumps(content).encode()

    async def drain(self, message: Message) -> bytes:
        """Answer a `Drain` with how many sequences there are; the worker drains, and ends.

        Raises:
            WireError: it is no such message, or meant for another process.
        """
        assert self.end is not None
        if decode_json(message.data, Drain).incarnation != self._reporter.incarnation:
            raise WireError("this is another process of that worker")
        self.end()
        return json.dumps({"num_sequences": self._engine.table.num_sequences}).encode()
