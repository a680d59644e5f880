"""Chooses what computes the forward pass: the worker's own kernels where they can, else torch's operators.

native     all layers by the library (`native_step.py`)
attention  attention by the library, the rest by torch: for models with a layer that the library does not know
torch      everything by torch: on a GPU, without a library for this processor, or by `--kernels torch`
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from services.worker.attention.native_paged import MAX_GROUP
from services.worker.executor.native_step import NativeForward
from services.worker.executor.step import ForwardPass, TorchForward
from services.worker.memory.kv_cache import KVCache
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ModelWeights
from services.worker.native.library import NativeLibrary, open_library
from shared.errors import StartupError

KINDS = ("auto", "native", "torch")
"""Values of the setting: `auto` falls back, `native` does not."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes a model's forward pass on this machine.

    Attributes:
        name: `native <instruction set>`, `attention <instruction set>` or `torch`.
        library: None for `torch`.
        whole: the library computes all of the layers.
    """

    name: str
    library: NativeLibrary | None = None
    whole: bool = False

    def open(
        self, spec: ModelSpec, weights: ModelWeights, rope: RopeTable, cache: KVCache, *, deterministic: bool
    ) -> ForwardPass:
        """Return the forward pass over a cache."""
        if self.library is not None and self.whole:
            return NativeForward(self.library, spec, weights, rope, cache)
        return TorchForward(spec, weights, rope, cache, deterministic=deterministic, library=self.library)


def choose_kernels(wanted: str, spec: ModelSpec, device: torch.device) -> Kernels:
    """Return the best kernels for a model on a device; the log says why they are not the library's.

    Raises:
        StartupError: `wanted` is none of `KINDS`, or `native` where that is not possible.
    """
    if wanted not in KINDS:
        raise StartupError(f"kernels {wanted!r} are not known", f"Use one of {', '.join(KINDS)}")
    if wanted == "torch":
        return Kernels("torch")
    library = open_library() if device.type == "cpu" else None
    if library is None or spec.group_size > MAX_GROUP:
        return _without_library(wanted, spec, device, is_there=library is not None)
    unknown = _unknown_layers(spec)
    if unknown:
        structlog.get_logger().warning("only attention is by native kernels", reason=unknown)
        return Kernels(f"attention {library.level}", library)
    return Kernels(f"native {library.level}", library, whole=True)


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
