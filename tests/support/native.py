"""The CPU kernels as tests use them: built once per session, for every instruction set that this processor has."""

from __future__ import annotations

import functools

import pytest

from services.worker.native.build import build, find_compiler
from services.worker.native.levels import read_cpu_flags, runnable
from services.worker.native.library import NativeLibrary, open_library

LEVEL_NAMES = [level.name for level in runnable(read_cpu_flags())]
"""Best first."""


def compiler() -> str:
    """Return the C++ compiler; without one the test is skipped."""
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@functools.cache
def built_library(name: str = LEVEL_NAMES[0]) -> NativeLibrary:
    """Return the library of a level; the test is skipped where no compiler can have built it."""
    library = open_library(name)
    if library is not None:
        return library
    level = next(level for level in runnable(read_cpu_flags()) if level.name == name)
    return NativeLibrary(build(level, compiler()), level.name)
