"""How messages of a modelled pipeline's stages travel: on the event loop's clock, over links that cost time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from services.worker.peers.frames import PeerLostError
from services.worker.pipeline.stage_messages import Activation, StageMessage


@dataclass(frozen=True, slots=True)
class ModelledLink:
    """The wire between two stages, as far as it costs time. Only activations have a size worth counting."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    token_bytes: int = 0
    """Bytes of one token's hidden state; hidden_size times 2 in 16 bits."""

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0 or self.token_bytes < 0:
            raise ValueError(f"{self} is no link")

    def transfer_s(self, message: StageMessage) -> float:
        """Return how long the message keeps the wire busy."""
        return self.token_bytes * message.num_tokens / self.bytes_per_s if isinstance(message, Activation) else 0.0


class MemoryChannel:
    """A modelled wire on the running loop's clock: one message after the other, each after the latency.

    Args:
        link: of the wire.
        on_message: called with each message when it arrives.
        on_lost: called once, with the reason, if the channel is cut; never after `close`.
        context: of whoever is called; None: that of whoever sends or cuts.
    """

    def __init__(
        self,
        link: ModelledLink,
        on_message: Callable[[StageMessage], None],
        on_lost: Callable[[str], None],
        context: Context | None = None,
    ) -> None:
        self._context = context
        self._link = link
        self._on_message = on_message
        self._on_lost = on_lost
        self._free_s = 0.0
        self._is_open = True

    def send(self, message: StageMessage) -> None:
        """Send a message; what is on the wire when the channel is cut never arrives."""
        if not self._is_open:
            raise PeerLostError("the channel is cut")
        loop = asyncio.get_running_loop()
        self._free_s = max(loop.time(), self._free_s) + self._link.transfer_s(message)
        loop.call_at(self._free_s + self._link.latency_s, self._arrive, message, context=self._context)

    def cut(self, reason: str) -> None:
        """Lose all that is under way; the receiving end notices after the latency. Idempotent."""
        if self._is_open:
            self._is_open = False
            loop = asyncio.get_running_loop()
            loop.call_later(self._link.latency_s, self._on_lost, reason, context=self._context)

    def close(self) -> None:
        """Carry nothing more, and tell nobody. Idempotent."""
        self._is_open = False

    def _arrive(self, message: StageMessage) -> None:
        if self._is_open:
            self._on_message(message)
