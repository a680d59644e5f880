"""The SDK in JavaScript: scripts of it that run under Node and in a page alike, and Node itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

CLIENT: Final = Path(__file__).parents[2] / "client" / "js"
NODE: Final = shutil.which("node")
"""None: it is not on PATH."""
LIMIT_S: Final = 60.0
READ: Final = """
const client = new SluiceClient(urls, {
  model: "tiny", limits: {retry: {firstBackoffS: 0.002, maxBackoffS: 0.01}}, ...options,
});
const read = async () => {
  const answer = client.chat("hi", {pace: "off", ...params});
  let shown = "";
  for await (const text of answer) shown += text;
  const {text, finishReason, usage, requestId, ttftS, qoe} = answer;
  return {shown, text, finishReason, usage, requestId, ttftS, qoe};
};
try {
  return await Promise.all(Array.from({length: count}, read));
} catch ({name, message, status, code}) {
  return {name, message, status, code};
} finally {
  await client.close();
}
"""
"""Gives what becomes of `count` answers at a time from `urls`, or the error of one."""


@cache
def _flags() -> tuple[str, ...]:
    """Return what gives a Node that has a WebSocket, but hides it, the name; older ones have none."""
    assert NODE is not None, "there is no Node"
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return ("--experimental-websocket",) if version.startswith(("v20.", "v21.")) else ()


async def run(script: str, told: asyncio.Event | None = None, /, **names: Any) -> Any:
    """Run the body of an asynchronous function under Node and return what it returns, as JSON has it.

    Args:
        script: with the SDK's exports, and `told`, a promise.
        told: keeps that promise.
        names: constants for it.

    Raises:
        AssertionError: it throws, or does not end.
    """
    constants = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
    code = (
        f"import * as sdk from {json.dumps((CLIENT / 'index.js').as_uri())};"
        f"const {{SluiceClient}} = sdk; {constants}"
        'const told = new Promise((resolve) => process.stdin.once("data", resolve));'
        f"const result = await (async () => {{ {script} }})();"
        "process.stdin.destroy(); process.stdout.write(JSON.stringify(result ?? null));"
    )
    return json.loads(await run_node([*_flags(), "--input-type=module", "--eval", code], told=told))


async def run_node(
    arguments: Sequence[str | Path], folder: Path | None = None, told: asyncio.Event | None = None
) -> str:
    """Run Node to its end and return what it prints.

    Args:
        arguments: on its command line.
        folder: where it runs.
        told: sends it a line when it is set.

    Raises:
        AssertionError: it fails, or does not end.
    """
    assert NODE is not None, "there is no Node"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(NODE, *arguments, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(LIMIT_S):
            if told is not None:
                await told.wait()
            output, errors = await process.communicate(b"\n" if told is not None else None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return output.decode()
