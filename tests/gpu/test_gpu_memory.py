"""Virtual memory of a CUDA device: the driver's rules, random lives of a memory, and a model in it."""

from __future__ import annotations

import os

import pytest
import torch

from services.worker.memory.cuda import CudaError, CudaMemory
from services.worker.memory.ranges import MappingError, PageId
from tests.support.checkpoints import CheckpointShape
from tests.support.elastic_runners import texts_with_drops
from tests.support.elastic_story import Story
from tests.support.gpu import NEEDS_DRIVER, ON_GPU
from tests.support.page_cards import Card, apply_and_commit
from tests.support.runners import MIB, open_runner

pytestmark = [*ON_GPU, NEEDS_DRIVER]

CUDA = torch.device("cuda", 0)
PAGE = 2 * MIB
SHAPE = CheckpointShape(num_layers=3, seed=11)


def open_memory(num_pages: int) -> CudaMemory:
    return CudaMemory(PAGE, num_pages, CUDA)


def test_what_a_page_holds_goes_with_it_and_kernels_under_way_are_waited_for() -> None:
    """The product that is still being written when its page moves arrives whole."""
    opened = open_memory(8)
    one, other = opened.reserve(4 * PAGE), opened.reserve(4 * PAGE)
    one.map_run(PAGE, [PageId(5), PageId(2), PageId(3)])
    side = 700  # 700 * 700 float32 fit in a page
    factor = torch.randn((side, side), device=CUDA)
    target = one.tensor()[2 * PAGE : 2 * PAGE + side * side * 4].view(torch.float32).view(side, side)
    for _ in range(200):
        torch.mm(factor, factor, out=target)
    one.unmap_run(2 * PAGE, 1)
    other.map_run(PAGE, [PageId(2)])
    moved = other.tensor()[PAGE : PAGE + side * side * 4].view(torch.float32).view(side, side)
    assert torch.equal(moved, factor @ factor)
    opened.close()


def test_pages_take_the_devices_memory_when_they_are_first_mapped_and_give_it_back() -> None:
    free = torch.cuda.mem_get_info(CUDA)[0]
    opened = open_memory(64)
    reserved = opened.reserve(2**36)
    assert abs(torch.cuda.mem_get_info(CUDA)[0] - free) < 4 * PAGE
    reserved.map_run(2**35, [PageId(page) for page in range(64)])
    assert free - torch.cuda.mem_get_info(CUDA)[0] >= 64 * PAGE
    opened.close()
    assert abs(torch.cuda.mem_get_info(CUDA)[0] - free) < 4 * PAGE


def test_sizes_below_the_granularity_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of the device's"):
        CudaMemory(4096, 4, CUDA)


def test_more_than_the_device_has_is_refused_and_nothing_stays_mapped() -> None:
    total = torch.cuda.mem_get_info(CUDA)[1]
    opened = CudaMemory(2**30, total // 2**30 + 2, CUDA)
    reserved = opened.reserve(opened.num_pages * 2**30)
    with pytest.raises(CudaError) as error:
        reserved.map_run(0, [PageId(page) for page in range(opened.num_pages)])
    assert error.value.is_memory_short
    assert reserved.page_at(0) is None
    opened.close()


def test_a_page_can_be_handed_to_another_memory() -> None:
    giver, taker = open_memory(2), open_memory(2)
    here, there = giver.reserve(PAGE), taker.reserve(PAGE)
    here.map_run(0, [PageId(1)])
    here.tensor().fill_(7)
    handle = giver.export(PageId(1))
    page = taker.adopt(handle)
    os.close(handle.descriptor)
    there.map_run(0, [page])
    there.tensor()[5] = 9
    assert here.tensor()[4:7].tolist() == [7, 9, 7]
    giver.close()
    assert there.tensor()[4:7].tolist() == [7, 9, 7]
    with pytest.raises(MappingError, match="mapped already"):
        taker.disown(page)
    taker.close()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_whatever_happens(seed: int) -> None:
    Story(seed, PAGE, open_memory).live(12)


@pytest.mark.parametrize("seed", range(6))
def test_memories_of_one_card_swap_pages_and_none_is_lost(seed: int) -> None:
    free = torch.cuda.mem_get_info(CUDA)[0]
    card = Card(seed, PAGE, lambda _number, num_pages: open_memory(num_pages))
    table = card.table()
    if table is not None:
        flows, taken = card.leave(table)
        before = torch.cuda.mem_get_info(CUDA)[0]
        card.swap(flows, taken, apply_and_commit)
        card.check_contents(table)
        num_blanks = sum(flow.num_blanks for flow in flows)
        assert before - torch.cuda.mem_get_info(CUDA)[0] <= (num_blanks + 4) * PAGE, "nobody has more than before"
        for memory in card.memories:
            memory.fill()
            memory.check_invariants()
        card.check_contents(table)
    card.close()
    assert abs(torch.cuda.mem_get_info(CUDA)[0] - free) < 4 * PAGE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_says_the_same_whose_layers_came_and_went(dtype: str) -> None:
    settings = {"device": "cuda", "dtype": dtype, "memory_bytes": 512 * MIB, "deterministic": True}
    calm = texts_with_drops(open_runner(SHAPE, **settings), [])
    runner = open_runner(SHAPE, **settings, page_bytes=PAGE)
    assert texts_with_drops(runner, [[1], [0, 2], [0], [2, 1]]) == calm
    runner.close()
