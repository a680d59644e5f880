"""A loaded model whose layers go and come back: it is opened anew over those that are there.

    open() ─► runner of [0, 4)      keep([0, 2))         open() ─► runner of [0, 2)       restore()
              closes, and the       layers 2, 3 become             more KV blocks,        layers 2, 3 are read from
              memory stays          memory for KV                  no row is known        the checkpoint again
                                                                   └── reside([0, 4)) ──► read already, beside its steps

Parameters and KV never move: every runner finds them at the addresses of the first one. One runner is open at a time.
It is closed by a change of what is computed: then rows do not survive, and of KV what others copy through `cache`. It
goes on after `reside`, which changes what is there beside. Blocks; one thread at a time.

Source: KunServe v2, section 4.1 (parameters are dropped by mapping their memory to the KV); v1, section 4.2 (they come
back beside serving, from the host or from other instances).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from services.worker.attention.base import Attention
from services.worker.contract.executor import HostMemory
from services.worker.executor.first_look import RunnerSettings
from services.worker.executor.model_runner import ModelInfo, ModelRunner
from services.worker.executor.parameter_load import ParameterLoad
from services.worker.executor.parameter_loading import ParameterLoading
from services.worker.executor.parameter_sources import ParameterSource
from services.worker.executor.runner import LoadedModel, Progress, load_model
from services.worker.memory import holdings
from services.worker.memory.change import MemoryLostError
from services.worker.memory.elastic import ElasticMemory
from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.page_swap import PageSwap
from services.worker.memory.spans import Spans
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, stage_parts
from shared.errors import StartupError
from shared.layers import LayerRange

T = TypeVar("T")


def load_elastic_model(settings: RunnerSettings, progress: Progress, spec: ModelSpec | None = None) -> ElasticModel:
    """Load a model in pages, `settings.page_bytes` large, so that layers can be dropped. As `load_model`.

    Raises:
        StartupError: as `load_model`.
    """
    assert settings.page_bytes is not None, "memory without pages cannot drop layers"
    return ElasticModel(load_model(settings, progress, spec, lends_memory=True))


class ElasticModel:
    """See the module.

    Args:
        loaded: in elastic memory that it was lent; the memory and the runner are owned from now on.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        memory = loaded.runner.memory
        assert isinstance(memory, ElasticMemory), "only memory in pages can drop layers"
        self._memory = memory
        self.spec, self.whole = loaded.opener.spec, LayerRange(0, loaded.runner.info.num_layers)
        """The model, and all of its layers."""
        self.layout, self.facts, self.device = memory.layout, memory.layout.facts, memory.device
        """Of the memory: arithmetic of its pages and blocks, and its sizes."""
        self._opener = loaded.opener
        self.grammars = loaded.opener.grammars
        """Over its vocabulary; None: no answer can be held to one."""
        self.cache: KVCache = loaded.cache
        """Keys and values of the layers that are held: to copy what is in blocks before and after a change.

        What a change does to their contents: blocks of layers that stay keep theirs as long as there are as many.
        """
        self._loading = ParameterLoading(loaded.opener.spec, loaded.opener.weights, loaded.tensors)
        self.digest = loaded.digest(self._loading.digests)
        """Of its parameters, of how it computes KV, and how that lies in a block; see `model_digest`."""
        self._addresses = self._find_addresses()
        self.host = loaded.runner.host
        """Host memory for KV of the layers that are held, the same at all times; None: there is none."""
        self._runner = loaded.runner
        self._runner.close()  # it may know of rows by which it was tried out
        self._lost: MemoryLostError | None = None
        self.info: ModelInfo = loaded.runner.info
        """Of the whole model, as it was loaded."""

    @property
    def layers(self) -> LayerRange:
        """Held now."""
        held = self._memory.holding.layers
        return LayerRange(held[0], held[-1] + 1)

    @property
    def resident(self) -> LayerRange:
        """Those whose parameters have memory, computed here or not. In any thread."""
        resident = self._memory.holding.resident
        return LayerRange(resident[0], resident[-1] + 1)

    @property
    def loaded_ratio(self) -> float:
        """Share of the resident parameters' bytes that are loaded, 0 to 1. In any thread."""
        return self._loading.loaded_ratio

    @property
    def load_now(self) -> ParameterLoad | None:
        """How far parameters are that `reside` loads; None: none are being loaded. In any thread."""
        return self._loading.load_now

    def host_attention(self, cache: KVCache) -> Attention[Any]:
        """Return an attention over keys and values of the model that lie in main memory."""
        return self._opener.host_attention(cache)

    def blocks_with(self, layers: LayerRange, resident: LayerRange | None = None) -> int:
        """Return how many KV blocks there will be for these layers, which are the whole model or a part of those held.

        Args:
            layers: to be held.
            resident: whose parameters are to be there too; None: no others.

        Raises:
            ValueError: other layers, or they are not all resident.
        """
        if layers == self.whole:
            return self.info.capacity.num_blocks
        self._check_held(layers)
        if resident is not None and not (resident.covers(layers) and self.whole.covers(resident)):
            raise ValueError(f"layers {layers} are not all among the resident ones, {resident}")
        return holdings.room(self.layout, layers, resident or layers)

    def blocks_ahead(self, layers: LayerRange, num_blocks: int) -> int:
        """Return of how many blocks a stage can have all layers beside the whole model and its own KV.

        Args:
            layers: of the stage: of this model, or of one in a memory like this.
            num_blocks: of those that it computes with.
        """
        return holdings.room_ahead(self.layout, layers, num_blocks)

    def open(self) -> ModelRunner:
        """Return a runner of the layers that are held, which is to be closed before another change than `reside`."""
        assert not self._runner.is_open, "one runner is open at a time"
        assert self._loading.is_complete, "parameters are missing that were not loaded"
        self._check_addresses()
        self._runner = self._opener.open(
            self.cache, self.info.max_model_len, self.info.reserve_bytes, owns_memory=False
        )
        if self.host is not None and self.host_memory is not None:
            self._runner.use_host(self.host, self.host_memory.share(len(self.layers), len(self.whole)))
        self._describe()
        return self._runner

    def keep(self, layers: LayerRange) -> None:
        """Drop all other layers, and have more KV blocks for these. Nothing is resident beside them then.

        Raises:
            ValueError: they are not all held.
            MemoryLostError: pages are not where they should be; only `close` is left to do.
            OSError, MemoryError: the system refuses; all of them are still held.
        """
        gone = self._close_for(layers)
        if layers == self.resident:
            return
        self._make_room(self.layers, 0)
        if gone:
            self._changed(lambda: self._memory.drop(gone))
            self._loading.take_in(layers)
        else:
            self._changed(self._memory.grow)

    def keep_by_pages(
        self, layers: LayerRange, in_use: Spans, by_blocks: int, taken: Spans, hand_over: Callable[[PageSwap], None]
    ) -> None:
        """Drop all other layers as `keep`, and hand their KV over against KV of these; the rest is memory for blocks.

        Args:
            layers: all held now.
            in_use: blocks whose KV stays: of these layers here, of the others at whoever gets them.
            by_blocks: added to their ids here.
            taken: pages of keys and values in each of these layers that come.
            hand_over: as in `ElasticMemory.swap`; if it raises anything but `MemoryLostError`, the model still has
                these layers and all blocks, of which those in use hold KV of these layers only.

        Raises:
            ValueError, MemoryLostError, OSError, MemoryError: as in `keep`.
            BaseException: what `hand_over` raised.
        """
        gone = self._close_for(layers)
        self._make_room(self.layers, 0)
        self._changed(lambda: self._memory.leave(gone, in_use, by_blocks))
        self._loading.take_in(layers)
        try:
            self._changed(lambda: self._memory.swap(taken, hand_over))
        finally:
            if self._lost is None:
                self._changed(self._memory.fill)

    def reside(
        self,
        layers: LayerRange,
        num_blocks: int,
        before: Sequence[ParameterSource] = (),
        after: Sequence[ParameterSource] = (),
        *,
        is_ahead: bool = False,
    ) -> int:
        """Have the parameters of some layers beside those that are held, and load what is not loaded in a thread.

        A runner may be open: it goes on with the blocks that there are then, at their addresses. Even a step may be
        under way in its thread if it uses no block with an id of `num_blocks` or above: those below have their memory
        all the time, and whatever sizes of the cache the step finds, of before or after, they are among them.

        Args:
            layers: that contain those held; just these: what is loaded beside becomes memory for KV.
            num_blocks: that there have to be; those with higher ids are not used any more.
            before: sources that are asked before the checkpoint is read; owned, whatever happens.
            after: those that are asked for what it does not give; owned.
            is_ahead: there are no more blocks than that, and what else there is becomes memory for KV of the layers
                beside: for `blocks_ahead`, see `ahead`.

        Returns:
            KV blocks that there are.

        Raises:
            ValueError: other layers, or so many blocks do not fit, or, ahead, they are not those of the whole model, or
                leave memory for none; nothing was changed.
            MemoryLostError: pages are not where they should be; only `close` is left to do.
            OSError, MemoryError: the system refuses; there may be fewer blocks than before.
        """
        with contextlib.ExitStack() as sources:
            for source in (*before, *after):
                sources.callback(source.close)
            if (fitting := self.blocks_with(self.layers, layers)) < num_blocks:
                raise ValueError(f"{fitting} blocks fit beside layers {layers}, {num_blocks} were promised")
            ahead_blocks = self.blocks_ahead(self.layers, num_blocks) if is_ahead else 0
            if is_ahead and (layers != self.whole or not ahead_blocks):
                raise ValueError(f"{num_blocks} blocks of layers {self.layers} leave no memory for KV of all layers")
            try:
                self._make_room(layers, min(num_blocks, self._memory.num_blocks), ahead_blocks)
                if is_ahead:
                    self._changed(lambda: self._memory.shrink(num_blocks))
                else:
                    self._changed(self._memory.grow)
            finally:
                self._describe()
                if self._lost is None:
                    sources.pop_all()
                    self._loading.begin(before, after)
        return self._memory.num_blocks

    def ahead(self) -> KVCache | None:
        """Return keys and values of all layers, of those that are not held too, in the first blocks.

        None: there is no memory for them. Valid until the next change; `restore` leaves what they hold.
        """
        left = {self._memory.holding.left(layer) for layer in self.whole if layer not in self.layers}
        blocks = left.pop() if len(left) == 1 else Spans()
        if not blocks:
            return None
        keys, values = zip(*(self._memory.kv(layer) for layer in self.whole), strict=True)
        return KVCache.over(keys, values, blocks.end)

    @property
    def host_memory(self) -> HostMemory | None:
        """What is said of `host`, for blocks with all layers."""
        return self.info.capacity.host

    @property
    def lendable(self) -> ModelWeights:
        """The parameters of the layers that are held, which stay loaded until those change."""
        return self._opener.weights.of_stage(self.spec, self.layers)

    def outer_names(self, layers: LayerRange) -> tuple[str, ...]:
        """Return the names of the parts outside of the layers that a stage with these needs."""
        return tuple(part.name for part in stage_parts(self.spec, layers))

    def restore(self) -> None:
        """Hold all layers again, with as many KV blocks as at the start. Called again after a failure, it goes on.

        Raises:
            StartupError: the memory or the checkpoint is not what it was.
        """
        self._runner.close()
        self._loading.stop()
        try:
            if self._lost is not None:
                raise self._lost
            self._take_back()
        except (NotEnoughPagesError, MemoryLostError, OSError, MemoryError) as error:
            raise StartupError(f"dropped layers cannot come back: {error}", "Start the worker again") from error
        self._loading.load()

    def close(self) -> None:
        """Give back all memory. Idempotent."""
        self._runner.close()
        self._loading.stop()
        self._memory.close()

    def check_invariants(self) -> None:
        """Check that every page is at exactly one place, and that nothing has moved. Slow: looks at every address."""
        self._memory.check_invariants()
        self._check_addresses()

    def _close_for(self, layers: LayerRange) -> list[int]:
        """Close the runner, and return the layers that are held besides some of those that are."""
        self._runner.close()
        self._check_held(layers)
        return [layer for layer in self.layers if layer not in layers]

    def _check_held(self, layers: LayerRange) -> None:
        if not self.layers.covers(layers):
            raise ValueError(f"layers {layers} are not all among those held, {self.layers}")

    def _take_back(self) -> None:
        memory, num_blocks = self._memory, self.info.capacity.num_blocks
        gone = [layer for layer in self.whole if layer not in memory.holding.layers]
        if gone:
            new = [layer for layer in gone if layer not in memory.holding.resident]
            self._loading.take_in(self.whole, new, memory.restore(gone, 0))
        if memory.num_blocks > num_blocks:
            memory.shrink(num_blocks)
        memory.grow(num_blocks - memory.num_blocks)
        assert memory.num_blocks == num_blocks, f"{memory.num_blocks} blocks fit, {num_blocks} did at the start"

    def _make_room(self, resident: LayerRange, min_blocks: int, ahead_blocks: int = 0) -> None:
        """Have memory for the parameters of these layers and no others; nothing is being loaded then."""
        self._loading.stop()
        new = [layer for layer in resident if layer not in self._memory.holding.resident]
        beside = [layer for layer in resident if layer not in self.layers]
        ahead = Spans.of((0, ahead_blocks))
        outer = self._changed(lambda: self._memory.reside(beside, min_blocks, ahead))
        self._loading.take_in(resident, new, outer)

    def _changed(self, change: Callable[[], T]) -> T:
        """Change the memory, and remember if it is lost by that."""
        try:
            return change()
        except MemoryLostError as error:
            self._lost = error
            raise

    def _describe(self) -> None:
        """Let the runner say what it has."""
        holding, runner = self._memory.holding, self._runner
        runner.info = replace(
            runner.info,
            param_bytes=self.layout.fixed_pages(holding) * self.facts.page_bytes,
            kv_bytes=self.cache.num_bytes,
            capacity=replace(runner.info.capacity, num_blocks=self.cache.num_blocks),
        )

    def _find_addresses(self) -> tuple[int, ...]:
        """Return where parameters and KV of every layer lie, held or not."""
        kv = (part.data_ptr() for layer in range(self.facts.num_layers) for part in self._memory.kv(layer))
        weights = self._opener.weights
        return (weights.outer.storage.data_ptr(), *(each.storage.data_ptr() for each in weights.layers), *kv)

    def _check_addresses(self) -> None:
        assert self._find_addresses() == self._addresses, "parameters or KV have moved"
        for layer in self.layers:
            lies_at = (self.cache.keys[layer].data_ptr(), self.cache.values[layer].data_ptr())
            assert lies_at == tuple(part.data_ptr() for part in self._memory.kv(layer)), f"the KV of {layer} has moved"
