"""`sluice replay`: finds out what the server takes, sends the trace on time, and reports as `sluice compare` does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from cli.bench.best_effort import ClosedLoop, tier_fields
from cli.bench.datasets import read_planned
from cli.bench.load import BenchLoad, http_send
from cli.bench.prompts import PromptMaker, TokenScale
from cli.bench.report import lateness_p99_s
from cli.bench.running import check_folder, load_session, run_shown, until_stopped
from cli.bench.server import BenchServer, measure_scale, probe_completions
from cli.bench.stream import BenchRecord
from cli.bench.workload import Planned
from cli.bench.workload import fit_context as fit_planned
from cli.console import Console
from cli.exit_codes import DONE, FAILED, KILLED, CommandError
from cli.replay.load import fit_context
from cli.replay.records import is_silent, records_of
from cli.replay.remarks import remarks_on
from cli.replay.sender import VOCAB_SIZE, Prompts, best_effort_bodies, planned, replay_load, token_prompts
from cli.replay.watch import ServerWatch
from sim.experiment.compare import compare, to_json
from sim.experiment.plots import check_matplotlib, write_plots
from sim.experiment.report import render
from sim.experiment.result import RunResult
from sim.experiment.summary import Slo, summarise
from sim.scenarios.arrivals import TraceArrivals
from sim.scenarios.load import LoadSpec as Arrivals
from sim.scenarios.parts import FixedReaders
from sim.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What `sluice replay` was told."""

    trace: Path
    url: str
    model: str = ""
    name: str = ""
    """Of the system in the report; empty: what the server calls itself."""
    upscale: float = 1.0
    """Load in multiples of the trace's own."""
    lengths: str = ""
    """Distribution of prompt and answer lengths; empty: the trace's own."""
    duration_s: float | None = None
    """Arrivals after it are left out."""
    warm_up_s: float = 0.0
    """Requests that arrive before it do not count."""
    reader: tuple[float, float] = (1.0, 4.8)
    """What QoE expects: seconds to the first token, then tokens per second."""
    slo: tuple[float, float] | None = None
    """What is in time: seconds to the first token, seconds per token."""
    best_effort: tuple[int, str] | None = None
    """What goes on beside the trace: requests under way, and their data set, or "" for the trace's own lengths."""
    vocab: int = VOCAB_SIZE
    """Prompts are of token ids below this, where the server takes ids."""
    seed: int = 0
    timeout_s: float = 600.0
    api_key: str = ""
    json_file: str = ""
    plot_folder: Path | None = None

    def workload(self) -> Workload:
        """Return the requests of the trace, as `sluice compare --trace` with the same flags has them.

        Raises:
            StartupError: the file is no trace, there are no such lengths, or no request is left.
        """
        load = Arrivals(
            name=self.trace.stem,
            arrivals=TraceArrivals(kind="trace", file=str(self.trace.absolute())),
            lengths=self.lengths or "trace",
            upscale=self.upscale,
            duration_s=self.duration_s,
            reader=FixedReaders(kind="fixed", ttft_s=self.reader[0], speed=self.reader[1]),
        )
        return load.workload(self.seed)


class ReplayRun:
    """One `sluice replay`.

    Args:
        settings: of the command.
        console: where the person looks.
        session: with the time limit and the headers.
        server: reachable.
        workload: what the trace wants.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        console: Console,
        session: aiohttp.ClientSession,
        server: BenchServer,
        workload: Workload,
    ) -> None:
        self._settings = settings
        self._console = console
        self._session = session
        self.server = server
        self.workload = workload
        self.num_cut = 0
        """Requests that were cut to the model's context."""
        self.has_token_ids = False
        """Whether prompts are token ids, of exactly the wanted length, and not words of about that length."""
        self._rng = np.random.default_rng(settings.seed)
        self._scale: TokenScale | None = None
        """How the server counts words; None: it was not asked."""
        self.load: BenchLoad | None = None
        self.beside: ClosedLoop | None = None
        """Best effort, if there is any."""
        self.requests: list[Planned] = []
        """What it asks for, again from the first when all were asked."""
        self.watch: ServerWatch | None = None

    @property
    def outcomes(self) -> list[BenchRecord]:
        """Of the requests that were sent so far."""
        return [] if self.load is None else self.load.outcomes

    async def run(self) -> None:
        """Return when every request has ended.

        Raises:
            CommandError: the server refuses even a short request.
        """
        prompts = await self._choose_prompts()
        self._say_what_is_sent()
        self.load = replay_load(self._session, self.server, self.workload, prompts)
        if self._settings.best_effort is not None:
            self.beside = await self._best_effort(*self._settings.best_effort, self.load)
        self.watch = ServerWatch(self._session, self.server.base_url, self.load.clock)
        watching = asyncio.create_task(self.watch.run(), name="watch")
        try:
            await run_shown(self.load, self._console, self.beside)
            await self.watch.look()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _choose_prompts(self) -> Prompts:
        """Find out what the server takes, and cut the workload to its context."""
        taken = await probe_completions(self.server, self._session)
        self.has_token_ids = taken == "ids"
        if taken == "none":
            self.server = replace(self.server, endpoint="chat")
        if self.server.max_model_len:
            self.workload, self.num_cut = fit_context(
                self.workload, self.server.max_model_len, is_exact=self.has_token_ids
            )
        if self.has_token_ids:
            return token_prompts(self.workload, self._settings.vocab)
        maker = PromptMaker(self._rng, await self._count_words())
        return lambda index: maker.make(int(self.workload.num_prompt[index]))

    async def _count_words(self) -> TokenScale:
        """Return how the server counts words."""
        if self._scale is None:
            self._scale = await measure_scale(self.server, self._session, self._rng, ())
        return self._scale

    async def _best_effort(self, num_in_flight: int, dataset: str, load: BenchLoad) -> ClosedLoop:
        """Return what goes on beside the load."""
        self.requests = planned(self.workload)
        if dataset:
            self.requests = read_planned(Path(dataset), await self._count_words())
            if limit := self.server.max_model_len:
                self.requests, _ = fit_planned(self.requests, limit)
        if not tier_fields(self.server):
            self._console.line("the server is none of ours: best effort is asked as plain requests")
        vocab_size = self._settings.vocab if self.has_token_ids else 0
        rng = np.random.default_rng((self._settings.seed, 0, 1))  # of no prompt of the trace: (seed, index)
        maker = PromptMaker(rng, self._scale or TokenScale(), vocab_size=vocab_size)
        bodies = best_effort_bodies(self.server, self.requests, maker)
        return ClosedLoop(http_send(self._session, self.server, bodies, load.clock), num_in_flight, load.clock)

    def _say_what_is_sent(self) -> None:
        load = self.workload
        what = "token ids" if self.has_token_ids else "words, about as long as wanted: the server takes no token ids"
        sizes = f"{load.num_prompt.sum()} prompt and {load.num_output.sum()} answer tokens"
        where = f"{self.server.model} at {self.server.base_url}"
        self._console.line(f"{load.name}: {len(load)} requests, {sizes}, over {load.arrival_s[-1]:.0f} s, on {where}")
        self._console.line(f"prompts are {what}")
        if self.num_cut:
            limit = self.server.max_model_len
            self._console.line(f"{self.num_cut} requests are cut to the model's context of {limit} tokens")


