"""Opens a `ModelRunner`: checks what can be checked before memory is taken, loads, measures, divides the memory.

Order: config.json → headers of the files → a first look at the budget → parameters → a dry step of the worst case →
KV blocks → in deterministic mode, a proof on the model's own shapes.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import structlog
import torch

from services.worker.executor.kernels import Kernels, choose_kernels
from services.worker.executor.model_runner import ModelInfo, ModelRunner, RunnerSettings
from services.worker.executor.opening import RunnerOpener
from services.worker.executor.selftest import prove_deterministic
from services.worker.executor.step_graphs import CudaRecorder, GraphRecorder
from services.worker.executor.step_threads import StepThreads, step_work
from services.worker.memory.budget import Demand, longest_context
from services.worker.memory.kv_cache import KVCache, bytes_per_block
from services.worker.memory.model_memory import ModelMemory, ModelSizes, open_memory
from services.worker.models.checkpoint import TensorEntry, check_against, find_tensors
from services.worker.models.loader import Progress, load_weights
from services.worker.models.spec import ModelSpec, check_context, read_spec
from services.worker.models.weights import parameter_bytes
from shared.errors import StartupError

__all__ = ["LoadedModel", "ModelInfo", "ModelRunner", "Progress", "RunnerSettings", "load_model", "load_runner"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOADED = 0.8
"""Share of the start that reading the checkpoint is taken for."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner, and what it takes to open another one over the same parameters."""

    runner: ModelRunner
    opener: RunnerOpener
    cache: KVCache
    """In which the runner keeps its KV."""
    tensors: dict[str, TensorEntry]
    """Where the parameters came from."""


def load_runner(settings: RunnerSettings, progress: Progress) -> ModelRunner:
    """Load a model and make it ready to run. Blocks; takes seconds to minutes.

    Raises:
        StartupError: the checkpoint is missing, broken or not supported, the device is not there, or the memory budget
            is too small; says what to do.
    """
    return load_model(settings, progress).runner


def load_model(settings: RunnerSettings, progress: Progress, *, lends_memory: bool = False) -> LoadedModel:
    """Load a model as `load_runner` does.

    Args:
        settings: of the runner.
        progress: called as it goes on.
        lends_memory: the runner does not close the memory; whoever calls does.

    Raises:
        StartupError: as `load_runner`.
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
    kernels = choose_kernels(
        settings.kernels, spec, device, dtype, deterministic=settings.deterministic, fused=settings.fused
    )
    if device.type == "cpu":
        kernels = _with_threads(settings, spec, kernels)
    memory = _open_memory(settings, ModelSizes(spec, settings.block_size, dtype, settings.layers), device)
    with ExitStack() as on_failure:
        on_failure.callback(memory.close)
        weights = load_weights(
            spec, tensors, dtype, memory.parameters, lambda done, what: progress(done * _LOADED, what), settings.layers
        )
        opener = RunnerOpener(
            settings, spec, weights, demand, kernels, memory, recorder=_recorder(settings, device, kernels)
        )
        progress(_LOADED, "measuring the workspace")
        reserve_bytes, division = opener.divide(context)
        _log_context(settings, division.max_model_len, spec.max_positions)
        cache = memory.open_kv(division.num_blocks, reserve_bytes)
        if opener.records_graphs:
            _record(opener, cache, division.max_model_len, progress)
        runner = opener.open(cache, division.max_model_len, reserve_bytes, owns_memory=not lends_memory)
        if settings.host_memory_bytes:
            runner.open_host(_num_host_blocks(settings, demand))
        if settings.deterministic:
            progress(0.95, "proving that results do not depend on the batch")
            prove_deterministic(runner, settings.max_batch_tokens)
        on_failure.pop_all()
    _log_loaded(runner.info)
    progress(1.0, "ready")
    return LoadedModel(runner, opener, cache, tensors)


def _open_memory(settings: RunnerSettings, sizes: ModelSizes, device: torch.device) -> ModelMemory:
    try:
        return open_memory(sizes, device, settings.memory_bytes, settings.page_bytes)
    except (ValueError, OSError, ImportError) as error:
        raise StartupError(f"memory of which layers can be dropped cannot be had: {error}", "Do without it") from error


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


def _with_threads(settings: RunnerSettings, spec: ModelSpec, kernels: Kernels) -> Kernels:
    """Return the kernels with the threads of their steps; torch's operators take those of a step of one token.

    How torch splits work among threads is not fixed, so that deterministic mode gives its operators one.
    """
    num_cores = settings.num_cores or len(os.sched_getaffinity(0))
    ordered = settings.deterministic and not kernels.whole
    threads = StepThreads.of(settings.num_threads, num_cores, ordered=ordered)
    torch.set_num_threads(threads.of_step(step_work(spec, spec.num_layers, 1, 0, 1)))
    return replace(kernels, threads=threads)


def _recorder(settings: RunnerSettings, device: torch.device, kernels: Kernels) -> GraphRecorder | None:
    """Return what records steps on the device; None: they are not to be, or cannot be recorded."""
    if not settings.graphs or device.type != "cuda" or kernels.flashinfer is None:
        return None
    return CudaRecorder(device)


def _record(opener: RunnerOpener, cache: KVCache, max_model_len: int, progress: Progress) -> None:
    began_s = time.monotonic()
    num_graphs = opener.record(
        cache, max_model_len, lambda done: progress(_LOADED + 0.15 * done, "recording steps of decodes")
    )
    took_s = round(time.monotonic() - began_s, 3)
    structlog.get_logger().info("steps recorded", num_graphs=num_graphs, took_s=took_s)


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
