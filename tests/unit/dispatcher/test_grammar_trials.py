"""Grammars in their trial: what comes of each, what it costs, whose turn it is, and a child that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import demo_model
from services.dispatcher.endpoints.fields import Fields
from services.dispatcher.endpoints.guided import parse_guide
from services.dispatcher.http.errors import ApiError
from services.dispatcher.text import grammar_trials
from services.dispatcher.text.grammar_trials import GrammarTrials, NoTrialsError, TrialsFullError, Verdict
from tests.support.hostile_forms import COSTLY, HOSTILE
from tests.support.waiting import until

MODEL = Path(demo_model.__file__).parent / "model"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def trials(model: Path = MODEL) -> AsyncIterator[GrammarTrials]:
    """Trials over the demo model's vocabulary, with their task."""
    found = GrammarTrials(model, 2048, 4)
    task = asyncio.create_task(found.run_forever())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


def child_of(found: GrammarTrials) -> int:
    assert found._child is not None
    return found._child.pid


def read(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended."""
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def resident_mib(pid: int) -> float:
    return int(read(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def lark(words: str) -> bytes:
    return f'start: "{words}"'.encode()


async def test_what_comes_of_a_grammar() -> None:
    async with trials() as found:
        assert await found.verdict(b'start: "a" | /[0-9]+/', "") == Verdict()
        gbnf = await found.verdict(b'root ::= "a" | digits\ndigits ::= [0-9]+\n', "")
        assert gbnf.converted is not None
        assert b"DIGITS: /[0-9]/+" in gbnf.converted
        assert await found.verdict(gbnf.converted, "") == Verdict()
        bad = await found.verdict(b"start: other", "")
        assert "other" in bad.reason
        assert bad.reason.isprintable()
        nothing = await found.verdict(b'{"grammars":[{"json_schema":{"$ref":"#"}}]}', "")
        assert nothing.reason == "no answer can match it"


@pytest.mark.slow
async def test_hostile_forms_cost_no_second_of_anybody_and_leave_nothing() -> None:
    """The limit on a copy is half a second of processor time; what the event loop does for a form is less."""
    async with trials() as found:
        await found.verdict(lark("warm"), "")
        child, costs = child_of(found), {}
        before_mib = resident_mib(child)
        for name, (fields, code) in HOSTILE.items():
            own_s, child_s = time.thread_time(), cpu_s(child)
            assert await outcome(found, fields) == code, name
            costs[name] = (time.thread_time() - own_s, cpu_s(child) - child_s)
            assert child_of(found) == child, f"{name} ended the child"
        assert not {name: cost for name, cost in costs.items() if max(cost) >= 1}
        assert resident_mib(child) - before_mib < 16
        assert read(child, f"task/{child}/children") == b""
    await until(lambda: not Path(f"/proc/{child}").exists())


async def outcome(found: GrammarTrials, fields: dict[str, Any]) -> str:
    """Return the code of the refusal; empty if the form is served."""
    try:
        guide = parse_guide(Fields(fields))
    except ApiError as error:
        return str(error.code)
    assert guide is not None
    verdict = await found.verdict(guide.grammar, "")
    if verdict.is_costly:
        return COSTLY
    return guide.code.value if verdict.reason else ""


async def test_a_grammar_that_takes_too_much_memory_is_refused_and_its_memory_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library's own appetite cannot be arranged, so the child is one whose grammars are its memory."""
    greedy = "from services.dispatcher.text import grammar_trial as t\n"
    greedy += "t.try_grammar = lambda _, text: {'reason': str(len(bytearray(int(text) << 20)))}\nt._main()\n"
    (tmp_path / "greedy.py").write_text(greedy)
    monkeypatch.setattr(grammar_trials, "CHILD", ("-c", greedy))
    async with trials() as found:
        assert (await found.verdict(b"100", "")).reason == str(100 << 20)
        before_mib = resident_mib(child_of(found))
        assert (await found.verdict(b"300", "")).is_costly
        assert resident_mib(child_of(found)) - before_mib < 16


async def test_a_grammar_is_tried_once_and_what_was_asked_for_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bytes] = []
    async with trials() as found:
        record(found, monkeypatch, tried)
        first, second = await asyncio.gather(found.verdict(lark("a"), "x"), found.verdict(lark("a"), "y"))
        assert first is second
        monkeypatch.setattr(grammar_trials, "MAX_KNOWN", 2)
        for words in ("b", "a", "c", "a", "b"):
            await found.verdict(lark(words), "x")
    assert tried == [lark(words) for words in ("a", "b", "c", "b")]


