"""Instruction sets for which the library is built, and which of them this machine has.

One library per level; the best one that the machine can run is chosen when a worker starts.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction set."""

    name: str
    machine: str
    """`platform.machine()` for which it exists; empty: any."""
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    """Names in /proc/cpuinfo that a processor must have."""


_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_AVX2 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}

LEVELS = (
    Level("amxbf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), _AMX),
    Level("avx512bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Level("avx512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    Level("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Level("baseline", "", (), frozenset()),
)
"""Best first. `baseline` is what the compiler assumes of every processor of its kind."""


def read_cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Return the processor's flags; none where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def buildable(machine: str = platform.machine()) -> tuple[Level, ...]:
    """Return the levels that can be compiled for a kind of machine, best first."""
    return tuple(level for level in LEVELS if level.machine in ("", machine))


def runnable(cpu_flags: frozenset[str], machine: str = platform.machine()) -> tuple[Level, ...]:
    """Return the levels that a processor can run, best first."""
    return tuple(level for level in buildable(machine) if level.cpu_flags <= cpu_flags)
