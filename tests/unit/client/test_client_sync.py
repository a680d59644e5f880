"""The synchronous client: threads, event loops, Ctrl-C, leaving early, and being forgotten."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import threading
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from sluice_client import (
    Answer,
    APIStatusError,
    AsyncAnswer,
    AsyncSluiceClient,
    ConnectionLostError,
    QoeTarget,
    SluiceClient,
)
from sluice_client.loop_thread import LoopThread
from tests.support.openai_server import (
    ROLE,
    WHOLE,
    WORDS,
    Server,
    delta,
    events,
    refuse,
    running,
    say,
    stream,
)
from tests.support.processes import heed_signals

ENDLESS = stream(events(ROLE, *(delta(word) for word in WORDS)), hang=True)
"""The server's handler is cancelled when the connection closes; it would wait for ever otherwise."""
SLOW = QoeTarget(ttft_s=1000.0, speed_tokens_per_s=0.001)


@asynccontextmanager
async def serving(*replies: Any, **options: Any) -> AsyncIterator[tuple[SluiceClient, Server]]:
    """A server under this loop, for a client that other threads use."""
    server = Server(*replies)
    async with running(server) as url:
        client = SluiceClient(url, model="demo", **options)
        try:
            yield client, server
        finally:
            await asyncio.to_thread(client.close)


def threads() -> list[threading.Thread]:
    """The threads of clients that there are."""
    return [thread for thread in threading.enumerate() if thread.name == "sluice-client"]


async def ended(server: Server) -> None:
    await asyncio.wait_for(server.ended.wait(), 10)


@pytest.mark.parametrize("kinds", [(Answer, AsyncAnswer), (SluiceClient, AsyncSluiceClient)])
def test_both_kinds_have_the_same_methods_with_the_same_arguments(kinds: tuple[type, type]) -> None:
    plain, asynchronous = ({n: m for n, m in inspect.getmembers(kind) if n[0] != "_"} for kind in kinds)
    assert plain.keys() - {"close"} == asynchronous.keys() - {"aclose"}
    for name in plain.keys() - {"close"}:
        if callable(plain[name]):
            arguments = [inspect.signature(kind[name]).parameters for kind in (plain, asynchronous)]
            assert arguments[0] == arguments[1], name
    assert inspect.signature(SluiceClient).parameters == inspect.signature(AsyncSluiceClient).parameters


@pytest.mark.parametrize("pace", ["reading", "smooth", "off"])
async def test_a_chat_streams_its_text_and_then_knows_all_about_it(pace: Any) -> None:
    async with serving(stream(WHOLE, request_id="r-7"), api_key="secret") as (client, server):

        def read() -> Answer:
            with client.chat("hi", pace=pace, max_tokens=9) as answer:
                assert "".join(answer) == "".join(WORDS)
            return answer

        answer = await asyncio.to_thread(read)
        assert server.posts[0]["max_tokens"] == 9
        assert server.requests[0][1]["Authorization"] == "Bearer secret"
        await asyncio.to_thread(client.close)
        assert (answer.text, answer.finish_reason, answer.request_id) == ("".join(WORDS), "stop", "r-7")
        assert answer.server_stats == {"qoe": 0.97, "ttft_s": 0.2, "tokens": 6}
        assert (answer.ttft_s, answer.stats.buffered_tokens) == (answer.stats.ttft_s, 0)
        assert 0 <= answer.qoe <= 1


async def test_replies_models_and_completions() -> None:
    reply = say({"id": "c-1", "choices": [{"index": 0, "finish_reason": "stop", "text": "yes"}]})
    async with serving(reply, reply, stream(WHOLE)) as (client, server):

        def use() -> None:
            assert client.models() == ["demo", "other/model"]
            assert client.complete_once("hi").text == client.chat_once("hi", n=2).text == "yes"
            assert client.complete([1, 2]).read() == "".join(WORDS)

        await asyncio.to_thread(use)
        assert [body.get("prompt") for body in server.posts] == ["hi", None, [1, 2]]


