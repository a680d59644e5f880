"""An event loop whose clock jumps from deadline to deadline, so that one seed gives one trace.

The services run on it unchanged: `asyncio.sleep`, `timeout`, `TaskGroup`, `Event`, `Queue` and `Future` work as they
do live. While a callback is ready the clock stands still; when none is, it jumps to the next deadline. Nothing here
reads a wall clock, starts a thread, or opens a descriptor: what needs one of these raises `NotInVirtualTimeError`.

Order, in full: ready callbacks run first in, first out. Timers that are due at the same instant become ready in the
order in which they were made. Tasks hash by their number within the loop, so that sets of tasks (inside `TaskGroup`,
or from `asyncio.wait`) have the same order in every process.

A callback whose context has a `Gate` runs only if the gate lets it (`sim.faults.process`: processes that stand
still or die).

    VirtualTimeError
    ├── DeadlockError           nothing is ready, no timer is set, and main is not done
    ├── LivelockError           callbacks follow each other for ever at one instant
    ├── LeakedTasksError        main is done, but tasks that nobody awaited are not
    └── NotInVirtualTimeError   a socket, a thread, a signal, a process, a file descriptor
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import heapq
import math
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NoReturn, Protocol, TypeVar, TypeVarTuple

MAX_ROUNDS_PER_INSTANT = 1_000_000
"""Passes over the ready queue without the clock moving; more is a loop that would never end."""

_MIN_CANCELLED_TIMERS = 100
"""Below this many, cancelled timers are left in the heap until they are due."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Gate(Protocol):
    """Decides whether what runs in its context runs now."""

    def admits(self, handle: asyncio.Handle) -> bool:
        """Return whether the callback may run; if not, the gate has kept it for later, or nobody will ever run it."""

    @property
    def is_open(self) -> bool:
        """Whether callbacks run now; while not, nobody can have looked at a task that failed."""


GATE: contextvars.ContextVar[Gate | None] = contextvars.ContextVar("gate", default=None)
"""Inherited, as the context is, by every callback, timer and task that is made within it."""


class VirtualTimeError(RuntimeError):
    """Anything that a run in virtual time can fail with by itself."""


class DeadlockError(VirtualTimeError):
    """Nothing can ever happen again; names each task that waits, and where."""

    def __init__(self, tasks: Sequence[asyncio.Task[Any]], now_s: float) -> None:
        self.waiting = tuple(describe(task) for task in tasks)
        waiting = "; ".join(self.waiting) or "no task"
        super().__init__(f"at {now_s:.6f} s nothing is ready and no timer is set; waiting: {waiting}")


class LivelockError(VirtualTimeError):
    """Callbacks keep the ready queue filled at one instant, so the clock can never move."""

    def __init__(self, tasks: Sequence[asyncio.Task[Any]], now_s: float) -> None:
        self.waiting = tuple(describe(task) for task in tasks)
        super().__init__(
            f"{MAX_ROUNDS_PER_INSTANT} rounds of callbacks at {now_s:.6f} s and still no end; "
            f"a task spins without waiting for time: {'; '.join(self.waiting)}"
        )


class LeakedTasksError(VirtualTimeError):
    """Main returned while tasks still ran; they were cancelled."""

    def __init__(self, leaked: Sequence[str]) -> None:
        self.leaked = tuple(leaked)
        super().__init__(f"{len(leaked)} tasks were left running: {'; '.join(leaked)}")


