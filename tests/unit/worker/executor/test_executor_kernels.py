"""Which kernels a model gets on the CPU, what the log says of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import structlog
import torch

from services.worker.executor import kernels as kernels_module
from services.worker.executor.kernels import WantedKernels, choose_kernels
from services.worker.models.spec import ModelSpec
from shared.errors import StartupError
from tests.support.attention_cases import CPU, attention_spec
from tests.support.native import LEVEL_NAMES, built_library

PLAIN = attention_spec((4, 2, 16), (None,))
NORMS_BEHIND = replace(PLAIN, norm_first=False)
PROJECTED = replace(PLAIN, embedding_size=8)
WIDE_GROUP = attention_spec((65, 1, 16), (None,))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    made = built_library()
    monkeypatch.setattr(kernels_module, "open_library", lambda: made)


def chosen(spec: ModelSpec, wanted: str = "auto") -> tuple[str, list[Any]]:
    """Return the kernels' name and the reasons that the log gives."""
    with structlog.testing.capture_logs() as logs:
        name = choose_kernels(WantedKernels(wanted), spec, CPU, torch.float32).name
    return name, [entry["reason"] for entry in logs]


def test_the_library_computes_everything_where_it_can() -> None:
    assert chosen(PLAIN) == chosen(PLAIN, "native") == (f"native {LEVEL_NAMES[0]}", [])
    assert chosen(PLAIN, "torch") == ("torch", [])


@pytest.mark.parametrize(
    ("spec", "expected", "reason"),
    [
        (NORMS_BEHIND, f"attention {LEVEL_NAMES[0]}", "behind its sums"),
        (PROJECTED, f"attention {LEVEL_NAMES[0]}", "is projected"),
        (WIDE_GROUP, "torch", "65 query heads"),
    ],
)
def test_layers_and_groups_that_the_library_does_not_know_are_torchs(
    spec: ModelSpec, expected: str, reason: str
) -> None:
    name, (said,) = chosen(spec)
    assert name == expected
    assert reason in said
    with pytest.raises(StartupError, match=reason):
        chosen(spec, "native")


def test_without_a_library_everything_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "open_library", lambda: None)
    name, (said,) = chosen(PLAIN)
    assert name == "torch"
    assert "no library is built" in said
    with pytest.raises(StartupError, match="no library is built"):
        chosen(PLAIN, "native")


def test_unknown_kernels_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(StartupError, match="auto, native, flashinfer, torch"):
        chosen(PLAIN, "fast")
