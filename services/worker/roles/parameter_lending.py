"""Parameters from one stage of a group to another, which loads them beside its own while the group serves.

    who loads                                        the stage that computes with them
    ask (layer, name of a part) ────────────────►    its bytes as they lie in memory, in pieces, each of them
                                ◄────────────────    after the activations that wait; or: it has no such part

A connection is of two threads, one at each end. Whoever loads checks the bytes by their digest, and asks another source
if they are wrong, if the connection breaks, or if nothing comes for a while.

Source: KunServe v1, section 4.2, and v2, section 4.4 (parameters are pulled from the instances that have them).
Deviation: over TCP, copied by both hosts, where the paper's transport is RDMA.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from typing import Final

import torch

from services.worker.executor.parameter_sources import SourceLostError
from services.worker.models.weights import ModelWeights, ParameterBuffer
from services.worker.peers.greeting import StageWelcome
from services.worker.pipeline.link_turns import BULK_PRIORITY, LinkTurns, set_priority
from shared.layers import LayerRange
from shared.wire import encode

PIECE_BYTES: Final = 256 * 1024
"""Sent at a time; as much may wait in the system's buffer."""
SILENCE_S: Final = 5.0
"""Longest time without a byte; then the source counts as lost."""
TURN_LIMIT_S: Final = 1.0
"""Longest time that a piece waits for activations."""
_ASK: Final = struct.Struct("<iB")
"""Layer, or -1: outside of the layers; and the length of the part's name, which follows."""
_FOUND: Final = struct.Struct("<Q")
"""Bytes of the part, which follow; 0: there is no such part here."""
_OUTER: Final = -1


class ParameterLender:
    """Lends the parameters of one stage, from the begin of its group until `close`.

    Args:
        weights: with the parts that are lent, which stay as they are until `close`.
        turns: of this worker's connections.
    """

    def __init__(self, weights: ModelWeights, turns: LinkTurns) -> None:
        self._weights = weights
        self._turns = turns
        self._lending: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._changing = threading.Lock()

    def welcome(self, sock: socket.socket, said: StageWelcome) -> None:
        """Welcome a connection, which is owned from now on, and answer what is asked in a thread of its own."""
        with self._changing:
            if self._is_closed:
                sock.close()
                return
            sock.settimeout(None)
            thread = threading.Thread(target=self._work, args=(sock, said), name="parameter lending", daemon=True)
            self._lending[sock] = thread
            thread.start()

    def close(self) -> None:
        """Break all connections and wait until nobody reads the parameters; a piece may have to go. Idempotent."""
        with self._changing:
            self._is_closed = True
            lending, self._lending = self._lending, {}
        for sock, thread in lending.items():
            with contextlib.suppress(OSError):  # the other end has gone
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _work(self, sock: socket.socket, welcome: StageWelcome) -> None:
        """Body of the thread."""
        with sock, contextlib.suppress(OSError, EOFError):  # the other end has enough, or has gone
            body = encode(welcome)
            sock.sendall(len(body).to_bytes(4, "little") + body)
            set_priority(sock, BULK_PRIORITY)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
            while True:
                layer, size = _ASK.unpack(_read(sock, _ASK.size))
                name = _read(sock, size).decode(errors="replace")
                self._send(sock, self._find(layer, name))
        with self._changing:
            self._lending.pop(sock, None)

    def _find(self, layer: int, name: str) -> torch.Tensor | None:
        """Return the bytes of a part, or None."""
        if layer != _OUTER and not 0 <= layer < len(self._weights.layers):
            return None
        part = (self._weights.outer if layer == _OUTER else self._weights.layers[layer]).get(name)
        return None if part is None else part.reshape(-1).view(torch.uint8)

    def _send(self, sock: socket.socket, part: torch.Tensor | None) -> None:
        if part is None:
            sock.sendall(_FOUND.pack(0))
            return
        sock.sendall(_FOUND.pack(len(part)))
        for first in range(0, len(part), PIECE_BYTES):
            piece = part[first : first + PIECE_BYTES].cpu().numpy().data
            self._turns.wait(TURN_LIMIT_S)
            sock.sendall(piece)


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
        self._sock = sock
        self._layers = layers
        self._outer = frozenset(outer)
        sock.settimeout(SILENCE_S)

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
        except (OSError, EOFError) as error:
            self.close()
            raise SourceLostError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._sock.close()

    def _receive(self, layer: int | None, name: str, target: torch.Tensor, piece_bytes: int) -> Iterator[int]:
        asked = name.encode()
        self._sock.sendall(_ASK.pack(_OUTER if layer is None else layer, len(asked)) + asked)
        (size,) = _FOUND.unpack(_read(self._sock, _FOUND.size))
        if size != len(target):
            raise EOFError(f"it has {size} bytes of '{name}', {len(target)} are needed")
        for first in range(0, size, piece_bytes):
            piece = target[first : first + piece_bytes]
            self._receive_into(piece)
            yield len(piece)

    def _receive_into(self, piece: torch.Tensor) -> None:
        if piece.device.type == "cpu":
            _read_into(self._sock, piece.numpy().data)
        else:
            data = bytearray(len(piece))
            _read_into(self._sock, memoryview(data))
            piece.copy_(torch.frombuffer(data, dtype=torch.uint8))


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _read_into(sock, memoryview(data))
    return bytes(data)


def _read_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the connection has ended")
        view = view[count:]
