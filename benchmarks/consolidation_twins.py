"""What emptying a worker costs those who read: each consolidation against a twin run that skips it.

    python -m benchmarks.consolidation_twins [--pairs 200] [--rate 4] [--by-kv-alone] [--tpot-s 0.1] [--ttft-s 1]

Qwen2.5-14B on A800s of 80 GB, conversations as they are, system `pack`, on the virtual clock. A run is let go on for a
while; as the planner next empties a worker the process forks, so both twins are the same to the bit until then. One
empties it and no other one, its twin skips that too. Compared are the half minutes after: whether a request that
arrived in it had its first token late, or one that decoded in it had its tokens slower than the limit, on average over
that time. *By KV alone* is the same with steps of any length, for placement as for the planner: what packing by memory
does where step time ends first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from typing import Any, Final, NoReturn
from unittest.mock import patch

import numpy as np

from benchmarks.harness import print_table
from services.planner.policy.moves import Avoided, Wanted, WantedMove
from services.planner.policy.packing.consolidation import Consolidation, Emptying
from shared.ids import WorkerId
from shared.messages.fetch import RunningPart
from shared.messages.report import ClusterView
from shared.process.log import only_from
from shared.systems import PACKED_STEP_S
from sim.experiment.records import Records
from sim.experiment.run import Progress, StopRun, run_system
from sim.scenarios.scenario import Scenario, validated

WINDOW_S: Final = 30.0
"""After a consolidation, that is looked at."""
FROM_S: Final = 20.0
"""From when on a consolidation is looked for."""
LATEST_S: Final = 40.0
"""Until when one is."""
LENGTH_S: Final = LATEST_S + WINDOW_S + 1.0
"""Of the arrivals."""
MOST_SEEDS: Final = 10
"""For a pair: in most runs somebody is emptied."""
NUM_INSTANCES: Final = 6
BURST: Final = 3.0
"""Times as much comes until then, so that fewer workers suffice afterwards."""


class Chosen:
    """The consolidation that is looked at, in the process that empties the worker as in its twin, which skips that."""

    def __init__(self) -> None:
        self.at_s = inf
        self.num_moves = 0
        self.is_twin = False
        self._twin_pid = 0
        self._answer: tuple[int, int] = (0, 0)
        """A pipe, from the twin."""

    def begin(self, at_s: float, num_moves: int) -> None:
        """Go on as two processes."""
        self.at_s, self.num_moves = at_s, num_moves
        self._answer, loop = os.pipe(), asyncio.get_running_loop()
        self._twin_pid = os.fork()
        self.is_twin = self._twin_pid == 0
        if self.is_twin:
            asyncio._set_running_loop(loop)  # noqa: SLF001  a loop runs in the process that started it

    def end_twin(self, num_late: int | None) -> NoReturn:
        """Say to the other process how many were late here, None where this one failed, and end."""
        if num_late is not None:
            os.write(self._answer[1], num_late.to_bytes(4))
        os._exit(num_late is None)

    def num_late_in_twin(self) -> int:
        """Return what the twin says when it ends.

        Raises:
            ChildProcessError: it failed.
        """
        reader, writer = self._answer
        os.close(writer)
        answer = os.read(reader, 4)
        os.close(reader)
        os.waitpid(self._twin_pid, 0)
        if not answer:
            raise ChildProcessError("a twin failed")
        return int.from_bytes(answer)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is a violation, seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A run and its twin."""

    num_moves: int
    violations: tuple[int, int]
    """Requests whose first token, or tokens, were late: with the consolidation, and without."""


