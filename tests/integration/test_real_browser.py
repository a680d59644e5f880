"""A real browser: the pages of one origin use the API, the others reach nothing. Run by `make test-browser`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from tests.support.chromium import PROGRAM, Browser, running_chromium
from tests.support.cutting_proxy import cutting
from tests.support.dispatchers import CHAT, HELLO, TEXT, Serve, write_keys
from tests.support.javascript import CLIENT, READ

pytestmark = [
    pytest.mark.browser,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on this machine (Debian: apt install chromium)"),
]

BODY = {"model": "tiny", "messages": HELLO}
TTFT_S, TOKENS_PER_S = 0.2, 50.0

ASK = """
const ask = (key, body) => fetch(url, {
  method: "POST",
  headers: {authorization: `Bearer ${key}`, "content-type": "application/json", "x-stainless-lang": "js"},
  body: JSON.stringify(body),
});
"""
READ_EVENTS = """
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue;
      const chunk = JSON.parse(event.slice(6));
      const text = chunk.choices[0].delta.content;
      if (text) yield {text, numTokens: chunk.sluice?.n ?? 1};
    }
  }
}
"""
TALK = """
return await new Promise((resolve) => {
  const heard = [];
  const socket = new WebSocket(url.replace(/^http/, "ws").replace(/chat.completions$/, "ws"));
  socket.onopen = () => socket.send(JSON.stringify({type: "request", id: "a", body}));
  socket.onmessage = ({data}) => {
    heard.push(JSON.parse(data));
    if (heard.at(-1).type === "done") socket.close();
  };
  socket.onclose = () => resolve(heard.map((each) => each.type));
});
"""
SDK = 'const {SluiceClient} = await import("/sluice-client/index.js");'
ATTACK = """
const unsure = (promise) => promise.then((answer) => answer.type, (error) => error.name);
const send = (mode) => unsure(fetch(url, {method: "POST", mode, body: new Blob([JSON.stringify(body)])}));
return [await send("no-cors"), await send("cors"), await unsure(fetch(url.replace("/chat/completions", "/cluster")))];
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with running_chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[str]:
    """Pages of another server, under every name that leads to this machine: the end of their origin."""

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>a page</title>", content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/", page), web.static("/sluice-client", CLIENT)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"example:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_page_that_may_reads_answers_refusals_and_limits(
    serve: Serve, browser: Browser, site: str, tmp_path: Path
) -> None:
    origin = f"http://chat.{site}"
    keys = write_keys(tmp_path / "keys.toml", {"sk-mine": ("acme", "infer")}, {"acme": "requests_per_min = 1"})
    script = """
    const found = [];
    for (const [key, more] of asked) {
      const answer = await ask(key, {...body, ...more});
      const names = ["x-request-id", "x-ratelimit-remaining-requests", "retry-after-ms"];
      const code = (await answer.json()).error?.code ?? null;
      found.push([answer.status, code, ...names.map((name) => answer.headers.has(name))]);
    }
    return found;
    """
    more = [{}, {"model": "no"}, {}, {"n": 2}]
    asked = [("sk-no", {}), *(("sk-mine", each) for each in more)]
    async with serve("hi", api_keys_file=keys, allow_origin=(origin,)) as running, browser.page(origin) as page:
        found = await page.run(ASK + script, url=running.url + CHAT, body=BODY, asked=asked)
    assert found == [
        [401, "invalid_api_key", True, False, False],
        [200, None, True, True, False],
        [404, "model_not_found", True, False, False],
        [429, "rate_limit_exceeded", True, True, True],
        [429, "rate_limit_exceeded", True, True, False],
    ]