async def test_errors_come_as_they_are_after_the_text_that_came() -> None:
    cut = stream(events(ROLE, delta("so far")), lose=True)
    async with serving(cut, refuse(400, "too long")) as (client, _):

        def use() -> None:
            shown, answer = "", client.chat("hi")
            with pytest.raises(ConnectionLostError):  # noqa: PT012  the loop shows what came before the error
                for text in answer:
                    shown += text
            assert shown == answer.text == "so far"
            with pytest.raises(APIStatusError, match="400: too long"):
                client.chat_once("hi")
            with pytest.raises(ValueError, match="one choice"):
                client.chat("hi", n=2)

        await asyncio.to_thread(use)


async def test_many_threads_have_answers_at_a_time() -> None:
    """No answer begins before all requests have come."""
    num_threads, num_come, all_come = 12, 0, asyncio.Event()

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal num_come
        num_come += 1
        if num_come == num_threads:
            all_come.set()
        await all_come.wait()
        return await stream(WHOLE)(request)

    async with serving(reply) as (client, _):
        with ThreadPoolExecutor(num_threads) as pool:
            reading = [pool.submit(lambda: "".join(client.chat("hi"))) for _ in range(num_threads)]
            texts = await asyncio.gather(*map(asyncio.wrap_future, reading))
        assert texts == ["".join(WORDS)] * num_threads
        assert len(threads()) == 1


async def test_it_can_be_used_where_an_event_loop_runs() -> None:
    async def cell(client: SluiceClient) -> str:
        asyncio.get_running_loop()
        return "".join(client.chat("hi"))

    async with serving(stream(WHOLE)) as (client, _):
        assert await asyncio.to_thread(lambda: asyncio.run(cell(client))) == "".join(WORDS)


@pytest.mark.parametrize("how", ["break", "close", "with", "stop", "cancel", "client"])
async def test_an_answer_left_early_closes_its_connection(how: str) -> None:
    async with serving(ENDLESS) as (client, server):

        def leave() -> str:
            answer = client.chat("hi")
            for _ in answer:
                break
            if how == "with":
                with answer:
                    next(answer)
            elif how == "client":
                client.close()
            elif how != "break":
                getattr(answer, how)()
            return "" if how == "break" else "".join(answer) if how in ("stop", "cancel") else answer.text

        text = await asyncio.to_thread(leave)
        await ended(server)
        assert not text or text in "".join(WORDS)


async def test_skip_shows_at_once_what_has_arrived() -> None:
    """At a token in 1000 s, only what is skipped is shown."""
    async with serving(ENDLESS) as (client, server):
        answer = client.chat("hi", pace="reading", qoe=SLOW)
        await asyncio.to_thread(answer.skip)
        assert await asyncio.to_thread(next, answer)
        await asyncio.to_thread(answer.close)
        await ended(server)
        assert await asyncio.to_thread(list, answer) == []


async def test_a_client_that_is_closed_tells_who_reads_and_who_comes_later() -> None:
    async with serving(ENDLESS) as (client, server):
        answer, has_begun = client.chat("hi", pace="off"), threading.Event()

        def read() -> None:
            for _ in answer:
                has_begun.set()

        reading = asyncio.create_task(asyncio.to_thread(read))
        await asyncio.to_thread(has_begun.wait)
        await asyncio.to_thread(client.close)
        assert threads() == []
        with pytest.raises(RuntimeError, match="the client is closed"):
            await reading
        await ended(server)
        later: list[Callable[[], object]] = [client.models, client.chat("hi").read, lambda: client.chat_once("hi")]
        for use in later:
            with pytest.raises(RuntimeError, match="the client is closed"):
                use()
        answer.close()
        client.close()


async def test_a_client_that_is_garbage_ends_its_thread_and_an_answer_keeps_it() -> None:
    async with running(Server(ENDLESS)) as url:

        def use() -> bool:
            answer = SluiceClient(url, model="demo").chat("hi")
            next(answer)
            (thread,) = threads()
            assert next(answer)
            del answer
            thread.join(10)
            return thread.is_alive()

        assert not await asyncio.to_thread(use)


