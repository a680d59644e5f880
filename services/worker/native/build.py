"""Compiles the kernels, one library per instruction set.

    python -m services.worker.native.build [--only LEVEL] [--compiler PROGRAM]

Without a compiler nothing is built and workers run on torch's own operators; this says so and exits with 0, since an
installation without it is complete, only slower. `--require` makes a missing compiler an error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.worker.native.levels import LEVELS, Level, buildable

SOURCES = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "lib"
"""Where the libraries go: `libsluice-<level>-<digest of sources and flags>.so`."""
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp-simd",
    "-pthread",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",  # GCC 12's own vector headers
    "-Wno-psabi",
)
_TIMEOUT_S = 300


def library_path(level: Level) -> Path:
    """Return where the library of a level lies once it is built from the sources as they are."""
    digest = hashlib.sha256(" ".join((*_FLAGS, *level.compiler_flags)).encode())
    for source in sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return LIBRARIES / f"libsluice-{level.name}-{digest.hexdigest()[:12]}.so"


def find_compiler(wanted: str = "") -> str | None:
    """Return the C++ compiler's path: of the one that is wanted, else g++, c++ or clang++; None if there is none."""
    names = (wanted, "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(level: Level, compiler: str) -> Path:
    """Compile one level unless it is there already; return its path.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its messages are in `stderr`.
    """
    target = library_path(level)
    if target.exists():
        return target
    LIBRARIES.mkdir(exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *_FLAGS, *level.compiler_flags, str(SOURCES / "sluice.cpp"), "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)  # noqa: S603 - our own sources
        unfinished.replace(target)  # a worker that starts meanwhile finds all of it or nothing
    finally:
        unfinished.unlink(missing_ok=True)
    for stale in LIBRARIES.glob(f"libsluice-{level.name}-*.so"):
        if stale != target:
            stale.unlink(missing_ok=True)
    return target


def main() -> None:
    """Build the levels asked for."""
    parser = argparse.ArgumentParser(description="compile the worker's CPU kernels")
    parser.add_argument("--only", choices=[level.name for level in LEVELS], help="one level; default: all")
    parser.add_argument("--require", action="store_true", help="fail without a compiler")
    parser.add_argument("--compiler", default="", help="C++ compiler; default: g++, c++ or clang++")
    arguments = parser.parse_args()
    compiler = find_compiler(arguments.compiler)
    if compiler is None:
        sys.stderr.write("no C++ compiler: workers will run on torch's operators, which is slower (install g++)\n")
        sys.exit(int(arguments.require))
    levels = [level for level in buildable() if arguments.only in (None, level.name)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        are_built = list(pool.map(lambda level: _build_or_say(level, compiler), levels))
    sys.exit(int(arguments.require and not all(are_built)))


def _build_or_say(level: Level, compiler: str) -> bool:
    """Build a level and say how it went; return whether it is there now."""
    try:
        path = build(level, compiler)
    except (subprocess.SubprocessError, OSError) as error:
        sys.stderr.write(f"{level.name}: not built by {compiler}\n{getattr(error, 'stderr', '') or error}\n")
        return False
    sys.stderr.write(f"{level.name}: {path.name}\n")
    return True


if __name__ == "__main__":
    main()
