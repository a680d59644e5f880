"""Where requests go whose prompts share prefixes: placements beside each other, on the virtual clock.

    python -m benchmarks.prefixes [--load all] [--workers 2,4,8] [--placements least-loaded,session-affinity]
        [--dispatchers 1] [--change none] [--seeds 1] [--rate R] [--warm-up 90] [--duration 180]
        [--model qwen2.5-14b] [--gpu a800]

The same conversations (`sim/workload/prefixes.py`) under each placement, at a rate per worker at which `least-loaded`
has all workers busy and nobody waits for long. A placement is one of the dispatcher's by its name, or a baseline of
this benchmark:

- `round-robin`: the next worker in turn;
- `session-affinity`: where the conversation's first turn went, which was the least loaded worker; of documents: where
  the document was first asked.

Behind a name `@100` lets workers bring prefixes from each other, over links of 100 Gbps each way. Running requests move
over such links in any case.

After the warm-up workers may change: with `join` one more comes, empty; with `restart` each in turn is told to leave,
at equal times until the end, and comes back empty.

Figures are of the time from the warm-up to the end, when what is under way is cut off. TTFT and TPOT: of the answers
that ended. By the workers' own counters: *hits*, the prompt tokens found in the prefix cache, of all that were looked
up; *computed*, those that were not found, per second and worker; *uneven*, the most that a worker computed of these
over the mean of all; the mean step; how often a sequence gave way. Progress goes to stderr; one seed has one output.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from typing import Final

import numpy as np

from benchmarks.baseline_placements import ASKING, BASELINES, placement_of
from benchmarks.harness import percentiles, print_table
from shared.errors import StartupError
from shared.process.log import only_from
from sim.catalog.instance import CatalogInstance, find_instance
from sim.cluster import ClusterParams, SimCluster
from sim.devices.channel import ModelledLink
from sim.experiment.setup import BLOCK_SIZE, LINK_LATENCY_S, MAX_SEQUENCES
from sim.requests import SimAnswer, SimRequest
from sim.virtual_time import run as run_virtually
from sim.worker import SimWorker, SimWorkerParams
from sim.workload.prefixes import AGENTS, CHATS, DOCUMENTS, NEWS, VOCAB_SIZE, PrefixLoad, SimConversation
from sim.workload.workload import F64

PROGRESS_S: Final = 20.0
"""Virtual seconds between two lines of progress."""
SETTLE_S: Final = 1.0
"""Virtual seconds after the end, in which what was cut off goes away."""
LINK_GBPS: Final = 100.0
"""Each way, unless a placement names them."""
DRAIN_LIMIT_S: Final = 60.0
"""Virtual seconds in which a worker has to leave."""
HEAD: Final = (
    "workers",
    "placement",
    "TTFT P50 / P99, s",
    "TPOT P50 / P99, ms",
    "answers/s",
    "tokens/s",
    "hits",
    "computed/s",
    "uneven",
    "step, ms",
    "gave way",
)


class Change(StrEnum):
    """What becomes of workers after the warm-up."""

    NONE = "none"
    JOIN = "join"
    """One more comes."""
    RESTART = "restart"
    """Each is restarted, one after the other."""


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """A load, and how much of it."""

    load: PrefixLoad
    rate_per_s: float
    """Conversations that begin, per second and worker."""
    affinity: Callable[[SimConversation], int]
    """What `session-affinity` keeps at one worker."""


CASES: Final = {
    "chats": PrefixCase(CHATS, 1.4, lambda conversation: conversation.index),
    "agents": PrefixCase(AGENTS, 0.8, lambda conversation: conversation.index),
    "documents": PrefixCase(DOCUMENTS, 1.2, lambda conversation: conversation.opening_index),
    "news": PrefixCase(NEWS, 2.0, lambda conversation: conversation.opening_index),
}


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a run counts, in seconds from its beginning."""

    warm_up_s: float
    end_s: float
    """Then the run ends."""


@dataclass(slots=True)
class PrefixRun:
    """What one run shows."""

    window_s: float
    ttft_s: list[float] = field(default_factory=list)
    """Of each answer that ended in the window."""
    tpot_s: list[float] = field(default_factory=list)
    """The same, of those with two tokens or more."""
    counted: F64 = field(default_factory=lambda: np.zeros((0, 6)))
    """[num_workers, 6] by how much the workers' counters grew; see `counters`."""

    def take(self, answer: SimAnswer) -> None:
        """Count an answer."""
        at_s = answer.delivered_s
        self.ttft_s.append(at_s[0])
        if len(at_s) > 1:
            self.tpot_s.append((at_s[-1] - at_s[0]) / (len(at_s) - 1))

    @property
    def computed(self) -> F64:
        """[num_workers] prompt tokens that were not found in the prefix cache."""
        computed: F64 = self.counted[:, 0] - self.counted[:, 1]
        return computed


