"""Opens a `ModelRunner`: checks what can be checked before memory is taken, loads, measures, divides the memory.

Order: config.json → headers of the files → a first look at the budget → parameters → a dry step of the worst case →
KV blocks → in deterministic mode, a proof on the model's own shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import structlog
import torch

from services.worker.attention.native_paged import split_bytes
from services.worker.attention.torch_paged import GROUP_BYTES, max_group_rows
from services.worker.engine.types import Batch, BatchFailedError, KvCapacity, RowInit, TableDelta
from services.worker.executor.kernels import Kernels, choose_kernels
from services.worker.executor.logit_rules import MAX_EDITS
from services.worker.executor.model_runner import ModelInfo, ModelRunner, RunnerSettings
from services.worker.executor.sampler import DRAW_ELEMENTS
from services.worker.executor.selftest import prove_deterministic
from services.worker.memory.budget import (
    MIN_RESERVE_BYTES,
    RESERVE_MARGIN,
    Demand,
    Division,
    divide,
    estimated_reserve,
    longest_context,
    next_context,
)
from services.worker.memory.kv_cache import KVCache, bytes_per_block
from services.worker.memory.measure import peak_bytes, release_free_memory
from services.worker.memory.model_memory import ModelMemory, ModelSizes, open_memory
from services.worker.models.checkpoint import check_against, find_tensors
from services.worker.models.loader import load_weights
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec, check_context, read_spec
from services.worker.models.weights import ModelWeights, num_parameters, parameter_bytes
from shared.errors import StartupError
from shared.layers import LayerRange
from shared.types import SamplingParams

__all__ = ["ModelInfo", "ModelRunner", "Progress", "RunnerSettings", "load_runner"]

Progress = Callable[[float, str], None]
"""Called with the share done, 0 to 1, and what is going on."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOADED = 0.8
"""Share of the start that reading the checkpoint is taken for."""


def load_runner(settings: RunnerSettings, progress: Progress) -> ModelRunner:
    """Load a model and make it ready to run. Blocks; takes seconds to minutes.

    Raises:
        StartupError: the checkpoint is missing, broken or not supported, the device is not there, or the memory budget
            is too small; says what to do.
    """
    progress(0.0, "checking the checkpoint")
    device, dtype = _device(settings.device), _dtype(settings.dtype)
    spec = read_spec(settings.model_dir)
    check_context(spec, settings.max_model_len)
    tensors = find_tensors(settings.model_dir)
    check_against(spec, tensors)
    demand = _demand(settings, spec, dtype)
    _num_host_blocks(settings, demand)
    context = longest_context(demand)
    progress(0.0, "choosing kernels")  # on a GPU some are compiled the first time
    kernels = choose_kernels(settings.kernels, spec, device, dtype, deterministic=settings.deterministic)
    _set_threads(settings, device, kernels)
    memory = _open_memory(settings, ModelSizes(spec, settings.block_size, dtype, settings.layers), device)
    with ExitStack() as on_failure:
        on_failure.callback(memory.close)
        weights = load_weights(
            spec, tensors, dtype, memory, lambda done, what: progress(done * _LOADED, what), settings.layers
        )
        loader = _Loader(settings, spec, weights, demand, kernels, memory)
        progress(_LOADED, "measuring the workspace")
        reserve_bytes, division = loader.divide(context)
        _log_context(settings, division.max_model_len, spec.max_positions)
        cache = memory.open_kv(division.num_blocks, reserve_bytes)
        runner = loader.open(cache, division.max_model_len, reserve_bytes)
        if settings.host_memory_bytes:
            runner.open_host(_num_host_blocks(settings, demand))
        if settings.deterministic:
            progress(0.9, "proving that results do not depend on the batch")
            prove_deterministic(runner, settings.max_batch_tokens)
        on_failure.pop_all()
    _log_loaded(runner.info)
    progress(1.0, "ready")
    return runner


def _open_memory(settings: RunnerSettings, sizes: ModelSizes, device: torch.device) -> ModelMemory:
    try:
        return open_memory(sizes, device, settings.memory_bytes, settings.page_bytes)
    except (ValueError, OSError, ImportError) as error:
        raise StartupError(f"memory of which layers can be dropped cannot be had: {error}", "Do without it") from error


