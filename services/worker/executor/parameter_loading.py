"""Parameters that have memory but are not loaded yet: which they are, and their way there from the checkpoint.

    take_in(new) ─► lacking ──load──► loaded                        at once: nobody serves meanwhile
                       ▲  └───begin─► buffer by buffer ─► loaded    in a thread of its own, beside steps
                       └────stop──────────┘                         what is under way is read again

Only what is lacking is written. A runner that is open has none of it (`ModelWeights.of_stage`), though bytes of both
may lie in one page. `begin` reads in pieces, each by one thread that does not hold the interpreter meanwhile.

Source: KunServe v1, section 4.2 (parameters are pulled beside serving). Deviation: from the host's checkpoint only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.worker.memory.spans import Spans
from services.worker.models.checkpoint import TensorEntry
from services.worker.models.loader import copy_pieces
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer
from shared.errors import StartupError
from shared.layers import LayerRange
from shared.log import get_logger

CPU_PIECE_ELEMENTS: Final = 32_000
"""Of a piece in main memory: torch copies so many in the calling thread, more (32 768) by all of its threads."""
GPU_PIECE_ELEMENTS: Final = 4 * 2**20
"""Of a piece on a GPU: below a millisecond of its link, for which a step's own copies may wait."""
_NOTHING: Final = Spans()
_log = get_logger()


@dataclass(frozen=True, slots=True)
class _FileState:
    """By which a file is known to be the one that was read before."""

    num_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _FileState:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class ParameterLoading:
    """See the module. Used by one thread at a time, but for `loaded_ratio`.

    Args:
        spec: the model.
        weights: all of its parameters, loaded.
        tensors: where they came from.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, tensors: dict[str, TensorEntry]) -> None:
        self._spec = spec
        self._weights = weights
        self._tensors = tensors
        self._files = {path: _FileState.of(path) for path in sorted({each.path for each in tensors.values()})}
        self._lacking: dict[int | None, ParameterBuffer] = {}
        """By layer, None: outside of the layers; with only the parts that are not loaded."""
        self._bytes = (0, 1)
        """Of the parameters that are lacking, and that have memory; replaced as one, for whoever asks meanwhile."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.take_in(LayerRange(0, spec.num_layers))

    @property
    def is_complete(self) -> bool:
        """All parameters that have memory are loaded."""
        return not self._lacking

    @property
    def loaded_ratio(self) -> float:
        """Share of the bytes of the parameters that have memory that are loaded, 0 to 1. In any thread."""
        lacking, resident = self._bytes
        return 1 - lacking / resident

    def take_in(self, resident: LayerRange, new: Iterable[int] = (), outer: Spans = _NOTHING) -> None:
        """Note which parameters have memory now; what had none before is lacking. Nothing is under way.

        Args:
            resident: layers that have it, with what a stage of them needs outside of the layers.
            new: those among them that had none.
            outer: bytes of the outer parameters that had none.
        """
        stage = self._weights.of_stage(self._spec, resident)
        layers = {layer for layer in (*self._lacking, *new) if layer is not None and layer in resident}
        lacking: dict[int | None, ParameterBuffer] = {layer: stage.layers[layer] for layer in sorted(layers)}
        names = {part.name for part in stage.outer.within(outer.ranges).parts}
        if None in self._lacking:
            names |= {part.name for part in self._lacking[None].parts} & {part.name for part in stage.outer.parts}
        if names:
            lacking[None] = stage.outer.only(names)
        self._lacking = lacking
        self._count(sum(each.num_bytes for each in (stage.outer, *stage.layers)))

    def load(self) -> None:
        """Load all that is lacking. Blocks; called again after a failure, it goes on. Nothing is under way.

        Raises:
            StartupError: the checkpoint is not what it was.
        """
        self._load(None)

    def begin(self) -> None:
        """Load what is lacking beside other work, until `stop`. Nothing is under way."""
        assert self._thread is None, "parameters are being loaded"
        if self._lacking:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._work, name="parameter loading", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End what `begin` has begun, within a piece. Idempotent."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        self._stopping.clear()

    def _work(self) -> None:
        """Body of the thread."""
        on_cpu = self._weights.outer.storage.device.type == "cpu"
        try:
            self._load(CPU_PIECE_ELEMENTS if on_cpu else GPU_PIECE_ELEMENTS)
        except Exception as error:  # whatever the system and torch come up with: `load` tries again, and says it
            _log.warning("parameters_not_loaded", reason=f"{type(error).__name__}: {error}")

    def _load(self, piece_elements: int | None) -> None:
        for layer, buffer in list(self._lacking.items()):
            self._check_files(buffer)
            try:
                if not self._fill(buffer, piece_elements):
                    return
                del self._lacking[layer]
            finally:
                self._count(self._bytes[1])

    def _fill(self, buffer: ParameterBuffer, piece_elements: int | None) -> bool:
        """Load a buffer; return whether all of it is there."""
        left = buffer.num_bytes
        for _, num_bytes in copy_pieces((buffer,), self._tensors, piece_elements):
            left -= num_bytes
            lacking, resident = self._bytes
            self._bytes = lacking - num_bytes, resident
            if not left or self._stopping.is_set():
                break
        return not left

    def _check_files(self, buffer: ParameterBuffer) -> None:
        sources = (source for part in buffer.parts for source in part.sources)
        for path in sorted({self._tensors[source.name].path for source in sources}):
            if not path.exists() or _FileState.of(path) != self._files[path]:
                raise StartupError(f"{path.name} is not the file that was loaded", "Start the worker again")

    def _count(self, resident_bytes: int) -> None:
        self._bytes = sum(buffer.num_bytes for buffer in self._lacking.values()), resident_bytes
