"""Stages in threads of this process, joined by socket pairs as processes would be by connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.pipeline.channel import SocketChannel
from services.worker.pipeline.pipeline import PipelineExecutor
from services.worker.pipeline.stage import StageDevice
from services.worker.pipeline.thread_stage import StageServer, ThreadStages


@dataclass(frozen=True)
class WiredPipeline:
    executor: PipelineExecutor
    servers: list[StageServer]
    """Members, in order."""
    control: list[socket.socket]
    """The members' ends of their connections to the leader."""
    leader_ends: list[socket.socket]

    async def close(self) -> None:
        """Close the executor, and wait for the members' threads."""
        await self.executor.close()
        self.join()

    def join(self) -> None:
        for server in self.servers:
            server.join()


def wire_up(stages: Sequence[StageDevice], loop: asyncio.AbstractEventLoop) -> WiredPipeline:
    """One connection from the leader to each member, one from each stage to the next."""
    control = [socket.socketpair() for _ in stages[1:]]
    ways = [socket.socketpair() for _ in stages[1:]]
    servers = []
    for i, stage in enumerate(stages[1:]):
        to_next = SocketChannel(ways[i + 1][0]) if i + 1 < len(ways) else None
        servers.append(StageServer(stage, SocketChannel(control[i][1]), SocketChannel(ways[i][1]), to_next))
    first = SocketChannel(ways[0][0]) if ways else None
    members = [SocketChannel(ours) for ours, _ in control]
    group = ThreadStages(stages[0], first, members, stages[0].capacity, loop)
    executor = PipelineExecutor(group, loop.time)
    return WiredPipeline(executor, servers, [theirs for _, theirs in control], [ours for ours, _ in control])
