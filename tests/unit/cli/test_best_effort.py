"""What `sluice bench --best-effort` keeps under way beside a load, and how it counts that."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from aiohttp import web

from cli.bench.best_effort import ClosedLoop
from cli.bench.command import BenchSettings, run_bench
from cli.bench.options import IN_FLIGHT, bench, best_effort
from cli.bench.report import render_best_effort, summarise_best_effort
from cli.bench.stream import BenchRecord
from cli.console import Console
from cli.exit_codes import DONE, FAILED
from shared.errors import StartupError
from tests.support.openai_server import Engine, refuse, running, say


@pytest.mark.parametrize("num_in_flight", [1, 3, 8])
async def test_so_many_requests_are_always_under_way_until_the_loop_is_cancelled(num_in_flight: int) -> None:
    """Requests take 1 to 5 turns of the event loop; the 200th end cancels."""
    rng, under_way, seen, is_enough = np.random.default_rng(num_in_flight), set[int](), set[int](), asyncio.Event()

    async def send(index: int, outcome: BenchRecord) -> None:
        under_way.add(index)
        for _ in range(int(rng.integers(1, 6))):
            await asyncio.sleep(0)
            seen.add(len(under_way))
        under_way.remove(index)
        outcome.end_s, outcome.num_output = 1.0, 2
        if index >= 200:
            is_enough.set()

    load = ClosedLoop(send, num_in_flight, lambda: 1.0)
    task = asyncio.create_task(load.run())
    await is_enough.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen - {num_in_flight} <= {num_in_flight - 1}, "one ends and the next begins within a turn"
    assert [outcome.index for outcome in load.outcomes] == list(range(len(load.outcomes)))
    summary = summarise_best_effort(load.outcomes, load.duration_s)
    assert summary["num_complete"] + summary["num_cancelled"] == summary["num_sent"] == len(load.outcomes)
    assert summary["num_cancelled"] <= num_in_flight


async def test_who_is_refused_does_not_ask_again_at_once() -> None:
    async def send(_index: int, outcome: BenchRecord) -> None:
        outcome.fail("http 429")

    load = ClosedLoop(send, 3, lambda: 0.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(load.run(), 0.05)
    assert len(load.outcomes) == 3


def test_figures_are_of_what_arrived_while_the_loop_ran() -> None:
    """10 s: two done with 5 tokens each, one cut after 3, one refused: 0.2 requests/s and 1.3 tokens/s."""
    outcomes = [BenchRecord(i, 0.0, 0.0, end_s, num_output=n) for i, (end_s, n) in enumerate(((1.0, 5), (2.0, 5)))]
    outcomes += [BenchRecord(2, 0.0, num_output=3), BenchRecord(3, 0.0, end_s=4.0, failure="http 429")]
    summary = summarise_best_effort(outcomes, 10.0)
    assert (summary["requests_per_s"], summary["output_tokens_per_s"], summary["num_cancelled"]) == (0.2, 1.3, 1)
    assert "2 done, 1 failed, 1 cancelled at the end, in 10.00 s" in render_best_effort(summary)
    assert "failed 1 × http 429" in render_best_effort(summary)
    assert summarise_best_effort([], 0.0)["requests_per_s"] is None


class Beside(Engine):
    """Answers a load only when it has answered `num_first` requests of best effort, or refused one."""

    def __init__(self, num_first: int, owner: str = "sluice", *, refuses: bool = False) -> None:
        super().__init__(overhead=7, models=say({"data": [{"id": "demo", "owned_by": owner}]}))
        self.num_first, self.refuses_beside = num_first, refuses
        self.is_turn = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self.posts[-1]
        if body in self.load:
            await self.is_turn.wait()
        elif body.get("stream") and self.refuses_beside:
            self.is_turn.set()
            return await refuse(429, "resource unavailable")(request)
        elif len(self.beside) > self.num_first:
            self.is_turn.set()
        return await super().complete(request)

    @property
    def load(self) -> list[Any]:
        return [body for body in self.streams if body not in self.beside]

    @property
    def beside(self) -> list[Any]:
        return [body for body in self.streams if "service_tier" in body or "document" in text_of(body)]


def text_of(body: Any) -> str:
    return str(body["messages"][0]["content"])


async def run(server: Engine, **fields: Any) -> tuple[int, str, str]:
    stderr = io.StringIO()
    async with asyncio.timeout(10), running(server) as url:
        code, text = await run_bench(BenchSettings(url=url, num_prompts=4, **fields), Console(stderr))
    return code, text, stderr.getvalue()


@pytest.fixture
def documents(tmp_path: Path) -> str:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"document {i}", "max_tokens": 3}) + "\n" for i in range(6)))
    return str(path)


async def test_best_effort_goes_on_until_the_load_has_ended_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    """Lengths are the load's: 107 tokens are 50 words. The load's own words are the same with and without."""
    alone, server, figures = Beside(0), Beside(12), tmp_path / "figures.json"
    alone.is_turn.set()
    await run(alone, input_len=107, output_len=5, reader_speed=4.8)
    fields = {"best_effort": (3, ""), "json_file": str(figures)}
    code, text, _ = await run(server, input_len=107, output_len=5, reader_speed=4.8, **fields)
    assert code == DONE, text
    assert sorted(map(text_of, server.load)) == sorted(map(text_of, alone.load))
    assert all(body["service_tier"] == "flex" and "qoe" not in body for body in server.beside)
    assert all("qoe" in body for body in server.load)
    assert {len(text_of(body).split()) for body in server.beside} == {50}
    assert len({text_of(body) for body in server.streams}) == len(server.streams), "nothing is in a prefix cache"
    record = json.loads(figures.read_text())
    assert record["settings"]["best_effort"] == [3, ""]
    found = record["summary"]["best_effort"]
    assert (record["summary"]["num_complete"], found["num_failed"]) == (4, 0)
    assert found["num_complete"] >= 10
    assert found["num_complete"] + found["num_cancelled"] == found["num_sent"] <= len(server.beside) + 3
    assert found["num_output_tokens"] >= 5 * found["num_complete"]
    assert render_best_effort(found) in text
    assert "4 done, 0 failed" in text


async def test_a_data_set_is_asked_in_its_order_and_begins_again(documents: str) -> None:
    server = Beside(9)
    code, text, _ = await run(server, best_effort=(1, documents))
    assert code == DONE, text
    asked = [text_of(body) for body in server.beside]
    assert asked == [f"document {i % 6}" for i in range(len(asked))]
    assert {body["max_tokens"] for body in server.beside} == {3}
    assert not any("ignore_eos" in body for body in server.beside)


async def test_a_server_of_others_is_asked_plainly(documents: str) -> None:
    server = Beside(4, "vllm")
    code, text, said = await run(server, best_effort=(2, documents))
    assert code == DONE, text
    assert len(server.beside) >= 4
    assert not any("service_tier" in body for body in server.posts)
    assert "best effort is asked as plain requests" in said


async def test_refused_best_effort_is_said_and_makes_the_exit_code_1() -> None:
    server = Beside(0, refuses=True)
    code, text, _ = await run(server, best_effort=(2, ""))
    assert (code, len(server.beside)) == (FAILED, 2)
    assert "4 done, 0 failed" in text
    assert "best effort 0 done, 2 failed, 0 cancelled" in text


async def test_a_data_set_that_is_none_ends_the_command_before_the_load() -> None:
    server = Beside(0)
    with pytest.raises(StartupError, match=r"none\.jsonl"):
        await run(server, best_effort=(2, "none.jsonl"))
    assert not server.streams


@pytest.mark.parametrize(
    ("value", "asked"),
    [("8", (8, "")), ("a.csv", (IN_FLIGHT, "a.csv")), ("8,a,b.json", (8, "a,b.json")), ("a,b", (IN_FLIGHT, "a,b"))],
)
def test_the_option_takes_a_number_a_file_or_both(value: str, asked: tuple[int, str]) -> None:
    assert best_effort(click.Context(bench), bench.params[0], value) == asked


def test_no_request_under_way_is_a_mistake() -> None:
    with pytest.raises(click.BadParameter):
        best_effort(click.Context(bench), bench.params[0], "0,a.csv")
