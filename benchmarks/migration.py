"""What it costs a reader that its request changes its worker, and others: Qwen2.5-14B on A800s, on the virtual clock.

    python -m benchmarks.migration [--gbps 25 100 200] [--tokens 8192] [--moves 200] [--system sluice] [--seed 0]
        [--plot FILE]

*One by one*: two workers whose decodes fill nine tenths of their KV memory; now and then one of the requests goes from
one to the other. A gap is the time between two tokens of a request. Its *extra* is what the gap in which it moved is
longer than those around it, in steps: of the source before, of the target after. *Others* are the gaps of those that
did not move, against the same run without moves. *Stop and copy* would add the time on the wire, *recomputing* the
prefill of all tokens (both by the cost model and the link's rate alone).

*Rolling restart*: eight workers, 60 % of their KV memory in use; one after the other drains, ends, and starts again.
Once as it is, and once where blocks have no names, so that requests go without their KV.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import print_table
from benchmarks.migration_load import Load
from shared.messages.fetch import FetchOutcome
from shared.process.log import only_from
from shared.systems import DEFAULT_SYSTEM
from sim.catalog.instance import CatalogInstance, find_instance
from sim.cluster import ClusterParams, SimCluster
from sim.devices.channel import ModelledLink
from sim.virtual_time import run
from sim.worker import SimWorker, SimWorkerParams

BLOCK_SIZE: Final = 16
MODEL, GPU = "qwen2.5-14b", "a800"
NUM_OUTPUT: Final = 4000
"""More than anybody lives to see: all decode, all the time."""
AROUND: Final = 12
"""Gaps before and after a move that say what a step takes there."""
AT_ONCE: Final = 20
"""Moves of one load."""
PAUSE_S: Final = 0.25
"""Between the end of a move and the next one."""
NUM_WORKERS: Final = 8
GROWTH: Final = 600
"""Tokens that a request gets while others move one by one, and half of the longest answer in a rolling restart."""
FULL_KV: Final = 0.9
RESTART_KV: Final = 0.6
RESTART_OUTPUT: Final = (200, 1500)
LATENCY_S: Final = 20e-6
CHUNK: Final = 2048
"""Tokens of a prompt in one step."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all figures of a run have in common."""

    instance: CatalogInstance
    system: str
    num_tokens: int
    """Of each prompt."""
    seed: int


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Requests that moved one after the other, over links of one rate."""

    gbps: float
    num_moved: int
    num_failed: int
    num_recomputed: int
    """Of which more than two blocks were computed again."""
    under_way_ms: float
    """Mean, from the question to the release."""
    wire_ms: float
    """Of a request's KV."""
    step_ms: float
    extra_steps_p50: float
    extra_steps_p99: float
    extra_p50_ms: float
    extra_p99_ms: float
    over_step_p99_ms: float
    """99th percentile of what an extra is longer than a step."""
    others_p99_ratio: float
    """99th percentile of the gaps of those that did not move, over that without moves."""
    stop_and_copy_ms: float
    recompute_ms: float
    extras_ms: tuple[float, ...]
    """Of each move, for the plot."""


@dataclass(frozen=True, slots=True)
class Restart:
    """All workers, one after the other."""

    with_kv: bool
    num_moved: int
    num_recomputed: int
    longest_gap_ms: float
    gap_p99_ms: float
    drained_s: float
    """The longest drain."""
    gaps_ms: tuple[float, ...]
    """Of all readers, for the plot."""


def params_of(setting: Setting, count: int, gbps: float, *, prefix_caching: bool = True) -> ClusterParams:
    """Return so many workers, with links of one rate between them."""
    instance, system = setting.instance, setting.system
    worker = SimWorkerParams(
        worker_id="",
        cost=instance.cost,
        num_blocks=instance.kv_tokens // BLOCK_SIZE,
        system=system,
        max_model_len=32_768,
        kv_bytes_per_token=instance.kv_bytes_per_token,
        prefix_caching=prefix_caching,
    )
    workers = tuple(replace(worker, worker_id=f"w{index}") for index in range(count))
    return ClusterParams(workers, system, link=ModelledLink(LATENCY_S, gbps * 1e9 / 8))