async def test_a_page_that_may_shows_a_stream_at_reading_speed(serve: Serve, browser: Browser, site: str) -> None:
    """The worker says all at once; the last of n tokens is shown (n − 1) / speed after the first is due, or later."""
    origin, key = f"http://chat.{site}", "k" * 16
    script = """
    const {PacedStream, makePacer, qoeTarget} = await import("/sluice-client/index.js");
    const startedS = performance.now() / 1000;
    const pacer = makePacer("reading", qoeTarget({ttftS, speedTokensPerS}));
    let text = "", numTokens = 0;
    async function* counted(pieces) {
      for await (const piece of pieces) {
        numTokens += piece.numTokens;
        yield piece;
      }
    }
    const answer = await ask(key, {...body, stream: true});
    for await (const shown of new PacedStream(counted(readEvents(answer)), pacer, {startedS})) text += shown;
    return [text, numTokens, performance.now() / 1000 - startedS, pacer.stats().bufferedTokens];
    """
    names = {"body": BODY, "key": key, "ttftS": TTFT_S, "speedTokensPerS": TOKENS_PER_S}
    async with serve(TEXT, api_key=key, allow_origin=(origin,)) as running, browser.page(origin) as page:
        shown = await page.run(ASK + READ_EVENTS + script, url=running.url + CHAT, **names)
        num_tokens = len(running.encode(TEXT))
    text, num_counted, took_s, num_left = shown
    assert (text, num_left) == (TEXT, 0)
    assert 1 < num_counted <= num_tokens
    assert took_s >= TTFT_S + (num_counted - 1) / TOKENS_PER_S - 0.001, "to the browser's own rounding"


@pytest.mark.parametrize("way", ["http", "websocket"])
async def test_a_page_reads_an_answer_by_the_sdk_and_resumes_it_though_its_connection_is_cut(
    serve: Serve, browser: Browser, site: str, way: str
) -> None:
    """Undisturbed, then over connections each of which is cut within its second or third event."""
    origin, options = f"http://chat.{site}", {"transport": way}
    async with (
        serve(TEXT, allow_origin=(origin,)) as running,
        cutting(running.url, [1800] * 12) as proxy,
        browser.page(origin) as page,
    ):
        running.worker.step_s = 0.001  # so that events come one by one
        answers = [
            await page.run(SDK + READ, urls=[url], options=options, count=1, params={"seed": 1, "logprobs": True})
            for url in (running.url, proxy.url)
        ]
        assert proxy.num_cut >= 3
        num_tokens = len(running.encode(TEXT))
    assert [answer["shown"] for (answer,) in answers] == [TEXT] * 2
    assert [answer["finishReason"] for (answer,) in answers] == ["stop"] * 2
    assert answers[0][0]["usage"]["completion_tokens"] == num_tokens + 1
    assert answers[0][0]["requestId"].startswith("req_"), "pages of other origins may read it"


async def test_a_page_has_several_answers_over_one_websocket_and_leaves_one(
    serve: Serve, browser: Browser, site: str
) -> None:
    origin = f"http://chat.{site}"
    script = """
    const client = new SluiceClient(url, {model: "tiny", transport: "websocket"});
    const left = client.chat("hi", {pace: "off"}), others = [client.chat("hi"), client.chat("hi")];
    const reading = others.map((answer) => answer.read());
    for await (const text of left) break;
    return [await Promise.all(reading), left.finishReason, await client.close()];
    """
    async with serve(allow_origin=(origin,)) as running, browser.page(origin) as page:
        telling = asyncio.create_task(page.run(SDK + script, url=running.url))
        items = await running.begun(3)
        assert len(running.front.sockets) == 1
        for item in items:
            await running.worker.emit(item, running.encode("so "))
        await running.worker.wait_cancelled()
        for item in items:
            if not item.finish:
                await running.end(item, "far")
        assert await telling == [["so far", "so far"], None, None]


async def test_the_page_of_the_readme_shows_the_answer(serve: Serve, browser: Browser, site: str) -> None:
    """Its module is beside it, as it says; the API alone has another address."""
    (page_text,) = re.findall(r"```html\n(.*?)```", (CLIENT.parent / "README.md").read_text(), flags=re.DOTALL)
    origin = f"http://chat.{site}"
    script = """
    document.documentElement.innerHTML = text;
    const module = document.createElement("script"), old = document.querySelector("script");
    module.type = old.type;
    module.text = old.text;
    old.replaceWith(module);
    while (story.textContent !== expected) await new Promise((resolve) => setTimeout(resolve, 20));
    """
    async with serve(TEXT, allow_origin=(origin,)) as running, browser.page(origin) as page:
        text = page_text.replace("http://127.0.0.1:8000", running.url)
        assert text != page_text
        await page.run(script, text=text, expected=TEXT)


