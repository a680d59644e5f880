"""Runs one seed: a cluster, its clients and its faults on the virtual clock; then judges what happened.

boot ── faults and requests (12 s) ── everything is mended ── all ends ── nothing is left ── one more request
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.engine.invariants import check_engine
from services.worker.engine.loop import ExecutorBrokenError
from services.worker.modelled.shadow_kv import TokenDraw
from services.worker.serving.watchdog import StuckStepError
from shared.subjects import Subjects
from sim.faults.checkers import Checker, judge_numbers, judge_peaks
from sim.faults.cluster import CallOutcome, FaultCluster
from sim.faults.kinds import MAX_DELAY_S, MESSAGE_KINDS
from sim.faults.scenario import (
    FIRST_TOKEN,
    VOCABULARY,
    Ask,
    FaultScenario,
    draw_group_scenario,
    draw_migration_scenario,
    draw_prefix_scenario,
    draw_scenario,
)
from sim.faults.trace import FaultTrace
from sim.requests import SimRequest
from sim.virtual_time import VirtualTimeLoop, run

BOOT_LIMIT_S = 10.0
END_LIMIT_S = 150.0
"""Virtual seconds after the last fault in which every call must have ended."""
MEND_LIMIT_S = 20.0
"""Seconds after the last fault in which every process must serve again, and every dispatcher know it."""
IDLE_LIMIT_S = 90.0
"""Seconds after the last call in which every trace of it must be gone."""
PROBE_LIMIT_S = 4.0
_LOOK_S = 0.25
_MAY_DIE = (ExecutorBrokenError, StuckStepError)
"""With these a worker ends by its own judgement of its device."""


SCENARIOS = {
    "all": draw_scenario,
    "groups": draw_group_scenario,
    "migration": draw_migration_scenario,
    "prefixes": draw_prefix_scenario,
}


@dataclass(frozen=True, slots=True)
class SeedReport:
    """What came of one seed."""

    seed: int
    violations: tuple[str, ...]
    """What is wrong, in words; empty if nothing is."""
    coverage: Counter[str]
    """Which paths were reached, and how often."""
    digest: str
    """Of everything that passed the broker."""
    virtual_s: float


def run_scenario(
    scenario: FaultScenario,
    print_line: Callable[[str], None] | None = None,
    watch: Callable[[FaultCluster], None] | None = None,
) -> SeedReport:
    """Run a scenario and judge it.

    Args:
        scenario: what runs and what fails.
        print_line: told line by line what happens; None: nobody reads.
        watch: shown the cluster at every instant at which something happened; what it raises ends the run.
    """
    trace = FaultTrace(print_line)
    with trace.hear_log():
        return run(_Run(scenario, trace, watch).main(), allow_leaks=True)


class _Run:
    def __init__(
        self, scenario: FaultScenario, trace: FaultTrace, watch: Callable[[FaultCluster], None] | None
    ) -> None:
        self._scenario = scenario
        self._trace = trace
        self._watch = watch
        self._violations: list[str] = []

    async def main(self) -> SeedReport:
        cluster = FaultCluster(self._scenario, self._trace)
        if self._watch is not None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop), "faults happen on the virtual clock"
            loop.on_instant = partial(self._watch, cluster)
        try:
            await self._trace.listen(cluster.broker, Subjects().plan_bucket())
            await cluster.conductor.start()
            cluster.launch()
            await self._until(lambda: cluster.is_whole, BOOT_LIMIT_S, "the cluster did not start")
            await asyncio.sleep(1.0)
            footprint, begun_s = cluster.footprint(), asyncio.get_running_loop().time()
            await self._live_through(cluster)
            await self._check_nothing_is_left(cluster, footprint)
            await self._probe(cluster)
            self._judge(cluster, begun_s)
        finally:
            cluster.bury()
        return SeedReport(
            self._scenario.seed,
            tuple(self._violations),
            self._coverage(cluster),
            self._trace.digest,
            asyncio.get_running_loop().time(),
        )

    async def _live_through(self, cluster: FaultCluster) -> None:
        """Let the faults happen and the clients ask; return when every call has ended and everything is mended."""
        loop = asyncio.get_running_loop()
        for fault in self._scenario.plan.faults:
            loop.call_later(fault.at_s, cluster.apply, fault)
        for move in self._scenario.plan.moves:
            loop.call_later(move.at_s, cluster.movers.begin, move)
        watch = asyncio.create_task(_note_peaks_forever(cluster), name="peaks")
        clients = [asyncio.create_task(_client(cluster, ask), name="client") for ask in self._scenario.asks]
        over_s = max((fault.end_s for fault in self._scenario.plan.faults), default=0.0)
        if any(fault.kind in MESSAGE_KINDS for fault in self._scenario.plan.faults):
            over_s += MAX_DELAY_S
        await asyncio.sleep(over_s)
        await cluster.conductor.restore_all()
        await self._until(lambda: cluster.is_whole, MEND_LIMIT_S, "I7: not every process came back")
        _, late = await asyncio.wait(clients, timeout=END_LIMIT_S)
        for client in late:
            client.cancel()
        if late:
            self._violations.append(f"I1: {len(late)} clients still waited {END_LIMIT_S:g} s after the last fault")
            await asyncio.wait(late)
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch

    async def _check_nothing_is_left(self, cluster: FaultCluster, footprint: object) -> None:
        await self._until(
            lambda: cluster.is_whole and not cluster.leftovers() and cluster.footprint() == footprint,
            IDLE_LIMIT_S,
            lambda: f"I4: {'; '.join(cluster.leftovers()) or f'{footprint} became {cluster.footprint()}'} is left",
        )
        for node in cluster.workers:
            if node.worker is not None:
                check_engine(node.worker.service.engine)

    async def _until(self, holds: Callable[[], bool], limit_s: float, what: str | Callable[[], str]) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not holds():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            self._violations.append(what if isinstance(what, str) else what())

    async def _probe(self, cluster: FaultCluster) -> None:
        """Everything is as before: one more request at each dispatcher is answered at once."""
        random = np.random.default_rng([self._scenario.seed, 2])
        known = len(cluster.calls)
        for index in range(len(cluster.dispatchers)):
            prompt = random.integers(FIRST_TOKEN, VOCABULARY, 20)
            ask = Ask(0.0, SimRequest(f"probe{index}", prompt, 8, seed=1), 1, index, PROBE_LIMIT_S)
            await cluster.follow(ask)
        for call in cluster.calls[known:]:
            if call.outcome is not CallOutcome.ANSWERED or call.answers[0].failure is not None:
                self._violations.append(f"I7: {call.answers[0].request.request_id} was not answered at once")

    def _judge(self, cluster: FaultCluster, begun_s: float) -> None:
        draw = TokenDraw.of_vocabulary(VOCABULARY, (2,), FIRST_TOKEN)
        self._violations += Checker(self._scenario, begun_s, draw, cluster.felt).judge(cluster.calls)
        self._violations += judge_numbers(self._trace.epochs, self._trace.attempts)
        self._violations += judge_peaks(cluster.peaks, sum(len(call.answers) for call in cluster.calls))
        if self._trace.counts["log handler raised"]:
            self._violations.append("I7: a handler of messages raised")
        for node in cluster.nodes:
            self._violations += [
                f"{name} of {node.name} died: {error!r}" for name, error in node.failures if type(error) not in _MAY_DIE
            ]

    def _coverage(self, cluster: FaultCluster) -> Counter[str]:
        """Return what was reached: what the services logged and sent, which faults were, how calls ended."""
        found = Counter(self._trace.counts)
        found.update(f"fault {fault.kind.value}" for fault in self._scenario.plan.faults)
        found.update(f"call {call.outcome.name.lower()}" for call in cluster.calls)
        found.update(f"refused {call.code.value}" for call in cluster.calls if call.code is not None)
        for node in cluster.dispatchers:
            if node.service is not None:
                lost = node.service.sessions.recovery.num_lost
                found.update({f"lost {loss.value}": count for loss, count in lost.items()})
        found.update(cluster.conductor.answers)
        found.update(cluster.movers.counts)
        for device in cluster.workers:
            found[f"system {device.params.system}"] += 1
            if device.worker is not None:
                totals = device.worker.service.engine.totals
                found.update({"preempted": totals.num_preemptions, "swapped out": totals.num_swap_outs})
                found.update({"swapped in": totals.num_swap_ins, "given up": totals.num_given_up_tokens})
                migration = device.worker.service.migration
                for (reason, outcome), count in () if migration is None else migration.fetching.outcomes.items():
                    found[f"{reason.value}: {outcome.value}"] += count
        answers = [answer for call in cluster.calls for answer in call.answers]
        found.update(f"failed {answer.failure.value}" for answer in answers if answer.failure is not None)
        found.update(f"finished {answer.finish.name.lower()}" for answer in answers)
        return found


async def _client(cluster: FaultCluster, ask: Ask) -> None:
    await asyncio.sleep(ask.at_s)
    await cluster.follow(ask)


async def _note_peaks_forever(cluster: FaultCluster) -> None:
    while True:
        cluster.note_peaks()
        await asyncio.sleep(_LOOK_S)


def describe(scenario: FaultScenario) -> Iterator[str]:
    """Return what a seed stands for, line by line."""
    workers = scenario.workers
    yield (
        f"seed {scenario.seed}: {len(workers)} workers of {workers[0].num_blocks} blocks ({workers[0].system}), "
        f"{len(scenario.dispatchers)} dispatchers, {len(scenario.planners)} planners, {len(scenario.asks)} clients"
    )
    for fault in scenario.plan.faults:
        yield f"  at {fault.at_s:6.3f} s  {fault}"
    for move in scenario.plan.moves:
        yield f"  at {move.at_s:6.3f} s  a request of {move.source} moves"


def main() -> int:
    """Run seeds from the command line; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m sim.faults", description="Random faults on the virtual clock.")
    parser.add_argument("--seed", type=int, default=0, help="the seed to run (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many seeds from there on; more than one: no trace")
    whose = "what a run is about: anything that fails, or also groups, requests that change their workers, or prefixes"
    parser.add_argument("--about", choices=sorted(SCENARIOS), default="all", help=whose)
    arguments = parser.parse_args()
    draw, bad = SCENARIOS[arguments.about], 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        print_line = partial(print, flush=True) if arguments.count == 1 else None
        if print_line is not None:
            print("\n".join(describe(draw(seed))))
        report = run_scenario(draw(seed), print_line)
        print(f"seed {seed}: {report.virtual_s:.1f} virtual seconds, digest {report.digest[:16]}")
        for violation in report.violations:
            print(f"  {violation}")
        bad += bool(report.violations)
    return min(bad, 1)