def one_by_one(setting: Setting, gbps: float, num_moves: int) -> OneByOne:
    """Return the figures of so many moves."""
    moved: list[tuple[float, float]] = []
    took: list[float] = []
    num_failed = num_recomputed = 0
    others, calm = list[np.ndarray](), list[np.ndarray]()
    instance, num_tokens = setting.instance, setting.num_tokens
    for number in range(-(-num_moves // AT_ONCE)):  # anew, so that texts do not grow until memory is full
        again = replace(setting, seed=setting.seed + number)
        found = run(_move(again, gbps, min(AT_ONCE, num_moves - number * AT_ONCE)), allow_leaks=True)
        moved, took = moved + found.moved, took + found.took_s
        num_failed, num_recomputed = num_failed + found.num_failed, num_recomputed + found.num_recomputed
        others.append(found.others)
        calm.append(run(_stay(again, gbps, found.until_s), allow_leaks=True))
    extras = np.array([extra for extra, _ in moved])
    steps = np.array([step for _, step in moved])
    kv_bytes = num_tokens * instance.kv_bytes_per_token
    wire_s = kv_bytes / (gbps * 1e9 / 8)
    step_s = float(np.median(steps))
    chunks = [(first, min(CHUNK, num_tokens - first)) for first in range(0, num_tokens, CHUNK)]
    prefill_s = sum(instance.cost.chunk_s(first, size) for first, size in chunks)
    return OneByOne(
        gbps=gbps,
        num_moved=len(moved),
        num_failed=num_failed,
        num_recomputed=num_recomputed,
        under_way_ms=1e3 * float(np.mean(took)),
        wire_ms=1e3 * wire_s,
        step_ms=1e3 * step_s,
        extra_steps_p50=float(np.median(extras / steps)),
        extra_steps_p99=float(np.percentile(extras / steps, 99)),
        extra_p50_ms=1e3 * float(np.median(extras)),
        extra_p99_ms=1e3 * float(np.percentile(extras, 99)),
        over_step_p99_ms=1e3 * float(np.percentile(extras - steps, 99)),
        others_p99_ratio=float(np.percentile(np.concatenate(others), 99) / np.percentile(np.concatenate(calm), 99)),
        stop_and_copy_ms=1e3 * (wire_s + step_s / 2),
        recompute_ms=1e3 * (prefill_s + step_s / 2),
        extras_ms=tuple((1e3 * extras).tolist()),
    )


async def _begun(
    cluster: SimCluster, setting: Setting, share: float, num_output: tuple[int, int] = (NUM_OUTPUT,) * 2
) -> Load:
    """Return a load that fills this share of the workers' KV memory, at work."""
    load = Load(cluster, setting.num_tokens, num_output, setting.seed)
    num_blocks = -(-(setting.num_tokens + min(GROWTH, num_output[1] // 2)) // BLOCK_SIZE)
    load.ask(len(cluster.params.workers) * int(share * cluster.params.workers[0].num_blocks / num_blocks))
    await load.all_have(2 * AROUND)
    return load


def _running(worker: SimWorker) -> list[tuple[str, int]]:
    return sorted((str(name), attempt) for name, attempt in worker.service.engine.registry.row_of)


@dataclass(frozen=True, slots=True)
class _Moves:
    moved: list[tuple[float, float]]
    """Of each, its extra gap and a step."""
    took_s: list[float]
    num_failed: int
    num_recomputed: int
    others: np.ndarray
    """Gaps of those that did not move."""
    until_s: tuple[float, float]
    """From when until when."""


async def _move(setting: Setting, gbps: float, num_moves: int) -> _Moves:
    random, loop = np.random.default_rng([setting.seed, 1]), asyncio.get_running_loop()
    moved: list[tuple[float, float]] = []
    took: list[float] = []
    touched: set[str] = set()
    num_failed = 0
    async with SimCluster(params_of(setting, 2, gbps)) as cluster:
        load = await _begun(cluster, setting, FULL_KV)
        begun_s = loop.time()
        for _ in range(num_moves):
            source, target = sorted(cluster.workers, key=lambda each: -each.service.engine.num_used_blocks)
            running = _running(source)
            name, attempt = running[int(random.integers(len(running)))]
            asked_s = loop.time()
            names = source.params.worker_id, target.params.worker_id
            fetched = await cluster.fetch(name, *names, attempt)
            if fetched.outcome is FetchOutcome.MOVED:
                took.append(loop.time() - asked_s)
                moved.append(await _extra(load, name, loop.time()))
                touched.add(name)
            else:
                num_failed += 1
            await asyncio.sleep(PAUSE_S)
        until_s = begun_s, loop.time()
        others = load.gaps(set(load.answers) - touched, until_s)
        if not others.size:  # everybody has moved once: gaps without the moves themselves
            others = load.gaps(set(load.answers), until_s)
        num_recomputed = sum(worker.service.engine.sharing.coming.num_recomputed for worker in cluster.workers)
        await load.end()
    return _Moves(moved, took, num_failed, num_recomputed, others, until_s)


async def _stay(setting: Setting, gbps: float, until_s: tuple[float, float]) -> np.ndarray:
    """Return the gaps of all in the same time, where nobody moves."""
    async with SimCluster(params_of(setting, 2, gbps)) as cluster:
        load = await _begun(cluster, setting, FULL_KV)
        while asyncio.get_running_loop().time() < until_s[1]:
            await asyncio.sleep(1.0)
        gaps = load.gaps(set(load.answers), until_s)
        await load.end()
    return gaps


async def _extra(load: Load, name: str, released_s: float) -> tuple[float, float]:
    """Return by how much the gap in which a request moved is longer than those around it, and those."""
    while np.count_nonzero(load.token_s(name) > released_s) <= AROUND:
        await asyncio.sleep(0.05)
    token_s = load.token_s(name)
    at = int(np.searchsorted(token_s, released_s))
    gaps = np.diff(token_s[at - 1 - AROUND : at + AROUND])
    step_s = (float(np.median(gaps[: AROUND - 1])) + float(np.median(gaps[AROUND + 1 :]))) / 2
    return float(gaps[AROUND - 1 : AROUND + 1].max()) - step_s, step_s


def rolling_restart(setting: Setting, gbps: float, *, with_kv: bool) -> Restart:
    """Return the figures of one."""
    return run(_restart(setting, gbps, with_kv=with_kv), allow_leaks=True)


async def _restart(setting: Setting, gbps: float, *, with_kv: bool) -> Restart:
    loop = asyncio.get_running_loop()
    async with SimCluster(params_of(setting, NUM_WORKERS, gbps, prefix_caching=with_kv)) as cluster:
        load = await _begun(cluster, setting, RESTART_KV, RESTART_OUTPUT)
        await asyncio.sleep(20.0)
        begun_s, drains_s, num_moved, num_recomputed = loop.time(), list[float](), 0, 0
        num_known = sum(len(answer.tokens) for answer in load.answers.values())
        for index in range(NUM_WORKERS):
            old, at_s = cluster.workers[index], loop.time()
            await old.service.drain(60.0)
            drains_s.append(loop.time() - at_s)
            assert old.service.migration is not None
            num_moved += old.service.migration.departures.num_left
            num_recomputed += old.service.engine.sharing.coming.num_recomputed
            await old.service.stop()
            await cluster.start_worker(replace(old.params, incarnation=1))
            await asyncio.sleep(10.0)
        for worker in cluster.workers:
            num_recomputed += worker.service.engine.sharing.coming.num_recomputed
        gaps = load.gaps(set(load.answers), (begun_s, loop.time()))
        assert sum(len(answer.tokens) for answer in load.answers.values()) > num_known
        await load.end()
    return Restart(
        with_kv=with_kv,
        num_moved=num_moved,
        num_recomputed=num_recomputed,
        longest_gap_ms=1e3 * float(gaps.max()),
        gap_p99_ms=1e3 * float(np.percentile(gaps, 99)),
        drained_s=max(drains_s),
        gaps_ms=tuple((1e3 * gaps).tolist()),
    )


def _print_moves(found: Sequence[OneByOne], num_tokens: int) -> None:
    head = ("", *(f"{each.gbps:g} Gbps" for each in found))
    rows = [
        (
            "moved; failed; recomputed",
            *(f"{each.num_moved}; {each.num_failed}; {each.num_recomputed}" for each in found),
        ),
        ("under way, mean, ms (on the wire)", *(f"{each.under_way_ms:.0f} ({each.wire_ms:.0f})" for each in found)),
        ("a step, ms", *(f"{each.step_ms:.1f}" for each in found)),
        ("extra gap, steps: P50; P99", *(f"{each.extra_steps_p50:.2f}; {each.extra_steps_p99:.2f}" for each in found)),
        ("extra gap, ms: P50; P99", *(f"{each.extra_p50_ms:.1f}; {each.extra_p99_ms:.1f}" for each in found)),
        ("beyond a step, P99, ms", *(f"{each.over_step_p99_ms:+.1f}" for each in found)),
        ("others' gaps, P99, over those without moves", *(f"{each.others_p99_ratio:.3f}" for each in found)),
        ("stop and copy would add, ms", *(f"{each.stop_and_copy_ms:.0f}" for each in found)),
        ("computing again would add, ms", *(f"{each.recompute_ms:.0f}" for each in found)),
    ]
    print_table(f"One by one, {num_tokens} tokens", head, rows)


def _print_restarts(found: Sequence[Restart]) -> None:
    head = ("", *("with KV" if each.with_kv else "without" for each in found))
    rows = [
        ("requests that left their worker with it", *(str(each.num_moved) for each in found)),
        ("computed more than two blocks again", *(str(each.num_recomputed) for each in found)),
        ("longest gap; P99, ms", *(f"{each.longest_gap_ms:.0f}; {each.gap_p99_ms:.0f}" for each in found)),
        ("longest drain, s", *(f"{each.drained_s:.2f}" for each in found)),
    ]
    print_table("Rolling restart", head, rows)


def _plot(path: Path, moves: Sequence[OneByOne], restarts: Sequence[Restart]) -> None:
    """Draw which share of the moves had at least so long an extra gap, and of a rolling restart's gaps likewise."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "sluice", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for each in moves:
            (line,) = left.plot(*_shares(each.extras_ms), label=f"{each.gbps:g} Gbps")
            left.axvline(each.stop_and_copy_ms, color=line.get_color(), ls=":", lw=1)
        left.axvline(moves[0].step_ms, color="black", lw=1, label="a step")
        left.axvline(moves[0].recompute_ms, color="black", ls="--", lw=1, label="computing again")
        left.set(xlabel="extra gap of a move, ms (dotted: stop and copy)", ylabel="share of moves", xscale="log")
        left.set_xlim(1, 2 * moves[0].recompute_ms)
        for restart in restarts:
            right.plot(*_shares(restart.gaps_ms), label="with KV" if restart.with_kv else "without")
        right.set(xlabel="gap in a rolling restart, ms", ylabel="share of gaps", xscale="log", yscale="log")
        for axes in (left, right):
            axes.legend()
            axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _shares(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return values in order, and for each the share of those that are at least as long; a thousand at most."""
    ordered = np.sort(np.asarray(values))
    at = np.unique(ordered.size - np.geomspace(1, ordered.size, 1000).astype(np.int64))
    return ordered[at], 1 - at / ordered.size


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.migration", description=__doc__)
    parser.add_argument("--gbps", type=float, nargs="+", default=[25.0, 100.0, 200.0], help="rates of the links")
    parser.add_argument("--tokens", type=int, default=8192, help="of each prompt")
    parser.add_argument("--moves", type=int, default=200, help="at each rate")
    parser.add_argument("--system", default=DEFAULT_SYSTEM)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="an SVG file of how gaps are distributed")
    arguments = parser.parse_args()
    setting = Setting(find_instance(MODEL, GPU), arguments.system, arguments.tokens, arguments.seed)
    with only_from("error"):
        moves = [one_by_one(setting, gbps, arguments.moves) for gbps in arguments.gbps]
        _print_moves(moves, arguments.tokens)
        restarts = [rolling_restart(setting, min(arguments.gbps), with_kv=with_kv) for with_kv in (True, False)]
    _print_restarts(restarts)
    if arguments.plot is not None:
        _plot(arguments.plot, moves, restarts)


if __name__ == "__main__":
    main()
