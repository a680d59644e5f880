"""Stands before every piece of parameters that comes back: counts it, holds it up, or lets it fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from services.worker.executor import parameter_loading
from services.worker.executor.elastic_model import ElasticModel
from services.worker.executor.parameter_loading import ParameterLoading
from services.worker.models.checkpoint import TensorEntry
from services.worker.models.loader import copy_pieces
from services.worker.models.weights import ParameterBuffer
from shared.errors import StartupError

LIMIT_S = 30.0
"""After which a loading that is held up fails, instead of the whole test."""
_POLL_S = 0.002


class LoadingGate:
    """Open when made. It holds up what is loaded beside steps, unless that is told to stop; all else passes.

    Args:
        patch: through which it is put there.
        piece_elements: of a piece that is loaded beside steps.
    """

    def __init__(self, patch: pytest.MonkeyPatch, piece_elements: int = 1500) -> None:
        self.read: list[ParameterBuffer] = []
        """Buffers of which pieces were asked for."""
        self.num_pieces = 0
        """That were read."""
        self.on_pass: Callable[[], None] = lambda: None
        """Called before each piece, where it is loaded."""
        self._changed = threading.Condition()
        self._num_allowed: int | None = None
        self._fails_at: int | None = None
        self._num_waiting = 0
        self._stopped: list[int] = []
        stop = ParameterLoading.stop

        def note_stop(loading: ParameterLoading) -> None:
            self._stopped.append(id(loading._checkpoint._tensors))
            stop(loading)
            self._stopped.remove(id(loading._checkpoint._tensors))

        patch.setattr(ParameterLoading, "stop", note_stop)
        patch.setattr(parameter_loading, "copy_pieces", self._pieces)
        patch.setattr(parameter_loading, "CPU_PIECE_ELEMENTS", piece_elements)

    def hold(self, num_pieces: int = 0) -> None:
        """Let so many more pieces pass, of all loadings beside steps together, and no others until `open`."""
        with self._changed:
            self._num_allowed = self.num_pieces + num_pieces
            self._changed.notify_all()

    def open(self) -> None:
        """Let all pieces pass."""
        with self._changed:
            self._num_allowed = None
            self._changed.notify_all()

    def fail_after(self, num_pieces: int) -> None:
        """Let every piece after so many fail."""
        with self._changed:
            self._fails_at = self.num_pieces + num_pieces

    def mend(self) -> None:
        """Let none fail any more."""
        with self._changed:
            self._fails_at = None

    def wait(self, num_loadings: int = 1) -> None:
        """Return when so many loadings are held up."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_held_up(num_loadings), LIMIT_S)

    def _is_held_up(self, num_loadings: int) -> bool:
        return (self._num_waiting, self.num_pieces) == (num_loadings, self._num_allowed)

    def _pieces(
        self,
        buffers: tuple[ParameterBuffer, ...],
        tensors: dict[str, TensorEntry],
        piece_elements: int | None = None,
    ) -> Iterator[tuple[str, int]]:
        self.read += buffers
        pieces = copy_pieces(buffers, tensors, piece_elements)
        while True:
            with self._changed:
                if piece_elements is not None:
                    self._pass(id(tensors))
                self.on_pass()
                if self._fails_at is not None and self.num_pieces >= self._fails_at:
                    raise StartupError("made up: the checkpoint cannot be read", "Copy it again")
                piece = next(pieces, None)
                self.num_pieces += piece is not None
            if piece is None:
                return
            yield piece

    def _pass(self, loading: int) -> None:
        """Return when a loading may go on."""
        self._num_waiting += 1
        self._changed.notify_all()
        for _ in range(round(LIMIT_S / _POLL_S)):
            if self._num_allowed is None or self.num_pieces < self._num_allowed or loading in self._stopped:
                break
            self._changed.wait(_POLL_S)
        else:
            raise AssertionError("parameters were held up for too long")
        self._num_waiting -= 1


def wait_until_loaded(model: ElasticModel) -> None:
    """Return when nothing is being loaded any more, whether it went well or not."""
    thread = model._loading._thread
    if thread is not None:
        thread.join()


def byte_ranges(buffer: ParameterBuffer) -> set[tuple[int, int]]:
    """Return at which addresses the parts of a buffer lie: first byte and one past the last of each."""
    parts = [buffer[part.name] for part in buffer.parts]
    return {(part.data_ptr(), part.data_ptr() + part.numel() * part.itemsize) for part in parts}
