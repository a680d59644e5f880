"""`sluice drain` on clusters of `sluice up`, under load: a rolling restart that no text shows, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from cli.processes import is_running
from shared.ids import Incarnation, WorkerId
from shared.messages.drain import Drain
from shared.subjects import Subjects
from shared.transport.bus import BusError
from shared.transport.nats_bus import NatsBus
from shared.wire import encode_json
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.cluster import Cluster, cluster
from tests.support.group_changes import ENV
from tests.support.processes import sluice, wait_until
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(240)

NUM_READERS = 4
WORKERS = ("worker-0", "worker-1")


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    """Two workers that can form a group, and are started again when they have ended."""
    folder, _ = stored_checkpoint(CheckpointShape())
    model = ("--model", str(folder), "--served-model-name", "checkpoint", "--max-model-len", "256")
    flags = ("--workers", "2", "--threads", "1", "--memory", "5300KiB", "--host-memory", "0", "--deterministic")
    env = {**ENV, "SLUICE_PLANNER_DROP_HOLD_S": "3600", "SLUICE_WORKER_PAGE_BYTES": "4096"}
    with cluster(*model, *flags, "--system", "kunserve", env=env) as found:
        yield found


def question(number: int) -> dict[str, Any]:
    prompt = [3 + (7 * number + place) % 90 for place in range(30)]
    sampling = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.8, "seed": number}
    return {"model": "checkpoint", "prompt": prompt, **sampling}


@contextmanager
def readers(up: Cluster) -> Iterator[list[tuple[int, str]]]:
    """Readers who ask one thing after the other, and their texts."""
    texts: list[tuple[int, str]] = []
    is_over = threading.Event()

    def read(number: int) -> None:
        while not is_over.is_set():
            texts.append((number, up.post("/v1/completions", question(number))["choices"][0]["text"]))

    with ThreadPoolExecutor(NUM_READERS) as pool:
        reading = [pool.submit(read, number) for number in range(NUM_READERS)]
        try:
            wait_until(lambda: len(texts) >= NUM_READERS, "all are read to", 60)
            yield texts
        finally:
            is_over.set()
        for each in reading:
            each.result()


def wait_until_all_ready(up: Cluster) -> None:
    def ready() -> bool:
        workers = up.get("/v1/cluster")["workers"]
        return len([w for w in workers if w["report"]["phase"] == "ready" and w["liveness"] == "alive"]) == len(WORKERS)

    wait_until(ready, "both workers are ready", 60)


def num_left(said: str) -> int:
    return sum(int(number) for number in re.findall(r"has ended; (\d+) sequences left it with their KV", said))


def test_a_rolling_restart_by_hand_changes_no_text(up: Cluster) -> None:
    wanted = {number: up.post("/v1/completions", question(number))["choices"][0]["text"] for number in range(4)}
    for _ in rounds("requests went on elsewhere"):
        with readers(up) as texts:
            before = {report["worker_id"]: report["incarnation"] for report in up.reports()}
            done = sluice("drain", *WORKERS, "--nats-url", up.nats_url)
        assert done.returncode == 0, done.stderr
        assert "worker-0 is back" in done.stdout
        assert re.search(r"^worker-1 has ended; ", done.stdout, re.MULTILINE)
        wait_until_all_ready(up)
        after = {report["worker_id"]: report["incarnation"] for report in up.reports()}
        assert all(after[name] != before[name] for name in WORKERS)
        assert all(text == wanted[number] for number, text in texts)
        if num_left(done.stdout) >= 2:
            break


@pytest.mark.parametrize(("stage", "by_signal"), first_of([(1, False), (0, True)], in_ci=1))
def test_a_stage_of_a_group_is_restored_before_it_drains(up: Cluster, stage: int, *, by_signal: bool) -> None:
    wanted = {number: up.post("/v1/completions", question(number))["choices"][0]["text"] for number in range(4)}
    with readers(up) as texts:
        dropped = sluice("drop", "--workers", ",".join(WORKERS), "--nats-url", up.nats_url)
        assert dropped.returncode == 0, dropped.stderr
        wait_until(lambda: all(report["group"] for report in up.reports()), "they are a group")
        (leaving,) = [report for report in up.reports() if report["stage"] == stage]
        name, drop = leaving["worker_id"], leaving["plan_id"]
        if by_signal:
            os.kill(leaving["pid"], signal.SIGTERM)
            wait_until(lambda: not is_running(leaving["pid"]), "it has ended", 60)
        else:
            done = sluice("drain", name, "--nats-url", up.nats_url)
            assert done.returncode == 0, done.stderr
            assert done.stderr.startswith(f"{name} is a stage of the group of {leaving['group']}, which is restored ")
            assert f"{name} has ended; " in done.stdout
    wait_until_all_ready(up)
    assert all(text == wanted[number] for number, text in texts)
    (other,) = [report for report in up.reports() if report["worker_id"] != name]
    assert not other["group"]
    assert other["plan_id"] > drop, "its group has not broken, but was restored by a plan"


def test_who_is_not_there_is_named(up: Cluster) -> None:
    done = sluice("drain", "worker-7", "--nats-url", up.nats_url)
    assert done.returncode == 3
    assert done.stderr.startswith("sluice: no worker 'worker-7' reports in cluster 'default'. `sluice status` ")
    assert all(report["phase"] == "ready" for report in up.reports())


async def test_what_is_meant_for_another_process_changes_nothing(up: Cluster) -> None:
    """Rubbish neither: `test_broker.py` sends it to every endpoint."""
    bus = await NatsBus.connect(up.nats_url, name="operator")
    try:
        report = next(report for report in up.reports() if report["worker_id"] == WORKERS[0])
        asked = encode_json(Drain(incarnation=Incarnation(report["incarnation"] + 1)))
        with pytest.raises(BusError, match="another process"):
            await bus.request(Subjects().drain(WorkerId(WORKERS[0])), asked, timeout_s=5)
    finally:
        await bus.close()
    assert "text" in up.post("/v1/completions", question(0))["choices"][0]
    assert {report["incarnation"] for report in up.reports()} >= {report["incarnation"]}
    assert all(report["phase"] == "ready" for report in up.reports())