async def hold_all(
    cluster: SimCluster,
    conversations: Sequence[SimConversation],
    on_answer: Callable[[SimConversation, SimRequest, SimAnswer], None],
) -> None:
    """Hold conversations; return when all have ended. Every turn gets its answer."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def hold(conversation: SimConversation) -> None:
        ASKING.set(conversation)
        answers: list[list[int]] = []
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.think_s)
            name, prompt = f"c{conversation.index}-{number}", conversation.prompt(answers)
            answer = await cluster.ask(SimRequest(name, prompt, turn.num_output, seed=conversation.index))
            assert answer.failure is None, f"{name}: {answer.failure}"
            answers.append(answer.tokens)
            on_answer(conversation, answer.request, answer)

    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            await asyncio.sleep(max(began_s + conversation.begin_s - loop.time(), 0.0))
            group.create_task(hold(conversation))


def counters(workers: Iterable[SimWorker]) -> F64:
    """Return what workers have counted so far, [num_ids, 6]: those of one id together, in order of their coming.

    Columns: prompt tokens that were looked up, and found; generated tokens; steps, and their seconds; preemptions.
    """
    counted: dict[str, F64] = {}
    for worker in workers:
        totals = worker.service.engine.totals
        row = (
            totals.num_prefix_cache_queries,
            totals.num_prefix_cache_hits,
            totals.num_generated_tokens,
            totals.num_steps,
            totals.busy_s,
            totals.num_preemptions,
        )
        name = worker.params.worker_id
        counted[name] = np.array(row, dtype=np.float64) + counted.get(name, np.zeros(len(row)))
    return np.array(list(counted.values()))


async def change_workers(change: Change, cluster: SimCluster, seen: list[SimWorker], window: Window) -> None:
    """Let workers come, or be restarted, from now to the end of the window; add each new one to those seen."""
    if change is Change.JOIN:
        name = f"worker-{len(cluster.workers)}"
        seen.append(await cluster.start_worker(replace(cluster.params.workers[0], worker_id=name)))
    elif change is Change.RESTART:
        begun_s, pause_s = asyncio.get_running_loop().time(), (window.end_s - window.warm_up_s) / len(cluster.workers)
        for number, worker in enumerate(tuple(cluster.workers)):
            await asyncio.sleep(begun_s + number * pause_s - asyncio.get_running_loop().time())
            await worker.stop(drain_limit_s=DRAIN_LIMIT_S)
            seen.append(await cluster.start_worker(replace(worker.params, incarnation=1)))


async def observe(
    params: ClusterParams,
    conversations: Sequence[SimConversation],
    window: Window,
    on_progress: Callable[[float], None] = lambda _: None,
    change: Change = Change.NONE,
) -> PrefixRun:
    """Return what a cluster's run shows.

    Args:
        params: of the cluster.
        conversations: what is asked.
        window: which part counts.
        on_progress: called now and then with the seconds that have passed.
        change: of its workers.
    """
    seen, loop = PrefixRun(window.end_s - window.warm_up_s), asyncio.get_running_loop()
    async with SimCluster(params) as cluster:
        began_s = loop.time()

        def on_answer(_: SimConversation, __: SimRequest, answer: SimAnswer) -> None:
            if loop.time() - began_s >= window.warm_up_s:
                seen.take(answer)

        holding = asyncio.create_task(hold_all(cluster, conversations, on_answer))
        workers, changing = list(cluster.workers), list[asyncio.Task[None]]()
        try:
            before = counters(workers)
            for at_s in sorted({window.warm_up_s, *np.arange(0.0, window.end_s, PROGRESS_S).tolist(), window.end_s}):
                await asyncio.wait([holding], timeout=began_s + at_s - loop.time())
                on_progress(at_s)
                if at_s == window.warm_up_s:
                    before = counters(workers)
                    changing.append(asyncio.create_task(change_workers(change, cluster, workers, window)))
            after = counters(workers)
            seen.counted = after - np.pad(before, ((0, len(after) - len(before)), (0, 0)))
            for task in (holding, *changing):
                if task.done():
                    task.result()
        finally:
            for task in (holding, *changing):
                task.cancel()
            await asyncio.gather(holding, *changing, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)
        cluster.check_idle()
    return seen


@dataclass(frozen=True, slots=True)
class Measurement:
    """What stays the same from run to run of one load."""

    name: str
    case: PrefixCase
    instance: CatalogInstance
    window: Window
    num_seeds: int
    num_dispatchers: int = 1
    change: Change = Change.NONE

    def run(self, num_workers: int, placement: str, seed: int) -> PrefixRun:
        """Run the conversations of a seed once."""
        rate_per_s = self.case.rate_per_s * num_workers
        conversations = self.case.load.conversations(rate_per_s, self.window.end_s, seed)
        params = cluster_of(num_workers, self.instance, self.case, placement)
        params = replace(params, num_dispatchers=self.num_dispatchers)

        def progress(at_s: float) -> None:
            told = (
                f"{self.name}, {num_workers} workers, {placement}, seed {seed}: {at_s:.0f} of {self.window.end_s:.0f} s"
            )
            print(told, file=sys.stderr, flush=True)

        with only_from("error"):
            return run_virtually(observe(params, conversations, self.window, progress, self.change))

    def report(self, workers: Sequence[int], placements: Sequence[str]) -> None:
        """Run all, and print a table."""
        rows: list[list[str]] = []
        for num_workers, placement in product(workers, placements):
            runs = [self.run(num_workers, placement, seed) for seed in range(self.num_seeds)]
            rows.append(row_of(num_workers, placement, runs))
            print(self.name, *rows[-1], sep="  ", file=sys.stderr, flush=True)
        window, rate = self.window, f"{self.case.rate_per_s:g} conversations/s per worker"
        seconds = f"{window.warm_up_s:g} s to {window.end_s:g} s"
        told = "" if self.num_dispatchers == 1 else f", {self.num_dispatchers} dispatchers"
        told += "" if self.change is Change.NONE else f", {self.change}"
        title = f"{self.name}{told}: {rate}, {self.instance.name}, {seconds}, {self.num_seeds} seeds"
        print_table(title, HEAD, rows)


def cluster_of(num_workers: int, instance: CatalogInstance, case: PrefixCase, placement: str) -> ClusterParams:
    """Return a cluster of equal instances that serve each request where a placement says."""
    name, _, gbps = placement.partition("@")
    link = ModelledLink(LINK_LATENCY_S, float(gbps or LINK_GBPS) * 1e9 / 8)
    workers = tuple(
        SimWorkerParams(
            f"worker-{i}",
            instance.cost,
            num_blocks=instance.kv_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_model_len=case.load.max_tokens,
            max_sequences=MAX_SEQUENCES,
            vocab_size=VOCAB_SIZE,
            kv_bytes_per_token=instance.kv_bytes_per_token,
            pull_prefixes=bool(gbps),
        )
        for i in range(num_workers)
    )
    return ClusterParams(workers, link=link, placement=placement_of(name, case.affinity))


def row_of(num_workers: int, placement: str, runs: Sequence[PrefixRun]) -> list[str]:
    """Return what is printed of the runs of some seeds: percentiles of all their answers, and means."""
    counted = np.concatenate([run.counted for run in runs])
    queries, hits, tokens, steps, busy_s, preemptions = counted.sum(axis=0).tolist()
    seconds = sum(run.window_s for run in runs)
    uneven = float(np.mean([run.computed.max() / run.computed.mean() for run in runs]))
    return [
        str(num_workers),
        placement,
        percentiles([each for run in runs for each in run.ttft_s]),
        percentiles([each for run in runs for each in run.tpot_s], scale=1e3),
        f"{sum(len(run.ttft_s) for run in runs) / seconds:.1f}",
        f"{tokens / seconds:.0f}",
        f"{hits / queries:.1%}",
        f"{(queries - hits) / seconds / num_workers:.0f}",
        f"{uneven:.2f}",
        f"{busy_s / steps * 1e3:.1f}",
        f"{preemptions:.0f}",
    ]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--load", choices=[*CASES, "all"], default="all")
    parser.add_argument("--workers", type=_numbers, default=[2, 4, 8], help="how many, as 2,4,8")
    parser.add_argument("--placements", type=_names, default=["least-loaded", *BASELINES], help="by name, as a,b")
    parser.add_argument("--dispatchers", type=int, default=1, help="how many; requests go to them in turn")
    parser.add_argument("--change", choices=list(Change), default=Change.NONE, help="of workers, after the warm-up")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--rate", type=float, help="conversations per second and worker; the load's if nothing is said")
    parser.add_argument("--warm-up", type=float, default=90.0, help="seconds that do not count")
    parser.add_argument("--duration", type=float, default=180.0, help="seconds of a run, the warm-up included")
    parser.add_argument("--model", default="qwen2.5-14b")
    parser.add_argument("--gpu", default="a800")
    asked = parser.parse_args()
    try:
        instance = find_instance(asked.model, asked.gpu)
        for name in asked.placements:
            placement_of(name.partition("@")[0], CASES["chats"].affinity)
    except StartupError as error:
        parser.error(str(error))
    for name, case in CASES.items():
        if asked.load in (name, "all"):
            chosen = case if asked.rate is None else replace(case, rate_per_s=asked.rate)
            window = Window(asked.warm_up, asked.duration)
            measurement = Measurement(
                name, chosen, instance, window, asked.seeds, asked.dispatchers, Change(asked.change)
            )
            measurement.report(asked.workers, asked.placements)


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
