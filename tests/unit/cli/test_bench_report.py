"""How `sluice bench` reads an answer's stream, and what it makes of the times."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.command import BenchSettings, run_bench
from cli.bench.report import render, summarise
from cli.bench.server import BenchServer as ApiServer
from cli.bench.server import measure_scale
from cli.bench.stream import AnswerReader, BenchRecord, spread_tokens, stream_answer
from cli.console import Console
from cli.exit_codes import DONE, FAILED, CommandError
from shared.errors import StartupError
from sluice_client.qoe import QoeTarget, final_qoe
from tests.support.openai_server import (
    FINISH,
    ROLE,
    USAGE,
    Engine,
    Server,
    chunk,
    delta,
    events,
    refuse,
    running,
    say,
    stream,
)

TARGET = QoeTarget(1.0, 10.0)


def outcome(sent_s: float, *deliveries: tuple[float, int], end_s: float | None = None, **fields: Any) -> BenchRecord:
    count = sum(count for _, count in deliveries)
    return BenchRecord(
        0, sent_s, sent_s, end_s, list(deliveries), num_input=5, num_output=count, is_counted=True, **fields
    )


def read(*parts: bytes, times: list[float] | None = None) -> BenchRecord:
    result = BenchRecord(0, 0.0)
    reader = AnswerReader(result)
    for i, part in enumerate(parts):
        reader.feed(part, times[i] if times else float(i))
    reader.close(float(len(parts)))
    return result


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(0, 200))
def test_spread_counts_sum_up_to_the_servers_count_in_order(counts: list[int], total: int) -> None:
    deliveries = [(float(i), count) for i, count in enumerate(counts)]
    spread = spread_tokens(deliveries, total)
    assert sum(count for _, count in spread) == total
    assert [at_s for at_s, _ in spread] == sorted({at_s for at_s, _ in spread})
    if total >= len(counts):
        assert len(spread) == len(counts), "nobody loses its only token while there are enough"
    if total == sum(counts):
        assert spread == deliveries


def test_an_end_token_without_text_counts_with_the_last_text() -> None:
    assert spread_tokens([(1.0, 1), (2.0, 1)], 3) == [(1.0, 1), (2.0, 2)]


def test_text_is_counted_by_the_server_and_timed_by_its_arrival() -> None:
    usage = {name: value for name, value in USAGE.items() if name != "sluice"}
    result = read(events(ROLE), events(delta("a"), delta("b")), events(delta("c")), events(FINISH, usage, "[DONE]"))
    assert (result.failure, result.is_counted, result.num_input, result.num_output) == ("", True, 3, 6)
    assert result.deliveries == [(1.0, 2), (1.0, 2), (2.0, 2)]


def test_a_chunk_of_several_tokens_counts_as_many_as_our_server_says() -> None:
    result = read(events(delta("ab", sluice={"n": 3}), delta("c")), events(FINISH, "[DONE]"))
    assert result.deliveries == [(0.0, 3), (0.0, 1)]
    assert (result.num_output, result.is_counted) == (4, False)


def test_tokens_without_text_arrive_with_the_end_where_the_server_counts_those_with_text() -> None:
    """As after an end token that is ignored."""
    usage = {**USAGE, "sluice": {"qoe": 1.0}}
    result = read(events(delta("a"), delta("b")), events(ROLE), events(FINISH, usage, "[DONE]"))
    assert result.deliveries == [(0.0, 1), (0.0, 1), (2.0, 4)]


@pytest.mark.parametrize("count", [10**18, -1, True, 1.5, "6", None])
def test_an_impossible_count_of_the_server_is_not_believed(count: object) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": count}}
    result = read(events(delta("a"), delta("b"), FINISH, usage, "[DONE]"))
    assert (result.num_input, result.num_output, result.is_counted) == (None, 2, False)


def test_completions_and_reasoning_are_text_too() -> None:
    text = chunk(choices=[{"index": 0, "text": "x", "finish_reason": None}])
    thought = chunk(choices=[{"index": 0, "delta": {"reasoning_content": "y"}, "finish_reason": "stop"}])
    assert read(events(text, thought, "[DONE]")).num_output == 2


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([events(delta("a"))], "broken off"),
        ([events(FINISH, "[DONE]")], "empty"),
        (
            [events(delta("a"), {"error": {"code": "worker_lost", "message": "gone"}}, "[DONE]")],
            "error event worker_lost",
        ),
        ([events({"error": "out of memory"}, "[DONE]")], "error event"),
    ],
)
def test_an_answer_that_fails_is_named(parts: list[bytes], kind: str) -> None:
    assert read(*parts).failure == kind


async def ask(*replies: Any, timeout_s: float = 5.0) -> BenchRecord:
    result = BenchRecord(0, 0.0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with running(Server(*replies)) as url, aiohttp.ClientSession(timeout=timeout) as session:
        await stream_answer(session, f"{url}/v1/chat/completions", b"{}", lambda: 0.0, result)
    assert result.end_s is not None
    return result


@pytest.mark.parametrize(
    ("reply", "kind", "detail"),
    [
        (refuse(429, "The queue is full."), "http 429", "The queue is full."),
        (stream(events(delta("a")), lose=True), "broken off", ""),
        (stream(events(delta("a"), "not json")), "malformed", "JSONDecodeError"),
        (stream(b"data: [1]\n\n"), "malformed", "no object"),
        (stream(b"data: \xff\n\n"), "malformed", "UTF-8"),
        (stream(b"data: " + b"[" * 100_000 + b"\n\n"), "malformed", "RecursionError"),
        *(
            (stream(events(delta("a", sluice={"n": number}))), "malformed", "impossible number of tokens")
            for number in (float("inf"), -1, 10**18, "x", True, None)
        ),
    ],
)
async def test_failures_have_kinds(reply: Any, kind: str, detail: str) -> None:
    result = await ask(reply)
    assert result.failure == kind
    assert detail in result.detail


async def test_silence_is_a_timeout_and_nobody_there_no_connection() -> None:
    assert (await ask(stream(events(delta("a")), hang=True), timeout_s=0.2)).failure == "timeout"
    result = BenchRecord(0, 0.0)
    async with aiohttp.ClientSession() as session:
        await stream_answer(session, "http://127.0.0.1:1/v1/x", b"{}", lambda: 0.0, result)
    assert result.failure == "no connection"


def test_the_figures_are_those_of_the_definitions() -> None:
    """Sent at 1 and 2; tokens at 1.5, then two at 2.0, and at 4.0, then 4.5.

    TTFT 0.5 and 2.0. TPOT (2.0 − 1.5) / 2 = 0.25 and 0.5. Gaps 0.5, 0, 0.5. End to end 1.5 and 3.0. 5 tokens
    from 1.0 to 5.0.
    """
    outcomes = [outcome(1.0, (1.5, 1), (2.0, 2), end_s=2.5), outcome(2.0, (4.0, 1), (4.5, 1), end_s=5.0)]
    summary = summarise(outcomes, TARGET, is_held_back=False)
    assert (summary["duration_s"], summary["num_output_tokens"], summary["num_input_tokens"]) == (4.0, 5, 10)
    assert (summary["requests_per_s"], summary["output_tokens_per_s"], summary["total_tokens_per_s"]) == (
        0.5,
        1.25,
        3.75,
    )
    assert (summary["ttft_s"]["mean"], summary["ttft_s"]["p50"]) == (1.25, 1.25)
    assert summary["tpot_s"]["mean"] == pytest.approx(0.375)
    assert summary["itl_s"]["mean"] == pytest.approx(1 / 3)
    assert summary["itl_s"]["p50"] == 0.5
    assert summary["e2e_s"]["p99"] == pytest.approx(1.5 + 0.99 * 1.5)
    expected = [final_qoe(TARGET, [0.5, 1.0, 1.0]), final_qoe(TARGET, [2.0, 2.5])]
    assert summary["qoe"]["mean"] == pytest.approx(sum(expected) / 2)
    assert expected[0] > expected[1]
    text = render(summary, TARGET)
    assert "2 done, 0 failed in 4.00 s, 0.50 per second" in text
    assert "TTFT           1250.00" in text


def test_failed_and_unfinished_answers_are_apart() -> None:
    failed = outcome(0.0, (0.5, 1), end_s=0.6, failure="http 500", detail="oops")
    outcomes = [outcome(0.0, (0.5, 1), end_s=1.0), failed, outcome(0.0, (0.7, 3))]
    summary = summarise(outcomes, TARGET, is_held_back=True)
    assert [summary[f"num_{name}"] for name in ("complete", "failed", "unfinished")] == [1, 1, 1]
    assert (summary["failures"], summary["num_output_tokens"]) == ({"http 500": 1}, 1)
    assert summary["qoe"]["mean"] == summary["qoe"]["share_ge_0_95"] == 0.5, "a failed answer scores 0"
    assert summary["tpot_s"] is None
    assert summary["lateness_p99_s"] is None
    text = render(summary, TARGET)
    assert "1 × http 500: oops" in text
    assert "1 given up" in text


def test_nothing_sent_is_no_error() -> None:
    text = render(summarise([], TARGET, is_held_back=False), TARGET)
    assert "0 done, 0 failed" in text
    assert "TTFT                 -" in text


def test_a_late_load_says_so() -> None:
    late = outcome(1.0, (1.5, 1), end_s=2.0)
    late.due_s = 0.9
    assert "late by 100 ms" in render(summarise([late], TARGET, is_held_back=False), TARGET)
    assert "late by" not in render(summarise([late], TARGET, is_held_back=True), TARGET)


@pytest.mark.parametrize("context", [0, 16, 100, 4096])
async def test_the_prompts_that_are_counted_first_fit_a_small_context(context: int) -> None:
    server = engine()
    async with running(server) as url, aiohttp.ClientSession() as session:
        scale = await measure_scale(ApiServer(url, "demo", "chat", context), session, np.random.default_rng(0), ())
    assert (scale.tokens_per_word, scale.overhead, scale.is_measured) == (2.0, 7.0, True)
    counts = [len(body["messages"][0]["content"].split()) for body in server.posts]
    assert counts[0] < counts[1] <= max(2, (context or 960) // 8)


def engine(kind: type[Engine] = Engine, **options: Any) -> Engine:
    """An engine that answers with four words, and counts 2 tokens a word and 7 more."""
    return kind(overhead=7, num_output=4, **options)


async def bench(server: Server, **fields: Any) -> tuple[int, str]:
    async with running(server) as url:
        return await run_bench(BenchSettings(url=url, **fields), Console())


async def test_a_load_is_sent_as_planned_and_measured(tmp_path: Path) -> None:
    """A prompt of 107 tokens is 50 words, as the server counts."""
    server = engine()
    path = tmp_path / "figures.json"
    code, text = await bench(server, num_prompts=6, input_len=107, output_len=9, json_file=str(path), api_key="secret")
    assert code == DONE
    assert "6 done, 0 failed" in text
    sent = server.streams
    assert len(sent) == 6
    assert {body["max_tokens"] for body in sent} == {9}
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in sent)
    assert {len(body["messages"][0]["content"].split()) for body in sent} == {50}
    assert len({body["messages"][0]["content"] for body in sent}) == 6
    record = json.loads(path.read_text())
    assert record["summary"]["num_input_tokens"] == 6 * 107
    assert record["summary"]["num_output_tokens"] == 24
    assert len(record["requests"]) == 6
    assert "secret" not in path.read_text()
    assert server.requests[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("owner", ["sluice", "vllm"])
@pytest.mark.parametrize("reader_speed", [None, 2.0])
async def test_readers_are_measured_of_any_server_and_our_own_alone_is_told(
    owner: str, reader_speed: float | None, tmp_path: Path
) -> None:
    """Thirty tokens in chunks of ten that no server counts by chunk: all are there long before the last is read."""

    class InChunks(Engine):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            if not self.posts[-1].get("stream"):
                return await super().complete(request)
            usage = chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 30})
            return await stream(events(delta("a"), delta("b")), events(delta("c"), FINISH, usage, "[DONE]"))(request)

    server = InChunks(models=say({"data": [{"id": "demo", "owned_by": owner}]}))
    path = tmp_path / "figures.json"
    code, text = await bench(server, num_prompts=3, reader_speed=reader_speed, ttft_target_s=0.5, json_file=str(path))
    assert code == DONE, text
    is_told = owner == "sluice" and reader_speed is not None
    told = {"ttft_s": 0.5, "speed_tokens_per_s": 2.0} if is_told else None
    assert [body.get("qoe") for body in server.streams] == [told] * 3
    record = json.loads(path.read_text())
    target = QoeTarget(0.5, reader_speed or 4.8)
    for request in record["requests"]:
        assert sum(count for _, count in request["deliveries"]) == 30
        times = [at_s - request["sent_s"] for at_s, count in request["deliveries"] for _ in range(count)]
        assert request["qoe"] == final_qoe(target, times)
    qoe = [request["qoe"] for request in record["requests"]]
    found = record["summary"]["qoe"]
    assert found["mean"] == pytest.approx(np.mean(qoe))
    assert found["p1"] == pytest.approx(np.percentile(qoe, 1))
    assert found["share_ge_0_95"] == np.mean([each >= 0.95 for each in qoe])
    assert f"{100 * found['share_ge_0_95']:.1f} % with at least 0.95; for a first token within 0.5 s" in text


async def test_ids_are_sent_to_completions() -> None:
    server = engine()
    code, _ = await bench(server, num_prompts=2, endpoint="completions", vocab=100, input_len=33, concurrency=1)
    assert code == DONE
    assert [len(body["prompt"]) for body in server.posts] == [33, 33], "no counting is needed"


async def test_a_data_set_keeps_its_texts_and_ends_as_the_model_likes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one two three four", "completion": "a b c"}\n{"prompt": "x"}\n')
    server = engine()
    assert (await bench(server, dataset=str(path)))[0] == DONE
    sent = server.streams
    limits = {body["messages"][0]["content"]: body["max_tokens"] for body in sent}
    assert limits == {"one two three four": 6, "x": 128}, "three words at two tokens each; what nothing states is 128"
    assert not any("ignore_eos" in body for body in sent)


async def test_a_trace_brings_its_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n5.0,27,3\n5.2,47,4\n")
    server = engine()
    record = tmp_path / "out.json"
    assert (await bench(server, dataset=str(path), json_file=str(record)))[0] == DONE
    sent = server.streams
    assert [(len(body["messages"][0]["content"].split()), body["max_tokens"]) for body in sent] == [(10, 3), (20, 4)]
    due = [request["due_s"] for request in json.loads(record.read_text())["requests"]]
    assert due == pytest.approx([0.0, 0.2])


async def test_failed_requests_make_the_exit_code_1() -> None:
    code, text = await bench(engine(refuses=True), num_prompts=3, concurrency=1)
    assert code == FAILED
    assert "1 × http 429: full" in text
    assert "2 done, 1 failed" in text


async def test_a_server_that_does_not_count_is_measured_by_chunks() -> None:
    code, text = await bench(engine(counts=False), num_prompts=2)
    assert code == DONE
    assert "8 out" in text
    assert "the server gives no usage" in text


@pytest.mark.parametrize("length", [b'"abc"', b"[1]", b"Infinity", b"-5", b"true", b"null", b"1" + b"0" * 30])
async def test_a_context_that_is_no_count_is_as_good_as_none(length: bytes) -> None:
    server = engine(models=say(b'{"data": [5, {"id": "demo", "max_model_len": ' + length + b"}]}"))
    code, text = await bench(server, num_prompts=1, endpoint="completions", vocab=10, input_len=9, output_len=3)
    assert (code, len(server.posts[0]["prompt"]), server.posts[0]["max_tokens"]) == (DONE, 9, 3), text


@pytest.mark.parametrize(
    "body", [b"<html>", b"[" * 100_000, b"5", b'{"data": 5}', b'{"data": {"id": "demo"}}', b"\xff"]
)
async def test_what_is_no_list_of_models_is_said_in_one_line(body: bytes) -> None:
    with pytest.raises(CommandError, match="lists no model"):
        await bench(engine(models=say(body)))


async def test_what_cannot_be_loaded_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"does not serve 'other'\. It serves: demo, other/model"):
        await bench(engine(), model="other")
    with pytest.raises(CommandError, match="answers 404: "):
        await bench(Server(refuse(404, "no such path")))
    with pytest.raises(CommandError, match=r"nothing answers at http://127\.0\.0\.1:1 "):
        await run_bench(BenchSettings(url="http://127.0.0.1:1"), Console())
    with pytest.raises(CommandError, match=r"/v1/models answers 401: .*Give a key with --api-key"):
        await bench(engine(models=say({"error": "no key"}, 401)))
    with pytest.raises(StartupError, match=r"there is no folder .*none\. Name another file with --json"):
        await bench(engine(), json_file=str(tmp_path / "none" / "figures.json"))
    with pytest.raises(StartupError, match=r"the trace .* cannot be read"):
        await bench(engine(), dataset=str(tmp_path / "none.csv"))


async def test_requests_are_sent_when_due_however_slow_the_answers_are() -> None:
    """Nobody is answered before all four have come."""
    everybody = asyncio.Barrier(4)

    class Patient(Engine):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            if self.posts[-1].get("stream"):
                await everybody.wait()
            return await super().complete(request)

    async with asyncio.timeout(10):
        assert (await bench(engine(Patient), num_prompts=4, request_rate=20.0, seed=3))[0] == DONE
