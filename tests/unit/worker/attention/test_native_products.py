"""The kernels' products by themselves: every kind of shape, with and without the matrix unit."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from services.worker.native import build as building
from services.worker.native import structures
from services.worker.native.levels import Level, read_cpu_flags, runnable
from services.worker.native.library import NativeLibrary
from tests.support.native import compiler

PROGRAM = Path(__file__).parents[3] / "support" / "products.cpp"
BEST = [level for level in runnable(read_cpu_flags()) if level.name != "baseline"][:2]
"""The two best levels: where the best one has a matrix unit, the next has none."""


@pytest.mark.slow
@pytest.mark.parametrize("level", BEST, ids=lambda level: level.name)
def test_products_of_every_shape_are_near_the_exact_sums_and_rows_do_not_depend_on_each_other(
    level: Level, tmp_path: Path
) -> None:
    program = tmp_path / "products"
    flags = (
        "-std=c++17",
        "-O2",
        "-fopenmp-simd",
        "-pthread",
        "-Wno-psabi",
        *level.compiler_flags,
        f"-I{building.SOURCES}",
    )
    done = subprocess.run([compiler(), *flags, PROGRAM, "-o", program], capture_output=True, text=True, check=False)
    if done.returncode and "unrecognized" in done.stderr:
        pytest.skip("this compiler is older than the level")
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([program], capture_output=True, text=True, check=False, timeout=100)
    if ran.returncode == 2:
        pytest.skip("the system does not let a process use the matrix unit")
    assert ran.returncode == 0, ran.stdout or f"ended by signal {-ran.returncode}"
    assert ran.stdout.strip() == "716 shapes"


def test_a_library_that_the_system_does_not_let_run_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "refused.so"
    text = f'extern "C" int sluice_abi() {{ return {structures.ABI}; }} extern "C" int sluice_open() {{ return 0; }}'
    command = [compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(target)]
    subprocess.run(command, input=text, text=True, check=True)
    assert ctypes.CDLL(str(target)).sluice_abi() == structures.ABI
    with pytest.raises(OSError, match="the system does not let this process use amxbf16"):
        NativeLibrary(target, "amxbf16")
