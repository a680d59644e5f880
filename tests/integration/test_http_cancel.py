"""POST /v1/requests/{id}/cancel: at every stage, by its owner only, as often as one likes; nothing is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.messages.request import RefusalReason
from tests.support.dispatchers import Running, Serve, hold_tokenizer
from tests.support.waiting import until

MINE = {"Authorization": "Bearer mine"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def cancel(running: Running, name: str, **headers: str) -> tuple[int, Any]:
    url = f"{running.url}/v1/requests/{name}/cancel"
    async with running.http.post(url, headers={**MINE, **headers}) as response:
        return response.status, await response.json()


def ask(running: Running, headers: dict[str, str] | None = None, **body: Any) -> asyncio.Task[tuple[int, str]]:
    """Send a request under the name `job-1`."""

    async def send() -> tuple[int, str]:
        async with running.ask(headers={**MINE, "x-request-id": "job-1", **(headers or {})}, **body) as response:
            return response.status, await response.text()

    return asyncio.create_task(send())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stage", ["tokenising", "submitting", "waiting for room", "prefill", "mid-stream"])
async def test_a_cancelled_request_ends_leaves_nothing_and_counts_as_one(
    running: Running, monkeypatch: pytest.MonkeyPatch, stage: str, num_choices: int, streamed: bool
) -> None:
    worker = running.worker
    worker.answers = stage != "submitting"
    worker.refuse = RefusalReason.FULL if stage == "waiting for room" else None
    leave = hold_tokenizer(running, monkeypatch, "encode_chat") if stage == "tokenising" else lambda: None
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
    await running.until_nothing_is_left()
    assert (await cancel(running, "job-1"))[1]["status"] == "cancelled"
    samples = {sample.name: sample for sample in await running.samples()}
    assert samples["sluice:requests_total"].labels["finish"] == "cancelled"
    assert samples["vllm:request_success_total"].labels["finished_reason"] == "abort"


async def reached(running: Running, stage: str, num_choices: int) -> None:
    """Return when the request has come so far."""
    front, worker = running.front, running.worker
    if stage == "tokenising":
        await until(lambda: front.pool.num_pending)
    elif stage == "submitting":
        await until(lambda: worker.submits)
    elif stage == "waiting for room":
        await until(lambda: front.sessions.num_queued)
    else:
        for item in await running.begun(num_choices):
            if stage == "mid-stream":
                await worker.emit(item, running.encode("Hello"))


async def test_others_cannot_cancel_nor_learn_of_a_request(running: Running) -> None:
    answer = ask(running, stream=True)
    (item,) = await running.begun()
    for name in ("job-1", f"chatcmpl-{item.submit.request_id}"):
        status, body = await cancel(running, name, Authorization="Bearer other")
        assert (status, body["error"]["code"]) == (404, "not_found")
    assert running.worker.running
    assert (await cancel(running, f"chatcmpl-{item.submit.request_id}"))[0] == 200
    assert "request_cancelled" in (await answer)[1]
    status, _ = await cancel(running, "job-1", Authorization="Bearer other")
    assert status == 404


async def test_a_request_that_ended_by_itself_says_so_and_one_that_never_was_is_not_found(serve: Serve) -> None:
    async with serve("hi") as running:
        assert (await ask(running))[0] == 200
        assert (await cancel(running, "job-1"))[1]["status"] == "ended"
        assert (await cancel(running, "job-2"))[0] == 404
        assert (await cancel(running, ""))[0] == 404
        async with running.http.get(f"{running.url}/v1/requests/job-1/cancel") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_a_cancelled_request_is_not_begun_again_under_its_key(running: Running) -> None:
    """What an SDK sends again by itself must not undo what a person wants."""
    first = ask(running, {"Idempotency-Key": "k"})
    await running.begun()
    await cancel(running, "job-1")
    assert (await first)[0] == 409
    status, told = await ask(running, {"Idempotency-Key": "k"})
    assert (status, "request_cancelled" in told) == (409, True)
    assert len(running.worker.submits) == 1
