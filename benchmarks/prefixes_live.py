"""Conversations that begin alike, on three live workers: where they go, and what is computed again.

    python -m benchmarks.prefixes_live [--workers 3] [--conversations 24] [--rounds 2]

Conversations over HTTP (token ids to `/v1/completions`), in a cluster of `sluice up` with one thread per worker and a
model of 25.7 M parameters (`peers_model.py`): each begins with one of four openings, and every turn sends all before it
and some more. The same ones, by turns, with `fcfs-chunked`, which places by load, and with `sluice`, whose workers may
and may not bring prefixes from each other. Hits, and what was brought, are the workers' own counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np

from benchmarks.harness import machine, percentiles, print_table
from benchmarks.live_cluster import LiveCluster
from benchmarks.peers_load import Share, foreign_share, wait_idle
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, make_checkpoint
from shared.messages.fetch import FetchOutcome, FetchReason
from shared.messages.report import WorkerReport

NUM_OPENINGS: Final = 4
OPENING_TOKENS: Final = 1200
TURNS: Final = 4
TURN_TOKENS: Final = 80
ANSWER_TOKENS: Final = 24
PAUSE_S: Final = (0.5, 2.0)
BEGIN_S: Final = 20.0
"""Over which conversations begin."""
WAYS: Final = {
    "fcfs-chunked": ("fcfs-chunked", "1"),
    "sluice, no prefix brought": ("sluice", "0"),
    "sluice": ("sluice", "1"),
}
"""System, and SLUICE_WORKER_PULL_PREFIXES, by what the table calls it."""


@dataclass(slots=True)
class LivePrefixRun:
    """What came of one cluster."""

    ttft_s: list[float] = field(default_factory=list)
    num_queries: int = 0
    num_hits: int = 0
    num_brought: int = 0
    """Prefixes that came from other workers."""
    foreign_ratio: float = 0.0
    """Share of the machine that others used."""


async def hold(url: str, model: str, number: int, seen: LivePrefixRun) -> None:
    """Hold one conversation."""
    random = np.random.default_rng(number)
    opening = np.random.default_rng(1_000_000 + number % NUM_OPENINGS).integers(FIRST_ID, NUM_TOKENS, OPENING_TOKENS)
    prompt = opening.tolist()
    await asyncio.sleep(float(random.uniform(0, BEGIN_S)))
    async with aiohttp.ClientSession() as session:
        for _ in range(TURNS):
            prompt += random.integers(FIRST_ID, NUM_TOKENS, TURN_TOKENS).tolist()
            fields = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
            began_s, is_first = time.perf_counter(), True
            async with session.post(f"{url}/v1/completions", json=fields) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {") and is_first and json.loads(line[6:])["choices"]:
                        seen.ttft_s.append(time.perf_counter() - began_s)
                        is_first = False
            await asyncio.sleep(float(random.uniform(*PAUSE_S)))


def take_counts(reports: list[WorkerReport], seen: LivePrefixRun) -> None:
    """Note what workers counted."""
    seen.num_queries = sum(report.num_prefix_cache_queries_total for report in reports)
    seen.num_hits = sum(report.num_prefix_cache_hits_total for report in reports)
    brought = (FetchReason.PREFIX.value, FetchOutcome.MOVED.value)
    counts = [each for report in reports for each in report.migration.fetches_total]
    seen.num_brought = sum(each.count for each in counts if (each.reason, each.outcome) == brought)


async def run(way: str, folder: Path, num_workers: int, num_conversations: int) -> LivePrefixRun:
    """Start a cluster, hold the conversations, and return what came of it."""
    system, pulls = WAYS[way]
    await wait_idle()
    cluster, seen = LiveCluster(), LivePrefixRun()
    flags = ("--model", str(folder), "--workers", str(num_workers), "--system", system, "--threads", "1")
    try:
        with tempfile.TemporaryDirectory() as logs:
            env = {"SLUICE_WORKER_PULL_PREFIXES": pulls}
            await cluster.serve(*flags, "--memory", "700MiB", log=Path(logs) / "log", env=env)
            async with aiohttp.ClientSession() as session, session.get(f"{cluster.url}/v1/models") as models:
                model = (await models.json())["data"][0]["id"]
            before = Share.take(cluster.pid)
            await asyncio.gather(*(hold(cluster.url, model, number, seen) for number in range(num_conversations)))
            seen.foreign_ratio = foreign_share(before, Share.take(cluster.pid))
            await asyncio.sleep(2.0)
            take_counts(await cluster.worker_reports(), seen)
    finally:
        await cluster.stop()
    return seen


async def measure(num_workers: int, num_conversations: int, num_rounds: int) -> None:
    """Run all ways by turns, and print the table."""
    found: dict[str, list[LivePrefixRun]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_checkpoint("small", model)
        for number in range(num_rounds):
            for way, runs in found.items():
                runs.append(await run(way, model, num_workers, num_conversations))
                print(f"round {number + 1} of {num_rounds}: {way}", file=sys.stderr, flush=True)
    rows = [
        [
            way,
            percentiles([each for one in runs for each in one.ttft_s]),
            f"{sum(one.num_hits for one in runs) / sum(one.num_queries for one in runs):.1%}",
            f"{sum(one.num_queries - one.num_hits for one in runs) / len(runs):.0f}",
            f"{sum(one.num_brought for one in runs) / len(runs):.1f}",
            f"{max(one.foreign_ratio for one in runs):.0%}",
        ]
        for way, runs in found.items()
    ]
    head = ["", "TTFT P50 / P99, s", "hits", "computed tokens", "prefixes brought", "others' share of the machine"]
    print_table(f"{num_conversations} conversations, {num_workers} workers, {machine()}", head, rows)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    asyncio.run(measure(asked.workers, asked.conversations, asked.rounds))


if __name__ == "__main__":
    main()
