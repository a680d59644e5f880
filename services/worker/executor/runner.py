"""Opens a `ModelRunner`: checks what can be checked before memory is taken, loads, measures, divides the memory.

Order: config.json → headers of the files → a first look at the budget → parameters → a dry step of the worst case →
KV blocks → in deterministic mode, a proof on the model's own shapes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from services.worker.executor.first_look import RunnerSettings, first_look
from services.worker.executor.kernels import Kernels, WantedKernels, choose_kernels
from services.worker.executor.model_runner import ModelInfo, ModelRunner
from services.worker.executor.opening import RunnerOpener
from services.worker.executor.selftest import prove_deterministic
from services.worker.executor.step_graphs import CudaRecorder, GraphRecorder
from services.worker.executor.step_threads import StepThreads
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.model_memory import ModelMemory, ModelSizes, open_memory
from services.worker.models.checkpoint import TensorEntry
from services.worker.models.digests import PartKey, model_digest
from services.worker.models.loader import Progress, load_weights
from services.worker.models.matching import MatchedCheckpoint
from services.worker.models.spec import ModelSpec, read_spec
from services.worker.sampling.grammar_cache import GrammarCache
from shared.errors import StartupError
from shared.grammars import open_compiler
from shared.host import count_cores

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

    def digest(self, digests: Mapping[PartKey, bytes]) -> str:
        """Return the digest of all that KV depends on: parameters, positions, layout, and kernels where they count.

        Args:
            digests: of `digests_of`, of its parameters.
        """
        blocks = [f"{each.dtype} {tuple(each.shape[1:])} {each.stride()[1:]}" for each in self.cache.pools()]
        kernels = self.runner.info.kernels if self.opener.deterministic else ""
        return model_digest(self.opener.spec, digests, kernels, *blocks)


def load_runner(settings: RunnerSettings, progress: Progress, spec: ModelSpec | None = None) -> ModelRunner:
    """Load a model as `load_model` does.

    Raises:
        StartupError: as `load_model`.
    """
    return load_model(settings, progress, spec).runner


def load_model(
    settings: RunnerSettings, progress: Progress, spec: ModelSpec | None = None, *, lends_memory: bool = False
) -> LoadedModel:
    """Load a model and make it ready to run. Blocks; takes seconds to minutes.

    Args:
        settings: of the runner.
        progress: called as it goes on.
        spec: of the model in `settings.model_dir`; None: it is read.
        lends_memory: the runner does not close the memory; whoever calls does.

    Raises:
        StartupError: the checkpoint is missing, broken or not supported, the device is not there, or the memory budget
            is too small; says what to do.
    """
    progress(0.0, "checking the checkpoint")
    device, dtype = _device(settings.device), _dtype(settings.dtype)
    look = first_look(settings, spec or read_spec(settings.model_dir))
    _log_checkpoint(look.checkpoint)
    spec, tensors = look.checkpoint.spec, look.checkpoint.tensors
    progress(0.0, "choosing kernels")  # on a GPU some are compiled the first time
    kernels = choose_kernels(_wanted_kernels(settings, fused=settings.fused), spec, device, dtype)
    if device.type == "cpu":
        kernels = _with_threads(settings, kernels)
    memory = _open_memory(settings, ModelSizes(spec, settings.block_size, dtype, settings.layers), device)
    with ExitStack() as on_failure:
        on_failure.callback(memory.close)
        weights = load_weights(
            spec, tensors, dtype, memory.parameters, lambda done, what: progress(done * _LOADED, what), settings.layers
        )
        opener = RunnerOpener(
            settings,
            spec,
            weights,
            look.demand,
            kernels,
            memory,
            recorder=_recorder(settings, device, kernels),
            grammars=open_grammars(settings.model_dir, spec),
        )
        reserve_bytes, division = opener.divide(
            look.longest_context,
            lambda tokens: progress(_LOADED, f"measuring the workspace for {tokens} tokens"),
        )
        _log_context(settings, division.max_model_len, spec.max_positions)
        cache = _open_kv(memory, division.num_blocks, reserve_bytes)
        if opener.records_graphs:
            _record(opener, cache, division.max_model_len, progress)
        runner = opener.open(cache, division.max_model_len, reserve_bytes, owns_memory=not lends_memory)
        if look.num_host_blocks:
            _open_host(runner, look.num_host_blocks)
        if settings.deterministic:
            progress(0.95, "proving that results do not depend on the batch")
            prove_deterministic(runner, settings.max_batch_tokens)
        on_failure.pop_all()
    _log_loaded(runner.info)
    progress(1.0, "ready")
    return LoadedModel(runner, opener, cache, tensors)


def open_grammars(model_dir: Path, spec: ModelSpec) -> GrammarCache | None:
    """Return what compiles grammars over a model's vocabulary; None: its tokenizer is not there, or is not taken."""
    try:
        return GrammarCache(open_compiler(model_dir, spec.vocab_size, spec.eos_token_ids))
    except (StartupError, ValueError) as error:
        structlog.get_logger().warning("no_grammars", reason=str(error)[:200])
        return None


