"""Does anything grow? Short requests come and go for minutes, some of them cut off; memory and descriptors are sampled.

Real processes: broker, monitor, dispatcher, two workers with the modelled executor. The first minute is warm-up; the
slope is a line through the samples of the rest.

    python -m benchmarks.churn [--minutes 6] [--clients 64]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field

import numpy as np
import uvloop

from benchmarks.harness import broker, cluster, machine, num_open_files, print_table, read_stream, rss_bytes

SAMPLE_S = 5.0
WARMUP_S = 60.0
TEXT = "fox river quiet sea dream small once upon time light house wind stone bread"


@dataclass
class Load:
    """What the clients have done."""

    num_done: int = 0
    num_cut: int = 0


@dataclass
class Samples:
    """One process over time."""

    pid: int
    at_s: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def take(self, now_s: float) -> None:
        self.at_s.append(now_s)
        self.rss.append(rss_bytes(self.pid))
        self.files.append(num_open_files(self.pid))

    def row(self, name: str) -> list[str]:
        """Return name, memory after the warm-up and at the end (MB), slope (MB/h), descriptors."""
        kept = [i for i, at_s in enumerate(self.at_s) if at_s >= WARMUP_S]
        hours = np.array([self.at_s[i] for i in kept]) / 3600
        memory = np.array([self.rss[i] for i in kept]) / 1e6
        slope = float(np.polyfit(hours, memory, 1)[0])
        files = f"{self.files[kept[0]]} / {self.files[-1]}"
        return [name, f"{memory[0]:.1f}", f"{memory[-1]:.1f}", f"{slope:+.1f}", files]


async def client(port: int, rng: random.Random, load: Load, until_s: float) -> None:
    """Ask again and again; every tenth answer is left in the middle."""
    while time.monotonic() < until_s:
        prompt = " ".join(rng.choices(TEXT.split(), k=rng.randrange(1, 60)))
        tokens = rng.randrange(1, 40)
        temperature, user = rng.choice([0.0, 0.8]), f"user-{rng.randrange(10**6)}"
        answer = read_stream(port, prompt, tokens, temperature=temperature, user=user)
        if rng.random() < 0.1:
            try:
                async with asyncio.timeout(rng.random() * 0.2):
                    await answer
            except TimeoutError:
                load.num_cut += 1
            continue
        load.num_done += int((await answer).done)


async def main() -> None:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--clients", type=int, default=64)
    chosen = parser.parse_args()
    load, worker = Load(), ["--executor", "modelled", "--profile", "llama-3-8b-tp1-h200", "--memory", "64MiB"]
    async with broker() as url, cluster(url, {"worker-0": worker, "worker-1": worker}) as (port, processes):
        samples = {name: Samples(process.pid) for name, process in processes.items()}
        began_s = time.monotonic()
        until_s = began_s + 60 * chosen.minutes
        clients = [
            asyncio.ensure_future(client(port, random.Random(number), load, until_s))
            for number in range(chosen.clients)
        ]
        while time.monotonic() < until_s:
            await asyncio.sleep(SAMPLE_S)
            for one in samples.values():
                one.take(time.monotonic() - began_s)
        await asyncio.gather(*clients)
    rows = [one.row(name) for name, one in samples.items()]
    title = f"{chosen.minutes:g} minutes of churn: {load.num_done} answers, {load.num_cut} cut off ({machine()})"
    print_table(title, ["process", "MB after 1 min", "MB at the end", "MB per hour", "descriptors"], rows)


if __name__ == "__main__":
    uvloop.run(main())
