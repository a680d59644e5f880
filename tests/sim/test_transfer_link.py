"""Links on the virtual clock: times by hand, priority, faults; nothing is lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from services.worker.transfer.link import (
    Arrival,
    LinkBrokenError,
    LinkClosedError,
    LinkError,
    LinkParams,
    TrafficClass,
    Windows,
)
from services.worker.transfer.modelled_link import LinkEnd, ModelledLink, ModelledWire, WireModel
from shared.ids import WorkerId
from sim.virtual_time import run

RATE = 1e6
MODEL = WireModel(rate_bytes_per_s=RATE, latency_s=0.001, notice_s=3.0)
HEADER = 32 / RATE


class End:
    """One end, and what it has heard."""

    def __init__(self, link: ModelledLink, *, releases: bool = True) -> None:
        self.link = link
        self.releases = releases
        self.arrivals: list[tuple[TrafficClass, int, float]] = []
        self.bodies: list[bytes] = []
        self.ends: list[LinkError] = []
        link.start(self._take, self.ends.append)

    def _take(self, arrival: Arrival) -> None:
        self.arrivals.append((arrival.traffic, arrival.number, round(asyncio.get_running_loop().time(), 6)))
        self.bodies.append(bytes(arrival.body) if arrival.body is not None else b"")
        if self.releases:
            self.link.release(arrival)


def pair(params: LinkParams | None = None, model: WireModel = MODEL) -> tuple[ModelledWire, End, End]:
    params = params or LinkParams(rate_bytes_per_s=RATE, frame_s=0.01)
    wire = ModelledWire(LinkEnd(WorkerId("a")), LinkEnd(WorkerId("b")), model, params)
    return wire, End(wire.ends[0]), End(wire.ends[1])


def on_virtual_clock(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def call() -> None:
        run(test())

    call.__name__ = test.__name__
    return call


@on_virtual_clock
async def test_a_message_takes_its_bytes_and_headers_and_the_latency() -> None:
    """25 000 bytes in frames of 10 000 at 1 MB/s: 25 ms, 3 headers of 32 us, 1 ms."""
    _, a, b = pair()
    sending = a.link.send(TrafficClass.CONTROL, 1, 7, [b"x" * 20_000, b"y" * 5_000])
    await sending.done
    assert asyncio.get_running_loop().time() == pytest.approx(0.025 + 3 * HEADER)
    await asyncio.sleep(0.1)
    assert b.arrivals == [(TrafficClass.CONTROL, 7, round(0.026 + 3 * HEADER, 6))]
    assert b.bodies == [b"x" * 20_000 + b"y" * 5_000]


@on_virtual_clock
async def test_an_activation_waits_for_one_frame_of_kv() -> None:
    """Frames of 10 ms. KV of 1 s is on the wire when, at 503 ms, an activation of 1 000 bytes comes."""
    _, a, b = pair()
    memory = bytearray(1_000_000)
    b.link.post(1, 0, [memoryview(memory)])
    kv = a.link.send(TrafficClass.KV, 1, 0, [b"k" * 1_000_000])
    await asyncio.sleep(0.503)
    a.link.send(TrafficClass.ACTIVATION, 2, 0, [b"a" * 1_000])
    await kv.done
    await asyncio.sleep(0.1)
    (first, _, activation_s), (second, _, kv_s) = b.arrivals
    assert (first, second) == (TrafficClass.ACTIVATION, TrafficClass.KV)
    assert activation_s - 0.503 <= 0.010 + 0.001 + 0.001 + 2 * HEADER + 1e-6
    assert kv_s == pytest.approx(1.0 + 100 * HEADER + 0.001 + HEADER + 0.001, abs=1e-5)
    assert bytes(memory) == b"k" * 1_000_000


@pytest.mark.parametrize("seed", range(10))
def test_activations_wait_for_a_frame_at_most_whatever_else_is_sent(seed: int) -> None:
    async def main() -> None:
        random = np.random.default_rng(seed)
        _, a, b = pair()
        delays: list[float] = []
        sent: dict[int, float] = {}
        loop = asyncio.get_running_loop()
        for number in range(40):
            traffic = TrafficClass(int(random.integers(1, 4)))
            size = int(random.integers(1, 3_000 if traffic is TrafficClass.ACTIVATION else 80_000))
            if traffic is TrafficClass.ACTIVATION:
                sent[number] = loop.time()
            a.link.send(traffic, 1, number, [bytes(size)])
            await asyncio.sleep(float(random.exponential(0.02)))
        await asyncio.sleep(10.0)
        delays = [at_s - sent[number] for traffic, number, at_s in b.arrivals if traffic is TrafficClass.ACTIVATION]
        assert len(b.arrivals) == 40
        # a frame of another class, at most a few activations queued behind each other, credit frames
        assert max(delays) < 0.010 + 0.001 + 4 * 0.003 + 10 * HEADER

    run(main())


@on_virtual_clock
async def test_without_credit_nothing_is_sent_and_with_it_everything_is() -> None:
    windows = Windows(control=1_000, activation=1_000, kv=1_000, parameters=1_000)
    _, a, b = pair(LinkParams(rate_bytes_per_s=RATE, windows=windows))
    b.releases = False
    held: list[Arrival] = []
    b.link._on_arrival = held.append
    sendings = [a.link.send(TrafficClass.ACTIVATION, 1, number, [bytes(400)]) for number in range(4)]
    await asyncio.sleep(1.0)
    assert [sending.done.done() for sending in sendings] == [True, True, False, False]
    assert sendings[3].revoke()
    assert not sendings[0].revoke()
    b.link.release(held.pop())
    await asyncio.sleep(1.0)
    assert [sending.done.done() for sending in sendings] == [True, True, True, True]
    assert sendings[3].done.cancelled()


@on_virtual_clock
async def test_a_wire_that_is_healed_in_time_carries_everything_late() -> None:
    wire, a, b = pair()
    a.link.send(TrafficClass.CONTROL, 1, 0, [bytes(50_000)])
    await asyncio.sleep(0.02)
    wire.cut()
    await asyncio.sleep(2.9)
    assert b.arrivals == []
    wire.heal()
    await asyncio.sleep(0.1)
    assert len(b.arrivals) == 1
    assert a.link.is_up
    assert b.link.is_up
    wire.cut()
    wire.heal()
    await asyncio.sleep(10.0)
    assert a.ends == b.ends == [], "a cut that was healed is forgotten"


@on_virtual_clock
async def test_a_wire_that_stays_cut_breaks_both_ends_for_good() -> None:
    wire, a, b = pair()
    memory = bytearray(100_000)
    b.link.post(1, 0, [memoryview(memory)])
    sending = a.link.send(TrafficClass.KV, 1, 0, [b"k" * 100_000])
    await asyncio.sleep(0.05)
    wire.cut()
    await asyncio.sleep(3.1)
    wire.heal()
    await asyncio.sleep(1.0)
    for end in (a, b):
        assert [type(error) for error in end.ends] == [LinkBrokenError]
        assert not end.link.is_up
    assert isinstance(sending.done.exception(), LinkBrokenError)
    with pytest.raises(LinkBrokenError, match="link to b"):
        a.link.send(TrafficClass.CONTROL, 1, 0, [b""])
    assert b.arrivals == []


@on_virtual_clock
async def test_damage_breaks_both_ends_and_is_not_handed_over() -> None:
    wire, a, b = pair()
    wire.damage(0)
    a.link.send(TrafficClass.CONTROL, 1, 0, [bytes(1_000)])
    await asyncio.sleep(1.0)
    assert b.arrivals == []
    assert "damaged" in b.ends[0].reason
    assert [type(error) for error in a.ends] == [LinkBrokenError]


@on_virtual_clock
async def test_the_death_of_a_process_is_noticed_at_once_that_of_a_host_in_time() -> None:
    for host, noticed_s in [(False, 0.001), (True, 3.0)]:
        wire, a, b = pair()
        await asyncio.sleep(1.0)
        wire.kill(0, host=host)
        await asyncio.sleep(noticed_s - 0.0005)
        assert b.ends == []
        await asyncio.sleep(0.001)
        assert [type(error) for error in b.ends] == [LinkBrokenError]
        assert a.ends == [], "nobody is left there"


@on_virtual_clock
async def test_closing_hands_over_what_has_left_and_gives_up_the_rest() -> None:
    _, a, b = pair()
    first = a.link.send(TrafficClass.CONTROL, 1, 0, [bytes(100)])
    second = a.link.send(TrafficClass.CONTROL, 1, 1, [bytes(50_000)])
    await first.done
    await a.link.close()
    await a.link.close()
    await asyncio.sleep(1.0)
    assert isinstance(second.done.exception(), LinkClosedError)
    assert [number for _, number, _ in b.arrivals] == [0]
    assert [type(error) for error in a.ends] == [LinkClosedError]
    assert [type(error) for error in b.ends] == [LinkBrokenError]


@on_virtual_clock
async def test_what_arrives_before_the_start_waits_for_it() -> None:
    wire = ModelledWire(LinkEnd(WorkerId("a")), LinkEnd(WorkerId("b")), MODEL)
    End(wire.ends[0]).link.send(TrafficClass.CONTROL, 1, 5, [b"early"])
    await asyncio.sleep(1.0)
    wire.ends[0].lose_peer()
    wire.ends[1].lose_peer()
    b = End(wire.ends[1])
    await asyncio.sleep(0.0)
    assert b.bodies == [b"early"]
    assert len(b.ends) == 1


@on_virtual_clock
async def test_extra_latency_delays_and_never_reorders() -> None:
    wire, a, b = pair()
    wire.extra_latency_s = 0.5
    a.link.send(TrafficClass.CONTROL, 1, 0, [b"slow"])
    await asyncio.sleep(0.01)
    wire.extra_latency_s = 0.0
    a.link.send(TrafficClass.CONTROL, 1, 1, [b"fast"])
    await asyncio.sleep(1.0)
    assert b.bodies == [b"slow", b"fast"]


def test_a_seed_gives_one_trace() -> None:
    async def main() -> list[tuple[TrafficClass, int, float]]:
        random = np.random.default_rng(3)
        wire, a, b = pair()
        for number in range(30):
            a.link.send(TrafficClass(int(random.integers(0, 4))), 1, number, [bytes(int(random.integers(0, 20_000)))])
            if random.random() < 0.2:
                wire.cut()
            await asyncio.sleep(float(random.exponential(0.01)))
            wire.heal()
        await asyncio.sleep(5.0)
        return b.arrivals

    traces = {tuple(run(main())) for _ in range(5)}
    assert len(traces) == 1
