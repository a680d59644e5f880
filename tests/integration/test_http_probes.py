"""Probes, models, metrics and the cluster page's data."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.status import run_status
from services.dispatcher.build import load_text
from shared.errors import StartupError
from shared.messages.report import Liveness, TransferKind, TransferProgress, WorkerPhase
from shared.messages.report_parts import MigrationPart, PrefixSketch, SharedPrefix
from shared.troubleshooting import sections
from shared.version import VERSION
from tests.support.dispatchers import Running, Serve, load_model, make_settings, running_dispatcher
from tests.support.fake_worker import make_status
from tests.support.raw_http import check_error
from tests.support.statuses import make_elastic_report, make_elastic_view
from tests.support.waiting import until

MEMORY_SERIES = ("sluice:host_blocks", "sluice:preempted_tokens_total", "sluice:pauses_total")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    async with serve(lambda _: [65, 66, 67], ready=False) as running:
        yield running


async def test_readiness_follows_the_workers_and_the_broker(served: Running) -> None:
    status, body = await served.get("/ready")
    assert (status, body["reason"]) == (503, "no worker is alive")
    loading = make_status(phase=WorkerPhase.LOADING, model="", progress_ratio=0.25, progress_text="reading")
    await served.view(loading)
    status, body = await served.get("/ready")
    assert (status, body["reason"]) == (503, "the model is loading")
    assert body["workers"] == [
        {
            "worker_id": "w0",
            "phase": "loading",
            "liveness": "alive",
            "progress_ratio": 0.25,
            "progress_text": "reading",
        }
    ]
    await served.view(make_status())
    assert await served.get("/health") == (200, {"status": "ok"})
    assert (await served.get("/ready"))[0] == 200
    served.broker.available = False
    assert (await served.get("/health"))[0] == 503
    assert await served.get("/live") == (200, {"status": "live"})
    served.broker.available = True


async def test_every_error_has_its_page_and_what_is_none_is_not_found(served: Running) -> None:
    for code, text in sections().items():
        async with served.http.get(f"{served.url}/errors/{code}") as answer:
            assert (answer.status, await answer.text()) == (200, text)
    for code in ("", "nothing", "..%2ftroubleshooting.md", "queue_full/"):
        status, body = await served.get(f"/errors/{code}")
        assert check_error(status, body) == (404, "not_found", None)
    async with served.http.post(f"{served.url}/errors/queue_full") as answer:
        assert check_error(answer.status, await answer.json()) == (405, "method_not_allowed", None)


async def test_a_worker_that_serves_another_model_does_not_count(served: Running) -> None:
    await served.view(make_status(model="other"))
    assert (await served.get("/ready"))[1]["reason"] == "no worker is alive"


async def test_models_are_listed_at_once_and_say_what_the_workers_hold(served: Running) -> None:
    status, body = await served.get("/v1/models")
    assert status == 200
    (model,) = body["data"]
    assert model["max_model_len"] == 512
    assert isinstance(model["created"], int)
    await served.view(make_status(max_model_len=512, num_blocks=10, block_size=16))
    assert (await served.get("/v1/models/tiny"))[1]["max_model_len"] == 160
    status, body = await served.get("/v1/models/other/tiny")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_model_name_may_have_a_slash(serve: Serve) -> None:
    async with serve(served_model_name="org/tiny-1.5") as running:
        for path in ("/v1/models/org/tiny-1.5", "/v1/models/org%2Ftiny-1.5"):
            assert (await running.get(path))[1]["id"] == "org/tiny-1.5"


async def test_a_model_of_several_names_answers_to_each_under_the_first(serve: Serve) -> None:
    names = "tiny,org/tiny-1.5,gpt-4"
    async with serve(lambda _: [65], served_model_name=names) as running:
        _, listed = await running.get("/v1/models")
        assert [(model["id"], model["root"]) for model in listed["data"]] == [(n, "tiny") for n in names.split(",")]
        assert (await running.get("/v1/models/org/tiny-1.5"))[1]["id"] == "org/tiny-1.5"
        for name in names.split(","):
            status, body = await running.post(model=name)
            assert (status, body.get("model")) == (200, "tiny")
        assert (await running.post(model="other"))[0] == 404


async def test_the_models_own_sampling_holds_unless_it_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 9}')
    load_model(tmp_path)
    for setting, expected in (("auto", (0.25, 9)), ("none", (1.0, 0))):
        text = load_text(make_settings(tmp_path, generation_config=setting))
        async with running_dispatcher(text, tmp_path, lambda _: [65]) as running:
            await running.post()
            sampling = running.worker.submits[-1].sampling
            assert (sampling.temperature, sampling.top_k) == expected


async def test_the_cluster_view_is_handed_on_with_its_age(served: Running) -> None:
    status, body = await served.get("/v1/cluster")
    assert (status, body["workers"], body["age_s"]) == (200, [], None)
    shared = MigrationPart(shared_prefixes=(SharedPrefix(name="ab" * 16, num_blocks=3),), num_left_total=7)
    await served.view(make_status(num_running=3, prefixes=PrefixSketch(marks="AQAAAA=="), migration=shared))
    _, body = await served.get("/v1/cluster")
    report = body["workers"][0]["report"]
    assert (report["num_running"], report["migration"]["num_left_total"]) == (3, 7)
    assert "prefixes" not in report, "what is made of prompts is nobody's to see"
    assert "shared_prefixes" not in report["migration"]
    assert body["age_s"] >= 0
    assert body["dispatcher"]["model"] == "tiny"


async def test_the_view_of_a_large_cluster_is_handed_on_whole_and_read_by_status(served: Running) -> None:
    """Over 8 MiB as JSON, and over 1 MiB without what does not change."""
    await served.view(*make_elastic_view(4000, model="tiny").workers)
    await until(lambda: served.front.sessions.cluster.num_ready == 4000)
    shown = await run_status(served.url, as_json=False)
    assert "4000 of 4000 workers can take requests" in shown
    status, body = await served.get("/v1/cluster")
    assert (status, len(body["workers"])) == (200, 4000)
    expected = make_elastic_report(3999, model="tiny").model_dump(mode="json")
    del expected["prefixes"], expected["migration"]["shared_prefixes"]
    assert body["workers"][-1]["report"] == expected
    assert body["num_left_out"] == 0
    assert not body.keys() & {"part", "num_parts", "facts"}


async def test_metrics_carry_both_families_of_names_and_true_counts(served: Running) -> None:
    await served.view(make_status(num_running=2, num_waiting=1, num_used_blocks=250))
    for _ in range(2):
        await served.stream()
    samples = {
        (sample.name, sample.labels.get("finished_reason", ""), sample.labels.get("le", "")): sample
        for sample in await served.samples()
    }

    def value(name: str, reason: str = "", le: str = "") -> float:
        assert samples[name, reason, le].labels["model_name"] == "tiny"
        return float(samples[name, reason, le].value)

    assert value("vllm:request_success_total", "stop") == 2
    assert value("vllm:prompt_tokens_total") == 26
    assert value("vllm:generation_tokens_total") == 6
    assert value("vllm:time_to_first_token_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds_count") == 4
    assert value("vllm:inter_token_latency_seconds_bucket", le="+Inf") == 4
    assert value("vllm:e2e_request_latency_seconds_count") == 2
    assert value("vllm:request_queue_time_seconds_count") == 2
    assert value("vllm:request_time_per_output_token_seconds_count") == 2
    assert value("vllm:num_requests_running") == 2
    assert value("vllm:num_requests_waiting") == 1
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("sluice:qoe_count") == value("sluice:stall_seconds_count") == 2
    assert value("sluice:pacer_buffer_tokens") == 0, "no stream is open"


async def test_workers_are_counted_by_phase_and_liveness_and_restarts_by_worker(served: Running) -> None:
    """However many there are, the counts are twelve series; of restarts each worker has one, which begins with 0."""
    await served.view(make_status("a", pid=1), make_status("b"), make_status("c", liveness=Liveness.DEAD))
    await served.samples()
    await served.view(make_status("a", pid=2, phase=WorkerPhase.LOADING), make_status("b"))
    samples = await served.samples()
    assert len([each for each in samples if each.name == "sluice:workers"]) == 12
    counts = {
        (each.labels["phase"], each.labels["liveness"]): each.value
        for each in samples
        if each.name == "sluice:workers" and each.value
    }
    assert counts == {("loading", "alive"): 1, ("ready", "alive"): 1}
    restarts = {each.labels["worker"]: each.value for each in samples if each.name == "sluice:worker_restarts_total"}
    assert restarts == {"a": 1, "b": 0, "c": 0}


async def test_many_workers_add_no_more_series_each_than_few(served: Running) -> None:
    """Of the state's names one, the restarts, has a series for each worker."""
    counts = []
    for number in (20, 40):
        await served.view(*(make_status(f"w{index}") for index in range(number)))
        samples = await served.samples()
        names = ("sluice:workers", "sluice:worker_restarts_total", "sluice:view_age_seconds", "sluice:ready")
        counts.append([len([each for each in samples if each.name == name]) for name in names])
    assert counts == [[12, 20, 1, 1], [12, 40, 1, 1]]


