"""One cluster on this machine, from the checks to the last process gone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial

from cli.cluster import checks
from cli.cluster.broker import Broker, BrokerAccess
from cli.cluster.children import DISPATCHER, MONITOR, PLANNER, ClusterPlan
from cli.cluster.drain_count import DrainCount
from cli.cluster.progress import StartProgress
from cli.cluster.run_dir import RunDir
from cli.cluster.settings import UpSettings, log_dir_of
from cli.cluster.supervisor import Supervisor
from cli.console import Console
from cli.exit_codes import FAILED, KILLED, REFUSED, CommandError
from cli.http import ask
from cli.model import find_model
from cli.notify import notify
from cli.pull import show_progress
from cli.run_file import Run, RunFile, find_runs
from cli.signals import StopSignals
from shared.host import FreeMemory, free_memory
from shared.model_sizes import CheckpointSizes, read_sizes
from shared.process.log import only_from
from shared.process.tasks import TaskOwner
from shared.sizing import Sizes, find_cards, size
from shared.subjects import Subjects
from shared.transport.bus import BusError

POLL_S = 0.1
"""Pause between two looks at `/ready`."""
HURRY_LIMIT_S = 2.0
"""Seconds that every process gets after a refused start."""
ANSWER_LIMIT_S = 0.5
"""Seconds in which the dispatcher says how many answers are under way, or that is left out for now."""
STOP_LIMIT_S = 10.0
"""Seconds that monitor and planner get to end, and workers beyond the answers' limit."""


class Cluster:
    """The processes of one `sluice up`.

    Args:
        settings: checked against each other by `checks`.
        console: where the person looks.
        run_dir: entered.
        worker_env: see `ClusterPlan`.
    """

    def __init__(
        self, settings: UpSettings, console: Console, run_dir: RunDir, worker_env: Mapping[str, str] | None = None
    ) -> None:
        self._settings = settings
        self._worker_env = worker_env or {}
        self._console = console
        self._run_dir = run_dir
        self.log_dir = log_dir_of(settings, run_dir.path)
        self.supervisor = Supervisor(self.log_dir, self.show, group=run_dir.group)
        self._broker = Broker(settings, self.supervisor, run_dir.path, self.show)
        self._tasks = TaskOwner(self.supervisor.fail_by)
        self._plan: ClusterPlan | None = None
        self._run_file = RunFile()
        self.is_found = False
        """Whether other commands find it without being told where."""
        self.ready_after_s = 0.0
        """Seconds from the start to the moment when it was ready."""

    @property
    def plan(self) -> ClusterPlan:
        """What runs; known once `start` has passed its checks."""
        assert self._plan is not None, "started"
        return self._plan

    async def start(self) -> None:
        """Return when the API answers and every worker is ready.

        Raises:
            StartupError: a check failed, or there is no broker.
            CommandError: a service refuses its settings, or it took too long.
        """
        settings, began_s = self._settings, asyncio.get_running_loop().time()
        self._tasks.start(self._run_dir.keep_guarded(self.show), name="guardian")
        checks.check_settings(settings)
        port = checks.find_port(settings.host, settings.port)
        model = await asyncio.to_thread(find_model, settings.model, partial(show_progress, self._console))
        self._console.end_status()
        settings, chosen = await asyncio.to_thread(choose_sizes, settings, read_sizes(model.folder))
        checks.check_memory(settings)
        plan = ClusterPlan(settings, model, self._broker.check(), port, self._run_dir.path, self._worker_env)
        self._console.show_status(f"checking the model {plan.model_name}")
        async with self._in_time("the model was not checked", "See whether its disk and the device answer"):
            await self.supervisor.check(plan.checks())
        self._announce(", ".join(plan.model_names), chosen)
        self._plan = replace(plan, broker=await self._broker.start(plan.broker, port))
        self._tell_where(self._plan)
        for spec in self._plan.specs():
            await self.supervisor.start(replace(spec, excuse=self._broker.excuse))
        notify(f"STATUS=loading {plan.model_name}")
        await self._wait_ready(self._plan.broker, self._plan.worker_names())
        self.supervisor.mark_ready(shows_warnings=settings.verbose)
        notify("READY=1", f"STATUS=serving {plan.model_name} at {plan.url}")
        self.ready_after_s = asyncio.get_running_loop().time() - began_s

    async def stop(self, *, is_asked: bool) -> None:
        """End every process in the order in which nothing is lost: dispatcher, workers, planner, monitor, broker.

        Args:
            is_asked: a person wants it, and is told what it waits for.
        """
        notify("STOPPING=1", "STATUS=finishing running answers")
        if is_asked:
            await self._drain()
        failure = self.supervisor.failure
        if failure is not None and failure.code == REFUSED:  # nothing was served yet, and the one line has been said
            self.supervisor.mute()
            services = [name for name in self.supervisor.pids() if name != Broker.NAME]
            await self.supervisor.stop(services, HURRY_LIMIT_S)
        order = [
            ([DISPATCHER], self._settings.drain_limit_s + STOP_LIMIT_S),
            (self._plan.worker_names() if self._plan is not None else [], STOP_LIMIT_S),
            ([PLANNER], STOP_LIMIT_S),
            ([MONITOR], STOP_LIMIT_S),
            ([Broker.NAME], STOP_LIMIT_S),
        ]
        await self._broker.close()
        for names, limit_s in order:
            for name in await self.supervisor.stop(names, limit_s):
                self.show(f"{name} did not end within {limit_s:g} s and was killed")
        await self._tasks.close()
        await self.supervisor.close()
        self._run_file.end()
        if is_asked:
            self._console.line("stopped")

    async def _drain(self) -> None:
        """End the dispatcher, and tell how many answers it waits for."""
        limit_s = self._settings.drain_limit_s
        count = DrainCount(self._console, limit_s, "Ctrl-C again ends at once")
        following = None if self._plan is None else self._tasks.start(self._follow(count, self._plan), name="drain")
        stopping = asyncio.ensure_future(self.supervisor.stop([DISPATCHER], limit_s + STOP_LIMIT_S))
        await asyncio.wait([stopping], timeout=ANSWER_LIMIT_S)
        count.show()
        late = await stopping
        if following is not None:
            following.cancel()
        self._console.end_status()
        if count.num_left and count.left_s <= 0:
            self.show(f"{count.num_left} answers had not ended within {limit_s:g} s, and were ended")
        if late:
            self.show(f"{DISPATCHER} did not end within {limit_s + STOP_LIMIT_S:g} s and was killed")

    async def _follow(self, count: DrainCount, plan: ClusterPlan) -> None:
        with suppress(BusError):  # no broker, so nobody knows
            async with plan.broker.connect("drain") as bus:
                await count.follow(bus, self._settings.cluster)

    def _tell_where(self, plan: ClusterPlan) -> None:
        """Let other commands find the cluster."""
        settings, log_dir = self._settings, str(self.log_dir.absolute())
        run = Run(
            plan.url,
            settings.cluster,
            plan.nats_url,
            plan.model_name,
            settings.workers,
            log_dir,
            settings.drain_limit_s,
        )
        try:
            self._run_file.write(run)
            self.is_found = len(find_runs()) == 1
        except OSError as error:
            self.show(f"other commands need --url or --nats-url: no run file can be written ({error})")

    def _announce(self, model_name: str, chosen: str) -> None:
        count = self._settings.workers
        workers = "1 worker" if count == 1 else f"{count} workers"
        self._console.line(f"starting {workers} with model {model_name}{'; ' if chosen else ''}{chosen}")
        if self._settings.verbose:
            broker = "broker, " if self._settings.has_own_broker else ""
            self._console.line(f"processes: {broker}monitor, planner, {workers}, dispatcher")
            kept = "" if self._settings.log_dir else " (until it stops; --log-dir keeps them)"
            self._console.line(f"logs: {self.log_dir}{kept}")

    async def _wait_ready(self, access: BrokerAccess, names: list[str]) -> None:
        progress = StartProgress(names, self._console)
        async with access.connect("up") as bus:
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            async with self._in_time("the cluster was not ready", "Look into its logs with --log-dir"):
                await progress.listen(bus, Subjects(self._settings.cluster))
                while not (progress.all_ready and await self._is_ready()):
                    progress.show(loop.time() - started_s)
                    await asyncio.sleep(POLL_S)
                progress.show(loop.time() - started_s)

    @asynccontextmanager
    async def _in_time(self, problem: str, hint: str) -> AsyncIterator[None]:
        """End the block, and the live line, by the start's limit; then the problem is said, and what to do."""
        limit_s = self._settings.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            hint = f"{hint}, or allow more with --start-limit-s"
            raise CommandError(f"{problem} within {limit_s:g} s", hint, FAILED, "slow_start") from error
        finally:
            self._console.end_status()

    async def _is_ready(self) -> bool:
        try:
            return (await ask(f"{self.plan.url}/ready", limit_s=2.0)).status == 200
        except CommandError:
            return False

    def show(self, text: str) -> None:
        """Tell the person what has happened just now."""
        self._console.line(f"{self._console.style(time.strftime('%H:%M:%S'), 'yellow')}  {text}")