def record(found: GrammarTrials, monkeypatch: pytest.MonkeyPatch, tried: list[bytes]) -> asyncio.Event:
    """Have trials note the grammar instead of asking a child, as long as the event is set, which it is."""
    going = asyncio.Event()
    going.set()

    async def ask(grammar: bytes) -> dict[str, Any]:
        await going.wait()
        tried.append(grammar)
        return {}

    monkeypatch.setattr(found, "_ask", ask)
    return going


async def test_tenants_take_turns_and_each_has_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []

    async def wait_in_line(found: GrammarTrials, **tenants: str) -> list[asyncio.Task[Verdict]]:
        tasks = [asyncio.create_task(found.verdict(lark(name), tenant)) for name, tenant in tenants.items()]
        await asyncio.sleep(0.01)
        return tasks

    async with trials() as found:
        going = record(found, monkeypatch, tried)
        going.clear()
        waiting = await wait_in_line(found, a0="a")  # this one is being tried
        waiting += await wait_in_line(found, **{f"a{i}": "a" for i in range(1, 17)})
        with pytest.raises(TrialsFullError):
            await found.verdict(lark("a17"), "a")
        waiting += await wait_in_line(found, b0="b", c0="c", b1="b")
        going.set()
        await asyncio.gather(*waiting)
        assert tried[:7] == [lark(name) for name in ("a0", "a1", "b0", "c0", "a2", "b1", "a3")]
        assert len(tried) == 20
        going.clear()
        crowd = await wait_in_line(found, first="first")
        crowd += await wait_in_line(found, **{f"t{i}": f"t{i}" for i in range(64)})
        with pytest.raises(TrialsFullError):
            await found.verdict(lark("late"), "late")
        crowd.pop().cancel()  # whoever leaves does not disturb
        going.set()
        await asyncio.gather(*crowd)


async def test_a_child_that_was_killed_is_replaced() -> None:
    async with trials() as found:
        await found.verdict(lark("a"), "")
        child = child_of(found)
        os.kill(child, signal.SIGKILL)
        assert await found.verdict(lark("b"), "") == Verdict()
        assert child_of(found) != child


async def test_a_child_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trials() as found:
        await found.verdict(lark("a"), "")
        child, start = child_of(found), found._start
        os.kill(child, signal.SIGSTOP)
        monkeypatch.setattr(grammar_trials, "WALL_LIMIT_S", 0.2)

        async def start_in_time() -> asyncio.subprocess.Process:
            monkeypatch.setattr(grammar_trials, "WALL_LIMIT_S", 30.0)
            return await start()

        monkeypatch.setattr(found, "_start", start_in_time)
        assert await found.verdict(lark("b"), "") == Verdict()
        assert child_of(found) != child


async def test_a_child_that_cannot_start_in_time_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "WALL_LIMIT_S", 0.0)
    async with trials() as found:
        with pytest.raises(TrialsFullError):
            await found.verdict(lark("a"), "")
        monkeypatch.undo()
        assert await found.verdict(lark("a"), "") == Verdict()


async def test_a_vocabulary_that_the_library_does_not_take(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    async with trials(tmp_path) as found:
        for _ in range(2):
            with pytest.raises(NoTrialsError):
                await found.verdict(lark("a"), "")


async def test_the_child_ends_with_the_dispatcher_and_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_NATS_PASSWORD", "secret")
    async with trials() as found:
        await found.verdict(lark("a"), "")
        child = child_of(found)
        assert b"secret" not in read(child, "environ")
        late = asyncio.create_task(found.verdict(lark("b"), ""))
        await asyncio.sleep(0)
    await asyncio.wait([late])
    await until(lambda: not Path(f"/proc/{child}").exists())
