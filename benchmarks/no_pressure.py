"""What something costs those who do not need it: two live clusters, the same but for one flag, take turns.

    python -m benchmarks.no_pressure [--starts 6] [--pairs 40] [--prompt 200] [--memory 1GiB] [--host-memory 1GiB]
    python -m benchmarks.no_pressure --systems fcfs-chunked sluice [--at-once 8] [--answer 64]

The flag is `--host-memory`, or `--system`. Both are started some times, since two starts differ by more than two
requests of one. Each pair sends prompts of new tokens to each cluster, so many at once, by turns in either order. In
the first table memory suffices for all of them; in the second, of host memory alone, the device has been filled before,
so that every prompt makes it forget another one, which the cluster with host memory copies there ahead. Ratios: second
/ first, the median of pairs and its 95 % interval (bootstrap over starts and pairs). The time to the first token is the
mean of those that were sent at once, that of whole answers is when all of them had ended. CPU time is that of all the
cluster's processes. With `--host-memory 0`, or twice the same system, both are the same: what is left is noise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import cpu_s, machine, print_table, rss_bytes
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, make_checkpoint
from benchmarks.third_turn import ANSWER_TOKENS, Twin, twins
from tests.support.pauses import processes_of

WITHOUT, WITH = "without", "with host memory"
NUM_DRAWS = 10_000
WARM_UP = 8
FILL_TOKENS = 1900


Seen = list[tuple[float, float, float]]
"""Of each turn in ms: time to the first token, to the last, and CPU time of all processes meanwhile."""


def processes(twin: Twin) -> list[int]:
    """Return the processes of a cluster."""
    assert twin.cluster.pid is not None, "it runs"
    return list(processes_of(twin.cluster.pid))


async def ask(twin: Twin, prompts: list[list[int]], num_tokens: int) -> tuple[float, float, float]:
    """Ask for all at once, and return what it took."""
    began_s, began_cpu_s = time.perf_counter(), sum(map(cpu_s, processes(twin)))
    taken = await asyncio.gather(*(twin.reader.ttft_s(prompt, num_tokens) for prompt in prompts))
    ttft_s = statistics.mean(each for each, _ in taken)
    whole_s = time.perf_counter() - began_s
    return 1e3 * ttft_s, 1e3 * whole_s, 1e3 * (sum(map(cpu_s, processes(twin))) - began_cpu_s)


class Phase:
    """What was seen of one state of the device's memory, over all starts.

    Args:
        names: of both.
        num_tokens: of each answer.
    """

    def __init__(self, names: tuple[str, ...], num_tokens: int) -> None:
        self._names, self._num_tokens = names, num_tokens
        self._seen: dict[str, list[Seen]] = {name: [] for name in names}
        self._resident: dict[str, list[int]] = {name: [] for name in names}

    async def run(self, found: dict[str, Twin], turns: list[list[list[int]]]) -> None:
        """Ask both, by turns in either order; the first prompts warm up."""
        seen: dict[str, Seen] = {name: [] for name in found}
        for place, prompts in enumerate(turns):
            for name in self._names[::-1] if place % 2 else self._names:
                seen[name].append(await ask(found[name], prompts, self._num_tokens))
        for name, twin in found.items():
            self._seen[name].append(seen[name][WARM_UP:])
            self._resident[name].append(sum(map(rss_bytes, processes(twin))))

    def lines(self) -> list[list[str]]:
        """Return a line for each figure: medians, the median ratio of pairs, its interval, and those by start."""
        random, lines = np.random.default_rng(1), list[list[str]]()
        first, second = (np.array(self._seen[name]) for name in self._names)
        for place, name in enumerate(("TTFT, ms", "whole answer, ms", "CPU time, ms")):
            pairs = second[:, :, place] / first[:, :, place]
            starts = random.integers(len(pairs), size=(NUM_DRAWS, len(pairs)))  # drawn anew, and pairs of each as well
            drawn = pairs[starts[:, :, None], random.integers(pairs.shape[1], size=(*starts.shape, pairs.shape[1]))]
            low, high = np.percentile(np.median(drawn, axis=(1, 2)), [2.5, 97.5])
            medians = [f"{np.median(each[:, :, place]):.1f}" for each in (first, second)]
            by_start = ", ".join(f"{ratio:.3f}" for ratio in np.median(pairs, axis=1))
            lines.append([name, *medians, f"{np.median(pairs):.3f}", f"{low:.3f} to {high:.3f}", by_start])
        means = [statistics.mean(self._resident[name]) for name in self._names]
        return [
            *lines,
            ["resident, MiB", *(f"{each / 2**20:.0f}" for each in means), f"{means[1] / means[0]:.3f}", "", ""],
        ]


def compared(chosen: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the flag of either cluster, by its name."""
    if not chosen.systems:
        return {WITHOUT: ("--host-memory", "0"), WITH: ("--host-memory", chosen.host_memory)}
    first, second = chosen.systems
    return {first: ("--system", first), f"{second}{' again' * (first == second)}": ("--system", second)}


