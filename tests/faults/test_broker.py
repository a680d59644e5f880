"""The broker dies, stands still, cuts a reader; messages are damaged, repeated, late, long (rows 13-15, 22-25)."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shared.ids import DispatcherId, WorkerId
from shared.messages.base import PROTOCOL_VERSION
from shared.transport.bus import BusError, Message
from shared.transport.nats_bus import NatsBus
from tests.faults.conftest import SMALL_STEPS
from tests.support.fault_checks import StagedCluster, staged
from tests.support.fault_cluster import DEMO_MODEL, NATS, Cluster, Shape, running, until
from tests.support.fault_streams import (
    CHAT,
    COMPLETIONS,
    all_read,
    ask,
    long_prompts,
    longest_gap_s,
    mixed_load,
    reading,
    seen,
)
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

MARGIN_S = 2.0
"""By how much a pause may be longer than the broker was away."""
QUEUE_LIMIT_S = 6.0
"""After which a request is refused: more than clients take to find a broker that is back, and to hear of workers."""
SLACK_S = 1.5
"""And what a busy machine of two cores may add."""


async def away(cluster: Cluster, how: str, duration_s: float) -> None:
    """Let the broker be killed, or stand still, for so long."""
    if how == "killed":
        cluster.kill(NATS)
        await asyncio.sleep(duration_s)
        await asyncio.to_thread(cluster.start_broker)
    else:
        cluster.freeze(NATS)
        await asyncio.sleep(duration_s)
        cluster.thaw(NATS)


@pytest.mark.parametrize(
    ("how", "duration_s"),
    first_of([("killed", 1.0), ("frozen", 10.0), ("killed", 10.0), ("frozen", 1.0)], in_ci=2),
)
async def test_streams_pause_while_the_broker_is_away_and_are_complete(
    cluster: StagedCluster, how: str, duration_s: float
) -> None:
    """Rows 14, 15."""
    async with cluster.unchanged(15) as readers:
        await away(cluster, how, duration_s)
    assert longest_gap_s(readers) < duration_s + MARGIN_S + SLACK_S


async def test_prompts_are_computed_although_the_broker_dies_meanwhile(cluster: StagedCluster) -> None:
    """Row 14, mid-prompt."""
    async with cluster.unchanged(load=long_prompts()):
        await asyncio.sleep(0.3)
        await away(cluster, "killed", 1.0)


async def test_the_broker_and_both_workers_killed_together_change_no_text(cluster: StagedCluster) -> None:
    """Rows 1, 14: nobody is left who knows of the requests, but their dispatcher."""
    async with cluster.unchanged(15):
        for name in (NATS, *cluster.workers):
            cluster.kill(name)
        await asyncio.to_thread(cluster.start_broker)
        for name in cluster.workers:
            cluster.start(name)


async def test_without_a_broker_new_requests_wait_and_are_refused_after_a_bound(tmp_path: Path) -> None:
    """Row 14: 503 with Retry-After, `/ready` says why; served again as soon as it is back."""
    shape = Shape(env={**SMALL_STEPS, "SLUICE_DISPATCHER_QUEUE_LIMIT_S": f"{QUEUE_LIMIT_S:g}"})
    with staged(tmp_path, shape) as cluster:
        cluster.kill(NATS)
        await until(lambda: _is_unready(cluster), "it is not ready", 10)
        started_s = time.monotonic()
        async with reading(cluster, mixed_load()[:2]) as readers:
            await all_read(readers)
        for reader in readers:
            assert reader.told.status == 503, reader.told
            assert int(reader.told.headers["Retry-After"]) >= 1
        assert time.monotonic() - started_s < QUEUE_LIMIT_S + 3
        async with cluster.unchanged(load=mixed_load()[:2]):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(cluster.start_broker)


async def _is_unready(cluster: Cluster) -> bool:
    status, body = await cluster.get("/ready")
    return status == 503 and "broker" in body["reason"]


class Tap:
    """Keeps copies of what one dispatcher is told by others."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._own: set[bytes] = set()

    def __call__(self, message: Message) -> None:
        if message.data not in self._own:
            self.messages.append(message.data)

    async def send(self, bus: NatsBus, subject: str, data: bytes) -> None:
        """Publish something that this tap will not take for another's."""
        self._own.add(data)
        await bus.publish(subject, data)


