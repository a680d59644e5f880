"""Where parameters that were dropped come back from: the host's checkpoint, or a peer that computes with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from services.worker.models.weights import ParameterBuffer


class SourceLostError(Exception):
    """A source is gone, or does not have what it should; the text says why. Another one may be asked."""


class ParameterSource(Protocol):
    """One of them, used by one thread."""

    @property
    def name(self) -> str:
        """Of whom it is, for people."""

    def has(self, layer: int | None, part: str) -> bool:
        """Return whether it is worth asking for a part of a layer; None: of those outside of the layers."""

    def fill(self, layer: int | None, buffer: ParameterBuffer, piece_elements: int | None) -> Iterator[int]:
        """Write the parts of a buffer, piece by piece as they are asked for; it may be left before the end.

        Args:
            layer: of the buffer.
            buffer: with memory behind its parts, all of which the source has.
            piece_elements: of a piece at most; None: any.

        Yields:
            Bytes of a piece that was written.

        Raises:
            SourceLostError: not all of it came.
            StartupError: the same, with a hint for people.
        """

    def close(self) -> None:
        """Ask for nothing more. Idempotent."""
