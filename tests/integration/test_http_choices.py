"""Several choices of one request: indices, ends, bill and workers; what happens when one fails or all are left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.messages.request import RefusalReason, Submit
from shared.process.log import flush_log
from shared.types import MAX_SEED, FinishReason
from tests.support.dispatchers import CHAT, COMPLETIONS, Running, Serve, index_of, texts_of, usage_of
from tests.support.fake_worker import FakeWorker, make_status

TEXTS = ["one fox", "two 🦊 foxes", "three foxes went down"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    """A worker whose answer to choice i is `TEXTS[i]`."""

    def script(submit: Submit) -> list[int]:
        return [*running.encode(TEXTS[index_of(submit) % len(TEXTS)]), running.end_id]

    async with serve(script, queue_limit_s=0.2) as running:
        running.worker.cached_tokens = 11
        yield running


def billed(running: Running) -> int:
    return sum(len(running.encode(words)) + 1 for words in TEXTS)


async def test_whole_choices_stand_in_order_and_the_prompt_is_billed_once(served: Running) -> None:
    status, body = await served.post(n=3)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == TEXTS
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert body["usage"] == usage_of(13, billed(served), 11)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streamed_choices_carry_their_index_and_end_each_by_itself(served: Running, path: str) -> None:
    events = await served.stream(path, n=3, max_tokens=100, stream_options={"include_usage": True})
    assert texts_of(events, 3) == TEXTS
    finishes = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [(0, "stop"), (1, "stop"), (2, "stop")]
    for index in range(3):  # nothing of a choice comes after its finish reason, and its role comes first
        own = [c for e in events for c in e["choices"] if c["index"] == index]
        assert own[-1]["finish_reason"] == "stop"
        if path == CHAT:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == events[-1]["sluice"]["tokens"] == billed(served)
    assert all(event["usage"] is None for event in events[:-1])


async def test_without_usage_each_finish_reason_carries_the_choices_own_estimate(served: Running) -> None:
    events = await served.stream(n=3)
    ends = {e["choices"][0]["index"]: e["sluice"]["tokens"] for e in events if e["choices"][0]["finish_reason"]}
    assert ends == {index: len(served.encode(words)) + 1 for index, words in enumerate(TEXTS)}


async def test_siblings_follow_the_first_choice_to_its_worker_with_seeds_that_count_up(served: Running) -> None:
    served.worker.submits.clear()
    await served.post(n=3, seed=MAX_SEED - 1)
    first, *others = served.worker.submits
    assert (first.fork_of, first.sampling.seed) == (None, MAX_SEED - 1)
    assert [other.fork_of for other in others] == [first.request_id] * 2
    assert [other.sampling.seed for other in others] == [MAX_SEED, -(2**63)]
    assert {submit.prompt for submit in served.worker.submits} == {first.prompt}
    assert len({submit.stream for submit in served.worker.submits}) == 3


async def test_siblings_without_a_seed_draw_differently_too(served: Running) -> None:
    served.worker.submits.clear()
    await served.post(n=3)
    assert len({submit.sampling.seed for submit in served.worker.submits}) == 3


async def test_a_sibling_that_the_worker_refuses_runs_elsewhere_by_itself(served: Running) -> None:
    """w0 refuses the third; w1 looks busier, so that it is asked second."""
    other = FakeWorker(served.broker.connect("w1"), "w1", served.worker.script)
    await other.start()
    await served.view(make_status(), make_status("w1", num_running=5))
    served.worker.judge = lambda submit: RefusalReason.FULL if index_of(submit) == 2 else None
    try:
        _, body = await served.post(n=3)
        assert [choice["message"]["content"] for choice in body["choices"]] == TEXTS
        assert [(index_of(submit), submit.attempt) for submit in other.submits] == [(2, 2)]
    finally:
        await other.stop()
        await other.bus.close()


async def test_a_sibling_that_finds_no_room_fails_alone(served: Running) -> None:
    served.worker.judge = lambda submit: RefusalReason.FULL if index_of(submit) == 1 else None
    status, body = await served.post(n=3)
    assert status == 200
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", None, "stop"]
    assert body["choices"][1]["error"]["code"] == "queue_full"
    assert body["choices"][1]["error"]["message"].startswith("Choice 1: ")
    assert [choice["message"]["content"] for choice in body["choices"]] == [TEXTS[0], "", TEXTS[2]]
    assert all("error" not in body["choices"][index] for index in (0, 2))


async def test_in_a_stream_the_error_of_one_choice_comes_when_the_others_have_ended(running: Running) -> None:
    task = asyncio.create_task(running.stream(n=2, stream_options={"include_usage": True}))
    first, second = sorted(await running.begun(2), key=lambda item: index_of(item.submit))
    await running.worker.emit(second, running.encode("lost"))
    await running.worker.emit(second, [], FinishReason.ERROR)
    await running.worker.emit(first, running.encode("fine"), FinishReason.LENGTH)
    events = await task
    assert texts_of(events, 2) == ["fine", "lost"]
    assert events[-1]["error"]["code"] == "request_failed"
    assert events[-1]["error"]["message"].startswith("Choice 1: ")
    assert events[-2]["usage"]["completion_tokens"] == len(running.encode("fine")) + len(running.encode("lost"))
    assert events[-3]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}


async def test_when_every_choice_fails_the_request_fails(running: Running) -> None:
    task = asyncio.create_task(running.post(n=2))
    for item in await running.begun(2):
        await running.worker.emit(item, [], FinishReason.ERROR)
    status, body = await task
    assert (status, body["error"]["code"]) == (500, "request_failed")


async def test_a_choice_cut_by_a_stop_string_leaves_the_others_alone(served: Running) -> None:
    _, body = await served.post(n=3, stop="foxes")
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one fox", "two 🦊 ", "three "]


async def test_more_choices_than_the_server_takes_are_refused_all_together(serve: Serve) -> None:
    async with serve(max_requests=4) as running:
        status, body = await running.post(n=5)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "integer_above_max_value", "n")
        task = asyncio.create_task(running.post(n=2))
        items = await running.begun(2)
        status, body = await running.post(n=3)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert len(running.worker.submits) == 2
        for item in items:
            await running.worker.emit(item, running.encode("x"), FinishReason.LENGTH)
        assert (await task)[0] == 200


async def test_best_of_equal_to_n_asks_for_nothing_more(served: Running) -> None:
    served.worker.submits.clear()
    status, _ = await served.post(COMPLETIONS, prompt="once", n=2, best_of=2)
    assert status == 200
    assert len(served.worker.submits) == 2


@pytest.mark.parametrize("prompt", ["Once upon", [40, 41, 42]])
@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_puts_the_prompt_before_every_choice(served: Running, prompt: Any, streamed: bool) -> None:
    shown = prompt if isinstance(prompt, str) else served.dispatcher.front.codec.decode(prompt)
    if streamed:
        events = await served.stream(COMPLETIONS, prompt=prompt, n=2, echo=True, max_tokens=50)
        texts = texts_of(events, 2)
        num_tokens = [e.get("sluice", {"n": 1}).get("n", 0) for e in events if e["choices"][0]["index"] == 0]
        own = len(served.encode(TEXTS[0]))
        assert sum(num_tokens) in (own, own + 1), "the end token counts where it comes together with text"
    else:
        _, body = await served.post(COMPLETIONS, prompt=prompt, n=2, echo=True, max_tokens=50)
        texts = [choice["text"] for choice in body["choices"]]
        assert body["usage"]["completion_tokens"] == sum(len(served.encode(words)) + 1 for words in TEXTS[:2])
    assert texts == [shown + words for words in TEXTS[:2]]


async def test_one_line_of_the_log_and_one_count_stand_for_all_choices(
    served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    await served.post(n=3)
    await asyncio.to_thread(flush_log, 10.0)  # what is read while the log's thread writes may be lost
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (line,) = [line for line in lines if line.get("num_choices") == 3]
    assert (line["event"], line["num_prompt_tokens"], line["num_cached_tokens"]) == ("request", 13, 11)
    assert line["num_output_tokens"] == billed(served)


def answer_to(prompt: list[int]) -> str:
    return f"answer of {prompt[0] - 40}"


@pytest_asyncio.fixture(loop_scope="module")
async def echoing(serve: Serve) -> AsyncIterator[Running]:
    """A worker whose answer names the first token of its prompt."""

    def script(submit: Submit) -> list[int]:
        return running.encode(answer_to(submit.prompt_ids().tolist()))

    async with serve(script, queue_limit_s=5.0) as running:
        running.worker.finish = FinishReason.LENGTH
        yield running


PROMPTS = [[40, 50], [41, 50, 51], [42, 50, 51, 52]]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_several_prompts_are_answered_one_after_the_other_in_the_indices(
    echoing: Running, streamed: bool, count: int
) -> None:
    expected = [answer_to(prompt) for prompt in PROMPTS for _ in range(count)]
    body = {"prompt": PROMPTS, "n": count, "max_tokens": 100}
    if streamed:
        events = await echoing.stream(COMPLETIONS, stream_options={"include_usage": True}, **body)
        texts, usage = texts_of(events, 3 * count), events[-1]["usage"]
    else:
        _, answer = await echoing.post(COMPLETIONS, **body)
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
        assert [choice["index"] for choice in answer["choices"]] == list(range(3 * count))
    assert texts == expected
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == sum(len(echoing.encode(words)) for words in expected)
    by_id = {submit.request_id: submit for submit in echoing.worker.submits}
    forks = [submit for submit in by_id.values() if submit.fork_of is not None]
    assert len(forks) == 3 * (count - 1)
    assert all(by_id[fork.fork_of].prompt == fork.prompt for fork in forks if fork.fork_of is not None)


async def test_each_prompt_is_repeated_before_its_own_choices(echoing: Running) -> None:
    _, answer = await echoing.post(COMPLETIONS, prompt=["a cat", "b dog"], n=2, echo=True, max_tokens=100)
    prompts = [echoing.encode("a cat"), echoing.encode("b dog")]
    shown = [f"{word}{answer_to(prompt)}" for word, prompt in zip(("a cat", "b dog"), prompts, strict=True)]
    assert [choice["text"] for choice in answer["choices"]] == [shown[0], shown[0], shown[1], shown[1]]


async def test_equal_prompts_without_a_seed_draw_differently_and_with_one_alike(echoing: Running) -> None:
    await echoing.post(COMPLETIONS, prompt=[[40], [40]])
    assert len({submit.sampling.seed for submit in echoing.worker.submits}) == 2
    echoing.worker.submits.clear()
    await echoing.post(COMPLETIONS, prompt=[[40], [40]], seed=3)
    assert {submit.sampling.seed for submit in echoing.worker.submits} == {3}


async def test_prompts_for_which_there_is_no_room_wait_and_take_one_place_in_the_queue(echoing: Running) -> None:
    """The worker runs two at a time; the third and later prompts of eight wait for the ends of others."""
    worker, sessions = echoing.worker, echoing.dispatcher.service.sessions
    worker.step_s = 0.002
    most_queued = 0

    def judge(_submit: Submit) -> RefusalReason | None:
        nonlocal most_queued
        most_queued = max(most_queued, sessions.num_queued)
        running = [item for item in worker.running.values() if not item.finish]
        return RefusalReason.FULL if len(running) >= 2 else None

    worker.judge = judge
    prompts = [[40 + index] for index in range(8)]
    status, answer = await echoing.post(COMPLETIONS, prompt=prompts, max_tokens=100)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == [answer_to(prompt) for prompt in prompts]
    assert most_queued == 1


async def test_a_prompt_that_fails_costs_no_other_prompt_its_answer(running: Running) -> None:
    task = asyncio.create_task(running.post(COMPLETIONS, prompt=[[40], [41]], n=2))
    for item in await running.begun(4):
        if index_of(item.submit) == 2:
            await running.worker.emit(item, [], FinishReason.ERROR)
        else:
            await running.worker.emit(item, running.encode("x"), FinishReason.LENGTH)
    status, body = await task
    assert status == 200
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length", None, "length"]
    assert body["choices"][2]["error"]["code"] == "request_failed"
