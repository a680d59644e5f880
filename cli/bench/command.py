"""`sluice bench`: checks the server, makes the load, runs it, prints what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from cli.bench.best_effort import ClosedLoop, tier_fields
from cli.bench.datasets import (
    DEFAULT_OUTPUT,
    DatasetSample,
    planned_sample,
    read_planned,
    read_samples,
    read_trace,
    with_output,
)
from cli.bench.load import BenchLoad, HttpLoad, http_send
from cli.bench.prompts import PromptMaker, TokenScale
from cli.bench.report import qoe_of, render, render_best_effort, summarise, summarise_best_effort
from cli.bench.running import check_folder, load_session, run_shown, until_stopped
from cli.bench.server import BenchServer, measure_scale
from cli.bench.stream import BenchRecord
from cli.bench.workload import Planned, arrive_at, first, fit_context, synthetic, upscale
from cli.console import Console
from cli.exit_codes import DONE, FAILED, KILLED, CommandError
from sluice_client.qoe import QoeTarget


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What `sluice bench` was told."""

    url: str
    model: str = ""
    endpoint: Literal["chat", "completions"] = "chat"
    dataset: str = "synthetic"
    """`synthetic`, or a file: see `cli.bench.datasets`."""
    num_prompts: int = 100
    request_rate: float | None = None
    """Requests per second, Poisson; inf: all at once; None: all at once, or a trace's own times."""
    concurrency: int | None = None
    scale: float = 1.0
    """Load of a trace, in multiples of its own."""
    input_len: int = 128
    output_len: int | None = None
    """None: 128, or what the data set says."""
    prefix_len: int = 0
    vocab: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0
    timeout_s: float = 600.0
    ttft_target_s: float = 1.0
    reader_speed: float | None = None
    """Tokens per second; None: QoE is that of the paper's mean reader, and no server is told of any."""
    best_effort: tuple[int, str] | None = None
    """What goes on beside the load: requests under way, and their data set, or "" for made-up prompts as long as the
    load's."""
    api_key: str = ""
    json_file: str = ""

    def target(self) -> QoeTarget:
        """Return what the reader expects."""
        return QoeTarget(self.ttft_target_s, self.reader_speed or QoeTarget().speed_tokens_per_s)


class Bench:
    """One `sluice bench`.

    Args:
        settings: of the command.
        console: where the person looks.
        session: with the time limit and the headers.
        server: reachable.
    """

    def __init__(
        self, settings: BenchSettings, console: Console, session: aiohttp.ClientSession, server: BenchServer
    ) -> None:
        self._settings = settings
        self._console = console
        self._session = session
        self._server = server
        self._rng = np.random.default_rng(settings.seed)
        self.load: BenchLoad | None = None
        """The load, once it is made; its outcomes are those so far."""
        self.best_effort: ClosedLoop | None = None
        """What goes on beside it, if anything does."""

    async def run(self) -> None:
        """Return when every request has ended."""
        settings, server = self._settings, self._server
        self._console.line(f"{server.model} at {server.base_url} ({settings.endpoint}), data set {settings.dataset}")
        samples = self._samples()
        scale = await self._scale(samples)
        planned = self._fit(self._plan(samples, scale), "requests")
        maker = PromptMaker(self._rng, scale, vocab_size=settings.vocab, num_prefix=settings.prefix_len)
        bodies = [self._body(request, maker, self._reader_fields()) for request in planned]
        self.load = HttpLoad(planned, bodies, self._session, server, settings.concurrency)
        if settings.best_effort is not None:
            num_in_flight, dataset = settings.best_effort
            body_of = self._best_effort_bodies(dataset, planned, scale)
            send = http_send(self._session, server, body_of, self.load.clock)
            self.best_effort = ClosedLoop(send, num_in_flight, self.load.clock)
        await run_shown(self.load, self._console, self.best_effort)

    def _fit(self, planned: list[Planned], what: str) -> list[Planned]:
        """Return the requests cut to the model's context, and say how many had to be."""
        limit = self._server.max_model_len
        fitted, num_cut = fit_context(planned, limit) if limit else (planned, 0)
        if num_cut:
            self._console.line(f"{num_cut} of {len(planned)} {what} are cut to the model's context of {limit}")
        return fitted

    def _best_effort_bodies(
        self, dataset: str, planned: Sequence[Planned], scale: TokenScale
    ) -> Callable[[int], bytes]:
        """Return what makes the request of a number; a data set begins again when all of it was asked."""
        requests = [replace(request, text="") for request in planned]
        if dataset:
            requests = read_planned(Path(dataset), scale, self._settings.output_len)
            requests = self._fit(requests, "requests of best effort")
        maker = PromptMaker(self._rng, scale, vocab_size=self._settings.vocab)
        fields = tier_fields(self._server)
        if not fields:
            self._console.line("the server is none of ours: best effort is asked as plain requests")
        return lambda number: self._body(requests[number % len(requests)], maker, fields)

    def _samples(self) -> list[DatasetSample]:
        if self._settings.dataset == "synthetic" or self._settings.dataset.endswith(".csv"):
            return []
        samples = read_samples(Path(self._settings.dataset))
        order = self._rng.permutation(len(samples))[: self._settings.num_prompts]
        return [samples[i] for i in order]

    async def _scale(self, samples: Sequence[DatasetSample]) -> TokenScale:
        """Return how the server counts words, or what it is assumed to do."""
        if self._settings.vocab:
            return TokenScale()
        texts = [sample.prompt for sample in samples[:8]]
        scale = await measure_scale(self._server, self._session, self._rng, texts)
        if not scale.is_measured:
            self._console.line("the server does not count tokens: 1.3 tokens a word are assumed")
        return scale

    def _plan(self, samples: Sequence[DatasetSample], scale: TokenScale) -> list[Planned]:
        settings = self._settings
        output = settings.output_len
        if samples:
            planned = [planned_sample(sample, scale, output) for sample in samples]
        elif settings.dataset == "synthetic":
            planned = synthetic(settings.num_prompts, settings.input_len, output or DEFAULT_OUTPUT)
        else:
            trace = upscale(read_trace(Path(settings.dataset)), settings.scale, self._rng)
            planned = first([with_output(request, output) for request in trace], settings.num_prompts)
        if not planned:
            raise CommandError("the load has no request", "Raise --scale or --num-prompts", FAILED)
        return planned if settings.request_rate is None else arrive_at(planned, settings.request_rate, self._rng)

    def _reader_fields(self) -> dict[str, Any]:
        """Return what tells a server of the readers."""
        is_told = self._settings.reader_speed is not None and self._server.is_own
        return {"qoe": asdict(self._settings.target())} if is_told else {}

    def _body(self, request: Planned, maker: PromptMaker, more: dict[str, Any]) -> bytes:
        prompt = request.text or maker.make(request.num_input)
        fields = self._server.body(prompt, request.num_output)
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        fields |= {"temperature": self._settings.temperature}
        if self._settings.ignore_eos and not request.text:
            fields["ignore_eos"] = True
        return json.dumps(fields | more).encode()


