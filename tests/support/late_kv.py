"""KV that comes to a stage of a live group later than anybody waits for it, and what it changes there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from services.worker.kv_moves.kv_traffic import KvTraffic
from services.worker.kv_moves.kv_wire import KvProgress, KvSocket
from services.worker.kv_moves.torch_exchange import TorchExchange
from services.worker.roles.torch_device import TorchGroupDevice


class LateKv:
    """KV that comes to one stage and is written only when it may be; before that the stage hears of no lost connection.

    Args:
        monkeypatch: undoes it.
        stage: to which it comes.
        way: `received` from other stages, or its `own`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: int, way: str) -> None:
        self._stage, self._way = stage, way
        self.has_come, self._may_be_written, self._was_tried = (threading.Event() for _ in range(3))
        send, receive, write_own = KvTraffic._send, KvTraffic._receive, KvTraffic._write_own

        def send_deaf(traffic: KvTraffic, *args: object) -> None:
            with self._deaf(traffic):
                send(traffic, *args)  # type: ignore[arg-type]

        def receive_late(traffic: KvTraffic, table: object, peer: int, sock: KvSocket, *more: object) -> None:
            given = LateSocket(sock, self) if self._is_late(traffic, "received") else sock
            with self._deaf(traffic), self._trying(is_late=given is not sock):
                receive(traffic, table, peer, given, *more)  # type: ignore[arg-type]

        def write_late(traffic: KvTraffic, *args: object) -> None:
            is_late = self._is_late(traffic, "own")
            if is_late:
                self.wait()
            with self._trying(is_late=is_late):
                write_own(traffic, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(KvTraffic, "_send", send_deaf)
        monkeypatch.setattr(KvTraffic, "_receive", receive_late)
        monkeypatch.setattr(KvTraffic, "_write_own", write_late)

    def wait(self) -> None:
        """Something has come: return when it may be written."""
        self.has_come.set()
        assert self._may_be_written.wait(60)

    def _is_late(self, traffic: KvTraffic, way: str) -> bool:
        return (traffic._stage, way) == (self._stage, self._way)

    @contextmanager
    def _deaf(self, traffic: KvTraffic) -> Iterator[None]:
        try:
            yield
        except OSError:
            if traffic._stage == self._stage:
                assert self._was_tried.wait(60)
            raise

    @contextmanager
    def _trying(self, *, is_late: bool) -> Iterator[None]:
        try:
            yield
        finally:
            if is_late and self._may_be_written.is_set():
                self._was_tried.set()

    async def come(self) -> None:
        """Return when there is something to write."""
        async with asyncio.timeout(30):
            while not self.has_come.is_set():
                await asyncio.sleep(0.001)

    async def write(self, device: TorchGroupDevice) -> None:
        """Let it be written from now on; return when the stage's exchange is over."""
        self._may_be_written.set()
        exchange = exchange_of(device)
        assert exchange._moving is not None
        async with asyncio.timeout(30):
            await asyncio.wait([exchange._moving])


def hold_sends(monkeypatch: pytest.MonkeyPatch, stages: Container[int]) -> threading.Event:
    """Let some stages send no KV until the event is set that is returned."""
    send, over = KvTraffic._send, threading.Event()

    def held(traffic: KvTraffic, *args: object) -> None:
        if traffic._stage in stages:
            assert over.wait(60)
        send(traffic, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(KvTraffic, "_send", held)
    return over


class LateSocket:
    """Of what it receives."""

    def __init__(self, sock: KvSocket, late: LateKv) -> None:
        self._sock = sock
        self._late = late

    def receive_chunk(self, into: memoryview) -> KvProgress | None:
        found = self._sock.receive_chunk(into)
        if into and found is None:
            self._late.wait()
        return found


def exchange_of(device: TorchGroupDevice) -> TorchExchange:
    """Return the exchange of the group that stands."""
    assert device._exchange_now is not None
    return device._exchange_now


def pages_of(device: TorchGroupDevice) -> list[bytes]:
    return [pool.contiguous().view(torch.uint8).numpy().tobytes() for pool in device._model.cache.pools()]


def changed_pages(device: TorchGroupDevice, before: Sequence[bytes]) -> list[int]:
    """Return in which pools of a layer's keys or values something has changed."""
    return [i for i, (old, new) in enumerate(zip(before, pages_of(device), strict=True)) if old != new]