async def test_what_nobody_reads_is_not_taken_from_the_server() -> None:
    """The reader takes one piece of an endless answer; what is in memory then is all that is ever taken."""
    part, num_bytes, is_stuck = events(delta("x" * 65_536)), 0, asyncio.Event()

    async def reply(request: web.Request) -> web.StreamResponse:
        nonlocal num_bytes
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while num_bytes < 256 << 20:
            try:
                async with asyncio.timeout(1):
                    await response.write(part)
            except TimeoutError:
                break
            num_bytes += len(part)
        is_stuck.set()
        return response

    async with serving(reply) as (client, _):
        answer = client.chat("hi", pace="off")
        await asyncio.to_thread(next, answer)
        await asyncio.wait_for(is_stuck.wait(), 60)
        assert num_bytes < 64 << 20
        await asyncio.to_thread(answer.close)


class Broken:
    async def __aenter__(self) -> None:
        raise OSError("no such thing")

    async def __aexit__(self, *_exc: object) -> None:
        raise AssertionError


def test_why_a_resource_cannot_be_opened_is_told_each_time() -> None:
    thread = LoopThread(Broken())
    for _ in range(2):
        with pytest.raises(OSError, match="no such thing"):
            thread.run(asyncio.Event().wait)
    for left in threads():
        left.join(10)
    assert threads() == []


@asynccontextmanager
async def script(code: str, url: str) -> AsyncIterator[Process]:
    """A program that uses the client, its output in a pipe; errors are in it."""
    code = f"import os, sys\nfrom sluice_client import SluiceClient\nURL = {url!r}\n{code}"
    command = (sys.executable, "-W", "always::ResourceWarning", "-W", "always::RuntimeWarning", "-c", code)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, preexec_fn=heed_signals
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def outcome(process: Process) -> tuple[int | None, str]:
    """Return what it ended with, and what it wrote."""
    output, _ = await asyncio.wait_for(process.communicate(b""), 60)
    return process.returncode, output.decode()


@pytest.mark.slow
async def test_ctrl_c_ends_the_reading_at_once_and_leaving_the_client_closes_the_connection() -> None:
    code = """
try:
    with SluiceClient(URL) as client:
        for text in client.chat("hi", pace="off"):
            print("text", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
print("done")
"""
    server = Server(ENDLESS)
    async with running(server) as url, script(code, url) as process:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"text\n"
        process.send_signal(signal.SIGINT)
        while await process.stdout.readline() != b"interrupted\n":
            pass
        await ended(server)
        assert await outcome(process) == (0, "done\n")


@pytest.mark.slow
async def test_ctrl_c_closes_the_connection_also_of_a_client_that_stays() -> None:
    """As when one types: the answer and the client are still there."""
    code = """
client = SluiceClient(URL)
answer = client.chat("hi", pace="off")
for _ in range(2):
    try:
        answer.read()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print(client.models())
"""
    server = Server(ENDLESS)
    async with running(server) as url, script(code, url) as process:
        while not server.posts:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        await ended(server)
        assert await outcome(process) == (0, "interrupted\n['demo', 'other/model']\n")


@pytest.mark.slow
@pytest.mark.parametrize("left", ["pass", "del client", "del client, answer", "client.close()", "answer.close()"])
async def test_a_client_that_is_forgotten_does_not_hold_up_the_end_of_the_interpreter(left: str) -> None:
    """By name: names are looked up in a thread of the standard library's. Nothing is complained about."""
    code = f"client = SluiceClient(URL)\nanswer = client.chat('hi', pace='off')\nnext(answer)\n{left}"
    server = Server(ENDLESS)
    async with running(server) as url, script(code, url.replace("127.0.0.1", "localhost")) as process:
        assert await outcome(process) == (0, "")
        await ended(server)


@pytest.mark.slow
async def test_a_client_in_use_is_refused_after_a_fork_and_the_parent_goes_on() -> None:
    code = """
client = SluiceClient(URL)
client.models()
if (pid := os.fork()) == 0:
    try:
        client.models()
    except RuntimeError as error:
        print(error, flush=True)
    client.close()
    with SluiceClient(URL) as mine:
        print(mine.models(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(client.models())
"""
    async with running(Server(ENDLESS)) as url, script(code, url) as process:
        code_, output = await outcome(process)
    refused, *lists = output.splitlines()
    assert (code_, lists) == (0, ["['demo', 'other/model']"] * 2)
    assert "was forked; make one in each process" in refused