async def test_the_sdk_tells_a_page_what_it_may_not_do(serve: Serve, browser: Browser, site: str) -> None:
    script = """
    const told = [];
    for (const options of [{apiKey: "k".repeat(16)}, {}, {transport: "websocket"}]) {
      const limits = {retry: {maxRetries: 0}};
      const client = new SluiceClient(url, {model: "tiny", limits, ...options});
      told.push(await client.chat("hi").read().catch(({name, message}) => `${name}: ${message}`));
    }
    try {
      new SluiceClient(url, {apiKey: "k".repeat(16), transport: "websocket"});
    } catch ({name, message}) {
      told.push(`${name}: ${message}`);
    }
    return told;
    """
    key, origin = "k" * 16, f"http://chat.{site}"
    async with serve("hi", api_key=key, allow_origin=(origin,)) as running:
        async with browser.page(origin) as page:
            with_key, without, over_socket, both = await page.run(SDK + script, url=running.url)
        async with browser.page(f"http://evil.{site}") as page:
            strange = (await page.run(SDK + script, url=running.url))[0]
    assert with_key == "hi"
    assert without.startswith("APIStatusError: ")
    assert over_socket.startswith("APIConnectionError: no WebSocket at ")
    assert both == 'RangeError: a page cannot give a WebSocket a key: where one is asked for, take transport "http"'
    assert strange.startswith("APIConnectionError: no answer from ")
    assert "does not let this page in" in strange


async def test_a_websocket_opens_for_the_page_that_may_and_for_no_other(
    serve: Serve, browser: Browser, site: str
) -> None:
    origin = f"http://chat.{site}"
    heard = {}
    async with serve("hi", allow_origin=(origin,)) as running:
        for who in (origin, f"http://evil.{site}"):
            async with browser.page(who) as page:
                heard[who] = await page.run(TALK, url=running.url + CHAT, body=BODY)
        assert len(running.worker.submits) == 1
    assert heard[origin][0] == "start"
    assert heard[origin][-1] == "done"
    assert heard[f"http://evil.{site}"] == []


async def test_pages_of_strangers_reach_no_worker_and_read_nothing(serve: Serve, browser: Browser, site: str) -> None:
    """A page without a word of the operator: it sends what needs no preflight, and asks under a name of its own."""
    async with serve("hi") as running:
        async with browser.page(f"http://evil.{site}") as page:
            assert await page.run(ATTACK, url=running.url + CHAT, body=BODY) == ["opaque", "TypeError", "TypeError"]
            assert await page.run(TALK, url=running.url + CHAT, body=BODY) == []
        rebound = f"http://evil.example:{running.url.rpartition(':')[2]}"
        async with browser.page(f"{rebound}/v1/cluster") as page:
            assert "foreign_host" in await page.run("return document.body.innerText")
            script = ASK + "const answer = await ask('', body); return [answer.status, await answer.text()]"
            status, text = await page.run(script, url=rebound + CHAT, body=BODY)
            assert (status, "foreign_host" in text) == (403, True)
            assert await page.run(TALK, url=rebound + CHAT, body=BODY) == []
        assert running.worker.submits == []


async def test_a_person_who_opens_an_address_of_the_server_sees_it(serve: Serve, browser: Browser) -> None:
    async with serve("hi") as running, browser.page(f"{running.url}/v1/models") as page:
        assert "tiny" in await page.run("return document.body.innerText")
        script = ASK + "const answer = await ask('', body); return answer.status"
        assert await page.run(script, url=running.url + CHAT, body=BODY) == 200
        assert (await page.run(TALK, url=running.url + CHAT, body=BODY))[-1] == "done"