async def num_malformed(cluster: Cluster, bus: NatsBus) -> int:
    return int((await cluster.dump(bus, "dispatcher-0"))["num_malformed"])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the message with a flipped bit, cut short, with rubbish behind it, or nothing but rubbish."""
    kind = rng.randrange(4)
    if kind == 0:
        place = rng.randrange(len(data) * 8)
        return bytes(byte ^ (1 << place % 8 if index == place // 8 else 0) for index, byte in enumerate(data))
    if kind == 1:
        return data[: rng.randrange(len(data))]
    return data + rng.randbytes(7) if kind == 2 else rng.randbytes(rng.randrange(1, 200))


async def test_damaged_token_messages_are_counted_and_change_nothing(cluster: StagedCluster) -> None:
    """Row 22, on the hot path: true messages of the running streams, damaged."""
    rng, tap = random.Random(22), Tap()
    subject = cluster.subjects.tokens(DispatcherId("dispatcher-0"))
    async with cluster.bus() as bus:
        before = await num_malformed(cluster, bus)
        listening = await bus.subscribe(subject, tap)
        num_sent = 0
        for _ in rounds("enough was sent"):
            async with cluster.unchanged(5) as readers:
                while any(not reader.task.done() for reader in readers):
                    for data in tap.messages[-5:]:
                        await tap.send(bus, subject, damaged(data, rng))
                        num_sent += 1
                    tap.messages.clear()
                    await asyncio.sleep(0.005)
            if num_sent > 100:
                break
        await listening.close()
        assert await num_malformed(cluster, bus) - before == num_sent
    lines = [event for event in cluster.events("dispatcher-0") if event.get("event") == "malformed_message"]
    assert lines
    assert all(line["subject"] == subject for line in lines)


async def test_damaged_requests_and_reports_are_refused_and_change_nothing(cluster: StagedCluster) -> None:
    """Row 22, on the control path: every endpoint of a worker, and what the monitor hears."""
    rng = random.Random(23)
    worker = WorkerId("worker-0")
    rubbish = [b"", b"\xff" * 40, b"\x81", b"{}", bytes(1000), b"\xdd" + b"\xff" * 4]
    rubbish.append(json.dumps({"kind": "submit", "version": PROTOCOL_VERSION}).encode())
    async with cluster.bus() as bus, cluster.unchanged(5):
        endpoints = [endpoint["subject"] for endpoint in (await cluster.stats(bus, worker))["endpoints"]]
        assert cluster.subjects.submit(worker) in endpoints
        for _ in range(30):
            for subject in [*endpoints, cluster.subjects.report(worker)]:
                await bus.publish(subject, rng.choice(rubbish) or b"-")
                await bus.publish(subject, rng.randbytes(rng.randrange(1, 300)))
            await asyncio.sleep(0.01)
        with pytest.raises(BusError, match=r"400|500|WireError"):
            await bus.request(cluster.subjects.submit(worker), b"\x81", timeout_s=5)
    await until(lambda: any(e.get("event") == "report_refused" for e in cluster.events("monitor")), "it is told")


async def test_absurd_reports_are_refused_and_nobody_is_given_up(cluster: StagedCluster) -> None:
    """Row 13: numbers that cannot be, in the name of a worker that serves."""
    subject = cluster.subjects.report(WorkerId("worker-0"))
    honest = {
        "version": PROTOCOL_VERSION,
        "kind": "worker_report",
        "worker_id": "worker-0",
        "sequence_number": 10**9,
        "phase": "ready",
    }
    absurd: list[dict[str, object]] = [
        {"num_blocks": -1},
        {"num_running": 10**12},
        {"tokens_per_s": float("nan")},
        {"step_time_s": float("inf")},
        {"progress_ratio": 7},
        {"worker_id": "worker-1"},
    ]
    async with cluster.bus() as bus, cluster.unchanged(5):
        for _ in range(20):
            for lie in absurd:
                await bus.publish(subject, json.dumps(honest | lie).encode())
            await asyncio.sleep(0.02)
        _, view = await cluster.get("/v1/cluster")
        assert len(view["workers"]) == len(cluster.workers)
        assert "dead" not in {worker["liveness"] for worker in view["workers"]}


async def test_repeated_and_late_messages_change_nothing(cluster: StagedCluster) -> None:
    """Row 23: every token message once more at once, some in reverse order, and all of the first second again later."""
    rng, tap = random.Random(24), Tap()
    subject = cluster.subjects.tokens(DispatcherId("dispatcher-0"))
    kept: list[bytes] = []
    async with cluster.bus() as bus:
        listening = await bus.subscribe(subject, tap)
        for _ in rounds("enough came"):
            async with cluster.unchanged() as readers:
                while any(not reader.task.done() for reader in readers):
                    fresh, tap.messages = tap.messages, []
                    kept += fresh[: max(0, 300 - len(kept))]
                    again = fresh + [rng.choice(kept) for _ in fresh]
                    for data in reversed(again):
                        await tap.send(bus, subject, data)
                    await asyncio.sleep(0.005)
            if len(kept) > 50:
                break
        async with cluster.unchanged(5) as readers:
            for data in kept:  # the streams of these have ended long ago
                await bus.publish(subject, data)
        await listening.close()


async def test_slow_and_delayed_links_lose_nothing(tmp_path: Path) -> None:
    """Row 23: half a second each way between the dispatcher and the broker."""
    shape = Shape(env=SMALL_STEPS, proxied=("dispatcher-0",))
    with staged(tmp_path, shape) as cluster:
        async with cluster.unchanged(5):
            cluster.proxies["dispatcher-0"].slow(delay_s=0.5)
        async with cluster.unchanged(5):
            cluster.proxies["dispatcher-0"].cut()


async def test_a_dispatcher_that_the_broker_cuts_as_too_slow_loses_no_token(tmp_path: Path) -> None:
    """Row 25: the broker holds 64 KiB for a reader and then ends its connection; what it dropped is asked for again."""
    wide: dict[str, Any] = {"temperature": 1.0, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}
    load = [ask(f"wide-{n}", CHAT, seed=n, **wide) for n in range(8)]
    shape = Shape(env=SMALL_STEPS, proxied=("dispatcher-0",), max_payload_bytes=64 * 1024, max_pending_bytes=64 * 1024)
    with staged(tmp_path, shape) as cluster:
        async with reading(cluster, load) as alone:
            await all_read(alone)
        texts = {reader.asked.name: reader.told.texts for reader in alone}
        async with cluster.unchanged(), reading(cluster, load) as readers:
            await seen(readers, 10)
            cluster.proxies["dispatcher-0"].slow(bytes_per_s=1000)
            await until(
                lambda: "Slow Consumer Detected" in cluster.log_of(NATS), "the broker has cut the dispatcher", 30
            )
            cluster.proxies["dispatcher-0"].heal()
            await all_read(readers)
            assert {reader.asked.name: reader.told.texts for reader in readers} == texts


PROFILE = """\
model = "tiny"
gpu = "none"
tp = 1
source = "invented: a step takes five milliseconds, whatever it holds"
mean_error_percent = 0.0
[step_ms]
g0 = 5.0
b0 = 0.0
d = 0.0
a = 0.0
"""


def long_context_model(folder: Path, num_tokens: int) -> Path:
    """Return a folder with the demo model's text side that claims a long context; for workers without tensors."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": num_tokens}))
    return folder


