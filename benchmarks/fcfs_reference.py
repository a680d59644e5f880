"""What a first-come-first-served server does with a load, by a queueing replay that shares no code with the simulator.

    python -m benchmarks.fcfs_reference              print the figures
    python -m benchmarks.fcfs_reference --out FILE   write them (tests/data/fcfs_reference.json)

One instance of Qwen2.5-14B on an A800. The rules are those that vLLM published for its first scheduler (version 0.6):

- Waiting requests are admitted in order of arrival, preempted ones first, while their whole prompts fit the token
  budget of a step, the number of sequences is below its limit, and their blocks leave 1 % of all blocks free. If any is
  admitted, the step computes these prompts and nothing else.
- Otherwise the step decodes one token of every running sequence, oldest first. If there is no block for the next token
  of one, the newest running sequence is preempted: it loses its blocks and goes to the front of the queue; later it
  computes its prompt and its outputs again.

A step takes max(g0 + b0·N, g1 + b1·N) + d·KVdec + a·P milliseconds: N tokens, KVdec tokens of KV that decodes read, P
query-key pairs of prefills. Nothing else takes time.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

G0, B0, G1, B1, D, A = 20.60, 0.0510, 14.64, 0.0975, 1.33e-4, 5.44e-6
"""Milliseconds: Qwen2.5-14B on one A800."""
NUM_BLOCKS, BLOCK_SIZE = 4_000, 16
"""64 000 token slots: a third of what an A800 has, so that a short window can fill them."""
MAX_SEQUENCES, MAX_TOKENS = 256, 4096
WATERMARK = 0.01
"""Share of all blocks that an admission leaves free."""
LOADS = {"light": 1.5, "busy": 4.0, "overload": 6.5}
"""Requests per second."""
DURATION_S = 120.0
SEED = 11
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival, [n] each."""

    arrival_s: F64
    num_prompt: I64
    num_output: I64


@dataclass(slots=True)
class Sequence:
    """One request on its way."""

    index: int
    num_prompt: int
    num_output: int
    num_done: int = 0
    """Output tokens so far."""
    num_blocks: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def num_known(self) -> int:
        """Tokens whose KV the next decode reads, its own among them."""
        return self.num_prompt + self.num_done


def draw_load(rate: float, duration_s: float = DURATION_S, seed: int = SEED) -> Load:
    """Return Poisson arrivals with log-normal lengths: prompts of 700 tokens on average, answers of 250."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate, int(3 * rate * duration_s) + 10))
    arrival_s = arrival_s[arrival_s < duration_s]
    prompt = rng.lognormal(np.log(700) - 0.32, 0.8, arrival_s.size)
    output = rng.lognormal(np.log(250) - 0.32, 0.8, arrival_s.size)
    return Load(arrival_s, np.clip(prompt, 16, 2048).astype(np.int64), np.clip(output, 4, 1024).astype(np.int64))


def step_s(num_tokens: int, kv_decode: int, pairs: int) -> float:
    """Return how long a step takes."""
    return 1e-3 * (max(G0 + B0 * num_tokens, G1 + B1 * num_tokens) + D * kv_decode + A * pairs)


class Server:
    """The queue and the KV memory of one instance."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_blocks = NUM_BLOCKS
        self.num_preemptions = 0

    def step(self) -> tuple[float, list[Sequence]]:
        """Choose and run one step; return its duration and the sequences that get a token."""
        if admitted := self._admit():
            pairs = sum(n * (n + 1) // 2 for n in (each.num_known for each in admitted))
            return step_s(sum(each.num_known for each in admitted), 0, pairs), admitted
        self._make_room()
        return step_s(len(self.running), sum(each.num_known for each in self.running), 0), list(self.running)

    def end(self, sequence: Sequence) -> None:
        """Free what a sequence holds."""
        self.free_blocks += sequence.num_blocks
        self.running.remove(sequence)

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        budget = MAX_TOKENS
        while self.waiting and len(self.running) < MAX_SEQUENCES:
            first = self.waiting[0]
            need = -(-first.num_known // BLOCK_SIZE)
            if first.num_known > budget or self.free_blocks - need < WATERMARK * NUM_BLOCKS:
                break
            self.waiting.popleft()
            first.num_blocks = need
            self.free_blocks -= need
            budget -= first.num_known
            self.running.append(first)
            admitted.append(first)
        return admitted

    def _make_room(self) -> None:
        """Give every running sequence a slot for the token that it computes; the newest give way."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            need = -(-sequence.num_known // BLOCK_SIZE) - sequence.num_blocks
            while need > self.free_blocks:
                newest = self.running.pop()
                self._preempt(newest)
                if newest is sequence:
                    return
            self.free_blocks -= need
            sequence.num_blocks += need
            index += 1

    def _preempt(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1


def replay(load: Load) -> tuple[list[Sequence], int]:
    """Return every request with the times of its tokens, and the number of preemptions."""
    lengths = zip(load.num_prompt.tolist(), load.num_output.tolist(), strict=True)
    sequences = [Sequence(i, *pair) for i, pair in enumerate(lengths)]
    coming = deque(zip(load.arrival_s.tolist(), sequences, strict=True))
    server, now_s = Server(), 0.0
    while coming or server.waiting or server.running:
        if not (server.waiting or server.running):
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            server.waiting.append(coming.popleft()[1])
        duration_s, rows = server.step()
        now_s += duration_s
        for sequence in rows:
            sequence.num_done += 1
            sequence.token_s.append(now_s)
            if sequence.num_done == sequence.num_output:
                server.end(sequence)
    return sequences, server.num_preemptions


def figures(load: Load) -> dict[str, int | float]:
    """Return TTFT and TPOT in seconds, output tokens per second from the first arrival to the last token."""
    sequences, num_preemptions = replay(load)
    ttft_s = np.array([each.token_s[0] for each in sequences]) - load.arrival_s
    tpot_s = np.array([np.diff(each.token_s).mean() for each in sequences])
    last_s = max(each.token_s[-1] for each in sequences)
    return {
        "requests": len(sequences),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "tpot_mean_s": float(tpot_s.mean()),
        "tpot_p99_s": float(np.percentile(tpot_s, 99)),
        "throughput_tokens_per_s": float(load.num_output.sum() / (last_s - load.arrival_s[0])),
        "preemptions": num_preemptions,
    }


def main() -> None:
    """Print or write the figures of every load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write")
    out: Path | None = parser.parse_args().out
    table = {
        name: {
            key: float(f"{value:.6g}") if isinstance(value, float) else value
            for key, value in figures(draw_load(rate)).items()
        }
        for name, rate in LOADS.items()
    }
    text = json.dumps({"duration_s": DURATION_S, "seed": SEED, "loads": table}, indent=2) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
