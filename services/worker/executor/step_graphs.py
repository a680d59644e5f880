"""Steps of decodes as graphs: recorded once for some numbers of rows, then started with one call each.

A step of decodes is some hundred short kernels, and the host takes longer to start them than the device to compute
them. A graph holds all of them from the embedding to the logits. What differs from step to step lies in memory that
stays where it is: tokens, positions and slots, and what attention has planned before each start.

A batch takes the smallest graph that has its rows. Those that are left are copies of its shortest row: they write the
same keys and values into the same slots, and nobody reads what comes out for them. Prompts, stages of a group, steps
some of whose keys lie elsewhere and those of rows with blocks that are filled from the right are computed without a
graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from services.worker.attention.base import RaggedRows
from services.worker.attention.block_lists import rows_from_right
from services.worker.attention.flashinfer_paged import FixedFlashInfer
from services.worker.contract.arrays import I32, I64
from services.worker.contract.batch import Batch
from services.worker.executor.inputs import InputBuffers, StepInputs
from services.worker.executor.step import DecodeLayers
from services.worker.memory.host_link import send
from services.worker.sampling.own_samples import OwnSamples
from services.worker.sampling.scoring import Scores

MAX_ROWS = 512
"""Of the largest graph: of more rows, the device computes longer than the host takes to start its kernels."""


class GraphRecorder(Protocol):
    """Records what is started on a device."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return what computes the same again, from and to the same memory."""


class CudaRecorder:
    """Records CUDA graphs. All of them use the same memory for what they compute: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record a graph; see `GraphRecorder`. The first computations, which may compile or take memory, stay out."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                compute()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads may go on with what they do, such as taking memory
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Graph:
    attention: FixedFlashInfer
    start: Callable[[], None]


class StepGraphs:
    """The graphs of a whole model over a cache; see the module.

    They hold addresses: parameters and blocks may go away meanwhile, but must be back in their places when one starts.

    Args:
        layers: of the whole model.
        fixed: returns attention for so many rows.
        recorder: of the cache's device.
        sizes: numbers of rows, ascending.
        samples: of the rows.
    """

    def __init__(
        self,
        layers: DecodeLayers,
        fixed: Callable[[int], FixedFlashInfer],
        recorder: GraphRecorder,
        sizes: tuple[int, ...],
        samples: OwnSamples | None = None,
    ) -> None:
        self.layers = layers
        self._fixed = fixed
        self._recorder = recorder
        self.sizes = sizes
        self._inputs = InputBuffers(sizes[-1], layers.cache.block_size, layers.cache.keys[0].device, samples)
        self._num_blocks = layers.cache.num_blocks
        self._addresses = _addresses(layers)
        self._graphs: dict[int, _Graph] = {}
        self._scores: Scores | None = None
        """Every graph writes the first ones: kept by each for itself, they would be several times as much."""

    def record(self, progress: Callable[[float], None]) -> None:
        """Record all graphs, the largest first, in whose memory the others find room. The first block is written.

        Args:
            progress: called with the share that is done.
        """
        device = self.layers.cache.keys[0].device
        self._scores = Scores.empty(self.sizes[-1], self.sizes[-1], self.layers.vocab_size, device)
        for done, size in enumerate(self.sizes[::-1]):
            attention = self._fixed(size)
            zeros = np.zeros(size, dtype=np.int32)
            batch = Batch(0, zeros, zeros + 1, zeros, zeros, np.ones(size, dtype=np.bool_))
            inputs = self._laid_out(batch, np.zeros((1, 1), dtype=np.int32))
            attention.plan(inputs.rows)

            def compute(inputs: StepInputs = inputs, attention: FixedFlashInfer = attention) -> None:
                hidden = self.layers.compute(inputs, None, attention.attend)
                self.layers.scores(hidden, inputs, self._kept().first(inputs.rows.num_tokens.size))

            self._graphs[size] = _Graph(attention, self._recorder.record(compute))
            progress((done + 1) / len(self.sizes))

    def fits(self, layers: DecodeLayers) -> bool:
        """Return whether these layers and their blocks are those that were recorded, in the same places."""
        return layers.cache.num_blocks <= self._num_blocks and _addresses(layers) == self._addresses

    def has_for(self, batch: Batch, tables: I32) -> bool:
        """Return whether there is a graph for a batch; see `StepGraph`."""
        if len(batch.rows) > self.sizes[-1] or len(batch.tokens) != len(batch.rows):
            return False
        size = self.layers.cache.block_size
        named = tables[batch.rows, : int(batch.start.max()) // size + 1]
        return not rows_from_right(RaggedRows(batch.num_tokens, batch.start, named), size).any()

    def run(self, batch: Batch, tables: I32, sampled: I64) -> Scores:
        """Compute a step of decodes; see `ForwardPass.run`."""
        num_rows = len(batch.rows)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        graph = self._graphs[size]
        inputs = self._laid_out(filled_up(batch, size), tables)
        graph.attention.plan(inputs.rows)
        graph.start()
        scores = self._kept().first(num_rows)
        if len(sampled) == num_rows:
            return scores
        wanted = send(sampled, scores.logits.device)
        return Scores(scores.finite, scores.logits[wanted], scores.largest[wanted])

    def _kept(self) -> Scores:
        assert self._scores is not None, "nothing is recorded yet"
        return self._scores

    def _laid_out(self, batch: Batch, tables: I32) -> StepInputs:
        return self._inputs.fill(batch, tables, np.arange(len(batch.rows), dtype=np.int64))


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return for which numbers of rows graphs are recorded, ascending, if a step has at most `max_rows`."""
    sizes = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, MAX_ROWS + 1, 64))
    largest = min(max_rows, MAX_ROWS)
    return (*(size for size in sizes if size < largest), largest)


def filled_up(batch: Batch, num_rows: int) -> Batch:
    """Return a batch of decodes with copies of its shortest row behind it."""
    missing = num_rows - len(batch.rows)
    if not missing:
        return batch
    places = np.concatenate((np.arange(len(batch.rows)), np.full(missing, np.argmin(batch.start))))
    return replace(
        batch,
        rows=batch.rows[places],
        num_tokens=batch.num_tokens[places],
        start=batch.start[places],
        tokens=batch.tokens[places],
        sample=batch.sample[places],
    )


def _addresses(layers: DecodeLayers) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in layers.tensors())
