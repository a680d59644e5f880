"""A real browser over its DevTools protocol: pages whose scripts are run, and give back what they return."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

PROGRAM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None: there is none on this machine."""
FLAGS: Final = (
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0"),
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
)
"""Every name that ends with `.example` leads to this machine, as a stranger's may."""
START_LIMIT_S: Final = 60.0
STEP_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.05


class Page:
    """One page, with nothing of its own but the answer at its address."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._num_asked = 0

    async def run(self, script: str, /, **names: Any) -> Any:
        """Run the body of an asynchronous function and return what it returns, as JSON has it.

        Args:
            script: in JavaScript.
            names: constants for it.

        Raises:
            AssertionError: it throws.
        """
        constants = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
        expression = f"(async () => {{ {constants} {script} }})()"
        options = {"awaitPromise": True, "returnByValue": True}
        result = await self._call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def show(self, url: str) -> None:
        """Open an address and return when all of it has come."""
        await self._call("Page.enable")
        await self._call("Page.navigate", url=url)
        async with asyncio.timeout(STEP_LIMIT_S):
            while (await self._socket.receive_json()).get("method") != "Page.loadEventFired":
                pass

    async def _call(self, method: str, **params: Any) -> Any:
        self._num_asked += 1
        await self._socket.send_json({"id": self._num_asked, "method": method, "params": params})
        async with asyncio.timeout(STEP_LIMIT_S):
            while (message := await self._socket.receive_json()).get("id") != self._num_asked:
                pass
        assert "error" not in message, message
        return message["result"]


class Browser:
    """A browser that runs.

    Args:
        http: for its DevTools.
        url: of these.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    @asynccontextmanager
    async def page(self, url: str) -> AsyncIterator[Page]:
        """Show an address in a tab until the block ends."""
        async with self._http.put(f"{self._url}/json/new") as answer:
            tab = json.loads(await answer.text())
        async with self._http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            await page.show(url)
            yield page
        async with self._http.get(f"{self._url}/json/close/{tab['id']}"):
            pass


@asynccontextmanager
async def running_chromium(folder: Path) -> AsyncIterator[Browser]:
    """Run the browser until the block ends.

    Args:
        folder: empty, for its profile.
    """
    assert PROGRAM is not None, "there is no browser"
    process = await asyncio.create_subprocess_exec(
        PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as http:
            port_file = folder / "DevToolsActivePort"
            while not port_file.is_file() or "\n" not in port_file.read_text():
                assert process.returncode is None, f"{PROGRAM} ended with {process.returncode}"
                await asyncio.sleep(_POLL_S)
        async with aiohttp.ClientSession() as http:
            yield Browser(http, f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
