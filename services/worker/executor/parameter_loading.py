"""Parameters that have memory but are not loaded yet: which they are, and their way there.

    take_in(new) ─► lacking ──load──► loaded                        at once: nobody serves meanwhile
                       ▲  └───begin─► buffer by buffer ─► loaded    in a thread of its own, beside steps
                       └────stop──────────┘                         what is under way is read again

Only what is lacking is written. A runner that is open has none of it (`ModelWeights.of_stage`), though bytes of both
may lie in one page. `begin` reads in pieces, each by one thread that does not hold the interpreter meanwhile. What has
come counts as loaded when its digests are those of the first loading; else, and where a source is lost, the next source
is asked for it. The host's checkpoint is always among them.

Source: KunServe v1, section 4.2 (parameters are pulled beside serving).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from services.worker.executor.parameter_load import ParameterLoad
from services.worker.executor.parameter_sources import ParameterSource, SourceLostError
from services.worker.memory.spans import Spans
from services.worker.models.checkpoint import TensorEntry
from services.worker.models.digests import digests_of, wrong_parts
from services.worker.models.loader import copy_pieces
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, ParameterBuffer
from shared.errors import StartupError
from shared.layers import LayerRange
from shared.process.log import get_logger

CPU_PIECE_ELEMENTS: Final = 32_000
"""Of a piece in main memory: torch copies so many in the calling thread, more (32 768) by all of its threads."""
GPU_PIECE_ELEMENTS: Final = 4 * 2**20
"""Of a piece on a GPU: below a millisecond of its link, for which a step's own copies may wait."""
_NOTHING: Final = Spans()
_log = get_logger()