async def test_prompts_close_to_the_size_of_a_message_just_work(tmp_path: Path) -> None:
    """Row 24: 4 bytes per token of 1 MiB. Also when prompt and answer so far go to another worker."""
    (tmp_path / "flat.toml").write_text(PROFILE)
    modelled = ("--executor", "modelled", "--profile", str(tmp_path / "flat.toml"), "--memory", "4GiB")
    shape = Shape(model=long_context_model(tmp_path / "model", 300_000), flags={"worker": modelled})
    rng = random.Random(24)
    longest = [rng.randrange(300, 2000) for _ in range(248_500)]
    most = ask("long", COMPLETIONS, prompt=longest, max_tokens=1_400, seed=24)
    too_long = ask("too long", COMPLETIONS, prompt=longest * 2, max_tokens=10)
    with running(Cluster(tmp_path, shape)) as cluster:
        async with reading(cluster, [most]) as (alone,):
            await alone.task
        assert alone.told.is_whole, alone.told.error
        assert alone.told.usage == (248_500, 1_400)
        async with reading(cluster, [most, too_long]) as (moved, refused):
            await refused.task
            assert (refused.told.error or {})["code"] == "context_length_exceeded"
            await seen([moved], 5)
            async with cluster.bus() as bus:
                dumps = {name: await cluster.dump(bus, name) for name in cluster.workers}
            (busy,) = [name for name, dump in dumps.items() if dump["sequences"]]
            cluster.kill(busy)
            await moved.task
        assert moved.told.texts == alone.told.texts
