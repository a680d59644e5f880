"""What `nats` of NATS's command-line tools asks of a broker, with the same credentials: a refusal shows as there.

`nats [--server URL] sub SUBJECT [--translate COMMAND]` hears for a second at most, and ends after one message;
`req SUBJECT BODY [--raw]`; `kv get BUCKET KEY --raw`; `micro ls`, `micro info NAME ID`, `micro stats NAME`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from typing import Any

import nats

HEAR_S = 1.0
ANSWER_S = 5.0


async def _sub(client: Any, args: argparse.Namespace) -> int:
    heard = await client.subscribe(args.what[0])
    await client.flush()
    try:
        message = await heard.next_msg(HEAR_S)
    except TimeoutError:
        return 0
    if args.translate:
        shown = await asyncio.create_subprocess_shell(args.translate, stdin=subprocess.PIPE)
        await shown.communicate(message.data)
        return shown.returncode or 0
    sys.stdout.write(f"[#1] Received on {message.subject!r}\n{message.data[:4000]!r}\n")
    return 0


async def _req(client: Any, args: argparse.Namespace) -> int:
    subject, body = args.what
    answer = await client.request(subject, body.encode(), timeout=ANSWER_S)
    sys.stdout.write(answer.data.decode() + "\n")
    return 0


async def _kv(client: Any, args: argparse.Namespace) -> int:
    verb, bucket, key = args.what
    assert verb == "get"
    store, name = client.jetstream(), f"KV_{bucket}"
    is_direct = (await store.stream_info(name)).config.allow_direct
    answer = await store.get_last_msg(name, f"$KV.{bucket}.{key}", direct=bool(is_direct))
    sys.stdout.write(answer.data.decode() + "\n")
    return 0


async def _micro(client: Any, args: argparse.Namespace) -> int:
    verb, *whom = args.what
    subject = ".".join((f"$SRV.{'STATS' if verb == 'stats' else 'INFO'}", *whom))
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish(subject, b"", reply=inbox)
    answer = await answers.next_msg(ANSWER_S)
    sys.stdout.write(answer.data.decode() + "\n")
    return 0


async def _main() -> int:
    parser = argparse.ArgumentParser(prog="nats")
    parser.add_argument("--server", default=os.environ.get("NATS_URL", "nats://127.0.0.1:4222"))
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--translate", default="")
    parser.add_argument("verb", choices=["sub", "req", "kv", "micro"])
    parser.add_argument("what", nargs="+")
    args = parser.parse_intermixed_args()
    problems: list[str] = []

    async def on_error(error: Exception) -> None:
        problems.append(str(error))

    client = await nats.connect(args.server, error_cb=on_error, max_reconnect_attempts=1)
    try:
        code = await {"sub": _sub, "req": _req, "kv": _kv, "micro": _micro}[args.verb](client, args)
    finally:
        await client.close()
    sys.stderr.write("".join(f"nats: error: {problem}\n" for problem in problems))
    return 1 if problems else code


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
