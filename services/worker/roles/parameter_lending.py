"""Parameters from one stage of a group to another, which loads them beside its own while the group serves.

    who loads                                        the stage that computes with them
    PARAMETER_ASK layer, name of a part ─────────►   its bytes as they lie in memory, in pieces, each of them
                              PARAMETER ◄─────────   after the activations that wait; none: it has no such part

A connection is of two threads, one at each end. Whoever loads checks the bytes by their digest, and asks another source
if they are wrong, if the connection breaks, or if nothing comes for a while.

Source: KunServe v1, section 4.2, and v2, section 4.4 (parameters are pulled from the instances that have them).
Deviation: over TCP, copied by both hosts, where the paper's transport is RDMA.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection, Iterator
from typing import Final

import torch

from services.worker.executor.parameter_sources import SourceLostError
from services.worker.models.weights import ModelWeights, ParameterBuffer
from services.worker.peers.frames import FrameKind, FrameSocket, PeerLostError
from services.worker.peers.greeting import PeerWelcome
from services.worker.peers.link_priority import BULK_PRIORITY, LinkPriority, set_priority
from shared.errors import WireError
from shared.layers import LayerRange
from shared.wire import encode

PIECE_BYTES: Final = 256 * 1024
"""Sent at a time; as much may wait in the system's buffer."""
SILENCE_S: Final = 5.0
"""Longest time without a byte; then the source counts as lost."""
YIELD_LIMIT_S: Final = 1.0
"""Longest time that a piece waits for activations."""
_MAX_NAME_BYTES: Final = 255
_OUTER: Final = 2**32 - 1
"""Instead of a layer: a part outside of them."""


class ParameterLender:
    """Lends the parameters of one stage, from the begin of its group until `close`.

    Args:
        weights: with the parts that are lent, which stay as they are until `close`.
        priority: of this worker's connections.
    """

    def __init__(self, weights: ModelWeights, priority: LinkPriority) -> None:
        self._weights = weights
        self._priority = priority
        self._lending: dict[FrameSocket, threading.Thread] = {}
        self._is_closed = False
        self._changing = threading.Lock()

    def welcome(self, sock: socket.socket, said: PeerWelcome) -> None:
        """Welcome a connection, which is owned from now on, and answer what is asked in a thread of its own."""
        with self._changing:
            if self._is_closed:
                sock.close()
                return
            frames = FrameSocket(sock)
            set_priority(sock, BULK_PRIORITY)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
            thread = threading.Thread(target=self._work, args=(frames, said), name="parameter lending", daemon=True)
            self._lending[frames] = thread
            thread.start()

    def close(self) -> None:
        """Break all connections and wait until nobody reads the parameters; a piece may have to go. Idempotent."""
        with self._changing:
            self._is_closed = True
            lending, self._lending = self._lending, {}
        for sock, thread in lending.items():
            sock.shut()
            thread.join()

    def _work(self, sock: FrameSocket, welcome: PeerWelcome) -> None:
        """Body of the thread."""
        with contextlib.closing(sock), contextlib.suppress(PeerLostError, WireError):  # the other end has enough
            sock.send(FrameKind.GREETING, encode(welcome))
            while True:
                asked = sock.receive(FrameKind.PARAMETER_ASK, max_bytes=_MAX_NAME_BYTES)
                part = self._find(asked.words[0], asked.payload.decode(errors="replace"))
                num_bytes = 0 if part is None else len(part)
                sock.send_pieces(FrameKind.PARAMETER, num_bytes, () if part is None else self._pieces(part))
        with self._changing:
            self._lending.pop(sock, None)

    def _find(self, layer: int, name: str) -> torch.Tensor | None:
        """Return the bytes of a part, or None."""
        if layer != _OUTER and not 0 <= layer < len(self._weights.layers):
            return None
        part = (self._weights.outer if layer == _OUTER else self._weights.layers[layer]).get(name)
        return None if part is None else part.reshape(-1).view(torch.uint8)

    def _pieces(self, part: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a part, each piece when it may be sent."""
        for first in range(0, len(part), PIECE_BYTES):
            piece = part[first : first + PIECE_BYTES].cpu().numpy().data
            self._priority.wait(YIELD_LIMIT_S)
            yield piece


class PeerSource:
    """A `ParameterSource` at the other end of a connection.

    Args:
        name: of the worker there.
        sock: connected and welcome; owned.
        layers: that it computes.
        outer: names of the parts outside of the layers that it computes with.
    """

    def __init__(self, name: str, sock: socket.socket, layers: LayerRange, outer: Collection[str]) -> None:
        self._name = name
        self._sock = FrameSocket(sock, silence_s=SILENCE_S)
        self._layers = layers
        self._outer = frozenset(outer)

    @property
    def name(self) -> str:
        """The worker's."""
        return self._name

    def has(self, layer: int | None, part: str) -> bool:
        """Return whether it computes with that part."""
        return part in self._outer if layer is None else layer in self._layers

    def fill(self, layer: int | None, buffer: ParameterBuffer, piece_elements: int | None) -> Iterator[int]:
        """Receive the parts of a buffer; see `ParameterSource`."""
        piece_bytes = buffer.num_bytes if piece_elements is None else piece_elements * buffer.dtype.itemsize
        try:
            for part in buffer.parts:
                yield from self._receive(layer, part.name, buffer[part.name].reshape(-1).view(torch.uint8), piece_bytes)
        except (PeerLostError, WireError) as error:
            self.close()
            raise SourceLostError(str(error)) from error

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._sock.close()

    def _receive(self, layer: int | None, name: str, target: torch.Tensor, piece_bytes: int) -> Iterator[int]:
        self._sock.send(FrameKind.PARAMETER_ASK, name.encode(), words=(_OUTER if layer is None else layer, 0))
        size = self._sock.receive_head(FrameKind.PARAMETER).num_bytes
        if size != len(target):
            raise WireError(f"it has {size} bytes of '{name}', {len(target)} are needed")
        for first in range(0, size, piece_bytes):
            piece = target[first : first + piece_bytes]
            self._receive_into(piece)
            yield len(piece)

    def _receive_into(self, piece: torch.Tensor) -> None:
        if piece.device.type == "cpu":
            self._sock.fill(piece.numpy().data)
        else:
            data = bytearray(len(piece))
            self._sock.fill(memoryview(data))
            piece.copy_(torch.frombuffer(data, dtype=torch.uint8))
