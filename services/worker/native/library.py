"""Finds and opens the library for this processor."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import structlog

from services.worker.native.build import library_path
from services.worker.native.levels import read_cpu_flags, runnable
from services.worker.native.structures import ABI, AttendArgs, ModelArgs, StepArgs

_NO_MEMORY, _OUTSIDE, _NOT_GIVEN = 1, 2, 3
"""`enum Result` of src/model.h; 0 is success."""


class NotGivenError(Exception):
    """What the step called for failed; its results are of no use."""


class NativeLibrary:
    """The kernels of one instruction set. Calls release the GIL; what they check is in `_raise_failure`."""

    def __init__(self, path: Path, level: str) -> None:
        self.level = level
        """Name of the instruction set."""
        self.file = path.name
        """Says of which sources it is, see `library_path`."""
        self._library = ctypes.CDLL(str(path))
        self._library.sluice_abi.restype = ctypes.c_int32
        found = self._library.sluice_abi()
        if found != ABI:
            raise OSError(f"{path.name} has ABI {found}, not {ABI}")
        self._library.sluice_open.restype = ctypes.c_int32
        if not self._library.sluice_open():
            raise OSError(f"the system does not let this process use {level}")
        self.forward = self._function("sluice_forward", ctypes.POINTER(ModelArgs), ctypes.POINTER(StepArgs))
        """(model, step): run the step's layers, and the head for the rows that are sampled."""
        self.attend = self._function("sluice_attend", ctypes.POINTER(AttendArgs))
        """(args): attention by itself."""

    def _function(self, name: str, *arguments: type) -> ctypes._NamedFuncPointer:
        function: ctypes._NamedFuncPointer = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int32
        function.errcheck = _raise_failure  # type: ignore[assignment]  # the stub wants a union of all kinds of results
        return function


def _raise_failure(result: int, _function: Any, _arguments: Any) -> None:
    """Turn a `Result` of src/model.h into an exception.

    Raises:
        MemoryError: there is no memory for the call's workspace; nothing was computed.
        IndexError: the step names what does not exist; nothing was computed.
        NotGivenError: see there.
    """
    if result == _NO_MEMORY:
        raise MemoryError("no memory for the workspace of the kernels")
    if result == _OUTSIDE:
        raise IndexError("a token, position or block of the step does not exist")
    if result == _NOT_GIVEN:
        raise NotGivenError("attention over keys that lie elsewhere was not to be had")


@functools.cache
def open_library(level: str = "") -> NativeLibrary | None:
    """Return the best library that is built and opens here, or that of one level; None if there is none."""
    for candidate in runnable(read_cpu_flags()):
        if level not in ("", candidate.name) or not (path := library_path(candidate)).exists():
            continue
        try:
            return NativeLibrary(path, candidate.name)
        except OSError as error:  # built for another kind of machine, or against libraries that are not here
            structlog.get_logger().warning("a kernel library cannot be opened", path=str(path), reason=str(error))
    return None
