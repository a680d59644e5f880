"""Pages that are lent: what is found is where the bytes lie, on main memory and on a stand-in of the CUDA driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.worker.memory.cuda import CudaMemory
from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import MappingError, PageId, VirtualMemory
from services.worker.transfer.fd_frames import Place
from services.worker.transfer.frames import FrameError
from services.worker.transfer.lending import BorrowedPages, LentPages, main_memory
from tests.support.fake_cuda_driver import GRANULARITY as PAGE
from tests.support.fake_cuda_driver import FakeDriver

CPU = torch.device("cpu")
NUM_PAGES = 12


@dataclass
class Backend:
    """A memory that lends, and how its peer maps what is lent."""

    memory: VirtualMemory
    open_memory: Callable[[int], VirtualMemory]

    def lend(self, lent: LentPages, borrowed: BorrowedPages, *pages: int) -> None:
        for page in pages:
            loan, handle = lent.loan(PageId(page))
            borrowed.take(loan, handle.descriptor)
            os.close(handle.descriptor)


@pytest.fixture(params=["posix", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    driver = FakeDriver()
    if request.param == "posix":
        made = Backend(PosixMemory(PAGE, NUM_PAGES), main_memory)
    else:
        made = Backend(
            CudaMemory(PAGE, NUM_PAGES, CPU, driver), lambda page_bytes: CudaMemory(page_bytes, 1, CPU, driver)
        )
    yield made
    made.memory.close()


def pages(*numbers: int) -> list[PageId]:
    return [PageId(number) for number in numbers]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_are_the_bytes(backend: Backend, seed: int) -> None:
    """Two ranges, with pages in any order and holes; spans anywhere."""
    random = np.random.default_rng(seed)
    memory = backend.memory
    ranges = [memory.reserve(8 * PAGE) for _ in range(2)]
    is_mapped = np.zeros((2, 8), dtype=np.bool_)
    mapped = random.permutation(NUM_PAGES)[:10].tolist()
    for page in mapped:
        while is_mapped[place := (int(random.integers(2)), int(random.integers(8)))]:
            pass
        is_mapped[place] = True
        ranges[place[0]].map(place[1] * PAGE, PageId(page))
        tensor = ranges[place[0]].tensor()[place[1] * PAGE : (place[1] + 1) * PAGE]
        tensor.copy_(torch.from_numpy(random.integers(0, 256, PAGE, dtype=np.uint8)))
    lent, borrowed = LentPages(memory, ranges), BorrowedPages(backend.open_memory)
    backend.lend(lent, borrowed, *mapped)
    num_found = 0
    for _ in range(60):
        views, is_whole = [], True
        for _ in range(int(random.integers(1, 4))):
            which, begin = int(random.integers(2)), int(random.integers(8 * PAGE - 1))
            end = min(begin + int(random.integers(1, 2 * PAGE)), 8 * PAGE)
            is_whole &= bool(is_mapped[which, begin // PAGE : (end - 1) // PAGE + 1].all())
            views.append(ranges[which].tensor().numpy().data[begin:end])
        places = lent.find(views)
        assert (places is not None) == is_whole
        if places is not None:
            num_found += 1
            assert b"".join(borrowed.views(places)) == b"".join(views)
            assert b"".join(bytes(borrowed.tensor(place).numpy()) for place in places) == b"".join(views)
    assert num_found > 3
    borrowed.close()


def test_places_end_with_their_page_and_neighbours_are_one(backend: Backend) -> None:
    reserved = backend.memory.reserve(3 * PAGE)
    reserved.map_run(0, pages(7, 2, 3))
    lent, seen = LentPages(backend.memory, [reserved]), reserved.tensor().numpy().data
    parts = [seen[10:20], seen[20 : PAGE + 5], seen[PAGE + 5 : PAGE + 6], seen[0:1]]
    assert lent.find(parts) == [(7, 10, PAGE - 10), (2, 0, 6), (7, 0, 1)]
    assert lent.find([seen[2 * PAGE :].toreadonly()]) == [(3, 0, PAGE)]


def test_what_cannot_be_lent_is_not_found(backend: Backend) -> None:
    memory, other = backend.memory, backend.open_memory(PAGE)
    reserved, hidden = memory.reserve(3 * PAGE), memory.reserve(PAGE)
    reserved.map_run(0, pages(0, 1))
    hidden.map(0, PageId(5))
    handle = other.export(PageId(0))
    reserved.map(2 * PAGE, memory.adopt(handle))
    os.close(handle.descriptor)
    lent, seen = LentPages(memory, [reserved]), reserved.tensor().numpy().data
    assert lent.find([seen[: 2 * PAGE]]) is not None
    assert lent.find([seen[2 * PAGE :]]) is None, "a page of another memory"
    assert lent.find([seen[: 2 * PAGE], hidden.tensor().numpy().data]) is None, "a range that is not lent"
    assert lent.find([memoryview(b"abc")]) is None
    assert LentPages(memory, []).find([seen[:1]]) is None
    reserved.unmap(PAGE)
    assert lent.find([seen[: 2 * PAGE]]) is None, "nothing is there"
    other.close()


def test_a_page_is_borrowed_given_back_and_borrowed_again(backend: Backend) -> None:
    reserved = backend.memory.reserve(PAGE)
    reserved.map(0, PageId(4))
    reserved.tensor().fill_(3)
    lent, borrowed = LentPages(backend.memory, [reserved]), BorrowedPages(backend.open_memory)
    place = Place(PageId(4), 5, 2)
    for _ in range(3):
        with pytest.raises(FrameError, match="page 4 was not lent"):
            borrowed.views([place])
        backend.lend(lent, borrowed, 4)
        with pytest.raises(FrameError, match="page 4 is lent already"):
            backend.lend(lent, borrowed, 4)
        assert (borrowed.num_pages, bytes(borrowed.views([place])[0])) == (1, b"\3\3")
        with pytest.raises(FrameError, match="over its end"):
            borrowed.tensor(Place(PageId(4), PAGE - 1, 2))
        borrowed.give_back(pages(4))
        with pytest.raises(FrameError, match="was not lent"):
            borrowed.give_back(pages(4))
    loan, handle = lent.loan(PageId(4))
    with pytest.raises(FrameError, match="of one memory"):
        borrowed.take(loan._replace(num_pages=NUM_PAGES + 1), handle.descriptor)
    os.close(handle.descriptor)
    borrowed.close()
    borrowed.close()


def test_a_borrowed_page_outlives_its_owner(backend: Backend) -> None:
    reserved = backend.memory.reserve(PAGE)
    reserved.map(0, PageId(4))
    reserved.tensor().fill_(3)
    lent, borrowed = LentPages(backend.memory, [reserved]), BorrowedPages(backend.open_memory)
    backend.lend(lent, borrowed, 4)
    backend.memory.close()
    assert bytes(borrowed.views([Place(PageId(4), 0, PAGE)])[0]) == b"\3" * PAGE
    with pytest.raises(MappingError, match="closed"):
        lent.loan(PageId(4))
    borrowed.close()


def test_those_who_watch_hear_of_unmapped_pages_until_they_are_forgotten(backend: Backend) -> None:
    reserved = backend.memory.reserve(3 * PAGE)
    reserved.map_run(0, pages(4, 1, 2))
    lent = LentPages(backend.memory, [reserved])
    one: list[PageId] = []
    other: list[PageId] = []
    lent.watch(one.extend)
    lent.watch(other.extend)
    reserved.unmap(PAGE)
    lent.forget(one.extend)
    lent.forget(one.extend)
    reserved.unmap_run(0, 1)
    assert (one, other) == ([1], [1, 4])
