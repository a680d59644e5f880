"""Chooses what computes the forward pass: the best kernels that this machine has for a model.

native      all layers by the worker's own library (`native_step.py`), on the CPU
attention   attention by that library, the rest by torch: for models with a layer that the library does not know
flashinfer  attention by FlashInfer, the rest by torch, on CUDA
torch       everything by torch: where none of these can, or by `--kernels torch`

On CUDA what lies between products is fused (`services/worker/fused`), whatever computes attention, unless everything is
to be torch's, or deterministic.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog
import torch

from services.worker.attention.base import Attention
from services.worker.attention.fixed_splits import FixedSplitAttention
from services.worker.attention.flashinfer_paged import FlashInferAttention, unsupported, workspace_bytes
from services.worker.attention.native_paged import MAX_GROUP, NativePagedAttention
from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.executor.attention_trial import attention_fault
from services.worker.executor.native_step import NativeForward
from services.worker.executor.step import DecodeLayers, ForwardPass, TorchForward
from services.worker.executor.step_graphs import GraphRecorder, StepGraphs
from services.worker.executor.step_threads import ONE_THREAD, StepThreads
from services.worker.memory.kv_cache import KVCache
from services.worker.models.decoder import Decoder, TiledDecoder
from services.worker.models.operators import LayerOperators
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights
from services.worker.native.library import NativeLibrary, open_library
from services.worker.sampling.own_samples import OwnSamples
from services.worker.sampling.scoring import Scoring
from shared.errors import StartupError

if TYPE_CHECKING:
    from services.worker.fused.library import FusedKernels  # needs Triton, which is not on every machine

KINDS = ("auto", "native", "flashinfer", "torch")
"""Values of the setting: `auto` falls back, `native` and `flashinfer` do not."""
TILE_ROWS = 32
"""Rows of every product in deterministic mode."""
MIN_CAPABILITY = (8, 0)
"""CUDA devices below it have no bfloat16 on tensor cores."""


@dataclass(frozen=True, slots=True)
class WantedKernels:
    """What is asked of kernels."""

    kind: str = "auto"
    """One of `KINDS`."""
    deterministic: bool = False
    """Results must not depend on the batch."""
    fused: bool = True
    """What lies between products may be fused."""
    from_right: bool = False
    """Some rows' blocks will be filled from the right."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes a model's forward pass on this machine.

    Attributes:
        name: `native <instruction set>`, `attention <instruction set>`, `flashinfer` or `torch`; `, fused` behind it.
        library: of `native` and `attention`.
        whole: the library computes all of the layers.
        flashinfer: the module, of `flashinfer`.
        fused: what lies between products, and choosing, by fewer kernels than torch's.
        threads: of steps on the CPU.
    """

    name: str
    library: NativeLibrary | None = None
    whole: bool = False
    flashinfer: Any = None
    fused: FusedKernels | None = None
    threads: StepThreads = ONE_THREAD

    @property
    def build(self) -> str:
        """What computes, to the version: `name`, and of which library, module and torch."""
        parts = [self.name, "" if self.library is None else self.library.file]
        parts.append("" if self.flashinfer is None else f"flashinfer {getattr(self.flashinfer, '__version__', '')}")
        return ", ".join(part for part in (*parts, f"torch {torch.__version__}") if part)

    def open(  # noqa: PLR0913  one argument per part that is joined here
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        rope: RopeTable,
        cache: KVCache,
        *,
        max_tokens: int,
        deterministic: bool,
        samples: OwnSamples | None = None,
        graphs: StepGraphs | None = None,
    ) -> ForwardPass:
        """Return the forward pass over a cache, for batches of at most `max_tokens` tokens.

        Args:
            spec: the model.
            weights: of the layers that the cache has.
            rope: angles of every position that may occur.
            cache: of these layers.
            max_tokens: of one batch.
            deterministic: results do not depend on the batch.
            samples: of the rows, for tokens that only the device has.
            graphs: used if they were recorded of the same layers in the same places.
        """
        if self.library is not None and self.whole:
            return NativeForward(self.library, spec, weights, rope, cache, self.threads)
        layers = self._layers(spec, weights, rope, cache, deterministic=deterministic)
        attention = self._attention(spec, cache, deterministic=deterministic)
        record = graphs if graphs is not None and graphs.fits(layers) else None
        return TorchForward(layers, attention, max_tokens=max_tokens, samples=samples, record=record)

    def graphs(  # noqa: PLR0913  what is recorded, and how
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        rope: RopeTable,
        cache: KVCache,
        recorder: GraphRecorder,
        *,
        sizes: tuple[int, ...],
        samples: OwnSamples | None = None,
    ) -> StepGraphs:
        """Return graphs of steps of so many decodes, not recorded yet; see `StepGraphs`. Needs FlashInfer."""
        assert self.flashinfer is not None, "only FlashInfer's attention can be recorded"
        attention = _flashinfer_attention(self.flashinfer, spec, cache)
        max_blocks = -(-rope.num_positions // cache.block_size)
        layers = self._layers(spec, weights, rope, cache, deterministic=False)
        return StepGraphs(layers, lambda size: attention.fixed(size, max_blocks), recorder, sizes, samples)

    def host_attention(self, spec: ModelSpec, cache: KVCache) -> Attention[Any]:
        """Return an attention over keys and values that lie in main memory, whatever the device is."""
        if self.library is not None:
            return NativePagedAttention(self.library, spec, cache, num_threads=self.threads.most)
        return FixedSplitAttention(spec, cache)

    def _layers(
        self, spec: ModelSpec, weights: ModelWeights, rope: RopeTable, cache: KVCache, *, deterministic: bool
    ) -> DecodeLayers:
        if self.fused is not None:
            fused = Decoder(spec, weights, self.fused.operators(spec, rope, cache))
            return DecodeLayers(fused, self.fused.scoring(), rope, cache)
        operators = LayerOperators(spec, rope, cache)
        decoder = (
            TiledDecoder(spec, weights, operators, TILE_ROWS) if deterministic else Decoder(spec, weights, operators)
        )
        return DecodeLayers(decoder, Scoring(), rope, cache)

    def _attention(self, spec: ModelSpec, cache: KVCache, *, deterministic: bool) -> Attention[Any]:
        if self.library is not None:
            return NativePagedAttention(self.library, spec, cache, num_threads=self.threads.most)
        if self.flashinfer is not None:
            return _flashinfer_attention(self.flashinfer, spec, cache)
        return FixedSplitAttention(spec, cache) if deterministic else TorchPagedAttention(spec, cache)


def choose_kernels(wanted: WantedKernels, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the best kernels for a model on a device; the log says why they are not better ones.

    Args:
        wanted: what they must, and may, do.
        spec: the model.
        device: that computes.
        dtype: of the model.

    Raises:
        StartupError: the kind is none of `KINDS`, or `native` or `flashinfer` where that is not possible.
    """
    chosen = _choose(wanted, spec, device, dtype)
    if not wanted.fused or wanted.kind == "torch" or wanted.deterministic or device.type != "cuda":
        return chosen
    found, reason = _open_fused(spec, dtype, device)
    if found is None:
        structlog.get_logger().warning("what lies between products is torch's, which is slower", reason=reason)
        return chosen
    return replace(chosen, name=f"{chosen.name}, fused", fused=found)


