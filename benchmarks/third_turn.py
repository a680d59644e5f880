"""How long the third turn of a chat waits that the device has forgotten, with memory of the host and without.

    python -m benchmarks.third_turn [--turn 900] [--asks 100] [--others 8] [--repeats 7] [--memory 400MiB]
                                    [--host-memory 1GiB]

Two clusters of one worker each, the same but for `--host-memory`, take turns. A chat has two turns; then other prompts
fill the device's KV until nothing of it is left there; then the third turn comes, with a short question, and its first
token is timed. `warm` is a third turn that comes before the others: as fast as it gets. The model has 25.7 M parameters
(`peers_model.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.live_cluster import LiveCluster
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, make_checkpoint

ANSWER_TOKENS = 8


class Reader:
    """Asks one cluster for completions of tokens.

    Args:
        session: of the client.
        url: of the cluster.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ttft_s(self, prompt: list[int], num_tokens: int = ANSWER_TOKENS) -> tuple[float, int]:
        """Ask, and read to the end; return the seconds until the first token, and how much of the prompt was cached."""
        body: dict[str, Any] = {"model": "small", "prompt": prompt, "max_tokens": num_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        began_s, first_s, num_cached = time.perf_counter(), 0.0, 0
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                said = json.loads(line[6:])
                if said["choices"] and not first_s:
                    first_s = time.perf_counter() - began_s
                if usage := said.get("usage"):
                    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return first_s, num_cached


@dataclass(frozen=True, slots=True)
class Twin:
    """One of several clusters that differ in one flag."""

    cluster: LiveCluster
    reader: Reader


class Chats:
    """Prompts of random tokens, no two alike.

    Args:
        turn: tokens that the first two turns add, each.
        asks: tokens that the third one adds.
        num_others: prompts of other readers before the third turn, each as long as that.
        seed: chooses them.
    """

    def __init__(self, turn: int, asks: int, num_others: int, seed: Sequence[int]) -> None:
        self._turn = turn
        self._asks = asks
        self._num_others = num_others
        self._random = np.random.default_rng(seed)

    def _prompt(self) -> list[int]:
        tokens: list[int] = self._random.integers(FIRST_ID, NUM_TOKENS, 2 * self._turn + self._asks).tolist()
        return tokens

    async def third_turn(self, reader: Reader, *, is_warm: bool) -> tuple[float, int]:
        """Have a chat; return the time to the first token of its third turn, and what of it was cached."""
        chat = self._prompt()
        for end in (self._turn, 2 * self._turn):
            await reader.ttft_s(chat[:end])
        for _ in range(0 if is_warm else self._num_others):
            await reader.ttft_s(self._prompt())
        return await reader.ttft_s(chat)


@asynccontextmanager
async def twins(checkpoint: Path, memory: str, flags: Mapping[str, Sequence[str]]) -> AsyncIterator[dict[str, Twin]]:
    """Run clusters of one worker with one thread each; gives them by name.

    Args:
        checkpoint: that they serve.
        memory: of each worker.
        flags: of `sluice up`, by the name of the cluster.
    """
    async with AsyncExitStack() as stack:
        session, found = await stack.enter_async_context(aiohttp.ClientSession()), dict[str, Twin]()
        for name, own in flags.items():
            cluster = LiveCluster()
            stack.push_async_callback(cluster.stop)
            log = checkpoint.with_name(f"{name}.log")
            common = ["--model", str(checkpoint), "--memory", memory, "--workers", "1", "--threads", "1"]
            await cluster.serve(*common, *own, log=log)
            found[name] = Twin(cluster, Reader(session, cluster.url))
        yield found


async def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """Print the table."""
    rows: dict[str, list[tuple[float, int]]] = {"with host memory": [], "without": [], "warm": []}
    flags = {"with host memory": ("--host-memory", chosen.host_memory), "without": ("--host-memory", "0")}
    async with twins(folder / "small", chosen.memory, flags) as found:
        for repeat in range(chosen.repeats + 1):
            for name, of in (("with host memory",) * 2, ("without",) * 2, ("warm", "without")):
                chats = Chats(chosen.turn, chosen.asks, chosen.others, [repeat, name == "warm"])
                turn = await chats.third_turn(found[of].reader, is_warm=name == "warm")
                if repeat:  # the first round warms up
                    rows[name].append(turn)
    print(f"{2 * chosen.turn + chosen.asks} tokens, {chosen.repeats} chats, {chosen.others} prompts between; ms\n")
    print("| third turn | TTFT, median | least | most | cached tokens |\n|---|---:|---:|---:|---:|")
    for name, turns in rows.items():
        times = [1000 * ttft_s for ttft_s, _ in turns]
        cached = statistics.median(num_cached for _, num_cached in turns)
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} | {cached:.0f} |")
    pairs = zip(rows["without"], rows["with host memory"], strict=True)
    ratios = [without[0] / with_it[0] for without, with_it in pairs]
    print(f"\nwithout / with: median of pairs {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turn", type=int, default=900, help="tokens that each of two turns adds [900]")
    parser.add_argument("--asks", type=int, default=100, help="tokens that the third turn adds [100]")
    parser.add_argument("--others", type=int, default=8, help="prompts of others, as long as three turns [8]")
    parser.add_argument("--repeats", type=int, default=7, help="chats of each kind [7]")
    parser.add_argument("--memory", default="400MiB", help="of each worker; parameters take 98 MiB [%(default)s]")
    parser.add_argument("--host-memory", default="1GiB", help="of the one that has some [%(default)s]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        make_checkpoint("small", Path(temporary) / "small")
        asyncio.run(measure(chosen, Path(temporary)))


if __name__ == "__main__":
    main()