class _OneEmptying(Consolidation):
    """Empties workers as ever until a time, then one."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__()
        self._chosen = chosen

    def __call__(self, view: ClusterView, avoided: Avoided, now_s: float) -> Sequence[Wanted]:
        wanted = super().__call__(view, avoided, now_s)
        if now_s < FROM_S:
            return wanted
        urgent = [each for each in wanted if not isinstance(each, Emptying)]
        emptying = [] if self._chosen.num_moves else [each for each in wanted if isinstance(each, Emptying)]
        return [*urgent, *(self._noted(each, now_s) for each in emptying)]

    def _noted(self, each: Emptying, now_s: float) -> _Noted:
        return _Noted(each.source, each.others, open_worker=each.open_worker, chosen=self._chosen, now_s=now_s)


@dataclass(frozen=True)
class _Noted(Emptying):
    """Emptying a worker; from its moves on there is a twin, if there are any."""

    chosen: Chosen = field(default_factory=Chosen)
    now_s: float = 0.0

    def choose(self, running: Sequence[RunningPart], busy: Set[WorkerId] = frozenset()) -> Sequence[WantedMove]:
        moves = () if self.chosen.num_moves else Emptying.choose(self, running, busy)
        if moves:
            self.chosen.begin(self.now_s, len(moves))
        return () if self.chosen.is_twin else moves


def scenario_of(rate_per_s: float) -> Scenario:
    """Return conversations on instances of which some are enough."""
    fields: dict[str, Any] = {
        "name": "twins",
        "model": "qwen2.5-14b",
        "gpu": "a800",
        "instances": NUM_INSTANCES,
        "lengths": "burstgpt-conversation",
        "duration_s": LENGTH_S,
        "arrivals": {
            "kind": "one-burst",
            "rate_per_s": rate_per_s,
            "burst_start_s": 0.0,
            "burst_end_s": FROM_S,
            "factor": BURST,
        },
    }
    return validated(fields, "twins")


def compare(seed: int, rate_per_s: float, limits: Limits, *, by_kv_alone: bool) -> Pair | None:
    """Return what became of a consolidation and of its twin; None: nobody was emptied."""
    limit_s = inf if by_kv_alone else PACKED_STEP_S
    chosen, late = Chosen(), None

    def stop_when_seen(progress: Progress) -> None:
        seen_s = min(chosen.at_s, LATEST_S) + (WINDOW_S + limits.ttft_s if chosen.num_moves else 0.0)
        if progress.at_s > seen_s:
            raise StopRun

    try:
        with (
            only_from("error"),
            patch("services.planner.config.Consolidation", partial(_OneEmptying, chosen)),
            patch("services.planner.policy.packing.consolidation.PACKED_STEP_S", limit_s),
            patch("services.dispatcher.policy.placement.PACKED_STEP_S", limit_s),
        ):
            records = run_system(scenario_of(rate_per_s), "pack", seed, on_progress=stop_when_seen).records
        late = num_late(records, chosen.at_s, limits)
    finally:
        if chosen.is_twin:
            chosen.end_twin(late)
    return Pair(chosen.num_moves, (late, chosen.num_late_in_twin())) if chosen.num_moves else None


def num_late(records: Records, at_s: float, limits: Limits) -> int:
    """Return how many requests had their first token, or their tokens, too late in the half minute from then on."""
    in_window = (records.token_s >= at_s) & (records.token_s < at_s + WINDOW_S)
    arrived = (records.arrival_s >= at_s) & (records.arrival_s < at_s + WINDOW_S)
    late = arrived & ~(records.ttft_s <= limits.ttft_s)
    for index in range(len(records)):
        own = slice(records.token_begin[index], records.token_begin[index + 1])
        token_s = records.token_s[own][in_window[own]]
        if token_s.size > 1:
            late[index] |= (token_s[-1] - token_s[0]) / (token_s.size - 1) > limits.tpot_s
    return int(np.count_nonzero(late))


def collect(num_pairs: int, jobs: int, rate_per_s: float, limits: Limits, *, by_kv_alone: bool) -> list[Pair]:
    """Return that many pairs, or what enough seeds gave; each process has its own patches."""
    look = partial(compare, rate_per_s=rate_per_s, limits=limits, by_kv_alone=by_kv_alone)
    pairs: list[Pair] = []
    seeds = iter(range(MOST_SEEDS * num_pairs))
    with ProcessPoolExecutor(jobs) as pool:
        while len(pairs) < num_pairs and (some := list(islice(seeds, 4 * jobs))):
            found = list(pool.map(look, some))
            pairs += [pair for pair in found if pair is not None]
            print(f"{len(pairs)} of {num_pairs} pairs", flush=True)
    return pairs[:num_pairs]


def main() -> None:
    """Print what became of all pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--by-kv-alone", action="store_true", help="with steps of any length")
    parser.add_argument("--ttft-s", type=float, default=1.0)
    parser.add_argument("--tpot-s", type=float, default=0.1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    limits = Limits(asked.ttft_s, asked.tpot_s)
    pairs = collect(asked.pairs, asked.jobs, asked.rate, limits, by_kv_alone=asked.by_kv_alone)
    violated = [sum(pair.violations[side] > 0 for pair in pairs) for side in (0, 1)]
    late = [sum(pair.violations[side] for pair in pairs) for side in (0, 1)]
    moves = sum(pair.num_moves for pair in pairs) / max(len(pairs), 1)
    row = (str(len(pairs)), f"{moves:.1f}", *map(str, violated), *map(str, late))
    head = (
        *("consolidations", "moves of each"),
        *("with violations", "twins with violations", "requests late", "in twins"),
    )
    print_table("Consolidations", head, [row])


if __name__ == "__main__":
    main()