class _Loader:
    """A model whose parameters are loaded, before its KV is."""

    def __init__(
        self,
        settings: RunnerSettings,
        spec: ModelSpec,
        weights: ModelWeights,
        demand: Demand,
        kernels: Kernels,
        memory: ModelMemory,
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._weights = weights
        self._demand = demand
        self._dtype = _dtype(settings.dtype)
        self._device = weights.outer.storage.device
        self._kernels = kernels
        self._memory = memory
        self._dry_step_s = 0.0

    def open(self, cache: KVCache, max_model_len: int, reserve_bytes: int) -> ModelRunner:
        """Return a runner over a cache."""
        settings, spec, demand = self._settings, self._spec, self._demand
        info = ModelInfo(
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            max_model_len=max_model_len,
            num_layers=spec.num_layers,
            layers=LayerRange(cache.layers[0], cache.layers[-1] + 1),
            hidden_size=spec.hidden_size,
            num_parameters=num_parameters(spec),
            param_bytes=demand.parameter_bytes,
            kv_bytes=cache.num_bytes,
            reserve_bytes=reserve_bytes,
            bytes_per_block=demand.bytes_per_block,
            capacity=KvCapacity(cache.num_blocks, settings.block_size),
            device=str(self._device),
            dtype=settings.dtype,
            dry_step_s=self._dry_step_s,
            kernels=self._kernels.name,
        )
        rope = RopeTable(spec.rope, spec.rotary_dim, max_model_len, self._dtype, self._device)
        forward = self._kernels.open(
            spec,
            self._weights,
            rope,
            cache,
            max_tokens=settings.max_batch_tokens,
            deterministic=settings.deterministic,
        )
        max_rows = max(settings.max_rows, settings.max_batch_rows)
        return ModelRunner(info, forward, self._memory, max_rows=max_rows, deterministic=settings.deterministic)

    def divide(self, context: int) -> tuple[int, Division]:
        """Return the reserve and the division of the budget for the longest context that fits, `context` at most."""
        reserve_bytes = self._measure(context)
        while (shorter := next_context(self._demand, reserve_bytes, context)) is not None:
            context = shorter
            reserve_bytes = self._measure(context)
        release_free_memory(self._device)  # the last measured cache is smaller than the one to come
        return reserve_bytes, divide(self._demand, reserve_bytes, context)

    def _measure(self, context: int) -> int:
        """Return the reserve: the peak of a dry step in the worst case, with a margin, and the table of angles."""
        settings, spec = self._settings, self._spec
        blocks = -(-context // settings.block_size)
        cache = KVCache(spec, blocks, settings.block_size, self._dtype, self._device, settings.layers)
        runner = self.open(cache, context, 0)
        for pool in runner.cache.pools():
            pool.fill_(0)  # resident before the measurement begins: KV is counted by itself

        def dry_steps() -> None:
            began_s = time.perf_counter()
            try:
                num_long = max_group_rows(spec, self._dtype, context) + 1
                runner.try_step(_worst_batch(settings, spec.vocab_size, context, num_long))
            except BatchFailedError as error:
                raise StartupError(
                    f"a first step of {settings.max_batch_tokens} tokens failed: {error.cause}",
                    "If it ran out of memory, lower max_batch_tokens, max_batch_rows or max_model_len",
                ) from error
            self._dry_step_s = time.perf_counter() - began_s

        measured = peak_bytes(self._device, dry_steps)
        if measured is None:
            item_bytes = self._dtype.itemsize
            gather_bytes = max(GROUP_BYTES, 2 * context * spec.kv_size * item_bytes)
            # a gathered group, its slots and mask; of drawn logits, four float32 and three 64-bit numbers each
            fixed_bytes = 3 * gather_bytes + max(DRAW_ELEMENTS, spec.vocab_size) * (4 * 4 + 3 * 8)
            measured = estimated_reserve(
                spec, settings.max_batch_tokens, settings.max_batch_rows, fixed_bytes, item_bytes
            )
        angle_bytes = 2 * context * spec.rotary_dim * self._dtype.itemsize
        if self._kernels.library is not None:
            measured += split_bytes(spec, context, torch.get_num_threads())
        return max(int(measured * RESERVE_MARGIN), MIN_RESERVE_BYTES) + angle_bytes


def _worst_batch(settings: RunnerSettings, vocab_size: int, context: int, num_long: int) -> Batch:
    """Return a batch that takes as much workspace as any can: decodes, and a prompt's last chunk that fills it up.

    Sampling sorts whole rows, penalises as many logits as it does at a time, and reports log-probabilities. All rows
    share the same blocks, since what is computed does not matter. Only `num_long` decodes see the whole context, as
    many as attention gathers at a time: more would take longer, not more memory.
    """
    max_tokens, max_rows = settings.max_batch_tokens, settings.max_batch_rows
    num_blocks = -(-context // settings.block_size)
    num_chunks = min(-(-max_tokens // context), max_rows)
    num_decodes = min(max_rows - num_chunks, max_tokens - num_chunks)
    chunks = np.full(num_chunks, min((max_tokens - num_decodes) // num_chunks, context), dtype=np.int32)
    num_tokens = np.concatenate((np.ones(num_decodes, dtype=np.int32), chunks))
    start = np.asarray(context - num_tokens, dtype=np.int32)
    start[num_long : max(num_decodes, num_long)] = 0
    table = TableDelta(
        np.repeat(np.arange(len(start), dtype=np.int32), num_blocks),
        np.tile(np.arange(num_blocks, dtype=np.int32), len(start)),
        np.tile(np.arange(num_blocks, dtype=np.int32), len(start)),
    )
    sampling = SamplingParams(max_tokens=1, top_p=0.9, top_k=vocab_size - 1, repetition_penalty=1.5, logprobs=20)
    known = np.arange(context, dtype=np.int32) % np.int32(vocab_size)
    num_penalised = MAX_EDITS // min(context, vocab_size) + 1
    unpenalised = sampling.model_copy(update={"repetition_penalty": 1.0})
    return Batch(
        step_id=0,
        rows=np.arange(len(start), dtype=np.int32),
        num_tokens=num_tokens,
        start=start,
        tokens=np.zeros(int(num_tokens.sum()), dtype=np.int32),
        sample=np.ones(len(start), dtype=np.bool_),
        table_delta=table,
        admits=tuple(
            RowInit(row, sampling, context, known) if row < num_penalised else RowInit(row, unpenalised, context)
            for row in range(len(start))
        ),
    )


def _demand(settings: RunnerSettings, spec: ModelSpec, dtype: torch.dtype) -> Demand:
    return Demand(
        memory_bytes=settings.memory_bytes,
        parameter_bytes=parameter_bytes(spec, dtype, settings.layers, settings.page_bytes or 1),
        bytes_per_block=bytes_per_block(spec, settings.block_size, dtype, settings.layers),
        block_size=settings.block_size,
        max_positions=spec.max_positions,
        max_model_len=settings.max_model_len,
        num_pools=2 * spec.num_layers,
        page_bytes=settings.page_bytes or 1,
    )


def _num_host_blocks(settings: RunnerSettings, demand: Demand) -> int:
    num_blocks = settings.host_memory_bytes // demand.bytes_per_block
    if settings.host_memory_bytes and not num_blocks:
        raise StartupError(
            f"host_memory holds no KV block of {demand.bytes_per_block} bytes", "Give more, or choose another system"
        )
    return num_blocks


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is not known", "Use cpu, cuda or cuda:<index>") from error
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name!r} is not supported", "Use cpu, cuda or cuda:<index>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise StartupError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices", "Use cpu"
        )
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise StartupError(f"dtype {name!r} is not supported", f"Use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _set_threads(settings: RunnerSettings, device: torch.device, kernels: Kernels) -> None:
    """Set the threads of one operator; torch takes one in deterministic mode: how it splits work is not fixed."""
    num_threads = settings.num_threads or (1 if settings.deterministic and not kernels.whole else None)
    if device.type == "cpu" and num_threads is not None:
        torch.set_num_threads(num_threads)


def _log_loaded(info: ModelInfo) -> None:
    structlog.get_logger().info(
        "model loaded",
        kernels=info.kernels,
        dtype=info.dtype,
        param_bytes=info.param_bytes,
        kv_bytes=info.kv_bytes,
        reserve_bytes=info.reserve_bytes,
        max_model_len=info.max_model_len,
    )


def _log_context(settings: RunnerSettings, max_model_len: int, max_positions: int) -> None:
    if settings.max_model_len is None and max_model_len < max_positions:
        structlog.get_logger().warning(
            "context lowered to what the memory holds", max_model_len=max_model_len, max_positions=max_positions
        )