async def run_replay(settings: ReplaySettings, console: Console) -> tuple[int, str]:
    """Replay the trace; return the exit code and what to print. Ctrl-C ends it and gives what there is.

    Raises:
        CommandError: nothing answers there, it serves no such model, or refuses everything.
        StartupError: the trace cannot be read, there are no such lengths, or no place for the figures.
    """
    check_folder(settings.json_file)
    if settings.plot_folder is not None:
        check_matplotlib()
    workload = settings.workload()
    async with load_session(settings.timeout_s, settings.api_key) as session:
        server = await BenchServer.find(session, settings.url, settings.model, "completions")
        replay = ReplayRun(settings, console, session, server, workload)
        is_whole = await until_stopped(replay.run())
    return _conclude(settings, replay, is_whole=is_whole)


def _conclude(settings: ReplaySettings, replay: ReplayRun, *, is_whole: bool) -> tuple[int, str]:
    outcomes = replay.outcomes
    if replay.watch is None or not outcomes:
        raise CommandError("stopped before the first request was sent", "", KILLED)
    beside = [] if replay.beside is None else replay.beside.outcomes
    records = records_of(replay.workload, outcomes, beside, replay.requests)
    result = RunResult(records, replay.watch.facts(), replay.watch.samples())
    slo = None if settings.slo is None else Slo(*settings.slo)
    cut_off_s = None
    if replay.beside is not None:
        cut_off_s = settings.duration_s or float(replay.workload.arrival_s[-1])
    summary = summarise(records, result.facts, slo=slo, warm_up_s=settings.warm_up_s, cut_off_s=cut_off_s)
    name = settings.name or replay.server.owner or "server"
    comparison = compare(_scenario(settings, replay), {settings.seed: {name: summary}})
    _write(settings, to_json(comparison), {name: result})
    lines = [render(comparison), "", *remarks_on(outcomes, records.real_time, beside)]
    if not is_whole:
        return KILLED, "\n".join([*lines, "stopped by Ctrl-C; the figures are those of the answers so far"])
    has_failed = any(outcome.failure and not is_silent(outcome) for outcome in beside)
    return (FAILED if has_failed or not records.real_time.is_complete.all() else DONE), "\n".join(lines).rstrip()


def _scenario(settings: ReplaySettings, replay: ReplayRun) -> dict[str, Any]:
    """Return what was run, as the JSON names it."""
    return {
        "name": "replay",
        "title": replay.workload.name,
        "url": replay.server.base_url,
        "model": replay.server.model,
        "trace": settings.trace.name,
        "upscale": settings.upscale,
        "lengths": settings.lengths or None,
        "duration_s": settings.duration_s,
        "warm_up_s": settings.warm_up_s,
        "reader": dict(zip(("ttft_s", "speed_tokens_per_s"), settings.reader, strict=True)),
        "best_effort": None if settings.best_effort is None else list(settings.best_effort),
        "prompts": "token ids" if replay.has_token_ids else "words",
        "num_cut_to_context": replay.num_cut,
        "lateness_p99_s": lateness_p99_s(replay.outcomes),
    }


def _write(settings: ReplaySettings, text: str, results: dict[str, RunResult]) -> None:
    """Write what was asked for."""
    try:
        if settings.json_file:
            Path(settings.json_file).write_text(text, encoding="utf-8")
        if settings.plot_folder is not None:
            write_plots(results, settings.plot_folder, settings.trace.stem)
    except OSError as error:
        hint = "Name another place with --json or --plot"
        raise CommandError(f"{error.filename} cannot be written: {error.strerror}", hint) from error
