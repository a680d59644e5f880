"""How many workers a load needs, by the sizes of its KV alone: a replay of packing, in seconds.

    python -m benchmarks.kv_sizes --traces DIR [--scenario mell-chat-7b] [--packers pack mell] [--upscale 4] [--seeds 3]
        [--rooms 0 0.01 0.02 0.04 0.08] [--shrunk 0.1]
        [--gbps 1 10 40 200] [--plot FILE]
    python -m benchmarks.kv_sizes --decisions 10000

Each second of a run, requests that have ended are taken out, those that go on have grown by a second's tokens, and
those that have come are put in, as one batch; moves are instant. Everybody decodes as fast (`--token-s`), and a
prompt is there at once. What is told, over the same requests:

    peak, GPU-s     most workers at a time and workers x seconds, over those of the sum of all KV, as if it were a fluid
    L2              the same of a proven lower bound (Martello and Toth, 1990): what nobody can be below
    paid            GPU-s, if a worker that is empty is kept for so many seconds
    moves, tokens   of running requests, and their KV, per request; one by one: if each operation were carried out alone
    restarts        of requests whose KV is computed again, per request

Left out, against the simulator: steps, queues, blocks, links.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.harness import machine, print_table
from services.planner.policy.packing.adaptive import (
    ALL_KINDS,
    AskedMove,
    MoveKind,
    TickBudget,
    divide,
    link_boundary,
    prefill_boundary,
)
from services.planner.policy.packing.bins import BinMove, Name
from services.planner.policy.packing.fits import BestFit, LoadBalance, WorstFit
from services.planner.policy.packing.mell import Mell
from services.planner.policy.packing.mell_printed import PrintedMell
from services.planner.policy.packing.pack import Pack
from services.planner.policy.packing.packer import Packer, net_moves
from shared.cost import prefill_pairs
from sim.catalog.instance import CatalogInstance
from sim.experiment.series import kept
from sim.scenarios.files import load_scenario
from sim.workload.workload import F64, Workload

TICK_S = 1.0
PLOTTED_TICKS = 10  # from one point of a curve to the next
HOLDS_S = (60, 300)
WARM_UP_S = 300.0
"""Until there are about as many requests as there will be."""


PACKERS: dict[str, Callable[[int], Packer]] = {
    "pack": Pack,
    "mell": Mell,
    "mell-printed": PrintedMell,
    "load-balance": LoadBalance,
    "best-fit": BestFit,
    "worst-fit": WorstFit,
}


@dataclass(slots=True)
class Replay:
    """What happened; one entry per second after the warm-up."""

    num_bins: list[int] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    """KV of all requests, in bins."""
    bound: list[int] = field(default_factory=list)
    num_requests: int = 0
    num_moves: int = 0
    num_unbatched_moves: int = 0
    num_moved_tokens: int = 0
    num_restarts: int = 0

    def figures(self) -> dict[str, float]:
        """Return what a table tells of it."""
        bins, total, bound = (np.array(each, dtype=np.float64) for each in (self.num_bins, self.total, self.bound))
        seconds, per_request = np.arange(bins.size, dtype=np.float64), max(self.num_requests, 1)
        figures = {
            "workers": bins.mean(),
            "peak": bins.max() / total.max(),
            "GPU-s": bins.sum() / total.sum(),
            "L2": bound.sum() / total.sum(),
            **{f"paid {hold_s} s": kept(seconds, bins, hold_s).sum() / total.sum() for hold_s in HOLDS_S},
            "used": total.sum() / bins.sum(),
            "moves": self.num_moves / per_request,
            "one by one": self.num_unbatched_moves / per_request,
            "tokens": self.num_moved_tokens / per_request,
            "restarts": self.num_restarts / per_request,
        }
        return {name: float(value) for name, value in figures.items()}


def lower_bound(sizes: Sequence[int], capacity: int) -> int:
    """Return how many bins these items need at least: L2 of Martello and Toth (1990)."""
    ordered = np.sort(np.minimum(sizes, capacity))[::-1].astype(np.int64)
    if not ordered.size:
        return 0
    sums = np.concatenate([[0], np.cumsum(ordered)])
    num_large = int(np.searchsorted(-ordered, -(capacity // 2), side="left"))  # more than a half
    thresholds = np.unique(ordered[num_large:]) if num_large < ordered.size else np.array([0])
    thresholds = np.concatenate([[0], thresholds])
    num_alone = np.searchsorted(-ordered, -(capacity - thresholds), side="left")  # nothing counted fits beside them
    num_counted = np.searchsorted(-ordered, -thresholds, side="right")
    rest = sums[np.maximum(num_counted, num_large)] - sums[num_large]
    room = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    extra = np.maximum(0, -((room - rest) // capacity))
    return int((num_large + extra).max())


def replay(
    workload: Workload,
    packer: Packer,
    token_s: float,
    until_s: float,
    each_second: Callable[[Packer, Sequence[BinMove], float], None] = lambda *_: None,
    *,
    warm_up_s: float = WARM_UP_S,
) -> Replay:
    """Have a packer keep all requests of a load; see the module.

    Args:
        workload: the requests.
        packer: has none.
        token_s: seconds per output token.
        until_s: the end.
        each_second: is told the moves of each second; may change capacities.
        warm_up_s: nothing before counts.
    """
    done, sizes, next_arrival, capacity = Replay(num_requests=len(workload)), dict[Any, int](), 0, packer.capacity
    arrival_s, end_s = workload.arrival_s, workload.arrival_s + workload.num_output * token_s

    def size_of(name: int, now_s: float) -> int:
        return min(int(workload.num_prompt[name] + (now_s - arrival_s[name]) / token_s), capacity)

    for now_s in np.arange(TICK_S, until_s + TICK_S, TICK_S):
        gone = [name for name in sizes if end_s[name] <= now_s]
        for name in gone:
            del sizes[name]
        grown = {name: size for name, before in sizes.items() if (size := size_of(name, now_s)) != before}
        come: dict[Any, int] = {}
        while next_arrival < len(workload) and arrival_s[next_arrival] <= now_s:
            if end_s[next_arrival] > now_s:
                come[next_arrival] = size_of(next_arrival, now_s)
            next_arrival += 1
        sizes |= grown | come
        moves = packer.batch(gone, grown, come)
        packer.tick(now_s)
        moves = net_moves([*moves, *packer.bins.take_moves()])
        each_second(packer, moves, now_s)
        done.num_moves += len(moves)
        done.num_moved_tokens += sum(size for move in moves for size in move.members.values())
        assert not packer.evicted, "there is no end of bins"
        if now_s >= warm_up_s:
            done.num_bins.append(len(packer.bins))
            done.total.append(sum(sizes.values()) / capacity)
            done.bound.append(lower_bound(list(sizes.values()), capacity))
    done.num_unbatched_moves, done.num_restarts = packer.bins.num_moves, packer.num_restarts
    return done


@dataclass(slots=True)
class Divided:
    """How the moves of a replay would travel, if they were all asked for when the packer made them."""

    instance: CatalogInstance
    bytes_per_s: float
    """Of each worker's way out, and of its way in."""
    kinds: frozenset[MoveKind]
    num_tokens: Counter[MoveKind] = field(default_factory=Counter)
    waited_s: list[float] = field(default_factory=list)
    """Of each move."""
    _waiting: dict[Name, tuple[BinMove, float]] = field(default_factory=dict)
    _links: TickBudget = field(default_factory=TickBudget)
    _prefills: TickBudget = field(default_factory=TickBudget)

    def tick(self, packer: Packer, moves: Sequence[BinMove], now_s: float) -> None:
        """Divide the moves of a second, and those that wait."""
        for move in moves:
            for name in move.members:
                _, since_s = self._waiting.get(name, (move, now_s))
                self._waiting[name] = move, since_s
        self._waiting = {name: each for name, each in self._waiting.items() if packer.where(name) is not None}
        link = link_boundary(self.bytes_per_s, self.instance.kv_bytes_per_token, TICK_S)
        asked = [
            AskedMove(name, move.members[name], (("out", move.source), ("in", move.target)), move.target)
            for name, (move, _) in self._waiting.items()
        ]
        self._links.refill({each: link for move in asked for each in move.links})
        targets = {move.target for move, _ in self._waiting.values()}
        self._prefills.refill({target: self._boundary(packer, target) for target in targets})
        for name, kind in divide(asked, self._links, self._prefills, self.kinds).items():
            if kind is not MoveKind.LATER:
                move, since_s = self._waiting.pop(name)
                self.num_tokens[kind] += move.members[name]
                self.waited_s.append(now_s - since_s)

    def _boundary(self, packer: Packer, number: int) -> int:
        """Return what a worker computes beside those that are there now; one that is given back meanwhile, nothing."""
        held = next((bin_ for bin_ in packer.bins if bin_.number == number), None)
        contexts = [size for item in held.items.values() for size in item.members.values()] if held else []
        rows, kv, prefix = len(contexts), sum(contexts), max(contexts, default=0) // 2

        def step_s(chunk: int) -> float:
            return self.instance.cost.step_s(rows + chunk, kv, prefill_pairs(prefix, chunk))

        return prefill_boundary(step_s, TICK_S) if contexts else 0