async def test_readiness_draining_and_what_runs_are_metrics(served: Running) -> None:
    async def read() -> dict[str, float]:
        return {each.name: each.value for each in await served.samples()}

    before = await read()
    assert (before["sluice:ready"], before["sluice:draining"]) == (0, 0)
    assert "sluice:view_age_seconds" not in before
    await served.view(make_status())
    there = await read()
    assert (there["sluice:ready"], there["sluice:draining"]) == (1, 0)
    assert 0 <= there["sluice:view_age_seconds"] < 60
    served.front.sessions.draining = True
    drains = await read()
    assert (drains["sluice:ready"], drains["sluice:draining"]) == (0, 1)
    served.front.sessions.draining = False
    (info,) = [each for each in await served.samples() if each.name == "sluice:build_info"]
    assert (info.value, info.labels["version"], info.labels["model_name"]) == (1, VERSION, "tiny")
    assert info.labels.keys() == {"model_name", "version", "python", "system"}


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
async def test_figures_of_the_process_have_the_names_of_prometheus_clients(served: Running) -> None:
    samples = {each.name: each for each in await served.samples() if each.name.startswith("process_")}
    own = ("resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds", "cpu_seconds_total")
    assert {f"process_{name}" for name in own} <= samples.keys()
    assert all(each.value > 0 and not each.labels for each in samples.values())


