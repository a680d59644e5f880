"""Where a worker's parameters and KV lie: in tensors of torch's, or in pages that can change hands.

The loader and the runner take buffers from a `ModelMemory` and do not know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.memory.cuda import CudaMemory
from services.worker.memory.elastic import ElasticMemory, KvShape
from services.worker.memory.huge_pages import advise_huge_pages
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.layout import MemoryFacts
from services.worker.memory.posix import HUGE_PAGE_BYTES, PosixMemory
from services.worker.memory.ranges import VirtualMemory
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import buffer_bytes, layer_bytes, outer_parts, outer_split
from shared.layers import LayerRange


class ModelMemory(Protocol):
    """Memory for one model on one device."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def parameters(self, layer: int | None, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 for the parameters of a layer, or (None) for those outside the layers."""

    def open_kv(self, num_blocks: int, reserve_bytes: int) -> KVCache:
        """Return a cache of so many blocks or a few more; what is reserved is for others to take."""

    def close(self) -> None:
        """Give back what is this memory's own. Idempotent."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model and how its numbers are stored."""

    spec: ModelSpec
    block_size: int
    """Tokens of a KV block."""
    dtype: torch.dtype
    layers: LayerRange | None = None
    """Of a stage of a pipeline; None: the whole model."""


class PlainMemory:
    """A tensor of torch's own for every buffer: for workers that never drop a layer."""

    def __init__(self, sizes: ModelSizes, device: torch.device) -> None:
        self.device = device
        self._sizes = sizes

    def parameters(self, layer: int | None, num_bytes: int) -> torch.Tensor:
        """Return a buffer of its own; see `ModelMemory`."""
        storage = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        advise_huge_pages(storage)
        return storage

    def open_kv(self, num_blocks: int, reserve_bytes: int) -> KVCache:
        """Return a cache with pools of its own; see `ModelMemory`."""
        sizes = self._sizes
        return KVCache(sizes.spec, num_blocks, sizes.block_size, sizes.dtype, self.device, sizes.layers)

    def close(self) -> None:
        """Do nothing: buffers end with their last user."""


def memory_facts(sizes: ModelSizes, page_bytes: int, num_pages: int) -> MemoryFacts:
    """Return the sizes of a model in pages.

    Block ids are below what all pages could back in a single layer, twice: in a group, ids of members that are not
    backed lie between those that are.
    """
    end, begin = outer_split(sizes.spec, sizes.dtype)
    block_bytes = _kv_shape(sizes).block_bytes
    return MemoryFacts(
        layer_bytes=layer_bytes(sizes.spec, sizes.dtype),
        outer_bytes=buffer_bytes(outer_parts(sizes.spec), sizes.dtype),
        first_stage_end=end,
        last_stage_begin=begin,
        block_bytes=block_bytes,
        page_bytes=page_bytes,
        num_pages=num_pages,
        max_blocks=max(num_pages * page_bytes // block_bytes, 1),
    )


def open_memory(
    sizes: ModelSizes, device: torch.device, memory_bytes: int, page_bytes: int | None
) -> PlainMemory | ElasticMemory:
    """Return memory for a model, on the CPU or a CUDA device.

    Args:
        sizes: the model.
        device: where.
        memory_bytes: the budget; plain memory is not bound to it.
        page_bytes: of elastic memory; None: plain memory.

    Raises:
        ValueError: pages of this size are not possible here, or the model's layers are those of a stage for good.
        NotEnoughPagesError: the budget does not hold the parameters.
        OSError, MemoryError: the system refuses.
    """
    if page_bytes is None:
        return PlainMemory(sizes, device)
    if sizes.layers is not None:
        raise ValueError("memory that can drop layers begins with all of them")
    num_pages = memory_bytes // page_bytes
    memory: VirtualMemory
    if device.type == "cuda":
        memory = CudaMemory(page_bytes, num_pages, device)
    else:
        memory = PosixMemory(page_bytes, num_pages, huge=page_bytes % HUGE_PAGE_BYTES == 0)
    try:
        return ElasticMemory(memory_facts(sizes, page_bytes, num_pages), _kv_shape(sizes), memory)
    except BaseException:
        memory.close()
        raise


def _kv_shape(sizes: ModelSizes) -> KvShape:
    return KvShape(sizes.block_size, sizes.spec.num_kv_heads, sizes.spec.head_dim, sizes.dtype)
