from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import virtual_time
from sim.virtual_time import (
    DeadlockError,
    LeakedTasksError,
    LivelockError,
    NotInVirtualTimeError,
    VirtualTimeLoop,
    run,
)
from tests.support.traces import outputs_of

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


# --- order and time ---


@given(delays=st.lists(st.floats(0.0, 1e6), max_size=40), start_s=st.floats(0.0, 1e6))
@settings(max_examples=60, deadline=None)
def test_timers_run_exactly_at_their_deadline_in_order_of_deadline_then_creation(
    delays: list[float], start_s: float
) -> None:
    woken: list[tuple[float, int]] = []

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()

        def note(number: int) -> None:
            woken.append((loop.time(), number))

        deadlines = [start_s + delay for delay in delays]
        for number, deadline in enumerate(deadlines):
            loop.call_at(deadline, note, number)
        await asyncio.sleep(max(delays, default=0.0) + 1.0)
        return deadlines

    deadlines = run(main(), start_s=start_s)
    assert woken == sorted((deadline, number) for number, deadline in enumerate(deadlines))


@given(
    plans=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8),
    cancelled=st.sets(st.integers(0, 7)),
)
@settings(max_examples=60, deadline=None)
def test_sleepers_wake_as_an_event_list_says(plans: list[list[int]], cancelled: set[int]) -> None:
    """Tasks that sleep through lists of whole seconds, against the sums; every second one of them may be cancelled."""
    woken: list[tuple[float, int, int]] = []

    async def sleeper(number: int, plan: list[int]) -> None:
        for position, delay in enumerate(plan):
            await asyncio.sleep(delay)
            woken.append((now(), number, position))

    async def main() -> None:
        tasks = [asyncio.create_task(sleeper(number, plan)) for number, plan in enumerate(plans)]
        asyncio.get_running_loop().call_at(2.5, lambda: [tasks[n].cancel() for n in cancelled if n < len(tasks)])
        await asyncio.gather(*tasks, return_exceptions=True)

    run(main())
    expected = []
    for number, plan in enumerate(plans):
        for position in range(len(plan)):
            at_s = float(sum(plan[: position + 1]))
            if number not in cancelled or at_s < 2.5:
                expected.append((at_s, number, position))
    assert sorted(woken) == sorted(expected)
    assert [at_s for at_s, _, _ in woken] == sorted(at_s for at_s, _, _ in woken), "time never runs backwards"


async def test_ready_callbacks_run_first_in_first_out_and_before_the_clock_moves() -> None:
    loop, log = asyncio.get_running_loop(), list[object]()
    loop.call_later(1.0, log.append, "timer")
    for number in range(3):
        loop.call_soon(log.append, number)
    loop.call_soon(lambda: loop.call_soon(log.append, "nested"))
    loop.call_later(0.0, log.append, "due now")
    loop.call_at(-5.0, log.append, "overdue")
    await asyncio.sleep(2.0)
    assert log == [0, 1, 2, "overdue", "due now", "nested", "timer"]


def test_a_clock_that_jumps_is_exact() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.1)
        first = loop.time()
        await asyncio.sleep(3600.0)
        return first, loop.time()

    assert run(main(), start_s=5.0) == (5.1, 5.1 + 3600.0)


