"""What is known before memory is taken: whether a checkpoint can be served with these settings. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.worker.config import Dtype
from services.worker.memory.budget import Demand, bytes_per_block, count_host_blocks, least_context, longest_context
from services.worker.memory.reserve import StepSizes, reserve_bound
from services.worker.models.checkpoint import find_tensors
from services.worker.models.matching import MatchedCheckpoint, match_checkpoint
from services.worker.models.spec import ModelSpec, check_context
from services.worker.models.weights import parameter_bytes
from shared.host import count_cores
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What a runner is to load, and its limits."""

    model_dir: Path
    """Checkpoint in Hugging Face format."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:<index>`."""
    dtype: str = "float32"
    """Type of parameters, activations and KV: `float32` or `bfloat16`."""
    memory_bytes: int = 2**30
    """Hard budget: parameters, reserve and KV. The interpreter and torch's libraries come on top."""
    host_memory_bytes: int = 0
    """Host memory for KV that leaves the device, beside the budget; 0: none leaves it."""
    block_size: int = 16
    """Token slots of a KV block."""
    max_batch_tokens: int = 2048
    """Tokens of one batch at most; raises the reserve."""
    max_batch_rows: int = 256
    """Rows of one batch at most; raises the reserve."""
    max_rows: int = 1024
    """Rows of the engine's table."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None: the model's own limit, or less if the memory holds less."""
    deterministic: bool = False
    """Text and logits do not depend, to the bit, on what else is in a batch or how a prompt is cut."""
    num_threads: int | None = None
    """Threads of every step on the CPU; None: as many as gain, or one for torch's operators in deterministic mode."""
    num_cores: int | None = None
    """Of those that the process may run on, cores that a step may take where `num_threads` is None; None: all."""
    kernels: str = "auto"
    """`auto`, `native`, `flashinfer` or `torch`; see `executor/kernels.py`."""
    graphs: bool = True
    """Steps of decodes are recorded as CUDA graphs, where that is possible; takes seconds at the start."""
    fused: bool = True
    """On CUDA what lies between products is computed by fewer kernels than torch's; see `services/worker/fused`."""
    overlap: bool | None = None
    """A step is launched before the one before it has ended; None: where the device computes beside the host."""
    layers: LayerRange | None = None
    """Of a stage of a pipeline: only their parameters and KV are held; None: the whole model."""
    page_bytes: int | None = None
    """Size of the pages of memory that can drop layers (memory/elastic.py), 2 MiB on a GPU; None: it cannot."""
    shares_blocks: bool = False
    """Best effort's blocks are filled from the right, so that somebody else's can be opened from the left."""


@dataclass(frozen=True, slots=True)
class FirstLook:
    """A checkpoint that can be served, by all that is known before memory is taken."""

    checkpoint: MatchedCheckpoint
    demand: Demand
    longest_context: int
    """Tokens of a request, if steps take no more than the least reserve."""
    num_host_blocks: int
    """KV blocks in `host_memory_bytes`."""


def first_look(settings: RunnerSettings, spec: ModelSpec) -> FirstLook:
    """Check a checkpoint and the budget by the headers of its files; tensors that are there twice are compared.

    Args:
        settings: of the runner to come.
        spec: of the model in `settings.model_dir`.

    Raises:
        StartupError: the checkpoint is missing, broken or not supported, or the memory is too small; says what to do.
    """
    check_context(spec, settings.max_model_len)
    checkpoint = match_checkpoint(spec, find_tensors(settings.model_dir))
    spec = checkpoint.spec
    demand = _demand(settings, spec)
    longest = longest_context(demand, _reserve_bound(settings, spec, least_context(demand)))
    host_bytes = settings.host_memory_bytes
    num_host_blocks = count_host_blocks(host_bytes, demand.bytes_per_block) if host_bytes else 0
    return FirstLook(checkpoint, demand, longest, num_host_blocks)


def step_sizes(settings: RunnerSettings, spec: ModelSpec) -> StepSizes:
    """Return what the memory of a runner's steps depends on."""
    return StepSizes(
        spec,
        Dtype(settings.dtype).itemsize,
        max_tokens=settings.max_batch_tokens,
        max_rows=settings.max_batch_rows,
        in_pages=settings.page_bytes is not None,
    )


def _demand(settings: RunnerSettings, spec: ModelSpec) -> Demand:
    dtype = Dtype(settings.dtype)
    page_bytes, num_layers = settings.page_bytes or 1, len(settings.layers or range(spec.num_layers))
    return Demand(
        memory_bytes=settings.memory_bytes,
        parameter_bytes=parameter_bytes(spec, dtype, settings.layers, page_bytes),
        bytes_per_block=bytes_per_block(spec, settings.block_size, dtype, settings.layers),
        block_size=settings.block_size,
        max_positions=spec.max_positions,
        max_model_len=settings.max_model_len,
        num_pools=2 * num_layers,
        page_bytes=page_bytes,
    )


def _reserve_bound(settings: RunnerSettings, spec: ModelSpec, context: int) -> int | None:
    if settings.device != "cpu":
        return None
    num_threads = settings.num_threads or count_cores(settings.num_cores)
    return reserve_bound(step_sizes(settings, spec), context, num_threads)
