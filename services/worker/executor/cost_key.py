"""For which workers the cost of a step is the same."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import torch

from services.worker.cost.kept import CostKey
from services.worker.executor.first_look import RunnerSettings
from services.worker.executor.model_runner import ModelInfo
from services.worker.models.spec import ModelSpec
from shared.host import processor_name
from shared.version import VERSION

_MODES: Final = ("block_size", "deterministic", "fused", "graphs", "overlap", "page_bytes")
"""Settings that choose between ways to compute a step."""


def cost_key(spec: ModelSpec, settings: RunnerSettings, info: ModelInfo) -> CostKey:
    """Return the key of a loaded model.

    Args:
        spec: of the whole model.
        settings: with which it was loaded.
        info: about it.
    """
    device, threads = torch.device(info.device), info.threads
    modes = [f"{name} {getattr(settings, name)}" for name in _MODES]
    return CostKey(
        model=blake2b(repr(spec).encode(), digest_size=16).hexdigest(),
        dtype=info.dtype,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {processor_name()}",
        build=", ".join((f"sluice {VERSION}", info.build, *modes)),
        threads=f"{threads.most}{'' if threads.are_given else ' at most'}",
    )