async def run_bench(settings: BenchSettings, console: Console) -> tuple[int, str]:
    """Run the load; return the exit code and what to print. Ctrl-C ends it and gives what there is.

    Raises:
        CommandError: nothing answers there, or it serves no such model.
        StartupError: the data set cannot be read, or the figures have no folder.
    """
    check_folder(settings.json_file)
    async with load_session(settings.timeout_s, settings.api_key) as session:
        server = await BenchServer.find(session, settings.url, settings.model, settings.endpoint)
        bench = Bench(settings, console, session, server)
        is_whole = await until_stopped(bench.run())
    return _conclude(settings, server, bench, is_whole=is_whole)


def _conclude(settings: BenchSettings, server: BenchServer, bench: Bench, *, is_whole: bool) -> tuple[int, str]:
    outcomes = [] if bench.load is None else bench.load.outcomes
    target = settings.target()
    summary = summarise(outcomes, target, is_held_back=settings.concurrency is not None)
    num_failed, text, beside = summary["num_failed"], render(summary, target), bench.best_effort
    if beside is not None:
        summary["best_effort"] = summarise_best_effort(beside.outcomes, beside.duration_s)
        num_failed += summary["best_effort"]["num_failed"]
        text += f"\n\n{render_best_effort(summary['best_effort'])}"
    if settings.json_file:
        _write(Path(settings.json_file), settings, server, summary, outcomes)
    if not is_whole:
        return KILLED, f"{text}\n\nstopped by Ctrl-C; the figures are those of the answers so far"
    return (FAILED if num_failed else DONE), text


def _write(
    path: Path, settings: BenchSettings, server: BenchServer, summary: dict[str, Any], outcomes: Sequence[BenchRecord]
) -> None:
    """Write settings, summary and every request; numbers that do not exist in JSON become null."""
    config = {name: value for name, value in asdict(settings).items() if name not in ("api_key", "json_file")}
    config["request_rate"] = None if settings.request_rate == float("inf") else settings.request_rate
    target = settings.target()
    requests = [{**asdict(outcome), "qoe": qoe_of(outcome, target)} for outcome in outcomes]
    record = {"settings": config | {"model": server.model}, "summary": summary, "requests": requests}
    try:
        path.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", "Name another file with --json") from error