def _open_memory(settings: RunnerSettings, sizes: ModelSizes, device: torch.device) -> ModelMemory:
    try:
        return open_memory(sizes, device, settings.memory_bytes, settings.page_bytes)
    except (ValueError, OSError, ImportError) as error:
        raise StartupError(f"memory of which layers can be dropped cannot be had: {error}", "Do without it") from error


def _open_kv(memory: ModelMemory, num_blocks: int, reserve_bytes: int) -> KVCache:
    try:
        return memory.open_kv(num_blocks, reserve_bytes)
    except (RuntimeError, OSError, MemoryError) as error:  # torch raises the first, also on a GPU
        raise StartupError(f"{memory.device} has no memory for {num_blocks} KV blocks", "Give less --memory") from error


def _open_host(runner: ModelRunner, num_blocks: int) -> None:
    try:
        runner.open_host(num_blocks)
    except (RuntimeError, MemoryError) as error:
        raise StartupError(f"the host has no memory for {num_blocks} KV blocks", "Give less --host-memory") from error


def check_compute(settings: RunnerSettings, spec: ModelSpec) -> None:
    """Check that there are the device and, where that takes no compiling, the kernels that the settings name.

    Raises:
        StartupError: there are not.
    """
    device = _device(settings.device)
    if device.type == "cpu" or settings.kernels not in ("auto", "flashinfer"):
        choose_kernels(_wanted_kernels(settings, fused=False), spec, device, _dtype(settings.dtype))


def _wanted_kernels(settings: RunnerSettings, *, fused: bool) -> WantedKernels:
    return WantedKernels(settings.kernels, settings.deterministic, fused, settings.shares_blocks)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is not known", "Use cpu, cuda or cuda:<index>") from error
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name!r} is not supported", "Use cpu, cuda or cuda:<index>")
    index = int(name.partition(":")[2] or 0)  # torch keeps its lowest 8 bits, with a sign
    if device.type == "cuda" and index >= torch.cuda.device_count():
        seen = f"torch sees {torch.cuda.device_count()} CUDA devices"
        if torch.version.cuda is None:
            seen = f"torch {torch.__version__} is a build without CUDA"
        raise StartupError(f"device {name!r} is not there: {seen}", "Use cpu, or see docs/gpu.md", "no_device")
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise StartupError(f"dtype {name!r} is not supported", f"Use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def make_pool(settings: RunnerSettings) -> None:
    """Make the threads that torch keeps, as many as loading will ask for: they keep the priority of their maker."""
    if _device(settings.device).type == "cpu":
        torch.set_num_threads(_step_threads(settings, ordered=False).most)


def _with_threads(settings: RunnerSettings, kernels: Kernels) -> Kernels:
    """Return the kernels with the threads of their steps; torch's operators take all of them.

    How torch splits work among threads is not fixed, so that deterministic mode gives its operators one.
    """
    threads = _step_threads(settings, ordered=settings.deterministic and not kernels.whole)
    torch.set_num_threads(threads.most)
    return replace(kernels, threads=threads)


def _step_threads(settings: RunnerSettings, *, ordered: bool) -> StepThreads:
    return StepThreads.of(settings.num_threads, count_cores(settings.num_cores), ordered=ordered)


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


def _log_checkpoint(checkpoint: MatchedCheckpoint) -> None:
    if checkpoint.is_untied:
        structlog.get_logger().warning("config.json ties the head to the embedding, but they differ: the head counts")
    if checkpoint.unused:
        structlog.get_logger().warning(
            "tensors left out, which are no part of the model",
            count=len(checkpoint.unused),
            first=checkpoint.unused[0],
        )


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
