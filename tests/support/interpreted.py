"""Runs Triton's kernels on the CPU: an interpreter computes each program by numpy, so that their numbers are seen."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.experimental.gluon  # noqa: F401  the interpreter asks for it, and it for the library as it is
import triton.language as tl
from triton.runtime import interpreter

from services.worker.fused import choice_kernels, drawing, layer_kernels, operators


@cache
def _interpreted(module: ModuleType) -> ModuleType:
    """Return the module once more, with functions that are interpreted: Triton decides that when they are made."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_interpreted", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        spec.loader.exec_module(again)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return again


_convert = interpreter._convert_float
_STANDARD = tl.standard


def _rounded(numbers: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """Round to bfloat16 as devices do; the interpreter cuts off."""
    if source == tl.float32 and target == tl.bfloat16:
        bits = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16).view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(numbers.shape)
    converted: np.ndarray = _convert(numbers, source, target, mode)
    return converted


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Interpret a function that a kernel calls, and leave Triton's language as it was."""
    scope = interpreter._patch_lang(function.fn)
    try:
        return function.rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Let kernels that are started be interpreted."""
    patch.setattr(interpreter, "_convert_float", _rounded)
    patch.setattr(interpreter.InterpretedFunction, "__call__", _call)
    library = _interpreted(_STANDARD)
    for name, function in vars(library).items():
        if isinstance(function, interpreter.InterpretedFunction) and hasattr(tl, name):
            patch.setattr(tl, name, function)
    patch.setattr(tl, "standard", library)
    patch.setattr(operators, "layer_kernels", _interpreted(layer_kernels))
    patch.setattr(operators, "choice_kernels", _interpreted(choice_kernels))
    patch.setattr(drawing, "choice_kernels", _interpreted(choice_kernels))