def _choose(wanted: WantedKernels, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Kernels:
    kind = wanted.kind
    if kind not in KINDS:
        raise StartupError(f"kernels {kind!r} are not known", f"Use one of {', '.join(KINDS)}")
    if kind == "torch":
        return Kernels("torch")
    if kind == "flashinfer" or (kind == "auto" and device.type == "cuda" and not wanted.deterministic):
        return _flashinfer(wanted, spec, device, dtype)
    library = open_library() if device.type == "cpu" else None
    if library is None or spec.group_size > MAX_GROUP:
        return _without_library(kind, spec, device, is_there=library is not None)
    unknown = _unknown_layers(spec)
    if unknown and kind == "native":
        raise StartupError(f"native kernels are not possible: {unknown}", "Use --kernels auto, or torch")
    if unknown:
        structlog.get_logger().warning("only attention is by native kernels", reason=unknown)
        return Kernels(f"attention {library.level}", library)
    return Kernels(f"native {library.level}", library, whole=True)


def _flashinfer(wanted: WantedKernels, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Kernels:
    library, reason = None, _without_flashinfer(spec, device, dtype, deterministic=wanted.deterministic)
    if reason is None:
        library, reason = _open_flashinfer()
    if reason is None:

        def make(small: ModelSpec, cache: KVCache) -> FlashInferAttention:
            return _flashinfer_attention(library, small, cache)

        reason = attention_fault(make, spec, dtype, device, from_right=wanted.from_right)
    if reason is None:
        return Kernels("flashinfer", flashinfer=library)
    if wanted.kind == "flashinfer":
        raise StartupError(f"FlashInfer's attention is not possible: {reason}", "Use --kernels auto, or torch")
    structlog.get_logger().warning("attention is torch's, not FlashInfer's, which is slower", reason=reason)
    return Kernels("torch")


def _without_flashinfer(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, deterministic: bool
) -> str | None:
    """Return why FlashInfer need not be looked for; None: nothing that is known before speaks against it."""
    if device.type != "cuda":
        return f"the device is {device}"
    if deterministic:
        return "its results depend on the batch, which deterministic mode excludes"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"the device's compute capability is below {'.'.join(map(str, MIN_CAPABILITY))}"
    return unsupported(spec, dtype)


def _open_flashinfer() -> tuple[Any, str | None]:
    """Return the module, or None and why it is not there."""
    try:
        return importlib.import_module("flashinfer"), None
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"it cannot be imported ({error}); `pip install 'flashinfer-python>=0.7'` brings it"


def _open_fused(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[FusedKernels | None, str | None]:
    """Return the kernels, or None and why they are not there."""
    try:
        library = importlib.import_module("services.worker.fused.library")
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"Triton cannot be imported ({error}); it comes with torch for CUDA"
    opened: tuple[FusedKernels | None, str | None] = library.open_fused(spec, dtype, device)
    return opened


def _flashinfer_attention(library: Any, spec: ModelSpec, cache: KVCache) -> FlashInferAttention:
    processors = torch.cuda.get_device_properties(cache.keys[0].device).multi_processor_count
    return FlashInferAttention(library, spec, cache, workspace_bytes(spec, processors))


def _without_library(wanted: str, spec: ModelSpec, device: torch.device, *, is_there: bool) -> Kernels:
    reason = "no library is built for this processor, or none can be opened"
    if device.type != "cpu":
        reason = f"the device is {device}"
    elif is_there:
        reason = f"{spec.group_size} query heads share a key head, at most {MAX_GROUP} may"
    if wanted == "native":
        raise StartupError(f"native kernels are not possible: {reason}", "Run make install, or use --kernels auto")
    if device.type == "cpu":
        structlog.get_logger().warning("kernels are torch's, which is slower", reason=reason)
    return Kernels("torch")


def _unknown_layers(spec: ModelSpec) -> str:
    """Return what the library does not compute outside of attention; empty if it computes all."""
    if not spec.norm_first or not spec.final_norm:
        return "the model's norms stand behind its sums"
    if spec.embedding_size is not None:
        return "the model's embedding is projected"
    return ""
