"""What a message costs a process that has nothing else to do: a bare uvloop server that echoes 200 bytes.

Its CPU time per message, by the kernel's count, when messages come one by one after a pause, and when the next one is
sent as soon as the last one is back. The difference is the machine's: caches that went cold, a core that wakes up.

    python -m benchmarks.cold_echo [--messages 400] [--pause-ms 50]
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import uvloop

from benchmarks.harness import cpu_s, free_port, machine, print_table

SIZE = 200
WARM_UP = 20
SERVER = """
import asyncio, sys, uvloop
class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(data)
async def main():
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", int(sys.argv[1]))
    print("ready", flush=True)
    await server.serve_forever()
uvloop.run(main())
"""


async def cpu_us_per_message(pid: int, port: int, num_messages: int, pause_s: float) -> float:
    """Return the server's CPU time per message in microseconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before = 0.0
    for index in range(num_messages + WARM_UP):
        if index == WARM_UP:
            before = cpu_s(pid)
        writer.write(bytes(SIZE))
        await reader.readexactly(SIZE)
        if pause_s:
            await asyncio.sleep(pause_s)
    used_s = cpu_s(pid) - before
    writer.close()
    await writer.wait_closed()
    return 1e6 * used_s / num_messages


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--pause-ms", type=float, default=50.0)
    chosen = parser.parse_args()
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(port), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        await server.stdout.readline()
        cold = await cpu_us_per_message(server.pid, port, chosen.messages, chosen.pause_ms / 1e3)
        warm = await cpu_us_per_message(server.pid, port, 20 * chosen.messages, 0.0)
    finally:
        server.terminate()
        await server.wait()
    print_table(
        f"CPU of a server that echoes {SIZE} bytes ({machine()})",
        ["messages", "CPU per message, µs"],
        [[f"one every {chosen.pause_ms:g} ms", f"{cold:.0f}"], ["without pauses", f"{warm:.0f}"]],
    )


if __name__ == "__main__":
    uvloop.run(main())
