"""Several choices of one request: indices, ends, bill and workers; what happens when one fails or all are left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.dispatcher.build import ModelText
from shared.messages.request import RefusalReason, Submit
from shared.process.log import flush_log
from shared.types import MAX_SEED, FinishReason
from tests.support.dispatchers import Running, running_dispatcher
from tests.support.fake_worker import FakeWorker, make_status, publish_view
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
TEXTS = ["one fox", "two 🦊 foxes", "three foxes went down"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def index_of(submit: Submit) -> int:
    _, _, index = submit.request_id.partition("-")
    return int(index or 0)


@pytest_asyncio.fixture(loop_scope="module")
async def served(text: ModelText, folder: Path) -> AsyncIterator[Running]:
    """A worker whose answer to choice i is `TEXTS[i]`."""

    def script(submit: Submit) -> list[int]:
        end = text.codec.tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        words = TEXTS[index_of(submit) % len(TEXTS)]
        return [*text.codec.tokenizer.encode(words, add_special_tokens=False).ids, end]

    async with running_dispatcher(text, folder, script, queue_limit_s=0.2) as running:
        running.worker.cached_tokens = 11
        yield running


async def events_of(running: Running, path: str = CHAT, **body: Any) -> list[Any]:
    """Return the events of a stream; the last one is `[DONE]`."""
    async with running.http.post(running.url + path, json={"model": "tiny", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        raw = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def texts_of(events: list[Any], count: int) -> list[str]:
    texts = [""] * count
    for event in events:
        for choice in event.get("choices", ()):
            texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return texts


def billed(running: Running) -> int:
    return sum(len(running.encode(words)) + 1 for words in TEXTS)


async def test_whole_choices_stand_in_order_and_the_prompt_is_billed_once(served: Running) -> None:
    status, body = await served.post(CHAT, messages=HELLO, n=3)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == TEXTS
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert body["usage"] == {
        "prompt_tokens": 13,
        "completion_tokens": billed(served),
        "total_tokens": 13 + billed(served),
        "prompt_tokens_details": {"cached_tokens": 11},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streamed_choices_carry_their_index_and_end_each_by_itself(served: Running, path: str) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "once", "max_tokens": 100}
    events = await events_of(served, path, n=3, stream_options={"include_usage": True}, **prompt)
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
    events = await events_of(served, messages=HELLO, n=3)
    ends = {e["choices"][0]["index"]: e["sluice"]["tokens"] for e in events if e["choices"][0]["finish_reason"]}
    assert ends == {index: len(served.encode(words)) + 1 for index, words in enumerate(TEXTS)}


async def test_siblings_follow_the_first_choice_to_its_worker_with_seeds_that_count_up(served: Running) -> None:
    served.worker.submits.clear()
    await served.post(CHAT, messages=HELLO, n=3, seed=MAX_SEED - 1)
    first, *others = served.worker.submits
    assert (first.fork_of, first.sampling.seed) == (None, MAX_SEED - 1)
    assert [other.fork_of for other in others] == [first.request_id] * 2
    assert [other.sampling.seed for other in others] == [MAX_SEED, -(2**63)]
    assert {submit.prompt for submit in served.worker.submits} == {first.prompt}
    assert len({submit.stream for submit in served.worker.submits}) == 3


async def test_siblings_without_a_seed_draw_differently_too(served: Running) -> None:
    served.worker.submits.clear()
    await served.post(CHAT, messages=HELLO, n=3)
    assert len({submit.sampling.seed for submit in served.worker.submits}) == 3


async def test_a_sibling_that_the_worker_refuses_runs_elsewhere_by_itself(served: Running) -> None:
    """w0 refuses the third; w1 looks busier, so that it is asked second."""
    other = FakeWorker(served.broker.connect("w1"), "w1", served.worker.script)
    await other.start()
    await publish_view(served.bus, make_status(), make_status("w1", num_running=5), number=2)
    await asyncio.sleep(0.01)
    served.worker.judge = lambda submit: RefusalReason.FULL if index_of(submit) == 2 else None
    try:
        _, body = await served.post(CHAT, messages=HELLO, n=3)
        assert [choice["message"]["content"] for choice in body["choices"]] == TEXTS
        assert [(submit.fork_of, submit.attempt) for submit in other.submits] == [(None, 2)]
    finally:
        await other.stop()
        await other.bus.close()


async def test_a_sibling_that_finds_no_room_fails_alone(served: Running) -> None:
    served.worker.judge = lambda submit: RefusalReason.FULL if index_of(submit) == 1 else None
    status, body = await served.post(CHAT, messages=HELLO, n=3)
    assert status == 200
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", None, "stop"]
    assert body["choices"][1]["error"]["code"] == "queue_full"
    assert body["choices"][1]["error"]["message"].startswith("Choice 1: ")
    assert [choice["message"]["content"] for choice in body["choices"]] == [TEXTS[0], "", TEXTS[2]]
    assert all("error" not in body["choices"][index] for index in (0, 2))


async def test_in_a_stream_the_error_of_one_choice_comes_when_the_others_have_ended(
    text: ModelText, folder: Path
) -> None:
    async with running_dispatcher(text, folder) as running:
        options = {"include_usage": True}
        task = asyncio.create_task(events_of(running, messages=HELLO, n=2, stream_options=options))
        await until(lambda: len(running.worker.running) == 2)
        first, second = sorted(running.worker.running.values(), key=lambda item: index_of(item.submit))
        await running.worker.emit(second, running.encode("lost"))
        await running.worker.emit(second, [], FinishReason.ERROR)
        await running.worker.emit(first, running.encode("fine"), FinishReason.LENGTH)
        events = await task
    assert texts_of(events, 2) == ["fine", "lost"]
    assert events[-1]["error"]["code"] == "request_failed"
    assert events[-1]["error"]["message"].startswith("Choice 1: ")
    assert events[-2]["usage"]["completion_tokens"] == len(running.encode("fine")) + len(running.encode("lost"))
    assert events[-3]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}


async def test_when_every_choice_fails_the_request_fails(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        task = asyncio.create_task(running.post(CHAT, messages=HELLO, n=2))
        await until(lambda: len(running.worker.running) == 2)
        for item in list(running.worker.running.values()):
            await running.worker.emit(item, [], FinishReason.ERROR)
        status, body = await task
    assert (status, body["error"]["code"]) == (500, "request_failed")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_cancels_every_choice(text: ModelText, folder: Path, streamed: bool) -> None:
    async with running_dispatcher(text, folder) as running:
        task = asyncio.create_task(running.post(CHAT, messages=HELLO, n=5, stream=streamed))
        await until(lambda: len(running.worker.running) == 5)
        await running.worker.emit(next(iter(running.worker.running.values())), running.encode("x"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not running.worker.running)
        await until(lambda: not len(running.dispatcher.service.sessions.table))
        assert len({cancel.request_id for cancel in running.worker.cancels}) == 5


async def test_a_choice_cut_by_a_stop_string_leaves_the_others_alone(served: Running) -> None:
    _, body = await served.post(CHAT, messages=HELLO, n=3, stop="foxes")
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one fox", "two 🦊 ", "three "]


async def test_more_choices_than_the_server_takes_are_refused_all_together(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder, max_requests=4) as running:
        status, body = await running.post(CHAT, messages=HELLO, n=5)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "integer_above_max_value", "n")
        task = asyncio.create_task(running.post(CHAT, messages=HELLO, n=2))
        await until(lambda: len(running.worker.running) == 2)
        status, body = await running.post(CHAT, messages=HELLO, n=3)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert len(running.worker.submits) == 2
        for item in list(running.worker.running.values()):
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
        events = await events_of(served, COMPLETIONS, prompt=prompt, n=2, echo=True, max_tokens=50)
        texts = texts_of(events, 2)
        num_tokens = [e.get("sluice", {"n": 1}).get("n", 0) for e in events if e["choices"][0]["index"] == 0]
        assert sum(num_tokens) == len(served.encode(TEXTS[0]))
    else:
        _, body = await served.post(COMPLETIONS, prompt=prompt, n=2, echo=True, max_tokens=50)
        texts = [choice["text"] for choice in body["choices"]]
        assert body["usage"]["completion_tokens"] == sum(len(served.encode(words)) + 1 for words in TEXTS[:2])
    assert texts == [shown + words for words in TEXTS[:2]]


async def test_one_line_of_the_log_and_one_count_stand_for_all_choices(
    served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    await served.post(CHAT, messages=HELLO, n=3)
    await asyncio.to_thread(flush_log, 10.0)  # what is read while the log's thread writes may be lost
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (line,) = [line for line in lines if line.get("num_choices") == 3]
    assert (line["event"], line["num_prompt_tokens"], line["num_cached_tokens"]) == ("request", 13, 11)
    assert line["num_output_tokens"] == billed(served)


def answer_to(prompt: list[int]) -> str:
    return f"answer of {prompt[0] - 40}"


@pytest_asyncio.fixture(loop_scope="module")
async def echoing(text: ModelText, folder: Path) -> AsyncIterator[Running]:
    """A worker whose answer names the first token of its prompt."""

    def script(submit: Submit) -> list[int]:
        words = answer_to(submit.prompt_ids().tolist())
        ids: list[int] = text.codec.tokenizer.encode(words, add_special_tokens=False).ids
        return ids

    async with running_dispatcher(text, folder, script, queue_limit_s=5.0) as running:
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
        events = await events_of(echoing, COMPLETIONS, stream_options={"include_usage": True}, **body)
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


async def test_a_prompt_that_fails_costs_no_other_prompt_its_answer(text: ModelText, folder: Path) -> None:
    async with running_dispatcher(text, folder) as running:
        task = asyncio.create_task(running.post(COMPLETIONS, prompt=[[40], [41]], n=2))
        await until(lambda: len(running.worker.running) == 4)
        for item in list(running.worker.running.values()):
            if index_of(item.submit) == 2:
                await running.worker.emit(item, [], FinishReason.ERROR)
            else:
                await running.worker.emit(item, running.encode("x"), FinishReason.LENGTH)
        status, body = await task
    assert status == 200
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length", None, "length"]
    assert body["choices"][2]["error"]["code"] == "request_failed"
