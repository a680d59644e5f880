"""POST /v1/requests/{id}/cancel: at every stage, by its owner only, as often as one likes; nothing is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.dispatcher.build import ModelText
from shared.messages.request import RefusalReason
from tests.support.dispatchers import Running, running_dispatcher
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
MINE = {"Authorization": "Bearer mine"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def cancel(running: Running, name: str, **headers: str) -> tuple[int, Any]:
    url = f"{running.url}/v1/requests/{name}/cancel"
    async with running.http.post(url, headers={**MINE, **headers}) as response:
        return response.status, await response.json()


def ask(running: Running, **body: Any) -> asyncio.Task[tuple[int, str]]:
    """Send a request under the name `job-1`."""

    async def send() -> tuple[int, str]:
        headers = {**MINE, "x-request-id": "job-1"}
        body_ = {"model": "tiny", "messages": HELLO, **body}
        async with running.http.post(running.url + CHAT, json=body_, headers=headers) as response:
            return response.status, await response.text()

    return asyncio.create_task(send())


async def tokenising(running: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    entered, leave = threading.Event(), threading.Event()
    encode = running.dispatcher.front.codec.encode_chat

    def slow(messages: Any) -> list[int]:
        entered.set()
        leave.wait(5)
        return encode(messages)

    monkeypatch.setattr(running.dispatcher.front.codec, "encode_chat", slow)
    return leave.set


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stage", ["tokenising", "submitting", "waiting for room", "prefill", "mid-stream"])
async def test_a_cancelled_request_ends_and_leaves_nothing(
    text: ModelText, folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, num_choices: int, streamed: bool
) -> None:
    async with running_dispatcher(text, folder) as running:
        worker, table = running.worker, running.dispatcher.service.sessions.table
        worker.answers = stage != "submitting"
        worker.refuse = RefusalReason.FULL if stage == "waiting for room" else None
        leave = await tokenising(running, monkeypatch) if stage == "tokenising" else lambda: None
        answer = ask(running, stream=streamed, n=num_choices)
        await reached(running, stage, num_choices)
        assert await cancel(running, "job-1") == (
            200,
            {"id": "job-1", "object": "request.cancellation", "status": "cancelled"},
        )
        status, told = await asyncio.wait_for(answer, 10)
        assert (status == 200) == (streamed and stage in ("prefill", "mid-stream"))
        assert "request_cancelled" in told
        assert '"finish_reason": "' not in told
        leave()
        worker.answers = True
        await until(lambda: not len(table) and not len(running.dispatcher.front.live) and not worker.running)
        assert running.dispatcher.service.sessions.num_queued == 0
        assert len(running.dispatcher.front.streams) == 0
        assert (await cancel(running, "job-1"))[1]["status"] == "cancelled"


async def reached(running: Running, stage: str, num_choices: int) -> None:
    """Return when the request has come so far."""
    front, worker = running.dispatcher.front, running.worker
    if stage == "tokenising":
        await until(lambda: front.pool.num_pending)
    elif stage == "submitting":
        await until(lambda: worker.submits)
    elif stage == "waiting for room":
        await until(lambda: front.sessions.num_queued)
    else:
        await until(lambda: len(worker.running) == num_choices)
        if stage == "mid-stream":
            for item in list(worker.running.values()):
                await worker.emit(item, running.encode("Hello"))


async def test_others_cannot_cancel_nor_learn_of_a_request(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        answer = ask(running, stream=True)
        await until(lambda: running.worker.running)
        (submit,) = running.worker.submits
        for name in ("job-1", f"chatcmpl-{submit.request_id}"):
            status, body = await cancel(running, name, Authorization="Bearer other")
            assert (status, body["error"]["code"]) == (404, "not_found")
        assert running.worker.running
        assert (await cancel(running, f"chatcmpl-{submit.request_id}"))[0] == 200
        assert "request_cancelled" in (await answer)[1]
        status, _ = await cancel(running, "job-1", Authorization="Bearer other")
        assert status == 404


async def test_a_request_that_ended_by_itself_says_so_and_one_that_never_was_is_not_found(
    text: ModelText, folder: Path
) -> None:
    async with running_dispatcher(text, folder, lambda _: [65, 66]) as running:
        assert (await ask(running))[0] == 200
        assert (await cancel(running, "job-1"))[1]["status"] == "ended"
        assert (await cancel(running, "job-2"))[0] == 404
        assert (await cancel(running, ""))[0] == 404
        async with running.http.get(f"{running.url}/v1/requests/job-1/cancel") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_a_cancelled_request_is_not_begun_again_under_its_key(text: ModelText, folder: Path) -> None:
    """What an SDK sends again by itself must not undo what a person wants."""
    async with running_dispatcher(text, folder) as running:

        def send() -> Awaitable[tuple[int, str]]:
            async def post() -> tuple[int, str]:
                headers = {**MINE, "Idempotency-Key": "k", "x-request-id": "job-1"}
                body = {"model": "tiny", "messages": HELLO}
                async with running.http.post(running.url + CHAT, json=body, headers=headers) as response:
                    return response.status, await response.text()

            return asyncio.create_task(post())

        first = send()
        await until(lambda: running.worker.running)
        await cancel(running, "job-1")
        assert (await first)[0] == 409
        status, told = await send()
        assert (status, "request_cancelled" in told) == (409, True)
        assert len(running.worker.submits) == 1


async def test_a_cancellation_counts_as_one_in_metrics(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        answer = ask(running, stream=True)
        await until(lambda: running.worker.running)
        await cancel(running, "job-1")
        await answer
        async with running.http.get(running.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        assert any(line.startswith("sluice:requests_total") and 'finish="cancelled"' in line for line in lines)
        assert any(
            line.startswith("vllm:request_success_total") and 'finished_reason="abort"' in line for line in lines
        )
