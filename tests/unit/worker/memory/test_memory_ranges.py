"""What every backend of virtual memory promises, on main memory and on a stand-in of the CUDA driver."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from services.worker.memory import posix
from services.worker.memory.cuda import CudaError, CudaMemory
from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import MappingError, PageHandle, PageId, VirtualMemory
from tests.support.fake_cuda_driver import GRANULARITY, FakeDriver

PAGE = GRANULARITY
CPU = torch.device("cpu")


def cuda_memory(num_pages: int, driver: FakeDriver | None = None) -> CudaMemory:
    return CudaMemory(PAGE, num_pages, CPU, driver or FakeDriver())


MAKERS: dict[str, Callable[[int], VirtualMemory]] = {
    "posix": lambda num_pages: PosixMemory(PAGE, num_pages),
    "cuda": cuda_memory,
}


@pytest.fixture
def main_memory() -> Iterator[PosixMemory]:
    opened = PosixMemory(PAGE, 8)
    yield opened
    opened.close()


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def gpu_memory(driver: FakeDriver) -> Iterator[CudaMemory]:
    opened = cuda_memory(8, driver)
    yield opened
    opened.close()
    assert (driver.handles, driver.mapped, driver.reserved, driver.num_contexts) == ({}, {}, {}, 0)


@pytest.fixture(params=["main_memory", "gpu_memory"])
def memory(request: pytest.FixtureRequest) -> VirtualMemory:
    opened: VirtualMemory = request.getfixturevalue(request.param)
    return opened


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


def test_what_a_page_holds_goes_with_it(memory: VirtualMemory) -> None:
    one, other = memory.reserve(4 * PAGE), memory.reserve(PAGE + 1)
    assert (one.tensor().shape, other.tensor().shape) == ((4 * PAGE,), (2 * PAGE,))
    one.map_run(PAGE, pages(5, 2, 3))
    seen = one.tensor()
    assert seen.dtype == torch.uint8
    for place in (1, 2, 3):
        seen[place * PAGE : (place + 1) * PAGE] = 10 * place
    assert one.unmap_run(2 * PAGE, 1) == [2]
    other.map_run(0, pages(2))
    assert one.page_at(2 * PAGE) is None
    assert other.page_at(0) == 2
    assert (other.tensor()[:PAGE] == 20).all()
    one.map_run(0, pages(6))
    assert one.unmap_run(0, 2) == [6, 5]
    one.map_run(0, pages(5))
    assert seen[:PAGE].tolist() == [10] * PAGE
    assert seen[3 * PAGE :].tolist() == [30] * PAGE
    assert one.tensor().data_ptr() == seen.data_ptr()


def test_the_rules_of_mapping_are_kept(memory: VirtualMemory) -> None:
    one, other = memory.reserve(4 * PAGE), memory.reserve(4 * PAGE)
    one.map_run(0, pages(0, 1))
    broken: list[tuple[str, Callable[[], object]]] = [
        ("page 1 is mapped at offset", lambda: one.map_run(PAGE, pages(6, 7))),
        ("page 0 is mapped already", lambda: other.map_run(0, pages(4, 0))),
        ("two places", lambda: other.map_run(0, pages(4, 4))),
        ("page 8 is not one of", lambda: other.map_run(0, pages(8))),
        ("page -1 is not one of", lambda: other.map_run(0, pages(-1))),
        ("offset 4096 is not a multiple", lambda: other.map_run(4096, pages(4))),
        ("offset 4096 is not a multiple", lambda: one.unmap_run(4096, 1)),
        ("not in a range of", lambda: other.map_run(4 * PAGE, pages(4))),
        ("not in a range of", lambda: other.map_run(3 * PAGE, pages(4, 5))),
        ("not in a range of", lambda: other.map_run(-PAGE, pages(4))),
        ("0 pages", lambda: other.map_run(0, [])),
        ("not in a range of", lambda: one.unmap_run(0, 5)),
        ("nothing is mapped at offset", lambda: one.unmap_run(PAGE, 2)),
        ("nothing is mapped at offset", lambda: other.unmap_run(0, 1)),
        ("cannot be reserved", lambda: memory.reserve(0)),
        ("was not adopted", lambda: memory.disown(PageId(7))),
    ]
    for message, act in broken:
        with pytest.raises(MappingError, match=message):
            act()
        assert [one.page_at(place * PAGE) for place in range(4)] == [0, 1, None, None]
        assert [other.page_at(place * PAGE) for place in range(4)] == [None] * 4
    other.map_run(0, pages(4, 6, 7, 5))


def test_nothing_works_after_the_end(memory: VirtualMemory) -> None:
    reserved = memory.reserve(PAGE)
    reserved.map_run(0, pages(0))
    memory.close()
    memory.close()
    acts: list[Callable[[], object]] = [
        lambda: reserved.unmap_run(0, 1),
        lambda: reserved.map_run(0, pages(1)),
        reserved.tensor,
        lambda: memory.reserve(PAGE),
        lambda: memory.export(PageId(1)),
    ]
    for act in acts:
        with pytest.raises(MappingError, match="the memory is closed"):
            act()


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_page_can_be_handed_to_another_memory(kind: str) -> None:
    giver, taker = MAKERS[kind](4), MAKERS[kind](2)
    here, there = giver.reserve(PAGE), taker.reserve(2 * PAGE)
    here.map_run(0, pages(3))
    here.tensor()[:] = 7
    handle = giver.export(PageId(3))
    page = taker.adopt(handle)
    os.close(handle.descriptor)
    there.map_run(0, [PageId(1), page])
    there.tensor()[PAGE + 5] = 9
    assert here.tensor()[4:7].tolist() == [7, 9, 7]
    with pytest.raises(MappingError, match="mapped already"):
        taker.disown(page)
    giver.close()
    assert there.tensor()[PAGE + 4 : PAGE + 7].tolist() == [7, 9, 7]  # the page lives as long as it is mapped
    there.unmap_run(PAGE, 1)
    taker.disown(page)
    with pytest.raises(MappingError, match="not one of"):
        there.map_run(PAGE, [page])
    again = taker.export(PageId(1))
    with pytest.raises(MappingError, match=r"no page|fills"):
        taker.adopt(PageHandle(again.descriptor, again.offset + PAGE // 2))
    os.close(again.descriptor)
    taker.close()


def descriptors() -> list[str]:
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "sluice-memory" in line]


def test_pages_of_one_file_are_adopted_by_one_descriptor() -> None:
    owner, reader = PosixMemory(PAGE, 64), PosixMemory(PAGE, 1)
    before = descriptors()
    adopted = []
    for page in range(64):
        handle = owner.export(PageId(page))
        adopted.append(reader.adopt(handle))
        os.close(handle.descriptor)
    assert len(descriptors()) == len(before) + 1
    for page in adopted:
        reader.disown(page)
    assert descriptors() == before
    owner.close()
    reader.close()


def test_a_file_that_could_become_shorter_is_not_adopted() -> None:
    """Whoever reads behind the end of a file is killed; a regular file cannot be sealed at all."""
    reader = PosixMemory(PAGE, 1)
    with tempfile.TemporaryFile() as regular:
        regular.truncate(PAGE)
        loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        os.ftruncate(loose, PAGE)
        for file in (regular.fileno(), loose):
            with pytest.raises(MappingError, match="not sealed against shrinking"):
                reader.adopt(PageHandle(file, 0))
        fcntl.fcntl(loose, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        reader.adopt(PageHandle(loose, 0))
        for offset in (PAGE, -PAGE, 4096):
            with pytest.raises(MappingError, match="has no page"):
                reader.adopt(PageHandle(loose, offset))
        os.close(loose)
    reader.close()


def extent() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0])


def test_nothing_is_left_behind() -> None:
    before, files = mappings(), descriptors()
    reserved_before = extent()
    opened = PosixMemory(PAGE, 8)
    reserved = opened.reserve(2**40)
    reserved.map_run(2**30, pages(3, 4, 1))
    page = opened.adopt(handle := opened.export(PageId(0)))
    os.close(handle.descriptor)
    reserved.map_run(0, [page])
    assert len(mappings()) == len(before) + 3  # two neighbours of the file, one, the adopted one
    assert extent() >= reserved_before + 2**40 // 4096
    opened.close()
    assert mappings() == before
    assert descriptors() == files
    assert extent() < reserved_before + 2**39 // 4096


def test_the_budget_is_hard(main_memory: PosixMemory) -> None:
    handle = main_memory.export(PageId(0))
    for size in (9 * PAGE, 7 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(handle.descriptor, size)
    os.close(handle.descriptor)


def test_whoever_touches_what_is_not_mapped_dies(main_memory: PosixMemory) -> None:
    reserved = main_memory.reserve(4 * PAGE)
    reserved.map_run(0, pages(0, 1))
    seen = reserved.tensor()
    seen[: 2 * PAGE] = 1
    reserved.unmap_run(PAGE, 1)
    assert dies_by(lambda: seen[PAGE - 1].item()) is None
    assert dies_by(lambda: seen[PAGE].item()) == signal.SIGSEGV  # was mapped before
    assert dies_by(lambda: seen[3 * PAGE].fill_(1)) == signal.SIGSEGV  # never was


def dies_by(act: Callable[[], object]) -> int | None:
    """Return the signal that ends a forked child which acts, if one does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child starts none and waits for none
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        act()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def test_a_run_of_which_a_part_cannot_be_mapped_is_not_mapped_at_all(
    main_memory: PosixMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages 6, 7 | 2 | 4, 5 are three calls of the system; the third is refused."""
    reserved = main_memory.reserve(8 * PAGE)
    calls = Mock(wraps=posix.mmap_at, side_effect=[DEFAULT, DEFAULT, OSError(12, "no more mappings"), *[DEFAULT] * 4])
    monkeypatch.setattr(posix, "mmap_at", calls)
    with pytest.raises(OSError, match="no more mappings"):
        reserved.map_run(0, pages(6, 7, 2, 4, 5))
    assert calls.call_count == 4  # and one that takes away what had been mapped
    assert dies_by(lambda: ctypes.string_at(reserved.address, 1)) == signal.SIGSEGV
    reserved.map_run(0, pages(6, 7, 2, 4, 5))
    assert calls.call_count == 7
    monkeypatch.undo()


@pytest.mark.parametrize(("function", "after"), [("cuMemCreate", 2), ("cuMemMap", 2), ("cuMemSetAccess", 0)])
def test_a_run_that_the_driver_refuses_is_not_mapped_at_all(
    function: str, after: int, driver: FakeDriver, gpu_memory: CudaMemory
) -> None:
    reserved = gpu_memory.reserve(8 * PAGE)
    driver.fail(function, after)
    with pytest.raises(CudaError, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY") as error:
        reserved.map_run(PAGE, pages(6, 7, 2, 4))
    assert error.value.is_memory_short
    assert driver.mapped == {}
    reserved.map_run(PAGE, pages(6, 7, 2, 4))
    assert len(driver.accessible) == 4


def test_pages_that_the_driver_does_not_unmap_stay_as_they_are(driver: FakeDriver, gpu_memory: CudaMemory) -> None:
    reserved = gpu_memory.reserve(8 * PAGE)
    reserved.map_run(0, pages(6, 7, 2))
    reserved.tensor()[: 3 * PAGE] = 5
    driver.fail("cuMemUnmap", 2)
    with pytest.raises(CudaError, match="cuMemUnmap"):
        reserved.unmap_run(0, 3)
    assert len(driver.accessible) == 3
    assert (reserved.tensor()[: 3 * PAGE] == 5).all()
    assert reserved.unmap_run(0, 3) == [6, 7, 2]


def test_a_page_of_a_gpu_is_taken_when_it_is_first_mapped(driver: FakeDriver, gpu_memory: CudaMemory) -> None:
    driver.num_bytes = 3 * PAGE
    reserved = gpu_memory.reserve(8 * PAGE)
    reserved.map_run(0, pages(0, 1))
    reserved.unmap_run(0, 2)
    reserved.map_run(2 * PAGE, pages(1, 0))
    assert driver.calls.count("cuMemCreate") == 2
    with pytest.raises(CudaError, match="cuMemCreate"):
        reserved.map_run(4 * PAGE, pages(2, 3))


def test_sizes_that_are_not_possible_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not a multiple of the system's 4096"):
        PosixMemory(5000, 4)
    with pytest.raises(ValueError, match=r"not a multiple of the system's 2097152"):
        PosixMemory(PAGE, 4, huge=True)
    driver = FakeDriver()
    with pytest.raises(ValueError, match=r"not a multiple of the device's 16384"):
        CudaMemory(4096, 4, CPU, driver)
    assert driver.num_contexts == 0
    for make in (lambda: PosixMemory(PAGE, 0), lambda: CudaMemory(0, 4, CPU, driver)):
        with pytest.raises(ValueError, match="are no memory"):
            make()


def test_huge_pages_hold_the_same() -> None:
    """Whether the system gives huge pages or not."""
    opened = PosixMemory(posix.HUGE_PAGE_BYTES, 2, huge=True)
    reserved = opened.reserve(2 * posix.HUGE_PAGE_BYTES)
    assert reserved.address % posix.HUGE_PAGE_BYTES == 0
    reserved.map_run(0, pages(1, 0))
    reserved.tensor()[:] = 3
    reserved.unmap_run(0, 1)
    reserved.unmap_run(posix.HUGE_PAGE_BYTES, 1)
    reserved.map_run(0, pages(0, 1))
    assert (reserved.tensor() == 3).all()
    opened.close()
