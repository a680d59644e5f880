"""How the KV of a request comes from worker to worker: what the live sockets and the simulator's network have to do."""

from __future__ import annotations

from typing import Final, Protocol

from services.worker.contract.kept_kv import KeptKv
from services.worker.migration.departures import Departures
from services.worker.migration.kv_messages import FindKv, HasLeft, KvListed, LetGo, ListKv, NotHere
from shared.ids import WorkerId

RATE_WEIGHT: Final = 0.3
"""Of what has come last in the moving average."""
SILENCE_S: Final = 6.0
"""A little more than a lease: who waits longer for the next thing waits for nobody."""


class KvRate:
    """At which KV comes from other workers, while it does: a moving average of the time of a byte.

    Of rates themselves an average would let a quick way hide slow ones.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """0: none has come."""

    def note(self, bytes_per_s: float) -> None:
        """Something has come at this rate; 0: nothing has."""
        if bytes_per_s:
            weight = RATE_WEIGHT if self.bytes_per_s else 1.0
            self.bytes_per_s = 1 / (weight / bytes_per_s + (1 - weight) / (self.bytes_per_s or 1.0))


class KvLink(Protocol):
    """A connection to the worker that runs a request. One thing at a time."""

    async def ask(self, message: ListKv | FindKv | LetGo) -> KvListed | HasLeft | NotHere:
        """Ask, and return the answer; raises `PeerLostError`."""

    async def get(self, coming: KeptKv) -> int:
        """Have blocks hold what the source has under their names; return the bytes that came.

        Args:
            coming: of the last list; nobody else reads or writes these blocks.

        Raises:
            PeerLostError: the connection is lost; the blocks hold anything.
        """

    async def close(self) -> None:
        """End the connection; nothing is written any more when it returns. Idempotent."""


class KvNetwork(Protocol):
    """A worker's way to the KV of the others, and theirs to its own."""

    @property
    def address(self) -> str:
        """Where others connect."""

    def serve(self, departures: Departures) -> None:
        """Let others connect from now on; each connection is for one request."""

    async def connect(self, worker_id: WorkerId, address: str, silence_s: float = SILENCE_S) -> KvLink:
        """Return a connection to the worker that is at this address.

        Args:
            worker_id: of that worker.
            address: where it is.
            silence_s: after which the connection is lost, if nothing comes over it that is waited for.

        Raises:
            PeerLostError: nobody is there, or says anything.
            PeerRefusedError: it is another one, of another cluster or model, or wants no connection.
        """

    async def disconnect(self) -> None:
        """End the connections that there are, both ways; nothing is read or written when it returns."""

    async def close(self) -> None:
        """Likewise, for good. Idempotent."""