async def test_what_is_on_its_way_to_a_worker_is_told_until_it_is_there(served: Running) -> None:
    move = TransferProgress(
        kind=TransferKind.KV_EXCHANGE, num_bytes=1000, num_moved_bytes=250, bytes_per_s=50.0, num_waiting=3, mode="live"
    )
    pages: list[dict[str, float]] = []
    for moves in ((move,), ()):
        await served.view(make_status(moves=moves))
        samples = [sample for sample in await served.samples() if sample.name.startswith("sluice:move_")]
        labels = {"model_name": "tiny", "worker": "w0", "kind": "kv_exchange"}
        assert all(sample.labels == labels for sample in samples)
        pages.append({sample.name.removeprefix("sluice:move_"): sample.value for sample in samples})
    assert pages == [{"left_bytes": 750, "moved_bytes": 250, "bytes_per_second": 50.0, "waiting_requests": 3}, {}]


async def test_what_became_of_kv_that_gave_way_or_lay_still_is_told(served: Running) -> None:
    """A worker that brought back 500 tokens starts anew and brings back 40: 540 in all."""
    pages: list[dict[str, float]] = []
    for back in (500, 40):
        totals: dict[str, Any] = {"num_recomputed_tokens_total": 70, "num_brought_back_tokens_total": back}
        totals["num_pauses_total"] = 7
        blocks: dict[str, Any] = {"num_host_blocks": 96, "num_used_host_blocks": 9}
        await served.view(make_status(**blocks, **totals, num_given_up_tokens_total=16))
        samples = [each for each in await served.samples() if each.name in MEMORY_SERIES]
        assert all(each.labels["worker"] == "w0" for each in samples)
        pages.append({each.labels.get("what") or each.labels.get("state", "pauses"): each.value for each in samples})
    assert pages[0] == {"used": 9, "all": 96, "recomputed": 70, "brought_back": 500, "given_up": 16, "pauses": 7}
    assert pages[1] == {**pages[0], "brought_back": 540}


async def test_the_cache_counts_of_a_worker_that_was_started_anew_go_on(served: Running) -> None:
    """The worker has looked up 100 tokens and found 64, then starts anew and finds 10 of 30: 130 and 74 in all."""
    counts: list[dict[str, float]] = []
    for queries, hits in ((100, 64), (100, 64), (30, 10)):
        status = make_status(num_prefix_cache_queries_total=queries, num_prefix_cache_hits_total=hits)
        await served.view(status)
        samples = [sample for sample in await served.samples() if "prefix_cache" in sample.name]
        assert all(sample.labels == {"model_name": "tiny", "worker": "w0"} for sample in samples)
        counts.append({sample.name.removeprefix("vllm:prefix_cache_"): sample.value for sample in samples})
    assert counts == [{"queries_total": 100, "hits_total": 64}] * 2 + [{"queries_total": 130, "hits_total": 74}]


async def test_a_port_that_is_taken_stops_the_start_with_one_line(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is already in use"):
            async with serve(port=port):
                raise AssertionError("it started")


async def test_the_default_is_to_listen_on_this_machine_only(folder: Path) -> None:
    assert make_settings(folder).host == "127.0.0.1"
