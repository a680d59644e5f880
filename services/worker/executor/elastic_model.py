"""A loaded model whose layers go and come back: it is opened anew over those that are there.

    open() ─► runner of [0, 4)      keep([0, 2))         open() ─► runner of [0, 2)       restore()
              closes, and the       layers 2, 3 become             more KV blocks,        layers 2, 3 are read from
              memory stays          memory for KV                  no row is known        the checkpoint again

Parameters and KV never move: every runner finds them at the addresses of the first one. Rows do not survive a change,
and of KV what others copy through `cache`. One runner is open at a time, and none during a change. Blocks; one thread
at a time.

Source: KunServe v2, section 4.1 (parameters are dropped by mapping their memory to the KV). Deviation: dropped layers
come back from the host's own copy of the checkpoint, where the paper also pulls them from other instances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.executor.model_runner import ModelInfo, ModelRunner, RunnerSettings
from services.worker.executor.runner import LoadedModel, Progress, load_model
from services.worker.memory import holdings
from services.worker.memory.change import MemoryLostError
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.layout import MemoryFacts
from services.worker.memory.spans import Spans
from services.worker.models.loader import fill_buffers
from shared.errors import StartupError
from shared.layers import LayerRange


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


def load_elastic_model(settings: RunnerSettings, progress: Progress) -> ElasticModel:
    """Load a model in pages, `settings.page_bytes` large, so that layers can be dropped. As `load_runner`.

    Raises:
        StartupError: as `load_runner`, or host memory for KV is asked for, which this model has none of.
    """
    assert settings.page_bytes is not None, "memory without pages cannot drop layers"
    if settings.host_memory_bytes:
        raise StartupError("a worker that drops layers has no host memory for KV", "Choose another system")
    return ElasticModel(load_model(settings, progress, lends_memory=True))


class ElasticModel:
    """See the module.

    Args:
        loaded: in elastic memory that it was lent; the memory and the runner are owned from now on.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        memory = loaded.runner.memory
        assert isinstance(memory, ElasticMemory), "only memory in pages can drop layers"
        self._memory = memory
        self._opener, self._cache, self._tensors = loaded.opener, loaded.cache, loaded.tensors
        self._files = {path: _FileState.of(path) for path in sorted({each.path for each in self._tensors.values()})}
        self._addresses = self._find_addresses()
        self._runner = loaded.runner
        self._runner.close()  # it may know of rows by which it was tried out
        self._missing = Spans()
        self._stale: tuple[int, ...] = ()
        self._lost: MemoryLostError | None = None
        self.info: ModelInfo = loaded.runner.info
        """Of the whole model, as it was loaded."""

    @property
    def layers(self) -> LayerRange:
        """Held now."""
        held = self._memory.held_layers
        return LayerRange(held[0], held[-1] + 1)

    @property
    def whole(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.info.num_layers)

    @property
    def facts(self) -> MemoryFacts:
        """Sizes of the memory."""
        return self._memory.layout.facts

    @property
    def cache(self) -> KVCache:
        """Keys and values of the layers that are held: to copy what is in blocks before and after a change.

        What a change does to their contents: blocks of layers that stay keep theirs as long as there are as many.
        """
        return self._cache

    def blocks_with(self, layers: LayerRange) -> int:
        """Return how many KV blocks there will be for these layers, which are the whole model or a part of those held.

        Raises:
            ValueError: other layers.
        """
        if layers == self.whole:
            return self.info.capacity.num_blocks
        if not self.layers.covers(layers):
            raise ValueError(f"layers {layers} are not all among those held, {self.layers}")
        gone = [layer for layer in self.layers if layer not in layers]
        layout, after = self._memory.layout, self._memory.holding
        if gone:
            after = holdings.grown(layout, holdings.dropped(layout, after, gone, Spans()))
        return layout.usable(after).total

    def open(self) -> ModelRunner:
        """Return a runner of the layers that are held, which is to be closed before the next change."""
        assert not self._runner.is_open, "one runner is open at a time"
        assert not self._missing.total + len(self._stale), "parameters are missing that were not loaded"
        self._check_addresses()
        runner = self._opener.open(self._cache, self.info.max_model_len, self.info.reserve_bytes, owns_memory=False)
        param_bytes = self._memory.layout.fixed_pages(self._memory.holding) * self.facts.page_bytes
        runner.info = replace(runner.info, param_bytes=param_bytes)
        self._runner = runner
        return runner

    def keep(self, layers: LayerRange) -> None:
        """Drop all other layers, and have more KV blocks for these.

        Raises:
            ValueError: they are not all held.
            MemoryLostError: pages are not where they should be; only `close` is left to do.
            OSError, MemoryError: the system refuses; nothing was changed.
        """
        self._runner.close()
        if not self.layers.covers(layers):
            raise ValueError(f"layers {layers} are not all among those held, {self.layers}")
        gone = [layer for layer in self.layers if layer not in layers]
        if not gone:
            return
        try:
            self._memory.drop(gone, in_use=Spans())
        except MemoryLostError as error:
            self._lost = error
            raise

    def restore(self) -> None:
        """Hold all layers again, with as many KV blocks as at the start. Called again after a failure, it goes on.

        Raises:
            StartupError: the memory or the checkpoint is not what it was.
        """
        self._runner.close()
        try:
            if self._lost is not None:
                raise self._lost
            self._take_back()
        except (NotEnoughPagesError, MemoryLostError, OSError, MemoryError) as error:
            raise StartupError(f"dropped layers cannot come back: {error}", "Start the worker again") from error
        self._load()

    def close(self) -> None:
        """Give back all memory. Idempotent."""
        self._runner.close()
        self._memory.close()

    def check_invariants(self) -> None:
        """Check that every page is at exactly one place, and that nothing has moved. Slow: looks at every address."""
        self._memory.check_invariants()
        self._check_addresses()

    def _take_back(self) -> None:
        memory, num_blocks = self._memory, self.info.capacity.num_blocks
        gone = [layer for layer in self.whole if layer not in memory.held_layers]
        if gone:
            self._missing = self._missing | memory.restore(gone, 0)
            self._stale = tuple(sorted((*self._stale, *gone)))
        if memory.num_blocks > num_blocks:
            memory.shrink(num_blocks)
        memory.grow(max_blocks=num_blocks - memory.num_blocks)
        assert memory.num_blocks == num_blocks, f"{memory.num_blocks} blocks fit, {num_blocks} did at the start"

    def _load(self) -> None:
        """Read what is arbitrary in the parameters."""
        if not self._stale and not self._missing:
            return
        for path, state in self._files.items():
            if not path.exists() or _FileState.of(path) != state:
                raise StartupError(f"{path.name} is not the file that was loaded", "Start the worker again")
        weights = self._opener.weights
        layers = (weights.layers[layer] for layer in self._stale)
        fill_buffers((weights.outer.within(self._missing.ranges), *layers), self._tensors)
        self._stale = ()
        self._missing = Spans()

    def _find_addresses(self) -> tuple[int, ...]:
        """Return where parameters and KV of every layer lie, held or not."""
        kv = (part.data_ptr() for layer in range(self.facts.num_layers) for part in self._memory.kv(layer))
        weights = self._opener.weights
        return (weights.outer.storage.data_ptr(), *(each.storage.data_ptr() for each in weights.layers), *kv)

    def _check_addresses(self) -> None:
        assert self._find_addresses() == self._addresses, "parameters or KV have moved"
        for layer in self.layers:
            lies_at = (self._cache.keys[layer].data_ptr(), self._cache.values[layer].data_ptr())
            assert lies_at == tuple(part.data_ptr() for part in self._memory.kv(layer)), f"the KV of {layer} has moved"