async def test_cancelled_timers_neither_run_nor_pile_up() -> None:
    """A timeout of 30 s around each of 10 000 short steps: the heap stays small, and no time passes for them."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    largest = 0
    for _ in range(10_000):
        loop.call_later(30.0, pytest.fail, "a cancelled timer ran").cancel()
        async with asyncio.timeout(30.0):
            await asyncio.sleep(0.001)
        largest = max(largest, len(loop._timers))
    assert loop.time() == pytest.approx(10.0)
    assert largest < 500


async def test_a_timer_at_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        asyncio.get_running_loop().call_later(float("nan"), print)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0):
            await asyncio.sleep(float("inf"))


# --- asyncio's own tools ---


async def test_timeouts_queues_events_and_groups_work() -> None:
    log: list[object] = []
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)

    async def produce() -> None:
        for number in range(5):
            await queue.put(number)
            log.append(("put", number, now()))

    async def consume() -> None:
        for _ in range(5):
            await asyncio.sleep(1.0)
            log.append(("got", await queue.get(), now()))

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(consume())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await asyncio.Event().wait()
    log.append(now())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().create_future(), 3.0)
    puts = [("put", 0, 0.0), ("put", 1, 0.0), ("put", 2, 1.0), ("put", 3, 2.0), ("put", 4, 3.0)]
    gots = [("got", number, float(number + 1)) for number in range(5)]
    assert [entry for entry in log if isinstance(entry, tuple)] == sorted(
        puts + gots, key=lambda entry: (entry[2], entry[0] == "put", entry[1])
    )
    assert log[-1] == 7.0
    assert now() == 10.0


async def test_a_failing_group_cancels_its_tasks_in_the_order_of_their_start() -> None:
    """A TaskGroup keeps its tasks in a set; ordinary tasks would come out of it by address."""
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(number)

    async def fail() -> None:
        await asyncio.sleep(1.0)
        raise ValueError

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(wait(number))
            group.create_task(fail())
    assert cancelled == list(range(50))


def test_async_generators_are_closed_at_the_end() -> None:
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(1.0)
            closed.append("closed")

    generators = []

    async def main() -> None:
        generator = numbers()
        generators.append(generator)
        async for _ in generator:
            break

    run(main())
    assert closed == ["closed"]


# --- failures ---


def test_a_task_that_ignores_its_cancellation_does_not_hide_the_error_of_main() -> None:
    async def main() -> None:
        async def stubborn() -> None:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006  (left on purpose)
        await asyncio.sleep(1.0)
        raise KeyError("main")

    with pytest.raises(KeyError, match="main") as caught:
        run(main())
    assert "stubborn" in caught.value.__notes__[0]


def test_waiting_for_what_cannot_happen_is_a_deadlock_that_names_who_waits_where() -> None:
    async def main() -> None:
        async def stuck() -> None:
            await asyncio.Event().wait()

        task = asyncio.create_task(stuck(), name="pump")
        await asyncio.sleep(1.5)
        await task

    with pytest.raises(DeadlockError, match=r"at 1\.500000 s nothing is ready") as caught:
        run(main())
    assert [name.split()[0] for name in caught.value.waiting] == ["task-1", "pump"]
    assert "locks.py" in caught.value.waiting[1]
    assert "Event.wait" in caught.value.waiting[1]


def test_a_sleep_without_end_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="sleep"):
        run(asyncio.sleep(float("inf")))


def test_spinning_at_one_instant_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "MAX_ROUNDS_PER_INSTANT", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match="spins"):
        run(main())


async def test_many_steps_at_many_instants_are_no_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "MAX_ROUNDS_PER_INSTANT", 10)
    for _ in range(100):
        await asyncio.sleep(0.5)
    assert now() == 50.0


def test_an_exception_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(10.0)
        pytest.fail("the run went on")

    with pytest.raises(ZeroDivisionError) as caught:
        run(main())
    assert "virtual time 1.000000 s" in caught.value.__notes__[0]


async def test_an_exception_handler_of_ones_own_takes_over() -> None:
    contexts: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: contexts.append(context))
    loop.call_later(1.0, lambda: 1 // 0)
    await asyncio.sleep(10.0)
    assert loop.time() == 10.0
    assert [type(context["exception"]) for context in contexts] == [ZeroDivisionError]


def test_a_failed_task_that_nobody_awaited_ends_the_run() -> None:
    async def main() -> None:
        async def fail() -> None:
            raise ValueError("lost")

        asyncio.create_task(fail(), name="pump")  # noqa: RUF006  (nobody awaits it, on purpose)
        await asyncio.sleep(1.0)

    with pytest.raises(ValueError, match="lost") as caught:
        run(main())
    assert "task 'pump' failed and nobody awaited it" in caught.value.__notes__[0]


def test_left_tasks_are_cancelled_and_reported() -> None:
    ended: list[str] = []

    async def main() -> str:
        async def forever(name: str) -> None:
            try:
                await asyncio.sleep(1000.0)
            finally:
                ended.append(name)

        for name in ("one", "two"):
            asyncio.create_task(forever(name), name=name)  # noqa: RUF006  (left on purpose)
        await asyncio.sleep(1.0)
        return "done"

    with pytest.raises(LeakedTasksError) as caught:
        run(main())
    assert [name.split()[0] for name in caught.value.leaked] == ["one", "two"]
    assert run(main(), allow_leaks=True) == "done"
    assert ended == ["one", "two"] * 2


def test_the_error_of_main_comes_before_what_it_left() -> None:
    async def main() -> None:
        asyncio.create_task(asyncio.sleep(5.0))  # noqa: RUF006  (left on purpose)
        raise KeyError("main")

    with pytest.raises(KeyError, match="main"):
        run(main())


async def test_a_run_inside_a_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="running event loop"):
        run(asyncio.sleep(1.0))


@pytest.mark.parametrize(
    "ask",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: asyncio.to_thread(print),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda loop: asyncio.open_connection("127.0.0.1", 80),
        lambda loop: asyncio.start_server(lambda reader, writer: None, port=0),
        lambda loop: asyncio.create_subprocess_exec("true"),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.add_signal_handler(15, print),
        lambda loop: loop.sock_recv(None, 1),
    ],
)
async def test_the_outside_world_does_not_exist(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(NotInVirtualTimeError, match="not available in virtual time"):
        await ask(asyncio.get_running_loop())


async def test_another_thread_cannot_call_in() -> None:
    errors: list[Exception] = []
    loop, log = asyncio.get_running_loop(), list[str]()

    def call() -> None:
        try:
            loop.call_soon_threadsafe(log.append, "thread")
        except NotInVirtualTimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    loop.call_soon_threadsafe(log.append, "same thread")
    await asyncio.sleep(1.0)
    assert log == ["same thread"]
    assert len(errors) == 1


def test_no_file_descriptor_is_opened() -> None:
    def count() -> int:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208  (one count, no paths needed)

    async def main() -> int:
        await asyncio.sleep(1.0)
        return count()

    before = count()
    assert run(main()) == before
    assert count() == before


# --- determinism ---


class Busy:
    """A scenario with ties, cancellations, groups and sets of tasks, whose trace is one line per event."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.log: list[str] = []

    def note(self, text: str) -> None:
        self.log.append(f"{now():.6f} {text}")

    async def work(self, name: str, queue: asyncio.Queue[int]) -> None:
        while (item := await queue.get()) >= 0:
            await asyncio.sleep(self.chance.choice((0.0, 0.001, 0.002, 0.5)))
            self.note(f"{name} {item}")

    async def be_impatient(self, number: int) -> None:
        try:
            async with asyncio.timeout(self.chance.choice((0.1, 0.2))):
                await asyncio.sleep(self.chance.choice((0.1, 0.2)))
                self.note(f"slept {number}")
        except TimeoutError:
            self.note(f"timeout {number}")

    async def fail_at(self, when: float) -> None:
        await asyncio.sleep(when)
        raise ValueError

    async def wait_for_ever(self, number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            task = asyncio.current_task()
            self.note(f"cancelled {number} {task and task.get_name()}")

    async def main(self) -> None:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=3)
        workers = [asyncio.create_task(self.work(f"w{n}", queue)) for n in range(5)]
        for number in (*range(200), *(-1 for _ in workers)):
            await queue.put(number)
        done, _ = await asyncio.wait(workers)
        self.note(" ".join(task.get_name() for task in done))
        await asyncio.gather(*(self.be_impatient(number) for number in range(40)))
        with contextlib.suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(30):
                    group.create_task(self.wait_for_ever(number))
                group.create_task(self.fail_at(0.25))


def trace_of(seed: int) -> str:
    """Return a digest of all that happens in the scenario, and the number of its events."""
    busy = Busy(seed)
    run(busy.main())
    return f"{hashlib.sha256(chr(10).join(busy.log).encode()).hexdigest()} {len(busy.log)}"


def test_ten_runs_with_one_seed_give_one_trace_and_another_seed_another() -> None:
    traces = [trace_of(3) for _ in range(10)]
    assert len(set(traces)) == 1
    assert trace_of(4) != traces[0]


@pytest.mark.slow
def test_processes_with_different_hash_seeds_give_the_same_trace() -> None:
    code = "from tests.unit.sim.test_virtual_time import trace_of; print(trace_of(3))"
    assert outputs_of(code) == {trace_of(3)}
