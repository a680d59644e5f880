"""A live cluster under a load from the client of `sluice replay`, and who used the machine meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.peers_engines import EngineProcess
from benchmarks.peers_load import Share, foreign_share
from cli.bench.load import HttpLoad
from cli.bench.running import load_session
from cli.bench.server import BenchServer
from cli.http import MAX_VIEW_BYTES, ask
from cli.replay.records import is_silent
from cli.replay.sender import replay_load, token_prompts
from shared.messages.report import ClusterView, WorkerReport
from shared.subjects import Subjects
from shared.transport.nats_bus import NatsBus
from shared.wire import decode_json
from sim.workload.workload import Workload

ANSWER_LIMIT_S: Final = 300.0
VIEW_LIMIT_S: Final = 10.0


class LiveCluster(EngineProcess):
    """A running `sluice up`, and this process's connection to its broker."""

    subjects: Final = Subjects("default")

    def __init__(self) -> None:
        super().__init__()
        self.url = ""
        self._bus: NatsBus | None = None

    @property
    def bus(self) -> NatsBus:
        """Connected while the cluster runs."""
        assert self._bus is not None, "it has been started"
        return self._bus

    async def serve(self, *flags: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start `sluice up` with these flags, and return when it serves."""
        line = await self.up(*flags, log=log, env=env)
        self.url = line["url"]
        self._bus = await NatsBus.connect(line["nats_url"], name="benchmark")

    async def stop(self) -> None:
        """End it, and everything that it started."""
        if self._bus is not None:
            await self._bus.close()
        await super().stop()

    async def send(self, workload: Workload) -> tuple[HttpLoad, float]:
        """See `send_load`."""
        return await send_load(self.url, self.pid, workload)

    async def worker_reports(self) -> list[WorkerReport]:
        """Return what the workers say of themselves in the newest view."""
        answer = await ask(f"{self.url}/v1/cluster", limit_s=VIEW_LIMIT_S, max_bytes=MAX_VIEW_BYTES)
        return [status.report for status in decode_json(answer.body, ClusterView, MAX_VIEW_BYTES).workers]


async def send_load(url: str, pid: int | None, workload: Workload) -> tuple[HttpLoad, float]:
    """Send a load; return it when it has ended, and the share of the machine that others used.

    Args:
        url: of the server.
        pid: its process, whose children are its own.
        workload: what is asked for.

    Raises:
        RuntimeError: an answer failed: then the figures are worth nothing.
    """
    async with load_session(ANSWER_LIMIT_S, "") as session:
        server = await BenchServer.find(session, url, "", "completions")
        load = replay_load(session, server, workload, token_prompts(workload))
        before = Share.take(pid)
        await load.run()
        foreign_ratio = foreign_share(before, Share.take(pid))
    failed = [outcome for outcome in load.outcomes if outcome.failure and not is_silent(outcome)]
    if failed:
        raise RuntimeError(f"{len(failed)} answers failed, the first with {failed[0].failure}: {failed[0].detail}")
    return load, foreign_ratio
