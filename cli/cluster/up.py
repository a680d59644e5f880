"""`sluice up`: a cluster on this machine until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import sys

from cli.cluster.background import leave
from cli.cluster.cluster import Cluster, run_cluster
from cli.cluster.hints import describe, next_steps
from cli.cluster.settings import UpSettings
from cli.cluster.watch import watched
from cli.console import Console


async def run_up(settings: UpSettings, console: Console, *, as_json: bool, leaves: bool = False) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit code.

    Args:
        settings: of the cluster.
        console: where the person looks.
        as_json: write one line of JSON to stdout once ready, and nothing else there.
        leaves: once ready write to a log instead; see `background.py`.
    """

    async def serve(cluster: Cluster, stop: asyncio.Event) -> int:
        plan = cluster.plan
        if as_json:
            ready = {"url": plan.url, "nats_url": plan.nats_url, "pids": cluster.supervisor.pids()}
            sys.stdout.write(json.dumps(ready) + "\n")
        else:
            console.line(f"{console.style('ready', 'green')} after {cluster.ready_after_s:.1f} s")
            told = describe(console, plan) if settings.verbose else next_steps(console, plan, is_found=cluster.is_found)
            sys.stdout.write(f"\n{told}\n")
        sys.stdout.flush()
        if leaves:
            leave(cluster.log_dir)
        if not as_json:
            console.line("Ctrl-C stops it")
        async with watched(cluster):
            await stop.wait()
        return 0

    return await run_cluster(settings, console, serve)
