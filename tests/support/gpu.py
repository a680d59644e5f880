"""What tests on a CUDA device have in common."""

from __future__ import annotations

import importlib.util
from typing import Final

import pytest
import torch

from tests.support.checkpoints import CheckpointShape
from tests.support.runners import MIB

ON_GPU: Final = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
WITH_LIBRARIES: Final = [
    *ON_GPU,
    pytest.mark.timeout(900),  # kernels of FlashInfer are compiled when they are first used
    pytest.mark.filterwarnings("default"),  # warnings of the device's libraries are not ours
]
NEEDS_FLASHINFER: Final = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
NEEDS_DRIVER: Final = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
)
WIDE: Final = CheckpointShape(
    hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, head_dim=64, weight_std=0.05
)
"""With heads that FlashInfer computes."""
LIMITS = {"dtype": "bfloat16", "kernels": "flashinfer", "memory_bytes": 768 * MIB, "max_batch_rows": 40, "max_rows": 64}
"""Of runners of it."""
