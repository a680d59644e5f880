"""Requests with contexts of several splits, on an engine that is stepped by hand, while KV is held back on its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from services.worker.contract.executor import Executor
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.executor.thread import ThreadExecutor
from services.worker.kv_moves.arrivals import Arrivals
from services.worker.kv_moves.kv_wire import KvSocket
from tests.support.checkpoints import CheckpointShape
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.live_groups import Texts, tokens_of
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
        extra=(("sliding_window", 300),),
    ),
}
LENGTHS = (40, 300, 530, 700, 1100, 530, 257, 511)
"""Of the prompts; 2 and 5 begin alike for 400 tokens."""
MAX_LEN = 1400


def long_prompt(name: int) -> list[int]:
    tokens = tokens_of(name, LENGTHS[name])
    return [*tokens_of(2, LENGTHS[2])[:400], *tokens[400:]] if name == 5 else tokens


def long_engine(num_lanes: int, num_blocks: int) -> Engine:
    return make_engine(
        num_blocks=num_blocks,
        max_batch_tokens=96,
        max_model_len=MAX_LEN,
        vocab_size=384,
        block_size=16,
        finished_kept=256,
        num_lanes=num_lanes,
    )


@dataclass
class LongServer:
    """An engine that is stepped by hand, and what it has said.

    Args:
        executor: of the first steps.
        num_tokens: of each answer.
    """

    executor: Executor
    num_tokens: int = 60
    texts: Texts = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    """Where the first batch of each began since the executor changed."""

    def __post_init__(self) -> None:
        self.engine = long_engine(1, self.executor.capacity.num_blocks)

    def add(self, names: Sequence[int]) -> None:
        """Take requests on, from their prompts."""
        for name in names:
            new = new_sequence(name, prompt=long_prompt(name), max_tokens=self.num_tokens, seed=name)
            if name % 2:
                update = {"temperature": 0.8, "top_p": 0.9}
                object.__setattr__(new, "sampling", new.sampling.model_copy(update=update))
            self.texts[name] = []
            assert isinstance(self.engine.residents.add(new), int)

    async def serve(self, num_steps: int = 10**9) -> int:
        """Make some steps, or all; return how many there were."""
        for number in range(num_steps):
            batch = self.engine.next_batch(0.0)
            if batch is None:
                return number
            for row, start in zip(batch.rows.tolist(), batch.start.tolist(), strict=True):
                self.starts.setdefault(int(self.engine.table.stream[row]) - 1000, start)
            events = self.engine.absorb(batch, await self.executor.submit(batch), 0.0)
            for stream, token in zip(events.stream.tolist(), events.tokens.tolist(), strict=True):
                if token >= 0:
                    self.texts[stream - 1000].append(token)
            check_engine(self.engine)
        return num_steps

    def enter(self, executor: Executor, kept: KeptKv = NOTHING_KEPT, arrivals: Arrivals | None = None) -> None:
        """Go on elsewhere."""
        self.starts.clear()
        self.executor = executor
        coming, spans = (NOTHING_KEPT, ()) if arrivals is None else (arrivals.coming, arrivals.spans)
        self.engine.enter_executor(executor.capacity.num_blocks, executor.depth, kept, coming, spans)


_CALM: dict[tuple[str, str, str, int], Texts] = {}


async def calm_long_texts(shape: str, dtype: str, kernels: str, num_tokens: int = 60) -> Texts:
    """Return what a worker says that was never disturbed, one request at a time."""
    key = (shape, dtype, kernels, num_tokens)
    if key not in _CALM:
        runner = open_runner(
            LONG_SHAPES[shape], deterministic=True, dtype=dtype, kernels=kernels, memory_bytes=24 * MIB
        )
        executor = ThreadExecutor(runner, asyncio.get_running_loop())
        server = LongServer(executor, num_tokens)
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
