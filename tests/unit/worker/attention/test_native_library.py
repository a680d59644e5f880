"""The library of CPU kernels: structures, instruction sets, how it is built and opened, the memory that it takes."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.native import build as building
from services.worker.native import library as opening
from services.worker.native import structures
from services.worker.native.levels import LEVELS, Level, read_cpu_flags, runnable
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.native import built_library, compiler
from tests.support.runners import MIB

MIRRORS = {"Layer": structures.LayerArgs, "Model": structures.ModelArgs, "Rows": structures.RowsArgs}
MIRRORS |= {"Step": structures.StepArgs, "Attend": structures.AttendArgs}
FLAG_OF_MACRO = {
    "__LZCNT__": "abm",
    "__POPCNT__": "popcnt",
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__LAHF_SAHF__": "lahf_lm",
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__AVX512BF16__": "avx512_bf16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_BF16__": "amx_bf16",
} | {f"__{name.upper()}__": name for name in ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "movbe")}
FLAG_OF_MACRO |= {f"__AVX512{name}__": f"avx512{name.lower()}" for name in ("F", "BW", "CD", "DQ", "VL")}
FLAG_OF_MACRO["__BMI__"] = "bmi1"


def compile_text(text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [compiler(), "-std=c++17", f"-I{building.SOURCES}", *flags, "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def layout_checks(name: str, mirror: type[ctypes.Structure], shift: int = 0) -> str:
    lines = [f'static_assert(sizeof(sluice::{name}) == {ctypes.sizeof(mirror) + shift}, "{name}");']
    for field, *_ in mirror._fields_:
        at = getattr(mirror, field)
        place, size = f"offsetof(sluice::{name}, {field})", f"sizeof(sluice::{name}::{field})"
        lines.append(f'static_assert({place} == {at.offset} && {size} == {at.size}, "{name}.{field}");')
    return "\n".join(lines)


def test_the_structures_lie_in_memory_as_their_mirrors_do() -> None:
    head = "#include <cstddef>\n#include <cstdint>\n#include <vector>\n#include <memory>\n"
    head += f'#include "model.h"\nstatic_assert(sluice::kAbi == {structures.ABI}, "ABI");\n'
    text = head + "\n".join(layout_checks(name, mirror) for name, mirror in MIRRORS.items())
    done = compile_text(text, "-fsyntax-only", "-Wno-invalid-offsetof")
    assert done.returncode == 0, done.stderr
    wrong = compile_text(head + layout_checks("Layer", structures.LayerArgs, shift=8), "-fsyntax-only")
    assert wrong.returncode != 0, "the check finds nothing"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_level_asks_for_all_that_the_compiler_may_use(level: Level) -> None:
    done = compile_text("", *level.compiler_flags, "-dM", "-E")
    if done.returncode:
        pytest.skip("this compiler is older than the level")
    macros = {line.split()[1] for line in done.stdout.splitlines()}
    assert {flag for macro, flag in FLAG_OF_MACRO.items() if macro in macros} <= level.cpu_flags
    for flag in level.cpu_flags:
        assert level not in runnable(level.cpu_flags - {flag}, "x86_64")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of libraries of its own, and nothing remembered of those that are open."""
    monkeypatch.setattr(building, "LIBRARIES", tmp_path / "lib")
    opening.open_library.cache_clear()
    yield tmp_path / "lib"
    opening.open_library.cache_clear()


@pytest.mark.slow
def test_a_library_that_cannot_be_opened_is_passed_over(elsewhere: Path) -> None:
    levels = runnable(read_cpu_flags())
    elsewhere.mkdir()
    for level in levels:
        building.library_path(level).write_bytes(b"built for another kind of machine")
    assert opening.open_library() is None
    building.library_path(levels[-1]).unlink()
    building.build(levels[-1], compiler())
    opening.open_library.cache_clear()
    library = opening.open_library()
    assert library is not None
    assert library.level == levels[-1].name


def test_a_failed_build_leaves_nothing_and_a_library_belongs_to_its_sources(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "sluice.cpp").write_text("this is no C++")
    monkeypatch.setattr(building, "SOURCES", sources)
    with pytest.raises(subprocess.CalledProcessError):
        building.build(LEVELS[-1], compiler())
    assert not list(elsewhere.iterdir())
    (sources / "sluice.cpp").write_text("")
    first = building.build(LEVELS[-1], compiler())
    (sources / ".editor~").write_text("not a source")
    assert building.library_path(LEVELS[-1]) == first
    (sources / "more.h").write_text("")
    second = building.build(LEVELS[-1], compiler())
    assert list(elsewhere.iterdir()) == [second]
    assert second != first


def test_a_call_that_finds_no_memory_says_so_and_nothing_is_thrown_through_it() -> None:
    """2^50 rows need more addresses than there are."""
    one_thread = {"num_threads": 1, "heads": 1, "kv_heads": 1, "head_dim": 16}
    args = structures.AttendArgs(rows=structures.RowsArgs(num_rows=2**50), **one_thread)
    with pytest.raises(MemoryError, match="workspace of the kernels"):
        built_library().attend(ctypes.byref(args))


PEAKS = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from services.worker.attention.base import RaggedRows
from services.worker.attention.native_paged import NativePagedAttention
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.measure import peak_bytes
from services.worker.memory.reserve import split_bytes
from services.worker.models.spec import read_spec
from services.worker.native.library import open_library

CONTEXT, CPU = 2**16, torch.device("cpu")
for num_heads, head_dim in ((16, 128), (64, 256)):
    spec = replace(read_spec(Path(sys.argv[1])), num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, windows=(300,))
    attention = NativePagedAttention(open_library(), spec, KVCache(spec, 1, 16, torch.float32, CPU), num_threads=2)
    tables = np.zeros((7, CONTEXT // 16), dtype=np.int32)  # all rows share one block: only lengths matter
    plan = attention.plan(RaggedRows(np.ones(7, np.int32), np.full(7, CONTEXT - 1, np.int32), tables))
    queries = torch.ones((7, num_heads, head_dim))
    attention.attend(plan, 0, queries)  # the threads' stacks come with the first call
    peak = peak_bytes(CPU, lambda: attention.attend(plan, 0, queries))
    print(split_bytes(spec, 512, 2), split_bytes(spec, CONTEXT, 2), peak)
"""


@pytest.mark.slow
def test_splits_side_by_side_take_the_memory_that_is_reserved() -> None:
    """In a process of its own: here, memory that tests before have freed would be used again."""
    built_library()
    folder = stored_checkpoint(CheckpointShape(num_layers=1))[0]
    command = [sys.executable, "-c", PEAKS, str(folder)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    first, second = done.stdout.splitlines()
    if first.endswith("None"):
        pytest.skip("the system does not let a process reset its peak")
    of_short, reserved, peak = (int(number) for number in first.split())
    assert of_short == 0
    assert 0.8 * reserved <= peak <= reserved + 2 * MIB
    _, most, peak = (int(number) for number in second.split())
    assert 7 * 256 * 64 * 258 * 4 > most == 64 * MIB
    assert peak < 4 * MIB, "too much, so one split after the other"
