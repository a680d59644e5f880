"""Records operators as a CUDA graph does: what memory each reads and writes, and nothing that Python did between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from services.worker.attention.flashinfer_paged import FlashInferAttention
from services.worker.executor import kernels as kernels_module
from services.worker.executor import opening
from services.worker.executor import runner as runner_module
from services.worker.executor.kernels import Kernels
from services.worker.fused import launching
from services.worker.memory.kv_cache import KVCache
from services.worker.models.spec import ModelSpec
from tests.support.live_groups import stated_peak

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits while a graph is recorded"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class ReplayRecorder:
    """A `Recorder` for the CPU.

    Attributes:
        num_starts: how often something recorded was started.
    """

    def __init__(self) -> None:
        self.num_starts = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record a graph; see `Recorder`."""
        recording = _Recording()
        launch = launching.launch

        def note(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():  # what an interpreter does meanwhile is not part of it
                launch(*args, **kwargs)
            recording.calls.append((launch, args, kwargs, None))

        with pytest.MonkeyPatch.context() as patch, recording:
            patch.setattr(launching, "launch", note)
            compute()

        def start() -> None:
            self.num_starts += 1
            for func, args, kwargs, result in recording.calls:
                again = func(*args, **kwargs)
                _overwrite(result, again, {_place(each) for each in _tensors((args, kwargs))})

        return start


def record_with(patch: pytest.MonkeyPatch, kernels: Kernels) -> ReplayRecorder:
    """Let every runner that opens be on these kernels, FlashInfer's attention by its stand-in, and record if it may."""
    recorder = ReplayRecorder()
    patch.setattr(opening, "peak_bytes", stated_peak)  # the real one counts what other tests leave behind
    patch.setattr(runner_module, "choose_kernels", lambda *_, **__: kernels)
    patch.setattr(runner_module, "_recorder", lambda settings, *_: recorder if settings.graphs else None)
    patch.setattr(kernels_module, "_flashinfer_attention", _with_workspace)
    return recorder


def _with_workspace(library: Any, spec: ModelSpec, cache: KVCache) -> FlashInferAttention:
    return FlashInferAttention(library, spec, cache, 2**27)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overwrite(kept: Any, again: Any, inputs: set[int]) -> None:
    """Put a result into the memory in which the recorded one lies, unless it is a view of what was given."""
    for old, new in zip(_tensors(kept), _tensors(again), strict=True):
        assert old.shape == new.shape, "a recorded operator's result has one size"
        if _place(old) not in inputs:
            old.copy_(new)
