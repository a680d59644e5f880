"""Runs experiments side by side, each in a process of its own; what comes out does not depend on how many there are.

A child sends its progress and at the end its result over a pipe. Ctrl-C is the parent's affair: it ends the children.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cli.exit_codes import FAILED, CommandError
from shared.process.log import only_from
from sim.experiment.result import RunResult
from sim.experiment.run import Progress, run_system
from sim.experiment.slo_scales import Latencies
from sim.experiment.summary import Slo, Summary, summarise
from sim.scenarios.scenario import Scenario

PROGRESS_PERIOD_S = 0.25
"""Wall time between two words of a child."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    scenario: Scenario
    system: str
    seed: int
    traces: Path | None = None
    keep_result: bool = False
    """Whether the whole result comes back, for figures, and not the summary alone."""


@dataclass(frozen=True, slots=True)
class RunDone:
    """What a run came to."""

    summary: Summary
    latencies: Latencies
    result: RunResult | None
    wall_s: float
    end_s: float
    """Virtual seconds that it took."""


OnProgress = Callable[[int, Progress | RunDone], None]
"""Called with a job's index and how far it is."""


def run_jobs(jobs: Sequence[Job], num_processes: int, on_progress: OnProgress = lambda _, __: None) -> list[RunDone]:
    """Return what each job came to, in their order.

    Raises:
        CommandError: a run failed, or its process died.
    """
    if num_processes == 1 or len(jobs) == 1:
        return [_run_here(index, job, on_progress) for index, job in enumerate(jobs)]
    return _Pool(jobs, on_progress).run(num_processes)


def _run_here(index: int, job: Job, on_progress: OnProgress) -> RunDone:
    done = run_job(job, lambda progress: on_progress(index, progress))
    on_progress(index, done)
    return done


def run_job(job: Job, on_progress: Callable[[Progress], None]) -> RunDone:
    """Run one experiment here; `on_progress` is called a few times per second of wall time."""
    began_s, said_s, last_s = time.monotonic(), 0.0, 0.0

    def report(progress: Progress) -> None:
        nonlocal said_s, last_s
        last_s = progress.at_s
        if time.monotonic() - said_s >= PROGRESS_PERIOD_S:
            said_s = time.monotonic()
            on_progress(progress)

    with only_from("error"):
        result = run_system(job.scenario, job.system, job.seed, job.traces, report)
    slo = None if job.scenario.slo is None else Slo(job.scenario.slo.ttft_s, job.scenario.slo.tpot_s)
    warm_up_s, cut_off_s = job.scenario.warm_up_s, job.scenario.duration_s
    if not job.scenario.has_best_effort:
        cut_off_s = None
    elif cut_off_s is None:
        cut_off_s = float(result.records.real_time.arrival_s[-1])
    summary = summarise(result.records, result.facts, slo=slo, warm_up_s=warm_up_s, cut_off_s=cut_off_s)
    latencies = Latencies.of(result.records, warm_up_s)
    return RunDone(summary, latencies, result if job.keep_result else None, time.monotonic() - began_s, last_s)


class _Pool:
    """The processes of one call.

    Args:
        jobs: to run.
        on_progress: see `run_jobs`.
    """

    def __init__(self, jobs: Sequence[Job], on_progress: OnProgress) -> None:
        self._context = multiprocessing.get_context("spawn")  # a child begins with nothing of this process's threads
        self._jobs = jobs
        self._on_progress = on_progress
        self._running: dict[Connection, tuple[int, BaseProcess]] = {}
        self._done: dict[int, RunDone] = {}

    def run(self, num_processes: int) -> list[RunDone]:
        """Run all jobs, so many at a time; end every process before this returns or raises."""
        waiting = list(reversed(range(len(self._jobs))))
        try:
            while waiting or self._running:
                while waiting and len(self._running) < num_processes:
                    self._start(waiting.pop())
                for pipe in wait(list(self._running)):
                    assert isinstance(pipe, Connection)
                    self._hear(pipe)
        finally:
            for _, process in self._running.values():
                process.kill()
            for _, process in self._running.values():
                process.join()
        return [self._done[index] for index in range(len(self._jobs))]

    def _start(self, index: int) -> None:
        here, there = self._context.Pipe(duplex=False)
        name = f"sluice-{self._jobs[index].system}"
        process = self._context.Process(target=_child, args=(there, self._jobs[index]), name=name, daemon=True)
        resource_tracker.ensure_running()  # which unblocks the signal where `start` would do it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()  # it inherits the mask, also while it imports
            there.close()
            self._running[here] = index, process  # from here on it is killed with this one
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _hear(self, pipe: Connection) -> None:
        index, process = self._running[pipe]
        try:
            message: Any = pipe.recv()
        except EOFError:
            message = None
        if isinstance(message, Progress):
            self._on_progress(index, message)
            return
        process.join()
        del self._running[pipe]
        pipe.close()
        if not isinstance(message, RunDone):
            job = self._jobs[index]
            reason = message or f"its process ended with {process.exitcode}"
            raise CommandError(f"the run of {job.system} with seed {job.seed} failed: {reason}", "", FAILED)
        self._done[index] = message
        self._on_progress(index, message)


def _child(pipe: Connection, job: Job) -> None:
    try:
        message: RunDone | str = run_job(job, pipe.send)
    except BrokenPipeError:  # whoever started this has ended
        return
    except Exception as error:  # the parent says it; the traceback is for whoever looks into it
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
    pipe.send(message)
    pipe.close()