class NotInVirtualTimeError(VirtualTimeError):
    """The outside world was asked for."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} is not available in virtual time: it would depend on the outside world")
        self.operation = operation


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. Use `run` unless a test needs the loop itself.

    An exception that reaches the loop's exception handler (raised in a callback, or never retrieved from a task) ends
    the run with that exception, unless `set_exception_handler` says otherwise.
    """

    # owned by BaseEventLoop, unknown to its type stubs
    _ready: collections.deque[asyncio.Handle]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self, *, start_s: float = 0.0) -> None:
        super().__init__()
        self._now_s = start_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._rounds = 0
        self._tasks: dict[int, _NumberedTask] = {}
        self._num_tasks = 0
        self._prune_at = 64
        self._failure: BaseException | None = None
        self.on_instant: Callable[[], None] | None = None
        """Called when nothing is left to do at an instant, before time moves on; what it raises ends the run."""
        self._home_thread = threading.get_ident()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run the callback at this virtual time, after those that were set earlier for the same time."""
        if math.isnan(when):
            raise ValueError("a timer needs a time, not NaN")
        self._check_open()
        when = float(when)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]  # noqa: SLF001  (makes its cancel() tell us)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`; a call from another thread is refused, since its moment would not be reproducible."""
        if threading.get_ident() != self._home_thread:
            raise NotInVirtualTimeError("call_soon_threadsafe from another thread")
        return self.call_soon(callback, *args, context=context)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[_T]:
        """Start a task; unnamed ones are numbered within this loop."""
        self._check_open()
        if len(self._tasks) >= self._prune_at:
            self.forget_done_tasks()
        self._num_tasks += 1
        label = f"task-{self._num_tasks}" if name is None else str(name)
        gate = GATE.get() if context is None else context.get(GATE)
        task = self._tasks[self._num_tasks] = _NumberedTask(self._num_tasks, coro, self, label, context, gate)
        return task

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run with the first error that nobody caught."""
        if self._failure is not None:
            return
        message = str(context.get("message") or "unhandled error in the event loop")
        error = context.get("exception")
        if isinstance(error, BaseException):
            error.add_note(f"{message} (virtual time {self._now_s:.6f} s)")
            self._failure = error
        else:
            self._failure = VirtualTimeError(f"{message}: {context.get('task') or context.get('future')}")

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that are not done, oldest first."""
        return [task for task in self._tasks.values() if not task.done()]

    def forget_done_tasks(self) -> None:
        """Drop the tasks that are done; one whose exception nobody looked at ends the run."""
        done = [task for task in self._tasks.values() if task.done() and (task.gate is None or task.gate.is_open)]
        for task in done:
            del self._tasks[task.number]
        self._prune_at = max(64, 2 * len(self._tasks))
        for task in done:
            if task._log_traceback:  # noqa: SLF001  (asyncio says so only when the garbage collector runs; we say it now)
                message = f"task '{task.get_name()}' failed and nobody awaited it"
                self.call_exception_handler({"message": message, "exception": task.exception(), "task": task})

    def resume(self, handles: Iterable[asyncio.Handle]) -> None:
        """Run callbacks that a gate kept, in this order, after those that are ready."""
        self._ready.extend(handles)

    def tasks_behind(self, gate: Gate) -> list[asyncio.Task[Any]]:
        """Return the tasks of this gate that are not done, oldest first."""
        return [task for task in self._tasks.values() if not task.done() and task.gate is gate]

    def abandon(self, gate: Gate) -> None:
        """Forget the tasks of a gate that nothing will pass again; nobody misses them."""
        for number, task in list(self._tasks.items()):
            if task.gate is gate:
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  (else asyncio complains)
                task._log_traceback = False  # noqa: SLF001  (the same for its error)
                del self._tasks[number]

    def take_failure(self) -> BaseException | None:
        """Return the error that ends this run, once."""
        failure, self._failure = self._failure, None
        return failure

    def wind_up(self) -> list[str]:
        """Cancel the tasks that are left, close async generators, and return what the left tasks were. Idempotent.

        A task that failed and that nobody awaited is kept for `take_failure`.
        """
        self._failure = None
        self._rounds = 0
        left = self.pending_tasks()
        leaked = [describe(task) for task in left]
        for task in left:
            task.cancel("the run is over")
        if left:
            self.run_until_complete(asyncio.wait(left))
        for task in left:
            if not task.cancelled():
                task.exception()  # seen: it ended after the run, whose own outcome is what is raised
        self.run_until_complete(self.shutdown_asyncgens())
        self.forget_done_tasks()
        return leaked

    def close(self) -> None:
        """Drop what is left. Idempotent."""
        super().close()
        self._timers.clear()
        self._tasks.clear()

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")

    def _run_once(self) -> None:
        """Run what is ready now; if nothing is, first jump to the next deadline."""
        timers, ready = self._timers, self._ready
        if self._timer_cancelled_count > max(_MIN_CANCELLED_TIMERS, len(timers) // 2):
            self._drop_cancelled_timers()
        if not ready and not self._stopping:
            self._jump()
        self._rounds += 1
        if self._rounds > MAX_ROUNDS_PER_INSTANT:
            raise LivelockError(self.pending_tasks(), self._now_s)
        while timers and timers[0][0] <= self._now_s:
            self._take_timer()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            gate = handle._context.get(GATE)  # type: ignore[attr-defined]  # noqa: SLF001  (a loop's work, as is running it)
            if gate is None or gate.admits(handle):
                handle._run()  # noqa: SLF001
                if self._failure is not None:
                    raise self._failure

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            self._take_timer()
        if not timers or timers[0][0] == math.inf:
            raise DeadlockError(self.pending_tasks(), self._now_s)
        if timers[0][0] > self._now_s:
            if self.on_instant is not None:
                self.on_instant()
            self._now_s = timers[0][0]
            self._rounds = 0

    def _take_timer(self) -> None:
        handle = heapq.heappop(self._timers)[2]
        handle._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001
        if handle.cancelled():
            self._timer_cancelled_count -= 1
        else:
            self._ready.append(handle)

    def _drop_cancelled_timers(self) -> None:
        # in place: _run_once holds a reference to the list
        self._timers[:] = [entry for entry in self._timers if not entry[2].cancelled()]
        heapq.heapify(self._timers)
        self._timer_cancelled_count = 0

    def _write_to_self(self) -> None:
        """Nothing: there is no selector that would have to wake up."""


class _NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, not on its address."""

    def __init__(
        self,
        number: int,
        coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        loop: VirtualTimeLoop,
        name: str,
        context: contextvars.Context | None,
        gate: Gate | None,
    ) -> None:
        self.number = number  # before the base class puts the task into a set
        self.gate = gate
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


def _refuse(operation: str) -> Callable[..., NoReturn]:
    def refused(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotInVirtualTimeError(operation)

    return refused


_OUTSIDE_WORLD = (
    *("run_in_executor", "getaddrinfo", "getnameinfo"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into"),
    *("sock_sendall", "sock_sendto", "sock_connect", "sock_accept", "sock_sendfile"),
    *("create_connection", "create_server", "create_datagram_endpoint", "start_tls", "sendfile"),
    *("create_unix_connection", "create_unix_server", "connect_accepted_socket"),
    *("connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell"),
    *("add_signal_handler", "remove_signal_handler"),
)
for _operation in _OUTSIDE_WORLD:
    setattr(VirtualTimeLoop, _operation, _refuse(_operation))


def describe(task: asyncio.Task[Any]) -> str:
    """Return the task's name and the innermost place where it waits: `pump (worker.py:12 in read)`."""
    coro: Any = task.get_coro()
    frame = getattr(coro, "cr_frame", None)
    while (inner := getattr(coro, "cr_await", None)) is not None and getattr(inner, "cr_frame", None) is not None:
        coro, frame = inner, inner.cr_frame
    if frame is None:
        return task.get_name()
    code = frame.f_code
    return f"{task.get_name()} ({PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname})"


def run(main: Coroutine[Any, Any, _T], *, start_s: float = 0.0, allow_leaks: bool = False) -> _T:
    """Run main to its end on a loop of its own, and return its result.

    Args:
        main: what to run.
        start_s: the virtual time at which it starts.
        allow_leaks: tasks that main leaves behind are cancelled silently instead of failing the run.

    Raises:
        DeadlockError: main waits for something that cannot happen.
        LivelockError: a task spins at one instant.
        LeakedTasksError: main returned, but left tasks.
        BaseException: whatever main, or a callback, or a task that nobody awaited, raised.
    """
    if _loop_is_running():
        main.close()
        raise RuntimeError("run() cannot be called from a running event loop")
    loop = VirtualTimeLoop(start_s=start_s)
    try:
        try:
            result = loop.run_until_complete(main)
        except BaseException as error:
            _wind_up_after(error, loop)
            raise
        leaked = loop.wind_up()
        if leaked and not allow_leaks:
            raise LeakedTasksError(leaked)
        if (failure := loop.take_failure()) is not None:
            raise failure
        return result
    finally:
        loop.close()


def _wind_up_after(error: BaseException, loop: VirtualTimeLoop) -> None:
    try:
        loop.wind_up()
    except VirtualTimeError as another:  # a task that ignores its cancellation; the first error matters more
        error.add_note(f"while ending the run: {another}")


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
