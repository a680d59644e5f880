"""Opens a `ModelRunner` over parameters that are loaded, and finds out how much memory its steps take beside them.

The same parameters can be opened again and again, over a cache that has got other layers meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.worker.attention.base import Attention
from services.worker.attention.torch_paged import fullest_group, query_tile
from services.worker.contract.batch import Batch, RowInit
from services.worker.contract.executor import BatchFailedError, KvCapacity
from services.worker.executor.first_look import RunnerSettings, step_sizes
from services.worker.executor.kernels import Kernels
from services.worker.executor.model_runner import ModelInfo, ModelRunner
from services.worker.executor.step_graphs import GraphRecorder, StepGraphs, graph_sizes
from services.worker.executor.step_threads import step_work
from services.worker.executor.trial_batch import trial_batch
from services.worker.memory.budget import (
    MIN_CONTEXT_TOKENS,
    Demand,
    Division,
    Trial,
    bytes_per_block,
    divide,
    next_context,
)
from services.worker.memory.host_kv import staged_bytes
from services.worker.memory.host_link import is_beside
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.measure import large_apart, peak_bytes, release_free_memory
from services.worker.memory.model_memory import ModelMemory
from services.worker.memory.reserve import estimated_peak, listed_bytes, reserve_bytes, split_bytes
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights, num_parameters
from services.worker.sampling.choosing import Chooser
from services.worker.sampling.grammar_cache import GrammarCache
from services.worker.sampling.logit_rules import MAX_EDITS
from services.worker.sampling.own_samples import OwnSamples
from shared.errors import StartupError
from shared.layers import LayerRange
from shared.types import SamplingParams


class RunnerOpener:
    """A model whose parameters are loaded.

    Args:
        settings: of its runners.
        spec: the model.
        weights: its parameters, all that are held.
        demand: what the budget is divided by.
        kernels: what computes.
        memory: in which parameters and KV lie.
        recorder: of the memory's device, if steps are to be recorded.
        grammars: over the model's vocabulary; None: no answer can be held to one.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        settings: RunnerSettings,
        spec: ModelSpec,
        weights: ModelWeights,
        demand: Demand,
        kernels: Kernels,
        memory: ModelMemory,
        *,
        recorder: GraphRecorder | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        self._settings = settings
        self.grammars = grammars
        self.deterministic = settings.deterministic
        """Results do not depend on the batch."""
        self.spec = spec
        self.weights = weights
        self._demand = demand
        self._device = memory.device
        self._kernels = kernels
        self._memory = memory
        self._recorder = recorder
        self._rope: RopeTable | None = None
        self._graphs: StepGraphs | None = None
        self._samples = OwnSamples(self._max_rows, spec.vocab_size, memory.device)
        self._dry_step_s = 0.0

    @property
    def _max_rows(self) -> int:
        return max(self._settings.max_rows, self._settings.max_batch_rows + 1)  # one more in the worst batch

    def host_attention(self, cache: KVCache) -> Attention[Any]:
        """Return an attention over keys and values of the model that lie in main memory."""
        return self._kernels.host_attention(self.spec, cache)

    def open(self, cache: KVCache, max_model_len: int, reserve_bytes: int, *, owns_memory: bool = True) -> ModelRunner:
        """Return a runner over a cache, for the layers that have blocks there; it knows of no row.

        Args:
            cache: over the memory.
            max_model_len: longest sequence.
            reserve_bytes: kept free for steps.
            owns_memory: the memory is closed with the runner.
        """
        settings, spec, dtype = self._settings, self.spec, cache.keys[0].dtype
        layers = LayerRange(cache.layers[0], cache.layers[-1] + 1)
        info = ModelInfo(
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_model_len=max_model_len,
            max_batch_tokens=settings.max_batch_tokens,
            num_layers=spec.num_layers,
            layers=layers,
            hidden_size=spec.hidden_size,
            num_parameters=num_parameters(spec),
            param_bytes=self._demand.parameter_bytes,
            kv_bytes=cache.num_bytes,
            reserve_bytes=reserve_bytes,
            bytes_per_block=bytes_per_block(spec, settings.block_size, dtype, layers),
            capacity=KvCapacity(cache.num_blocks, settings.block_size),
            device=str(self._device),
            dtype=settings.dtype,
            dry_step_s=self._dry_step_s,
            kernels=self._kernels.name,
            build=self._kernels.build,
            threads=self._kernels.threads,
        )
        forward = self._kernels.open(
            spec,
            self.weights.of_stage(spec, layers),
            self._rope_for(max_model_len, dtype),
            cache,
            max_tokens=settings.max_batch_tokens,
            deterministic=settings.deterministic,
            samples=self._samples,
            graphs=self._graphs,
        )
        chooser = Chooser(
            self._max_rows,
            info.eos_token_ids,
            info.vocab_size,
            row_by_row=settings.deterministic,
            choose=None if self._kernels.fused is None else self._kernels.fused.choose,
            grammars=self.grammars,
        )
        return ModelRunner(
            info,
            forward,
            self._memory,
            chooser,
            max_rows=self._max_rows,
            samples=self._samples,
            overlaps=is_beside(self._device) if settings.overlap is None else settings.overlap,
            owns_memory=owns_memory,
        )

    @property
    def records_graphs(self) -> bool:
        """Whether steps of decodes of the whole model are recorded; see `step_graphs.py`."""
        return self._recorder is not None and self._kernels.flashinfer is not None and self._settings.layers is None

    def record(self, cache: KVCache, max_model_len: int, progress: Callable[[float], None]) -> int:
        """Record the steps of decodes over a cache that has no KV yet; return how many graphs there are.

        Runners of all layers use them from now on.

        Args:
            cache: of all layers.
            max_model_len: longest sequence.
            progress: called with the share that is done.
        """
        self._graphs = self._new_graphs(cache, max_model_len)
        with torch.inference_mode():
            self._graphs.record(progress)
        return len(self._graphs.sizes)

    def _new_graphs(self, cache: KVCache, max_model_len: int, *, only_largest: bool = False) -> StepGraphs:
        assert self._recorder is not None
        settings, spec, dtype = self._settings, self.spec, self.weights.dtype
        sizes = graph_sizes(settings.max_batch_rows)
        weights = self.weights.of_stage(spec, LayerRange(0, spec.num_layers))
        rope = self._rope_for(max_model_len, dtype)
        chosen = sizes[-1:] if only_largest else sizes
        return self._kernels.graphs(spec, weights, rope, cache, self._recorder, sizes=chosen, samples=self._samples)

    def divide(self, longest: int, progress: Callable[[int], None]) -> tuple[int, Division]:
        """Return the reserve and the division of the budget for the longest context that fits.

        Args:
            longest: context that is possible.
            progress: called with each context before it is tried.

        Raises:
            StartupError: the budget is too small, or a first step failed.
        """
        trials: list[Trial] = []
        with large_apart():
            if self._device.type == "cpu":
                self._warm_up(min(longest, MIN_CONTEXT_TOKENS))
            while (context := next_context(self._demand, longest, trials)) is not None:
                progress(context)
                trials.append(Trial(context, self._measure(context)))
        release_free_memory(self._device)  # the last measured cache is smaller than the one to come
        return divide(self._demand, trials)

    def _rope_for(self, max_model_len: int, dtype: torch.dtype) -> RopeTable:
        """Return the angles of so many positions; the last table is kept, since it is the largest thing to make.

        Those that graphs were recorded with are kept as long as the graphs.
        """
        if self._graphs is not None and self._graphs.layers.rope.num_positions == max_model_len:
            return self._graphs.layers.rope
        if self._rope is None or self._rope.num_positions != max_model_len:
            self._rope = None  # the old one goes before the new one comes
            self._rope = RopeTable(self.spec.rope, self.spec.rotary_dim, max_model_len, dtype, self._device)
        return self._rope

    def _warm_up(self, context: int) -> None:
        """Measure a small step for nothing: the first one counts what code and threads take once."""
        settings = self._settings
        num_tokens, num_rows = min(settings.max_batch_tokens, context), min(settings.max_batch_rows, 4)
        small = replace(settings, max_batch_tokens=num_tokens, max_batch_rows=num_rows)
        runner = self._trial_runner(context)
        peak_bytes(self._device, lambda: self._try(small, runner))

    def _measure(self, context: int) -> int:
        """Return the reserve for a context, by the peak of a dry step in the worst case."""
        settings, spec = self._settings, self.spec
        runner = self._trial_runner(context)
        for pool in runner.cache.pools():
            pool.fill_(0)  # resident before the measurement begins: KV is counted by itself

        sizes = step_sizes(settings, spec)
        peak = peak_bytes(self._device, lambda: self._try(settings, runner))
        if peak is None:
            peak = estimated_peak(sizes, context)
        elif self._lists_keys:
            peak += listed_bytes(sizes, context)
        elif self.records_graphs:
            peak += self._graph_bytes(runner.cache, context)
        if settings.host_memory_bytes and self._device.type == "cuda":
            peak += staged_bytes(self._demand.bytes_per_block)
        if self._kernels.library is not None:
            peak += split_bytes(spec, context, self._kernels.threads.most)
        # of a group, whose context is another, beside those that were recorded
        num_angles = 2 if self.records_graphs and sizes.in_pages else 1
        return reserve_bytes(sizes, peak, context, num_angles=num_angles)

    @property
    def _lists_keys(self) -> bool:
        """Whether attention is by torch's operators, and not in fixed shapes."""
        kernels = self._kernels
        return kernels.library is None and kernels.flashinfer is None and not self._settings.deterministic

    def _trial_runner(self, context: int) -> ModelRunner:
        """Return a runner over a cache of its own, which has blocks for the tokens of one batch at most."""
        settings = self._settings
        blocks = -(-min(context, settings.max_batch_tokens) // settings.block_size)
        cache = KVCache(self.spec, blocks, settings.block_size, self.weights.dtype, self._device, settings.layers)
        return self.open(cache, context, 0)

    def _try(self, settings: RunnerSettings, runner: ModelRunner) -> None:
        """Run the worst step that the settings allow, and work out what it takes if whole chunks come last."""
        began_s, context = time.perf_counter(), runner.info.max_model_len
        tile = 1 if self._kernels.library is not None else query_tile(context)
        batch = _worst_batch(settings, self.spec, self.weights.dtype, context, tile)
        blocks = batch.table_delta.block_id
        np.remainder(blocks, runner.cache.num_blocks, out=blocks)
        try:
            runner.try_step(batch)
        except BatchFailedError as error:
            raise StartupError(
                f"a first step of {settings.max_batch_tokens} tokens failed: {error.cause}",
                "If it ran out of memory, lower max_batch_tokens, max_batch_rows or max_model_len",
            ) from error
        took_s = time.perf_counter() - began_s
        self._dry_step_s = took_s * _times_as_long(self.spec, len(runner.cache.layers), batch, context)

    def _graph_bytes(self, cache: KVCache, context: int) -> int:
        """Return what recorded steps keep. Smaller graphs find room in the memory of the largest."""
        kept: list[StepGraphs] = []

        def record() -> None:
            kept.append(self._new_graphs(cache, context, only_largest=True))
            with torch.inference_mode():
                kept[0].record(lambda _: None)

        return peak_bytes(self._device, record) or 0


def _times_as_long(spec: ModelSpec, num_layers: int, batch: Batch, context: int) -> float:
    """Return how many times as long a step takes if all its chunks stand at the end of the context."""
    num_tokens, ends = batch.num_tokens.astype(np.int64), batch.start + batch.num_tokens
    late, tried = (
        step_work(spec, num_layers, len(batch.tokens), int(np.dot(num_tokens, each)), len(batch.rows))
        for each in (np.where(num_tokens > 1, context, ends), ends)
    )
    return late / tried


def _worst_batch(settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype, context: int, tile: int) -> Batch:
    """Return a batch that takes as much workspace as any can: decodes, and a prompt's last chunk that fills it up.

    Sampling sorts whole rows, penalises as many logits as it does at a time, and reports log-probabilities. All rows
    share the same blocks, since what is computed does not matter.

    What takes longer and no more memory is left out: few tokens see the whole context. The last `tile` of a chunk do,
    a row of their own beside those allowed; the others stand where every window that is outgrown is just filled. Of
    the decodes, one group is as full as any can be.

    Args:
        settings: its limits.
        spec: the model.
        dtype: of the cache.
        context: most tokens of a sequence.
        tile: tokens of a chunk that attention computes at a time.
    """
    max_tokens, max_rows, vocab_size = settings.max_batch_tokens, settings.max_batch_rows, spec.vocab_size
    num_blocks = -(-context // settings.block_size)
    num_chunks = min(-(-max_tokens // context), max_rows)
    num_decodes = min(max_rows - num_chunks, max_tokens - num_chunks)
    chunks = np.full(num_chunks, min((max_tokens - num_decodes) // num_chunks, context), dtype=np.int32)
    is_cut = num_chunks == 1 and chunks[0] > tile
    if is_cut:
        chunks = np.array([chunks[0] - tile, tile], dtype=np.int32)
    num_tokens = np.concatenate((np.ones(num_decodes, dtype=np.int32), chunks))
    start = np.asarray(context - num_tokens, dtype=np.int32)
    num_long, num_keys = fullest_group(spec, dtype, context, num_decodes)
    start[:num_decodes] = 0
    start[:num_long] = num_keys - 1
    start[: min(num_long, 1)] = max(num_keys - 2, 0)  # as good as never all rows are equally long: they need a mask
    if is_cut:
        filled = max((window for window in spec.windows if window is not None and window < context), default=0)
        start[num_decodes] = min(filled, start[num_decodes])
    sampling = SamplingParams(max_tokens=1, top_p=0.9, top_k=vocab_size - 1, repetition_penalty=1.5, logprobs=20)
    known, ends = np.arange(context, dtype=np.int32) % np.int32(vocab_size), (start + num_tokens).tolist()
    num_penalised = MAX_EDITS // min(context, vocab_size) + 1
    unpenalised = sampling.model_copy(update={"repetition_penalty": 1.0})
    admits = tuple(
        RowInit(row, sampling, context, known[: max(end, vocab_size)])
        if row < num_penalised
        else RowInit(row, unpenalised, context)
        for row, end in enumerate(ends)
    )
    return trial_batch(start, num_tokens, num_blocks, admits=admits)
