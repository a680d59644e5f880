"""Pages of a CUDA device that are lent to another process, by the same calls as pages of main memory."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys

import numpy as np
import pytest
import torch

from services.worker.memory.cuda import CudaMemory
from services.worker.memory.ranges import PageId
from services.worker.transfer.fd_frames import Place
from services.worker.transfer.lending import BorrowedPages, LentPages
from tests.support.runners import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"),
]

CUDA = torch.device("cuda", 0)
PAGE = 2 * MIB
READER = """
import sys, torch
from services.worker.memory.cuda import CudaMemory
from services.worker.transfer.fd_frames import Loan, Place
from services.worker.transfer.lending import BorrowedPages
loan, descriptor = Loan(*map(int, sys.argv[1:5])), int(sys.argv[5])
device = torch.device("cuda", 0)
borrowed = BorrowedPages(lambda page_bytes: CudaMemory(page_bytes, 1, device))
borrowed.take(loan, descriptor)
own = CudaMemory(loan.page_bytes, 1, device)
reserved = own.reserve(loan.page_bytes)
reserved.map(0, 0)
place = Place(loan.page, 0, loan.page_bytes)
reserved.tensor().copy_(borrowed.tensor(place))
on_host = bytes(borrowed.views([place])[0])
borrowed.close()
assert bytes(reserved.tensor().cpu().numpy().data) == on_host
sys.stdout.buffer.write(on_host)
"""


def open_memory(page_bytes: int) -> CudaMemory:
    return CudaMemory(page_bytes, 1, CUDA)


def test_a_lent_page_is_read_by_another_memory_until_it_is_given_back() -> None:
    memory = CudaMemory(PAGE, 4, CUDA)
    reserved = memory.reserve(4 * PAGE)
    reserved.map_run(PAGE, [PageId(3), PageId(1)])
    reserved.tensor()[PAGE : 3 * PAGE].copy_(torch.arange(2 * PAGE, device=CUDA) % 251)
    lent, borrowed = LentPages(memory, [reserved]), BorrowedPages(open_memory)
    for page in (PageId(3), PageId(1)):
        loan, handle = lent.loan(page)
        borrowed.take(loan, handle.descriptor)
        os.close(handle.descriptor)
    places = [Place(PageId(3), PAGE - 5, 5), Place(PageId(1), 0, 7)]
    expected = (np.arange(PAGE - 5, PAGE + 7) % 251).astype(np.uint8).tobytes()
    assert b"".join(borrowed.views(places)) == expected
    assert torch.cat([borrowed.tensor(place) for place in places]).is_cuda
    borrowed.give_back([PageId(3)])
    assert borrowed.num_pages == 1
    borrowed.close()
    assert int(reserved.tensor()[PAGE + 1]) == 1, "the owner still has it"
    memory.close()


async def test_another_process_copies_a_lent_page_on_the_device() -> None:
    memory = CudaMemory(PAGE, 2, CUDA)
    reserved = memory.reserve(PAGE)
    reserved.map(0, PageId(1))
    data = np.random.default_rng(0).integers(0, 256, PAGE, dtype=np.uint8)
    reserved.tensor().copy_(torch.from_numpy(data))
    torch.cuda.synchronize()
    loan, handle = LentPages(memory, [reserved]).loan(PageId(1))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READER, *map(str, loan), str(handle.descriptor)),
        stdout=asyncio.subprocess.PIPE,
        pass_fds=[handle.descriptor],
    )
    said, _ = await process.communicate()
    os.close(handle.descriptor)
    assert process.returncode == 0
    assert said == data.tobytes()
    memory.close()
