"""The fence around late writes: it lets them side by side, waits for those under way, and lets none begin behind it."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from services.worker.kv_moves.write_fence import WriteFence, WritesEndedError


def test_writes_go_side_by_side_and_none_begins_once_it_is_shut() -> None:
    fence = WriteFence()
    with fence.writing(), fence.writing():
        fence.shut()
        with pytest.raises(WritesEndedError), fence.writing():
            raise AssertionError("it was let in")
    fence.wait()
    fence.shut()
    fence.wait()


def test_it_waits_until_the_last_write_is_over_also_one_that_fails() -> None:
    fence, goes_on = WriteFence(), [threading.Event() for _ in range(2)]
    has_begun, is_waiting, is_over = threading.Barrier(3), threading.Event(), threading.Event()
    ended: list[int] = []

    def write(index: int) -> None:
        with suppress(RuntimeError), fence.writing():
            has_begun.wait(30)
            goes_on[index].wait(30)
            ended.append(index)
            raise RuntimeError

    def end() -> None:
        fence.shut()
        is_waiting.set()
        fence.wait()
        assert ended == [1, 0]
        is_over.set()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    has_begun.wait(30)
    threads.append(threading.Thread(target=end))
    threads[-1].start()
    assert is_waiting.wait(30)
    for index in (1, 0):
        assert not is_over.wait(0.05), "somebody still writes"
        goes_on[index].set()
    for thread in threads:
        thread.join(30)
    assert is_over.is_set()
