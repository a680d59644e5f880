"""Requests with contexts of several splits, on an engine that is stepped by hand, while KV is held back on its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

import pytest

from services.worker.contract.executor import Executor
from services.worker.executor.thread import ThreadExecutor
from services.worker.kv_moves.kv_wire import KvSocket
from tests.support.checkpoints import CheckpointShape
from tests.support.exchanged_kv import Server
from tests.support.live_groups import Texts, new_engine, tokens_of
from tests.support.runners import MIB, open_runner

LONG_SHAPES = {
    "long": CheckpointShape(num_layers=4, hidden_size=32, num_heads=2, num_kv_heads=1, max_positions=2048),
    "long, window": CheckpointShape(
        family="mistral",
        num_layers=4,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        max_positions=2048,
        extra={"sliding_window": 300},
    ),
}
LENGTHS = (40, 300, 530, 700, 1100, 530, 257, 511)
"""Of the prompts; 2 and 5 begin alike for 400 tokens."""
MAX_LEN = 1400


long_engine = partial(new_engine, max_sequences=16, max_batch_tokens=96, max_batch_rows=8, max_model_len=MAX_LEN)


def long_prompt(name: int) -> list[int]:
    tokens = tokens_of(name, LENGTHS[name])
    return [*tokens_of(2, LENGTHS[2])[:400], *tokens[400:]] if name == 5 else tokens


def long_server(executor: Executor, names: Sequence[int] = ()) -> Server:
    """Return a server of such requests, with longer answers."""
    return Server(executor, names, 60, long_engine, long_prompt)


_CALM: dict[tuple[str, str, str], Texts] = {}


async def calm_long_texts(shape: str, dtype: str, kernels: str) -> Texts:
    """Return what a worker says that was never disturbed, one request at a time."""
    key = (shape, dtype, kernels)
    if key not in _CALM:
        runner = open_runner(
            LONG_SHAPES[shape], deterministic=True, dtype=dtype, kernels=kernels, memory_bytes=24 * MIB
        )
        executor = ThreadExecutor(runner, asyncio.get_running_loop())
        server = long_server(executor)
        for name in range(len(LENGTHS)):
            server.add([name])
            await server.serve()
        _CALM[key] = server.texts
        await executor.close()
    return _CALM[key]


class HeldKv:
    """Chunks of KV that are sent only when they may be.

    Args:
        monkeypatch: undoes it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go = threading.Condition()
        self._num_free = 0
        self.num_sent = 0
        send = KvSocket.send_chunk

        def held(sock: KvSocket, data: memoryview) -> None:
            with self._may_go:
                assert self._may_go.wait_for(lambda: self._num_free > 0, 60)
                self._num_free -= 1
                self.num_sent += 1
            send(sock, data)

        monkeypatch.setattr(KvSocket, "send_chunk", held)

    def __enter__(self) -> HeldKv:
        return self

    def __exit__(self, *_: object) -> None:
        self.let()

    def let(self, count: int = 10**9) -> None:
        """Let some more chunks go, or all."""
        with self._may_go:
            self._num_free += count
            self._may_go.notify_all()