class Shrinking:
    """Has some workers hold less: others every minute, a fifth less each.

    Args:
        share: of the workers.
        seed: of which.
    """

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = Random(seed)

    def tick(self, packer: Packer, _: Sequence[BinMove], now_s: float) -> None:
        """Change capacities, if it is time."""
        if now_s % 60:
            return
        for bin_ in list(packer.bins):
            if bin_.capacity != packer.capacity:
                packer.change_capacity(bin_.number, packer.capacity)
        numbers = sorted(bin_.number for bin_ in packer.bins)
        for number in self._random.sample(numbers, int(self._share * len(numbers))):
            packer.change_capacity(number, packer.capacity * 4 // 5)


def operation_times_s(packer: Packer, capacity: int, num_bins: int, num_operations: int, seed: int) -> F64:
    """Return the thread time of operations on so many workers, of requests that come, grow and go at random."""
    random = np.random.default_rng(seed)
    names, sizes = list[int](), dict[int, int]()
    times_s = list[float]()
    for name in itertools.count():
        kind = random.integers(3) if len(packer.bins) >= num_bins else 0
        size = max(1, int(capacity * random.beta(1, 3)))
        at = int(random.integers(len(names))) if names else 0
        start_s = time.thread_time()
        if kind == 0:
            packer.place(name, size)
        elif kind == 1:
            packer.resize(names[at], min(sizes[names[at]] + capacity // 500, capacity))
        else:
            packer.remove(names[at])
        taken_s = time.thread_time() - start_s
        if kind == 0:
            names.append(name)
            sizes[name] = size
        elif kind == 1:
            sizes[names[at]] = min(sizes[names[at]] + capacity // 500, capacity)
        else:
            del sizes[names[at]]
            names[at] = names[-1]
            names.pop()
        if len(packer.bins) >= num_bins - 50:
            times_s.append(taken_s)
        if len(times_s) == num_operations:
            return np.array(times_s)
    raise AssertionError("it goes on")


def print_decisions(names: Sequence[str], num_bins: int, num_operations: int) -> None:
    """Print how long operations take on so many workers."""
    rows: list[list[str]] = []
    for name in names:
        capacity = 18_526
        times_s = operation_times_s(PACKERS[name](capacity), capacity, num_bins, num_operations, seed=0)
        rows.append([name, *(f"{1e6 * value:.1f}" for value in np.percentile(times_s, [50, 99, 99.9]))])
    title = f"Thread time of an operation on {num_bins} workers, {num_operations} operations, microseconds; {machine()}"
    print_table(title, ["packer", "median", "P99", "P99.9"], rows)


def print_divided(
    instance: CatalogInstance,
    workload: Workload,
    packers: Mapping[str, Callable[[int], Packer]],
    gbps: Sequence[float],
    token_s: float,
) -> None:
    """Print how the moves of a load would travel over links of these rates."""
    rows: list[list[str]] = []
    ways = {"adaptive": ALL_KINDS, "KV only": frozenset({MoveKind.KV}), "tokens only": frozenset({MoveKind.TOKENS})}
    for name, make in packers.items():
        divided = [
            (f"{rate:g}", way, Divided(instance, rate * 1e9 / 8, kinds)) for rate in gbps for way, kinds in ways.items()
        ]

        def each_second(packer: Packer, moves: Sequence[BinMove], now_s: float, divided: Any = divided) -> None:
            for *_, each in divided:
                each.tick(packer, moves, now_s)

        done = replay(workload, make(instance.kv_tokens), token_s, float(workload.arrival_s[-1]), each_second)
        for rate, way, each in divided if done.num_moves else ():
            share = each.num_tokens[MoveKind.KV] / max(sum(each.num_tokens.values()), 1)
            wait_s = np.array(each.waited_s or [0.0])
            told = (f"{len(each.waited_s)}", f"{share:.0%}", f"{(wait_s == 0).mean():.1%}", f"{wait_s.mean():.2f}")
            rows.append([name, rate, way, *told])
    header = ["packer", "Gbps", "moves go as", "moved", "tokens as KV", "moves at once", "wait, mean s"]
    print_table("How moves travel; seed 0", header, rows)


def plot(runs: Mapping[str, Replay], rooms: Mapping[float, dict[str, float]], title: str, file: Path) -> None:
    """Draw workers over time, and what room for growth costs and saves."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "sluice", "svg.fonttype": "none"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        over_time, over_room = figure.subplots(1, 2)
        total = next(iter(runs.values())).total
        minutes = (WARM_UP_S + TICK_S * np.arange(0, len(total), PLOTTED_TICKS)) / 60
        for name, run in runs.items():
            over_time.plot(minutes, run.num_bins[::PLOTTED_TICKS], label=name, lw=0.8)
        over_time.plot(minutes, total[::PLOTTED_TICKS], label="sum of KV", color="black", lw=0.8, ls=":")
        over_time.set(xlabel="minutes", ylabel="workers", title=title)
        over_time.legend(fontsize=7, ncols=2)
        shares = [100 * room for room in rooms]
        over_room.plot(shares, [each["GPU-s"] for each in rooms.values()], marker=".")
        over_room.set(xlabel="room for growth, % of a worker", ylabel="GPU-s over those of the sum of KV", title="pack")
        moves = over_room.twinx()
        moves.plot(shares, [each["moves"] for each in rooms.values()], marker=".", color="tab:orange")
        moves.set_ylabel("moves per request", color="tab:orange")
        figure.savefig(file, metadata={"Date": None, "Creator": None})
    print(f"wrote {file}")


def main() -> None:
    """Replay, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of the trace that the scenario names, if it does")
    parser.add_argument("--scenario", default="mell-chat-7b")
    parser.add_argument("--packers", nargs="+", choices=PACKERS, default=list(PACKERS))
    parser.add_argument("--upscale", type=float, help="multiplies the load")
    parser.add_argument("--duration", type=float, help="seconds in which requests arrive")
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0; figures are their means")
    parser.add_argument("--token-s", type=float, default=0.05, help="seconds per output token")
    parser.add_argument("--rooms", type=float, nargs="*", default=[], help="pack with these shares for growth, besides")
    parser.add_argument("--shrunk", type=float, default=0.0, help="share of the workers that hold a fifth less")
    parser.add_argument("--gbps", type=float, nargs="*", default=[], help="divide moves among links and prefills, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw seed 0")
    parser.add_argument("--decisions", type=int, metavar="N", help="only time operations on so many workers")
    args = parser.parse_args()
    if args.decisions:
        print_decisions(args.packers, args.decisions, num_operations=20_000)
        return
    scenario = load_scenario(args.scenario).with_overrides(upscale=args.upscale, duration_s=args.duration)
    if scenario.duration_s is not None and scenario.duration_s <= WARM_UP_S:
        parser.error(f"--duration: more than {WARM_UP_S:g} seconds, after which figures begin")
    capacity = scenario.instance().kv_tokens
    packers = {name: PACKERS[name] for name in args.packers}
    packers |= {f"pack {room:.1%}": partial(Pack, room_for_growth=room) for room in args.rooms}
    workloads = [scenario.workload(seed, args.traces) for seed in range(args.seeds)]
    runs = {
        name: [
            replay(workload, make(capacity), args.token_s, workload.arrival_s[-1], Shrinking(args.shrunk, seed).tick)
            for seed, workload in enumerate(workloads)
        ]
        for name, make in packers.items()
    }
    means = {name: _mean([run.figures() for run in each]) for name, each in runs.items()}
    header = ["packer", *next(iter(means.values()))]
    rows = [[name, *(_shown(value) for value in each.values())] for name, each in means.items()]
    print_table(f"{scenario.title}; seeds 0 to {args.seeds - 1}", header, rows)
    if args.gbps:
        print_divided(scenario.instance(), workloads[0], packers, args.gbps, args.token_s)
    if args.plot:
        first = {name: each[0] for name, each in runs.items() if name in PACKERS}
        plot(first, {room: means[f"pack {room:.1%}"] for room in args.rooms}, scenario.name, args.plot)


def _shown(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.0f}"


def _mean(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in figures])) for name in figures[0]}


if __name__ == "__main__":
    main()