def _file_state(path: Path) -> tuple[int, int, int]:
    """Return by what a file is known to be the one that was read before: its size, time of change and inode."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


class CheckpointSource:
    """The checkpoint that was loaded, in the host's memory or on its disk.

    Args:
        tensors: by name; where they are.
    """

    name = "the checkpoint"

    def __init__(self, tensors: dict[str, TensorEntry]) -> None:
        self._tensors = tensors
        self._files = {path: _file_state(path) for path in sorted({each.path for each in tensors.values()})}

    def has(self, layer: int | None, part: str) -> bool:
        """Return that it has every part."""
        return True

    def fill(self, layer: int | None, buffer: ParameterBuffer, piece_elements: int | None) -> Iterator[int]:
        """Read the parts of a buffer; see `ParameterSource`."""
        self._check_files(buffer)
        for _, num_bytes in copy_pieces((buffer,), self._tensors, piece_elements):
            yield num_bytes

    def close(self) -> None:
        """Keep nothing open: there is nothing."""

    def _check_files(self, buffer: ParameterBuffer) -> None:
        sources = (source for part in buffer.parts for source in part.sources)
        for path in sorted({self._tensors[source.name].path for source in sources}):
            if not path.exists() or _file_state(path) != self._files[path]:
                raise StartupError(f"{path.name} is not the file that was loaded", "Start the worker again")


class ParameterLoading:
    """See the module. Used by one thread at a time, but for `loaded_ratio` and `load_now`.

    Args:
        spec: the model.
        weights: all of its parameters, loaded.
        tensors: where they came from.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, tensors: dict[str, TensorEntry]) -> None:
        self._spec = spec
        self._weights = weights
        self._checkpoint = CheckpointSource(tensors)
        self.digests = digests_of(weights)
        """Of all of its parts, as they were loaded first."""
        self._lacking: dict[int | None, ParameterBuffer] = {}
        """By layer, None: outside of the layers; with only the parts that are not loaded."""
        self._unread: set[str] = set()
        """Parts outside of the layers that are not loaded, needed now or not: a page may hold some of either kind."""
        self._bytes = (0, 1)
        """Of the parameters that are lacking, and that have memory; replaced as one, for whoever asks meanwhile."""
        self._given: Counter[str] = Counter()
        """Bytes that were loaded since the last `begin`, by the name of the source; replaced as one, likewise."""
        self._begun_bytes = 0
        """That were lacking at the last `begin`."""
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

    @property
    def load_now(self) -> ParameterLoad | None:
        """How far what `begin` has begun is; None: nothing was lacking then, or `stop` has ended it. In any thread."""
        thread = self._thread
        if thread is None or not self._begun_bytes:
            return None
        is_over = not thread.is_alive()  # before the figures, which are the last ones then
        given = tuple(self._given.items())
        num_loaded = max(self._begun_bytes - self._bytes[0], 0)  # memory may come and go meanwhile
        return ParameterLoad(self._begun_bytes, num_loaded, given, is_over)

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
        self._unread |= {part.name for part in self._weights.outer.within(outer.ranges).parts}
        if names := self._unread & {part.name for part in stage.outer.parts}:
            lacking[None] = stage.outer.only(names)
        self._lacking = lacking
        self._count(sum(each.num_bytes for each in (stage.outer, *stage.layers)))

    def load(self) -> None:
        """Load all that is lacking, from the checkpoint. Blocks; called again after a failure, it goes on.

        Nothing is under way.

        Raises:
            StartupError: the checkpoint is not what it was.
        """
        self._load((self._checkpoint,), None)

    def begin(self, before: Sequence[ParameterSource] = (), after: Sequence[ParameterSource] = ()) -> None:
        """Load what is lacking beside other work, until `stop`. Nothing is under way.

        Args:
            before: sources that are asked before the checkpoint, in this order; owned.
            after: those that are asked for what it does not give; owned.
        """
        assert self._thread is None, "parameters are being loaded"
        self._stopping.clear()
        self._begun_bytes, self._given = self._bytes[0], Counter()
        work = threading.Thread(target=self._work, args=(before, after), name="parameter loading", daemon=True)
        self._thread = work
        work.start()

    def stop(self) -> None:
        """End what `begin` has begun, within a piece. Idempotent."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        self._stopping.clear()

    def _work(self, before: Sequence[ParameterSource], after: Sequence[ParameterSource]) -> None:
        """Body of the thread."""
        on_cpu = self._weights.outer.storage.device.type == "cpu"
        began_s = time.perf_counter()
        try:
            self._load((*before, self._checkpoint, *after), CPU_PIECE_ELEMENTS if on_cpu else GPU_PIECE_ELEMENTS)
            if self._given and self.is_complete:
                _log.info(
                    "parameters_loaded",
                    num_bytes=self._given.total(),
                    sources=", ".join(f"{name}: {count}" for name, count in self._given.items()),
                    took_s=round(time.perf_counter() - began_s, 4),
                )
        except Exception as error:  # whatever the system and torch come up with: `load` tries again, and says it
            _log.warning("parameters_not_loaded", reason=f"{type(error).__name__}: {error}")
        finally:
            for source in (*before, *after):
                source.close()

    def _load(self, sources: Sequence[ParameterSource], piece_elements: int | None) -> None:
        lost: list[ParameterSource] = []
        for layer, buffer in list(self._lacking.items()):
            try:
                if not self._fill(layer, buffer, [each for each in sources if each not in lost], piece_elements, lost):
                    return
                del self._lacking[layer]
                if layer is None:
                    self._unread.difference_update(part.name for part in buffer.parts)
            finally:
                self._count(self._bytes[1])

    def _fill(
        self,
        layer: int | None,
        buffer: ParameterBuffer,
        sources: Sequence[ParameterSource],
        piece_elements: int | None,
        lost: list[ParameterSource],
    ) -> bool:
        """Load a buffer, each part from the first source that gives it; return False if it was stopped before."""
        left = {part.name for part in buffer.parts}
        cause: Exception | None = None
        for source in sources:
            parts = buffer.only({name for name in left if source.has(layer, name)})
            if not parts.parts:
                continue
            try:
                if not self._take(source.fill(layer, parts, piece_elements), parts.num_bytes):
                    return False
                self._check(layer, parts)
            except (SourceLostError, StartupError) as error:
                cause = error
                lost.append(source)
                where = "outside of the layers" if layer is None else layer
                _log.warning("parameter_source_lost", source=source.name, layer=where, reason=str(error))
                self._count(self._bytes[1])
            else:
                left.difference_update(part.name for part in parts.parts)
                self._given = self._given + Counter({source.name: parts.num_bytes})
        if not left:
            return True
        if isinstance(cause, StartupError):
            raise cause
        raise StartupError(f"parameters cannot be loaded again: {cause}", "Start the worker again") from cause

    def _check(self, layer: int | None, buffer: ParameterBuffer) -> None:
        """Compare the bytes of all parts of a buffer with those that were loaded first."""
        if wrong := wrong_parts(self.digests, layer, buffer):
            raise SourceLostError(f"{', '.join(wrong)} came with other bytes than were loaded first")

    def _take(self, pieces: Iterator[int], num_bytes: int) -> bool:
        """Let so many bytes be written; return whether all of them are."""
        for piece_bytes in pieces:
            num_bytes -= piece_bytes
            lacking, resident = self._bytes
            self._bytes = lacking - piece_bytes, resident
            if not num_bytes or self._stopping.is_set():
                break
        return not num_bytes

    def _count(self, resident_bytes: int) -> None:
        self._bytes = sum(buffer.num_bytes for buffer in self._lacking.values()), resident_bytes
