"""The SDK against a whole dispatcher, through a proxy that breaks connections: the reader sees the same text, once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import pytest
import pytest_asyncio

from shared.messages.report import WorkerPhase
from shared.messages.request import RefusalReason, Submit
from sluice_client import (
    APIStatusError,
    AsyncSluiceClient,
    ClientLimits,
    ConnectionLostError,
    QoeTarget,
    RetryPolicy,
)
from tests.support.cutting_proxy import cutting
from tests.support.dispatchers import TEXT, Running, Serve
from tests.support.fake_worker import FakeWorker, make_status
from tests.support.waiting import until

LIMITS = ClientLimits(retry=RetryPolicy(first_backoff_s=0.002, max_backoff_s=0.01))
FAST = QoeTarget(ttft_s=0.001, speed_tokens_per_s=10_000.0)
Way = Literal["http", "websocket"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    """A worker that answers every request with TEXT, from where it is told to go on."""
    async with serve(TEXT) as running:
        running.worker.step_s = 0.001  # so that events come one by one
        yield running


def client_of(*urls: str, way: Way = "http", limits: ClientLimits = LIMITS) -> AsyncSluiceClient:
    return AsyncSluiceClient(urls, model="tiny", limits=limits, rng=random.Random(7), transport=way)


def nothing_left(running: Running) -> bool:
    front = running.front
    return not (len(front.sessions.table) or len(front.live) or len(front.streams) or len(front.sockets))


async def size_of_answer(running: Running, way: Way) -> int:
    """Bytes that a whole answer takes on its way to the client."""
    async with cutting(running.url, [10**9]) as proxy, client_of(proxy.url, way=way) as client:
        assert await client.chat("hi", stop="nowhere").read() == TEXT
    return proxy.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "orderly", "step"), [("http", False, 151), ("http", True, 797), ("websocket", False, 397)]
)
async def test_a_connection_cut_anywhere_changes_nothing(served: Running, way: Way, orderly: bool, step: int) -> None:
    """Cut all along the answer, headers included: between events, within events, within characters; reset or FIN."""
    whole = await size_of_answer(served, way)
    for cut in range(1, whole, step):
        async with (
            cutting(served.url, [cut], orderly=orderly) as proxy,
            client_of(proxy.url, way=way) as client,
        ):
            shown = [piece async for piece in client.chat("hi", stop="nowhere", pace="off")]
            assert "".join(shown) == TEXT, cut
            await until(lambda: proxy.num_cut == 1)
    await until(lambda: nothing_left(served))


@pytest.mark.parametrize("way", ["http", "websocket"])
async def test_a_connection_that_is_cut_again_and_again_still_brings_the_whole_answer(
    served: Running, way: Way
) -> None:
    """Each connection brings two or three events; each of them is progress."""
    async with cutting(served.url, [1400] * 12) as proxy, client_of(proxy.url, way=way) as client:
        answer = client.chat("hi", pace="off", logprobs=True)
        shown = [piece async for piece in answer]
        assert "".join(shown) == answer.text == TEXT
        assert answer.finish_reason == "stop"
        assert (answer.usage or {})["completion_tokens"] == len(served.encode(TEXT)) + 1
        assert proxy.num_cut >= 3
    await until(lambda: nothing_left(served))


async def test_an_answer_goes_on_at_another_dispatcher_when_its_own_dies(serve: Serve) -> None:
    """The second one knows nothing of the request: key and body are enough to make the same answer."""
    seeds = []

    def script(submit: Submit) -> Sequence[int]:
        seeds.append((submit.request_id, submit.sampling.seed, len(submit.generated_ids())))
        return [*first.encode(TEXT), first.end_id]

    async with (
        serve(script) as first,
        serve(script) as second,
        cutting(first.url, [2000, 0]) as proxy,  # and then there is nobody
        client_of(proxy.url, second.url) as client,
    ):
        first.worker.step_s = 0.001
        answer = client.chat("hi", pace="smooth", qoe=FAST)
        assert "".join([piece async for piece in answer]) == TEXT
        assert seeds == [seeds[0]] * 2
        assert proxy.num_connections == 2


async def test_a_draining_dispatcher_hands_its_clients_over(serve: Serve) -> None:
    async with serve() as first, serve(TEXT) as second, client_of(first.url, second.url) as client:
        answer = client.chat("hi", pace="off")
        reading = asyncio.create_task(answer.read())
        (item,) = await first.begun()
        await first.worker.emit(item, first.encode(TEXT)[:4])
        await until(lambda: answer.text)
        await first.dispatcher.service.drain(0.0)
        assert await reading == TEXT


async def test_an_answer_that_lost_its_worker_and_found_no_room_goes_on_when_there_is_some(serve: Serve) -> None:
    """The other worker is ready and full, so the stream ends with `queue_full`."""
    async with serve(queue_limit_s=0.2) as running, client_of(running.url) as client:
        full = FakeWorker(running.bus, "w1", lambda _: [*running.encode(TEXT), running.end_id])
        full.refuse = RefusalReason.FULL
        await full.start()
        answer = client.chat("hi", pace="off")
        reading = asyncio.create_task(answer.read())
        (item,) = await running.begun()
        await running.worker.emit(item, running.encode(TEXT)[:4])
        await until(lambda: answer.text)
        await running.worker.stop()
        await running.view(make_status(phase=WorkerPhase.STOPPED), make_status("w1"))
        await until(lambda: not running.table)
        full.refuse = None
        assert await reading == TEXT
        await full.stop()
        samples = [sample for sample in await running.samples() if sample.name == "sluice:requests_total"]
        assert {sample.labels["finish"] for sample in samples} >= {"queue_full", "stop"}


@pytest.mark.parametrize("way", ["http", "websocket"])
async def test_overload_is_retried_and_other_errors_are_raised(serve: Serve, way: Way) -> None:
    limits = ClientLimits(retry=RetryPolicy(max_retries=0))
    async with (
        serve("hi", queue_limit_s=0.05) as running,
        client_of(running.url, way=way) as client,
        client_of(running.url, way=way, limits=limits) as impatient,
    ):
        running.worker.refuse = RefusalReason.TOO_LONG
        with pytest.raises(APIStatusError) as refused:
            await client.chat("hi").read()
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        assert len(running.worker.submits) == 1
        running.worker.refuse = None
        await running.view(make_status(phase=WorkerPhase.LOADING, model=""))
        with pytest.raises(APIStatusError) as loading:
            await impatient.chat("hi").read()
        assert (loading.value.status, loading.value.code) == (503, "model_loading")
        assert loading.value.retry_after_s == 5.0


@pytest.mark.parametrize("way", ["http", "websocket"])
@pytest.mark.parametrize("how", ["cancel", "stop", "aclose", "context"])
@pytest.mark.parametrize("stage", ["submitting", "prefill", "mid-stream"])
async def test_an_answer_that_is_left_is_cancelled_at_every_stage(
    running: Running, way: Way, how: str, stage: str
) -> None:
    async with client_of(running.url, way=way) as client:
        worker = running.worker
        worker.answers = stage != "submitting"
        answer = client.chat("hi", pace="off")
        async with answer:
            reading = asyncio.create_task(read_all(answer))
            await until(lambda: worker.submits)
            if worker.answers:
                (item,) = await running.begun()
            if stage == "mid-stream":
                await worker.emit(item, running.encode("Hello"))
                await until(lambda: answer.text)
            if how != "context":
                await getattr(answer, how)()
        await asyncio.wait([reading], timeout=10)
        assert reading.done()
        await worker.wait_cancelled()
        await running.until_nothing_is_left()
        worker.answers = True
        assert worker.running == {}


async def read_all(answer: Any) -> None:
    async for _ in answer:
        pass


async def test_seventeen_answers_at_once_take_a_second_connection(running: Running) -> None:
    async with client_of(running.url, way="websocket") as client:
        reading = [asyncio.create_task(client.chat("hi", pace="off").read()) for _ in range(17)]
        items = await running.begun(17)
        assert len(running.front.sockets) == 2
        for item in items:
            await running.end(item, TEXT)
        assert await asyncio.gather(*reading) == [TEXT] * 17


async def test_a_server_that_never_comes_back_ends_the_answer_with_an_error(running: Running) -> None:
    policy = RetryPolicy(first_backoff_s=0.002, max_backoff_s=0.01, resume_limit_s=0.1)
    async with (
        cutting(running.url, [1200]) as proxy,
        client_of(proxy.url, limits=ClientLimits(retry=policy)) as client,
    ):
        answer = client.chat("hi", pace="off")
        reading = asyncio.create_task(answer.read())
        (item,) = await running.begun()
        proxy.refuse()
        whole = f"{TEXT} " * 4
        for word in whole.split(" "):  # one event each: together they would be too few bytes to be cut
            num_bytes = proxy.num_bytes
            await running.worker.emit(item, running.encode(f"{word} "))
            await until(lambda before=num_bytes: proxy.num_bytes > before or proxy.num_cut)
        with pytest.raises(ConnectionLostError, match="could not be resumed: no answer from"):
            await reading
        assert whole.startswith(answer.text)


async def test_a_server_without_websockets_is_named_with_the_way_out() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with client_of(url, way="websocket") as client:
            with pytest.raises(APIStatusError, match="transport='http'") as refused:
                await client.chat("hi").read()
    assert refused.value.status == 404