def choose_sizes(settings: UpSettings, model: CheckpointSizes) -> tuple[UpSettings, str]:
    """Return the settings with what was not named, by what is free here, and what to tell of it.

    Raises:
        StartupError: the model does not fit.
    """
    named = Sizes(settings.device, settings.dtype, settings.memory)
    sizes, told = size(named, settings.workers, model, FreeMemory(free_memory()), find_cards())
    return settings.model_copy(update=asdict(sizes)), told


async def run_cluster(
    settings: UpSettings,
    console: Console,
    use: Callable[[Cluster, asyncio.Event], Awaitable[int]],
    worker_env: Mapping[str, str] | None = None,
) -> int:
    """Start a cluster, use it, and stop it; return the exit code.

    Args:
        settings: of the cluster.
        console: where the person looks.
        use: called once the cluster is ready, with the event that says that it should end; cancelled when the cluster
            fails or a signal comes while it starts.
        worker_env: see `ClusterPlan`.
    """
    with RunDir() as run_dir, only_from("error"):  # warnings are the children's, which are shown as lines

        def kill() -> None:
            console.line("stopped at once")
            run_dir.end()
            os._exit(KILLED)

        signals = StopSignals(kill)
        cluster = Cluster(settings, console, run_dir, worker_env)
        try:
            return await _run(cluster, console, signals.stop, use)
        finally:
            await cluster.stop(is_asked=signals.stop.is_set())
            signals.close()


async def _run(
    cluster: Cluster,
    console: Console,
    stop: asyncio.Event,
    use: Callable[[Cluster, asyncio.Event], Awaitable[int]],
) -> int:
    """Return the exit code of whichever comes first: the use's end, a failure of the cluster, a signal at the start."""
    starting = asyncio.create_task(cluster.start(), name="start")
    failing = asyncio.create_task(cluster.supervisor.wait_failed(), name="failure")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    using: asyncio.Task[int] | None = None
    try:
        await asyncio.wait([starting, failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not failing.done():
            starting.result()
            using = asyncio.ensure_future(use(cluster, stop))
            await asyncio.wait([using, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            console.end_status()
            console.line(failing.result().line)
            return failing.result().code
        return using.result() if using is not None and using.done() else 0
    finally:
        tasks = [task for task in (starting, failing, stopping, using) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
