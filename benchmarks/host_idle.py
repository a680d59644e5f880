"""What host memory costs those who do not need it: two live clusters, the same but for `--host-memory`, take turns.

    python -m benchmarks.host_idle [--starts 6] [--pairs 40] [--prompt 200] [--memory 1GiB] [--host-memory 1GiB]

Both are started some times, since two starts differ by more than two requests of one. Each pair sends one prompt of new
tokens to each cluster, by turns in either order. In the first table memory suffices for all of them; in the second the
device has been filled before, so that every prompt makes it forget another one, which the cluster with host memory
copies there ahead. Ratios: with host memory / without, the median of pairs and its 95 % interval (bootstrap over starts
and pairs). CPU time is that of all the cluster's processes, per request. With `--host-memory 0` both are the same: what
is left is noise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import cpu_s, machine, print_table, rss_bytes
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, make_checkpoint
from benchmarks.third_turn import Twin, twins
from tests.support.pauses import processes_of

WITH, WITHOUT = "with host memory", "without"
NUM_DRAWS = 10_000
WARM_UP = 8
FILL_TOKENS = 1900


Seen = list[tuple[float, float, float]]
"""Of each request in ms: time to the first token, to the last, and CPU time of all processes meanwhile."""


def processes(twin: Twin) -> list[int]:
    """Return the processes of a cluster."""
    assert twin.cluster.pid is not None, "it runs"
    return list(processes_of(twin.cluster.pid))


async def ask(twin: Twin, prompt: list[int]) -> tuple[float, float, float]:
    """Ask, and return what it took."""
    began_s, began_cpu_s = time.perf_counter(), sum(map(cpu_s, processes(twin)))
    ttft_s, _ = await twin.reader.ttft_s(prompt)
    whole_s = time.perf_counter() - began_s
    return 1e3 * ttft_s, 1e3 * whole_s, 1e3 * (sum(map(cpu_s, processes(twin))) - began_cpu_s)


class Phase:
    """What was seen of one state of the device's memory, over all starts."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Seen]] = {WITHOUT: [], WITH: []}
        self._resident: dict[str, list[int]] = {WITHOUT: [], WITH: []}

    async def run(self, found: dict[str, Twin], prompts: list[list[int]]) -> None:
        """Ask both, by turns in either order; the first prompts warm up."""
        seen: dict[str, Seen] = {name: [] for name in found}
        for place, prompt in enumerate(prompts):
            for name in (WITH, WITHOUT) if place % 2 else (WITHOUT, WITH):
                seen[name].append(await ask(found[name], prompt))
        for name, twin in found.items():
            self._seen[name].append(seen[name][WARM_UP:])
            self._resident[name].append(sum(map(rss_bytes, processes(twin))))

    def lines(self) -> list[list[str]]:
        """Return a line for each figure: medians, the median ratio of pairs, its interval, and those by start."""
        random, lines = np.random.default_rng(1), list[list[str]]()
        without, with_it = (np.array(self._seen[name]) for name in (WITHOUT, WITH))
        for place, name in enumerate(("TTFT, ms", "whole answer, ms", "CPU time, ms")):
            pairs = with_it[:, :, place] / without[:, :, place]
            starts = random.integers(len(pairs), size=(NUM_DRAWS, len(pairs)))  # drawn anew, and pairs of each as well
            drawn = pairs[starts[:, :, None], random.integers(pairs.shape[1], size=(*starts.shape, pairs.shape[1]))]
            low, high = np.percentile(np.median(drawn, axis=(1, 2)), [2.5, 97.5])
            medians = [f"{np.median(each[:, :, place]):.1f}" for each in (without, with_it)]
            by_start = ", ".join(f"{ratio:.3f}" for ratio in np.median(pairs, axis=1))
            lines.append([name, *medians, f"{np.median(pairs):.3f}", f"{low:.3f} to {high:.3f}", by_start])
        means = [statistics.mean(self._resident[name]) for name in (WITHOUT, WITH)]
        return [
            *lines,
            ["resident, MiB", *(f"{each / 2**20:.0f}" for each in means), f"{means[1] / means[0]:.3f}", "", ""],
        ]


async def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """Print the tables."""
    random = np.random.default_rng(0)

    def prompts(count: int, num_tokens: int) -> list[list[int]]:
        tokens: list[list[int]] = random.integers(FIRST_ID, NUM_TOKENS, (count, num_tokens)).tolist()
        return tokens

    roomy, full = Phase(), Phase()
    for start in range(chosen.starts):
        names = (WITH, WITHOUT) if start % 2 else (WITHOUT, WITH)
        host_memory = {name: chosen.host_memory if name == WITH else "0" for name in names}
        async with twins(folder / "small", chosen.memory, host_memory) as found:
            await roomy.run(found, prompts(WARM_UP + chosen.pairs, chosen.prompt))
            for prompt in prompts(chosen.fill, FILL_TOKENS):
                for twin in found.values():
                    await ask(twin, prompt)
            await full.run(found, prompts(WARM_UP + chosen.pairs, chosen.prompt))
    header = ["", WITHOUT, WITH, "ratio", "95 % interval", "by start"]
    for title, phase in (("Memory suffices", roomy), ("The device forgets", full)):
        asked = f"{chosen.starts} starts, {chosen.pairs} pairs of {chosen.prompt} tokens each"
        print_table(f"{title}; {asked}", header, phase.lines())
    print(f"\n{machine()}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=6, help="of both clusters [%(default)s]")
    parser.add_argument("--pairs", type=int, default=40, help="of requests, for each table and start [%(default)s]")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each [%(default)s]")
    parser.add_argument("--fill", type=int, default=24, help="prompts of 1 900 tokens that fill it [%(default)s]")
    parser.add_argument("--memory", default="1GiB", help="of each worker; parameters take 98 MiB [%(default)s]")
    parser.add_argument("--host-memory", default="1GiB", help="of the one that has some [%(default)s]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        make_checkpoint("small", Path(temporary) / "small")
        asyncio.run(measure(chosen, Path(temporary)))


if __name__ == "__main__":
    main()
