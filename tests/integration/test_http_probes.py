"""Probes, models, metrics and the cluster page's data."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from services.dispatcher.build import ModelText, load_text
from shared.errors import StartupError
from shared.messages.report import Move, MoveKind, WorkerPhase
from tests.support.dispatchers import Running, load_model, make_settings, running_dispatcher
from tests.support.fake_worker import make_status, publish_view

HELLO = [{"role": "user", "content": "hi"}]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(text: ModelText, folder: Path) -> AsyncIterator[Running]:
    async with running_dispatcher(text, folder, lambda _: [65, 66, 67], ready=False) as running:
        yield running


async def get(running: Running, path: str) -> tuple[int, Any]:
    async with running.http.get(running.url + path) as response:
        return response.status, await response.json()


async def test_readiness_follows_the_workers_and_the_broker(served: Running) -> None:
    status, body = await get(served, "/ready")
    assert (status, body["reason"]) == (503, "no worker is alive")
    loading = make_status(phase=WorkerPhase.LOADING, model="", progress_ratio=0.25, progress_text="reading")
    await publish_view(served.bus, loading)
    await asyncio.sleep(0.01)
    status, body = await get(served, "/ready")
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
    await publish_view(served.bus, make_status(), number=2)
    await asyncio.sleep(0.01)
    assert await get(served, "/health") == (200, {"status": "ok"})
    assert (await get(served, "/ready"))[0] == 200
    served.broker.available = False
    assert (await get(served, "/health"))[0] == 503
    assert await get(served, "/live") == (200, {"status": "live"})
    served.broker.available = True


async def test_a_worker_that_serves_another_model_does_not_count(served: Running) -> None:
    await publish_view(served.bus, make_status(model="other"))
    await asyncio.sleep(0.01)
    assert (await get(served, "/ready"))[1]["reason"] == "no worker is alive"


async def test_models_are_listed_at_once_and_say_what_the_workers_hold(served: Running) -> None:
    status, body = await get(served, "/v1/models")
    assert status == 200
    (model,) = body["data"]
    assert model["max_model_len"] == 512
    assert isinstance(model["created"], int)
    await publish_view(served.bus, make_status(max_model_len=512, num_blocks=10, block_size=16))
    await asyncio.sleep(0.01)
    assert (await get(served, "/v1/models/tiny"))[1]["max_model_len"] == 160
    status, body = await get(served, "/v1/models/other/tiny")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_model_name_may_have_a_slash(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder, served_model_name="org/tiny-1.5") as running:
        for path in ("/v1/models/org/tiny-1.5", "/v1/models/org%2Ftiny-1.5"):
            assert (await get(running, path))[1]["id"] == "org/tiny-1.5"


async def test_a_model_of_several_names_answers_to_each_under_the_first(text: ModelText, folder: Path) -> None:
    names = "tiny,org/tiny-1.5,gpt-4"
    async with running_dispatcher(text, folder, lambda _: [65], served_model_name=names) as running:
        _, listed = await get(running, "/v1/models")
        assert [(model["id"], model["root"]) for model in listed["data"]] == [(n, "tiny") for n in names.split(",")]
        assert (await get(running, "/v1/models/org/tiny-1.5"))[1]["id"] == "org/tiny-1.5"
        for name in names.split(","):
            status, body = await running.post("/v1/chat/completions", model=name, messages=HELLO)
            assert (status, body.get("model")) == (200, "tiny")
        assert (await running.post("/v1/chat/completions", model="other", messages=HELLO))[0] == 404


async def test_the_models_own_sampling_holds_unless_it_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 9}')
    load_model(tmp_path)
    for setting, expected in (("auto", (0.25, 9)), ("none", (1.0, 0))):
        text = load_text(make_settings(tmp_path, generation_config=setting))
        async with running_dispatcher(text, tmp_path, lambda _: [65]) as running:
            await running.post("/v1/chat/completions", messages=HELLO)
            sampling = running.worker.submits[-1].sampling
            assert (sampling.temperature, sampling.top_k) == expected


async def test_the_cluster_view_is_handed_on_with_its_age(served: Running) -> None:
    status, body = await get(served, "/v1/cluster")
    assert (status, body["workers"], body["age_s"]) == (200, [], None)
    await publish_view(served.bus, make_status(num_running=3))
    await asyncio.sleep(0.01)
    _, body = await get(served, "/v1/cluster")
    assert body["workers"][0]["report"]["num_running"] == 3
    assert body["age_s"] >= 0
    assert body["dispatcher"]["model"] == "tiny"


async def test_metrics_carry_both_families_of_names_and_true_counts(served: Running) -> None:
    await publish_view(served.bus, make_status(num_running=2, num_waiting=1, num_used_blocks=250))
    await asyncio.sleep(0.01)
    for _ in range(2):
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        async with served.http.post(served.url + "/v1/chat/completions", json=body) as response:
            await response.read()
    async with served.http.get(served.url + "/metrics") as response:
        assert response.status == 200
        page = await response.text()
    samples = {
        (sample.name, sample.labels.get("finished_reason", ""), sample.labels.get("le", "")): sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
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
    assert value("sluice:qoe_count") == 2


async def test_what_is_on_its_way_to_a_worker_is_told_until_it_is_there(served: Running) -> None:
    move = Move(
        kind=MoveKind.KV_EXCHANGE, num_bytes=1000, num_moved_bytes=250, bytes_per_s=50.0, num_waiting=3, mode="live"
    )
    pages: list[dict[str, float]] = []
    for number, moves in enumerate(((move,), ()), start=1):
        await publish_view(served.bus, make_status(moves=moves), number=number)
        await asyncio.sleep(0.01)
        async with served.http.get(served.url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        samples = [sample for family in families for sample in family.samples if sample.name.startswith("sluice:move_")]
        labels = {"model_name": "tiny", "worker": "w0", "kind": "kv_exchange"}
        assert all(sample.labels == labels for sample in samples)
        pages.append({sample.name.removeprefix("sluice:move_"): sample.value for sample in samples})
    assert pages == [{"left_bytes": 750, "moved_bytes": 250, "bytes_per_second": 50.0, "waiting_requests": 3}, {}]


async def test_the_cache_counts_of_a_worker_that_was_started_anew_go_on(served: Running) -> None:
    """The worker has looked up 100 tokens and found 64, then starts anew and finds 10 of 30: 130 and 74 in all."""
    counts: list[dict[str, float]] = []
    for number, (queries, hits) in enumerate(((100, 64), (100, 64), (30, 10)), start=1):
        status = make_status(num_prefix_cache_queries_total=queries, num_prefix_cache_hits_total=hits)
        await publish_view(served.bus, status, number=number)
        await asyncio.sleep(0.01)
        async with served.http.get(served.url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        samples = [sample for family in families for sample in family.samples if "prefix_cache" in sample.name]
        assert all(sample.labels == {"model_name": "tiny", "worker": "w0"} for sample in samples)
        counts.append({sample.name.removeprefix("vllm:prefix_cache_"): sample.value for sample in samples})
    assert counts == [{"queries_total": 100, "hits_total": 64}] * 2 + [{"queries_total": 130, "hits_total": 74}]


async def test_a_port_that_is_taken_stops_the_start_with_one_line(text: ModelText, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is already in use"):
            async with running_dispatcher(text, folder, port=port):
                raise AssertionError("it started")


async def test_the_default_is_to_listen_on_this_machine_only(folder: Path) -> None:
    assert make_settings(folder).host == "127.0.0.1"
