"""What a scraper reads of the planner is what its events and the view say."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.planner.metrics import MAX_GAP_S, PlannerMetrics
from services.planner.policy.plans.intent import PlanOutcome
from services.planner.policy.scale_signal import ScaleWish
from shared.errors import StartupError
from shared.ids import WorkerId
from shared.messages.report import ClusterView, Liveness
from shared.process.metrics_server import serve_metrics
from tests.support.plan_cluster import clustered
from tests.support.plan_workers import SUBJECTS, PlanCluster
from tests.support.statuses import make_status, make_view

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(metrics: PlannerMetrics, wish: ScaleWish | None = None) -> Samples:
    return parse(metrics.render(7, wish, is_superseded=False)[0].decode())


def view(*groups: str, liveness: Liveness = Liveness.ALIVE) -> ClusterView:
    """One worker for each name of a group; "" is alone."""
    return make_view(
        *(
            make_status(f"w{index}", liveness=liveness, throttled=group == "w0", group=group)
            for index, group in enumerate(groups)
        )
    )


def test_time_in_groups_is_that_of_each_worker_between_views() -> None:
    metrics = PlannerMetrics()
    metrics.see(view("", "", ""), 1.0)
    metrics.see(view("w0", "w0", ""), 2.0)
    metrics.see(view("w0", "w0", "w2", "w2"), 5.0)
    found = scraped(metrics)
    assert found["sluice:group_worker_seconds_total", ()] == 6.0
    assert found["sluice:groups", ()] == 2
    assert found["sluice:grouped_workers", ()] == 4
    assert found["sluice:throttled_workers", ()] == 2
    assert found["sluice:instances", ()] == 4
    metrics.see(view("w0", "w0"), 5.0 + 10 * MAX_GAP_S)
    assert scraped(metrics)["sluice:group_worker_seconds_total", ()] == 6.0 + 4 * MAX_GAP_S, "nobody looked so long"
    metrics.see(view("w0", "w0", liveness=Liveness.DEAD), 6.0 + 10 * MAX_GAP_S)
    assert scraped(metrics)["sluice:grouped_workers", ()] == 0


def test_wanted_instances_are_those_that_there_are_or_more() -> None:
    metrics = PlannerMetrics()
    metrics.see(view("", ""), 0.0)
    assert scraped(metrics)["sluice:instances_wanted", ()] == 2
    assert scraped(metrics, ScaleWish(5, 1, ""))["sluice:instances_wanted", ()] == 5
    metrics.see(view(*[""] * 6), 1.0)
    assert scraped(metrics, ScaleWish(5, 1, ""))["sluice:instances_wanted", ()] == 6, "an autoscaler takes none away"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (PlanOutcome(True, "", 3, 0.2, "drop", (), (WorkerId("w0"),)), "done"),
        (PlanOutcome(False, "", 3, 0.2, "drop", (), (WorkerId("w0"),)), "failed"),
        (PlanOutcome(False, "", 3, 0.2, "drop"), "aborted"),
        (PlanOutcome(False, "no plan was begun"), ""),
    ],
)
def test_plans_are_counted_by_what_became_of_them(outcome: PlanOutcome, said: str) -> None:
    metrics = PlannerMetrics()
    metrics.note(outcome)
    counts = {
        labels: value for (name, labels), value in scraped(metrics).items() if name == "sluice:plan_seconds_count"
    }
    assert counts == ({(("lever", "drop"), ("outcome", said)): 1} if said else {})


@clustered(2, max_instances=8, scale_hold_s=5.0, cooldown_s=0)
async def test_a_planner_counts_what_it_tells(cluster: PlanCluster) -> None:
    await cluster.burst("w0", after_s=1.3, queued=5, demanded=40)
    await asyncio.sleep(8)
    cluster.relax(0)
    await cluster.until(lambda: not cluster.groups())
    await asyncio.sleep(1)
    data = await cluster.bus.request(SUBJECTS.admin("planner", "p", "metrics"), b"", timeout_s=5)
    found = parse(data.decode())
    told = Counter(name for _, name, _ in cluster.events if name.startswith(("plan_", "planner_", "instances_")))
    counted = {
        dict(labels)["name"]: value for (name, labels), value in found.items() if name == "sluice:planner_events_total"
    }
    assert counted == told
    for lever in ("drop", "restore"):
        assert found["sluice:plan_seconds_count", (("lever", lever), ("outcome", "done"))] == 1
    assert found["sluice:groups", ()] == 0
    formed_s, restored_s = cluster.times("plan_done")
    spent_s = found["sluice:group_worker_seconds_total", ()]
    assert spent_s == pytest.approx(2 * (restored_s - formed_s), abs=2 * 1.5), "two workers, a view each 0.5 s"


async def test_metrics_are_scraped_over_http_and_nothing_else_is_there() -> None:
    metrics = PlannerMetrics()
    metrics.count("plan_done")
    async with (
        serve_metrics("127.0.0.1", 0, lambda: metrics.render(3, None, is_superseded=True)) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        async with session.get("/metrics") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            found = parse(await answer.text())
        assert found["sluice:planner_epoch", ()] == 3
        assert found["sluice:planner_superseded", ()] == 1
        assert found["sluice:planner_events_total", (("name", "plan_done"),)] == 1
        for path, method, status in (("/", "GET", 404), ("/metrics", "POST", 405)):
            async with session.request(method, path) as answer:
                assert answer.status == status


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "planner:9100"}, None),
        ({"Host": "localhost:9100"}, None),
        ({"Host": "evil.example:9100"}, "foreign_host"),
        ({"Origin": "http://evil.example"}, "foreign_origin"),
        ({"Sec-Fetch-Site": "cross-site"}, "foreign_origin"),
    ],
)
async def test_a_page_that_somebody_opens_reads_no_metrics(headers: dict[str, str], code: str | None) -> None:
    async with (
        serve_metrics("127.0.0.1", 0, lambda: (b"all", "text/plain"), names=("planner",)) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.get("/metrics", headers=headers) as answer,
    ):
        text = await answer.text()
        assert (answer.status, text.partition(":")[0]) == ((200, "all") if code is None else (403, code))


async def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen at 127.0.0.1:{port}"):
            async with serve_metrics("127.0.0.1", port, lambda: (b"", "")):
                pass
