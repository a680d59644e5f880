"""Keeps child processes running: restarts what ends by itself, gives up with one line, stops in order.

    exit code 2 before the child was ever ready   it refused to start: its line is the failure, nothing is restarted
    any other end that nobody asked for           restarted with growing pauses, and told of
    too many of these                             the failure says so, if nothing was ready yet or nothing can be
                                                  served without the child; else it is tried again for ever

The supervisor never decides to end the run: it sets `failure`, and its owner stops everything. Children end with the
process that started them (`bound.py`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cli.cluster.child_log import ChildLog
from cli.cluster.restart import RestartParams, is_failing, restart_delay_s
from cli.exit_codes import FAILED, REFUSED, CommandError
from shared.errors import pointer
from shared.process.tasks import TaskOwner
from shared.transport.bus_rules import is_power_of_two

BOUND = Path(__file__).with_name("bound.py")

READ_BYTES = 64 * 1024
KILL_LIMIT_S = 5.0
"""Seconds that a killed process may take to be gone."""
MAX_LATE_READS = 64
"""Reads of what an ended child left in its pipe; its own children may go on writing."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How one child is started."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    needed_as: str = ""
    """What nothing can be served without. The run ends when all children of this word fail; empty: it goes on."""
    excuse: Callable[[], str] = str
    """Returns why it is not the child's fault now that it fails, so that the run does not end for it; "": it is."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Why the run cannot go on."""

    line: str
    """One line for the person."""
    code: int
    """Exit code of the run."""