async def forget(found: dict[str, Twin], turns: list[list[list[int]]]) -> None:
    """Fill the memory of both."""
    for prompts in turns:
        for twin in found.values():
            await ask(twin, prompts, 1)


async def measure(chosen: argparse.Namespace, folder: Path) -> None:
    """Print the tables."""
    random = np.random.default_rng(0)

    def turns(count: int, at_once: int, num_tokens: int) -> list[list[list[int]]]:
        tokens: list[list[list[int]]] = random.integers(FIRST_ID, NUM_TOKENS, (count, at_once, num_tokens)).tolist()
        return tokens

    def some() -> list[list[list[int]]]:
        return turns(WARM_UP + chosen.pairs, chosen.at_once, chosen.prompt)

    flags = compared(chosen)
    names = tuple(flags)
    phases = {"Memory suffices": Phase(names, chosen.answer)}
    if not chosen.systems:
        phases["The device forgets"] = Phase(names, chosen.answer)
    for start in range(chosen.starts):
        in_order = dict(list(flags.items())[:: -1 if start % 2 else 1])
        async with twins(folder / "small", chosen.memory, in_order) as found:
            for title, phase in phases.items():
                if title != "Memory suffices":
                    await forget(found, turns(chosen.fill, 1, FILL_TOKENS))
                await phase.run(found, some())
        print(f"# start {start + 1} of {chosen.starts}", file=sys.stderr, flush=True)
    header = ["", *names, "ratio", "95 % interval", "by start"]
    for title, phase in phases.items():
        asked = f"{chosen.starts} starts, {chosen.pairs} pairs of {chosen.at_once} × {chosen.prompt} tokens each"
        print_table(f"{title}; {asked}", header, phase.lines())
    print(f"\n{machine()}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=6, help="of both clusters [%(default)s]")
    parser.add_argument("--pairs", type=int, default=40, help="of requests, for each table and start [%(default)s]")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each [%(default)s]")
    parser.add_argument("--systems", nargs=2, help="two that are compared, instead of host memory with none")
    parser.add_argument("--at-once", type=int, default=1, help="requests of each turn [%(default)s]")
    parser.add_argument("--answer", type=int, default=ANSWER_TOKENS, help="tokens of each [%(default)s]")
    parser.add_argument("--fill", type=int, default=24, help="prompts of 1 900 tokens that fill it [%(default)s]")
    parser.add_argument("--memory", default="1GiB", help="of each worker; parameters take 98 MiB [%(default)s]")
    parser.add_argument("--host-memory", default="1GiB", help="of the one that has some [%(default)s]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        make_checkpoint("small", Path(temporary) / "small")
        asyncio.run(measure(chosen, Path(temporary)))


if __name__ == "__main__":
    main()
