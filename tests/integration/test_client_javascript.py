"""The SDK in JavaScript, under Node, against a whole dispatcher: over HTTP and WebSockets, broken and whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from shared.messages.request import RefusalReason, Submit
from tests.support.cutting_proxy import cutting
from tests.support.dispatchers import TEXT, Running, Serve
from tests.support.javascript import NODE, READ, run
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(NODE is None, reason="node is not on PATH: the SDK in JavaScript was not tested"),
]
WAYS = ["http", "websocket"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve) -> AsyncIterator[Running]:
    """A worker that answers every request with TEXT, from where it is told to go on."""
    async with serve(TEXT) as running:
        running.worker.step_s = 0.001  # so that events come one by one
        yield running


async def read(*urls: str, way: str, count: int = 1, params: Any = None, **options: Any) -> Any:
    """Return what becomes of answers to one client, or its error."""
    options = {"transport": way, **options}
    return await run(READ, urls=urls, options=options, count=count, params=params or {})


@pytest.mark.parametrize("way", WAYS)
async def test_node_reads_an_answer_and_knows_all_about_it(served: Running, way: str) -> None:
    (answer,) = await read(served.url, way=way, params={"qoe": {"ttftS": 0.5}, "seed": 1})
    assert answer["shown"] == answer["text"] == TEXT
    assert answer["finishReason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(served.encode(TEXT)) + 1
    assert answer["requestId"].startswith("req_")
    assert answer["ttftS"] > 0
    assert 0 <= answer["qoe"] <= 1
    await until(lambda: not (len(served.table) or len(served.front.live) or len(served.front.sockets)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("orderly", [False, True], ids=["reset", "fin"])
async def test_an_answer_is_whole_though_its_connection_is_cut_again_and_again(
    served: Running, way: str, orderly: bool
) -> None:
    """Each connection brings two or three events, and is cut within one; the text is that of the undisturbed answer."""
    (undisturbed,) = await read(served.url, way=way, params={"seed": 1})
    async with cutting(served.url, [1400] * 12, orderly=orderly) as proxy:
        (answer,) = await read(proxy.url, way=way, params={"seed": 1, "logprobs": True})
        assert proxy.num_cut >= 3
    for name in ("shown", "text", "finishReason"):
        assert answer[name] == undisturbed[name], name


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_goes_on_at_another_dispatcher_when_its_own_dies(serve: Serve, way: str) -> None:
    seeds = []

    def script(submit: Submit) -> Sequence[int]:
        seeds.append((submit.request_id, submit.sampling.seed, len(submit.generated_ids())))
        return [*first.encode(TEXT), first.end_id]

    async with serve(script) as first, serve(script) as second, cutting(first.url, [2000, 0]) as proxy:
        first.worker.step_s = 0.001
        (answer,) = await read(proxy.url, second.url, way=way)
        assert answer["shown"] == TEXT
        assert seeds == [seeds[0]] * 2
        assert proxy.num_connections == 2


async def test_seventeen_answers_at_once_take_a_second_connection(running: Running) -> None:
    reading = asyncio.create_task(read(running.url, way="websocket", count=17))
    items = await running.begun(17)
    assert len(running.front.sockets) == 2
    for item in items:
        await running.end(item, TEXT)
    assert [answer["shown"] for answer in await reading] == [TEXT] * 17


@pytest.mark.parametrize("way", WAYS)
async def test_a_refusal_has_its_status_and_code_and_is_not_retried(serve: Serve, way: str) -> None:
    async with serve("hi") as running:
        running.worker.refuse = RefusalReason.TOO_LONG
        refusal = await read(running.url, way=way)
        assert len(running.worker.submits) == 1
    assert refusal.pop("message")
    assert refusal == {"name": "APIStatusError", "status": 400, "code": "context_length_exceeded"}


@pytest.mark.parametrize("way", WAYS)
async def test_node_says_the_key_over_both_ways(serve: Serve, way: str) -> None:
    key = "k" * 16
    async with serve("hi", api_key=key) as running:
        (answer,) = await read(running.url, way=way, apiKey=key)
        assert answer["shown"] == "hi"
        refused = await read(running.url, way=way, apiKey="hidden-" + "x" * 16)
    assert refused["name"] == {"http": "APIStatusError", "websocket": "APIConnectionError"}[way]
    assert "hidden" not in str(refused)


LEAVE = """
const client = new SluiceClient(url, {model: "tiny", transport});
const controller = new AbortController();
const answer = client.chat("hi", {pace: "off", signal: controller.signal});
let shown = "", error = null;
const leave = () => how === "abort" ? controller.abort() : answer[how]();
if (stage === "submitting") told.then(leave);
try {
  for await (const text of answer) {
    shown += text;
    if (how === "break") break;
    await leave();
  }
} catch ({name}) {
  error = name;
}
if (stage === "mid-stream") await told;
await client.close();
return [shown, error, answer.finishReason];
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("how", "stage"),
    [
        ("stop", "submitting"),
        ("abort", "submitting"),
        *((how, "mid-stream") for how in ("break", "close", "cancel", "abort")),
    ],
)
async def test_an_answer_that_is_left_is_cancelled_at_the_worker(
    running: Running, way: str, how: str, stage: str
) -> None:
    worker, told = running.worker, asyncio.Event()
    worker.answers = stage != "submitting"
    leaving = asyncio.create_task(run(LEAVE, told, url=running.url, transport=way, how=how, stage=stage))
    await until(lambda: worker.submits)
    if worker.answers:
        (item,) = await running.begun()
        await worker.emit(item, running.encode("Hello"))
        await worker.wait_cancelled()  # with its connection still open, if that has several answers
    told.set()
    shown, error, finish_reason = await leaving
    assert shown == ("Hello" if stage == "mid-stream" else "")
    assert error == ("AbortError" if how == "abort" else None)
    assert finish_reason is None
    await worker.wait_cancelled()
    await running.until_nothing_is_left()
    worker.answers = True


async def test_a_websocket_that_cannot_be_is_told_with_the_way_out() -> None:
    script = """
    const tell = (options, more = {}) => {
      Object.assign(globalThis, more);
      try {
        new SluiceClient("http://there", {transport: "websocket", ...options});
      } catch (error) {
        return error.message;
      }
    };
    return [
      tell({}, {WebSocket: undefined}), tell({WebSocket: class {}}),
      tell({apiKey: "hidden"}, {WebSocket: class {}, document: {}}), tell({}),
    ];
    """
    missing, given, page, plain = await run(script)
    assert 'option WebSocket, such as that of the package ws, or take transport "http"' in missing
    assert "a page cannot give a WebSocket a key" in page
    assert "hidden" not in page
    assert given is plain is None