class _Child:
    def __init__(self, spec: ChildSpec, log: ChildLog) -> None:
        self.spec = spec
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        self._output_fd: int | None = None
        self.stopping = asyncio.Event()
        self.was_ready = False
        self.is_restarting = False
        self.num_exits = 0
        self.exits_s: deque[float] = deque(maxlen=64)
        self.task: asyncio.Task[None] | None = None

    def begin_output(self) -> int:
        """Open a pipe that is read on the event loop; return its writing end.

        A pipe of our own, because asyncio's `wait` for a process also waits until its pipes are closed, and a
        grandchild may hold them open.
        """
        reading_fd, writing_fd = os.pipe()
        os.set_blocking(reading_fd, False)
        self._output_fd = reading_fd
        asyncio.get_running_loop().add_reader(reading_fd, self._take_output, reading_fd)
        return writing_fd

    def end_output(self) -> None:
        """Take what the pipe still holds, and close it."""
        fd, self._output_fd = self._output_fd, None
        if fd is not None:
            for _ in range(MAX_LATE_READS):
                if not self._take_output(fd):
                    break
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _take_output(self, fd: int) -> bool:
        """Take what is there; return whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self.log.feed(data)
        else:
            asyncio.get_running_loop().remove_reader(fd)
        return bool(data)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Owns the children of one run.

    Args:
        log_dir: one file per child.
        show: takes one line for the person.
        group: returns the process group that a child joins which is started now; None for this process's own.
        params: of restarts.
    """

    def __init__(
        self,
        log_dir: Path,
        show: Callable[[str], None],
        *,
        group: Callable[[], int] | None = None,
        params: RestartParams | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._listener = show
        self._is_muted = False
        self._group = group
        self._params = params or RestartParams()
        self._children: dict[str, _Child] = {}
        self._tasks = TaskOwner(self.fail_by)
        self._failed = asyncio.Event()
        self.failure: RunFailure | None = None
        self.on_end: Callable[[str], None] | None = None
        """Called with the name of a child that has ended and is started again."""

    def mute(self) -> None:
        """Show nothing more: what children say from now on is no news. Their log files still take it."""
        self._is_muted = True

    def _show(self, text: str) -> None:
        if not self._is_muted:
            self._listener(text)

    async def start(self, spec: ChildSpec) -> None:
        """Start the child and keep it running until it is stopped.

        Raises:
            OSError: the program cannot be started.
        """
        assert spec.name not in self._children, f"{spec.name} runs already"
        child = _Child(spec, ChildLog(spec.name, self._log_dir / f"{spec.name}.log", self._show))
        self._children[spec.name] = child
        await self._spawn(child)
        child.task = self._tasks.start(self._keep(child), name=f"keep-{spec.name}")

    async def check(self, specs: Sequence[ChildSpec]) -> None:
        """Run children that end by themselves, side by side; what they say is not kept, as those that start say it too.

        Raises:
            CommandError: one of them refuses, and why.
            OSError: one cannot be started.
        """
        logs = [ChildLog(spec.name, Path(os.devnull), lambda _text: None) for spec in specs]
        children = [_Child(spec, log) for spec, log in zip(specs, logs, strict=True)]
        checks = [asyncio.ensure_future(self._check(child)) for child in children]
        try:
            await asyncio.gather(*checks)
        finally:
            for child in children:
                child.signal(signal.SIGKILL)
            await asyncio.wait(checks, timeout=KILL_LIMIT_S)  # one may hang in the kernel
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
            for log in logs:
                log.close()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the children that run now."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process is not None and child.process.returncode is None
        }

    def mark_ready(self, *, shows_warnings: bool = True) -> None:
        """From now on a child that refuses to start again counts as one that ended by itself.

        Args:
            shows_warnings: of children; otherwise their files have them, and only errors are shown.
        """
        for child in self._children.values():
            child.was_ready = True
            if not shows_warnings:
                child.log.show_failures_only()

    def restart(self, name: str) -> None:
        """Have the child end and start again at once, which counts for nothing against it."""
        child = self._children[name]
        child.is_restarting = name in self.pids()
        child.signal(signal.SIGTERM)

    async def wait_failed(self) -> RunFailure:
        """Return when the run cannot go on."""
        await self._failed.wait()
        assert self.failure is not None, "set before the event"
        return self.failure

    async def stop(self, names: Sequence[str], limit_s: float) -> list[str]:
        """Ask these children to end, and kill those that have not after the limit; return the names of the killed."""
        children = [self._children[name] for name in names if name in self._children]
        for child in children:
            child.stopping.set()
            child.signal(signal.SIGTERM)
        tasks = [child.task for child in children if child.task is not None and not child.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
        late = [child for child in children if child.task is not None and not child.task.done()]
        for child in late:
            child.signal(signal.SIGKILL)
        if late:
            await asyncio.wait([child.task for child in late if child.task is not None], timeout=KILL_LIMIT_S)
        return [child.spec.name for child in late]

    async def close(self) -> None:
        """Kill whatever runs, and forget it."""
        await self.stop(list(self._children), 0.0)
        await self._tasks.close()
        for child in self._children.values():
            child.log.close()
        self._children.clear()

    async def _spawn(self, child: _Child) -> None:
        program = shutil.which(child.spec.argv[0])
        if program is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), child.spec.argv[0])
        writing_fd = child.begin_output()
        try:
            child.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(BOUND), str(os.getpid()), program, *child.spec.argv[1:]),
                env={**os.environ, **child.spec.env},
                stdin=subprocess.DEVNULL,
                stdout=writing_fd,
                stderr=subprocess.STDOUT,
                process_group=None if self._group is None else self._group(),
            )
        except BaseException:
            child.end_output()
            raise
        finally:
            os.close(writing_fd)

    async def _check(self, child: _Child) -> None:
        await self._spawn(child)
        code = await self._wait_end(child)
        if code == REFUSED:
            raise CommandError(child.log.refusal().removeprefix("sluice: "), code=REFUSED)
        if code > 0:  # no reason not to try
            how = _ending(code) + _said(child, code)
            self._show(f"what {child.spec.name} would refuse is not known: asked, it ended {how}")

    async def _keep(self, child: _Child) -> None:
        code: int | None = await self._wait_end(child)
        problem = ""
        while not child.stopping.is_set():
            delay_s = self._judge(child, code, problem)
            if delay_s is None:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await child.stopping.wait()
            if child.stopping.is_set():
                return
            try:
                await self._spawn(child)
            except OSError as error:  # no process, file or memory to be had now
                code, problem = None, str(error)
                continue
            if child.stopping.is_set():  # asked to stop while it started
                child.signal(signal.SIGTERM)
            code = await self._wait_end(child)

    async def _wait_end(self, child: _Child) -> int:
        assert child.process is not None, "spawned"
        try:
            return await child.process.wait()
        finally:
            child.end_output()

    def _judge(self, child: _Child, code: int | None, problem: str) -> float | None:
        """Return the pause before the restart, or None after declaring the failure.

        Args:
            child: which has ended.
            code: of its exit; None: it could not be started.
            problem: why it could not.
        """
        name, now_s = child.spec.name, asyncio.get_running_loop().time()
        if child.is_restarting:
            child.is_restarting = False
            return 0.0
        if code == REFUSED and not child.was_ready:
            self._fail(RunFailure(child.log.refusal(), REFUSED))
            return None
        child.exits_s.append(now_s)
        child.num_exits += 1
        how = f"because it could not be started ({problem})" if code is None else _ending(code) + _said(child, code)
        delay_s = restart_delay_s(self._params, child.exits_s, now_s)
        if not is_failing(self._params, child.exits_s, now_s):
            self._show(f"{name} ended {how}; it starts again in {delay_s:.1f} s")
            if self.on_end is not None:
                self.on_end(name)
            return delay_s
        times = f"{name} ended {self._params.max_exits} times within {self._params.window_s:g} s, the last time {how}"
        excuse = child.spec.excuse()
        if not child.was_ready or (self._is_needed(child, now_s) and not excuse):
            hint = "Use --log-dir DIR to keep the logs of a run"
            self._fail(RunFailure(f"sluice: {times}. {hint}{pointer('keeps_ending')}", FAILED))
            return None
        if child.num_exits == self._params.max_exits or is_power_of_two(child.num_exits):
            why = f" ({excuse})" if excuse else ""
            self._show(f"{times}{why}; it is tried again every {delay_s:.1f} s, and the others go on")
        return delay_s

    def _is_needed(self, child: _Child, now_s: float) -> bool:
        """Return whether nothing can be served without this child, which fails."""
        same = [other for other in self._children.values() if other.spec.needed_as == child.spec.needed_as]
        return bool(child.spec.needed_as) and all(is_failing(self._params, other.exits_s, now_s) for other in same)

    def _fail(self, failure: RunFailure) -> None:
        if self.failure is None:
            self.failure = failure
            self._failed.set()

    def fail_by(self, name: str, error: BaseException) -> None:
        """Declare that the run cannot go on, because a task of this name died."""
        self._fail(RunFailure(f"sluice: the supervisor failed ({name}: {error!r}). Please report it", FAILED))


def _said(child: _Child, code: int) -> str:
    words = child.log.last_words() if code > 0 else ""
    return f": {words}" if words else ""


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
