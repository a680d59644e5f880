"""How a load fares, in seconds: a replay of steps that chooses the windows and loads that are worth simulating.

    python -m benchmarks.load_replay --traces DIR [--scenario standard-15] [--trace FILE] [--lengths NAME]
        [--windows 0:640 1084:1724] [--factors 60 70 80] [--seed 0]

Steps of instances, as the engine forms them and the cost model prices them, for `fcfs` (whole prompts first),
`fcfs-chunked` and `oracle` (chunked, memory without end); requests are placed by the dispatcher's rule. What makes it
fast: sequences that decode are a count and a sum of tokens, and each is looked at again only in the step that ends it.

Left out, against the simulator: messages (each placement knows every instance as it will be after its present step),
and blocks (a sequence holds half a block more than its tokens).
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness import print_table
from benchmarks.standard_loads import parse_window
from services.dispatcher.policy.placement import WAITING_WEIGHT
from shared.cost import CostModel, prefill_pairs
from sim.experiment.setup import BLOCK_SIZE
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import Scenario
from sim.workload.workload import F64, Workload

WHOLE_PROMPTS = {"fcfs": True, "fcfs-chunked": False, "oracle": False}
"""Systems, and whether their prompts go through whole and before decodes."""


@dataclass(slots=True)
class Row:
    """One request on its way through an instance."""

    index: int
    arrival_s: float
    num_known: int
    """Tokens to compute before the next one is drawn: the prompt, and after a preemption its outputs too."""
    num_left: int
    """Tokens still to be drawn."""
    num_computed: int = 0
    begun_at: int = 0
    """Number of the decode step after which it began to decode."""
    ttft_s: float | None = None


@dataclass(slots=True)
class Steps:
    """What one instance did, step by step."""

    duration_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    held_tokens: list[float] = field(default_factory=list)
    wanted_tokens: list[float] = field(default_factory=list)
    """Held, and the prompts of those that wait."""


class Instance:
    """One instance and its queue.

    Args:
        cost: of a step.
        kv_tokens: token slots; None: without end.
        whole_prompts: prompts go through whole and before decodes; else decodes first, and prompts in chunks.
        max_tokens: of one step.
        max_rows: sequences in one step.
    """

    def __init__(
        self, cost: CostModel, kv_tokens: int | None, *, whole_prompts: bool, max_tokens: int, max_rows: int
    ) -> None:
        self._cost = cost
        self._kv_tokens = kv_tokens
        self._whole_prompts = whole_prompts
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._waiting: deque[Row] = deque()
        self._waiting_tokens = 0
        self._prefills: list[Row] = []
        self._decodes: dict[int, Row] = {}  # by request, in the order of their admission
        self._ends: list[tuple[int, int, int]] = []  # decode step that ends it, begun_at, request
        self._decode_tokens = 0  # KV of those that decode
        self._num_decode_steps = 0
        self._now_s = 0.0  # end of the present step
        self.steps = Steps()
        self.num_preempted = 0
        self.num_lost_tokens = 0

    @property
    def wanted_tokens(self) -> float:
        """Token slots that requests hold or wait for."""
        return self._held() + self._waiting_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of prompts, under way and waiting, that are still to be computed."""
        return self._waiting_tokens + sum(row.num_known - row.num_computed for row in self._prefills)

    def load(self, kv_tokens: int) -> float:
        """Return what the dispatcher compares, of an instance with so many slots (`place_least_loaded`)."""
        return self.wanted_tokens / kv_tokens + WAITING_WEIGHT * self._cost.b1_s * self.uncomputed_tokens

    def put(self, row: Row) -> None:
        """Queue a request that arrives now."""
        if not (self._waiting or self._prefills or self._decodes):
            self._now_s = max(self._now_s, row.arrival_s)
        self._waiting.append(row)
        self._waiting_tokens += row.num_known

    def advance(self, until_s: float) -> None:
        """Do every step that begins before then."""
        while self._now_s < until_s and (self._waiting or self._prefills or self._decodes):
            self._step()

    def _step(self) -> None:
        self.num_preempted += self._make_room()
        num_decodes = 0 if self._whole_prompts else len(self._decodes)
        num_tokens, pairs = self._prefill(self._max_tokens - num_decodes)
        if self._whole_prompts and not num_tokens:
            num_decodes = len(self._decodes)
        num_tokens += num_decodes
        assert num_tokens, "the first of all that run fits, so somebody always goes on"
        duration_s = self._cost.step_s(num_tokens, self._decode_tokens if num_decodes else 0, pairs)
        self._now_s += duration_s
        if num_decodes:
            self._end_decode_step()
        for row in [row for row in self._prefills if row.num_computed == row.num_known]:
            self._prefills.remove(row)
            if row.ttft_s is None:
                row.ttft_s = self._now_s - row.arrival_s
            self._begin_decoding(row)
        self.steps.duration_s.append(duration_s)
        self.steps.end_s.append(self._now_s)
        self.steps.held_tokens.append(self._held())
        self.steps.wanted_tokens.append(self.wanted_tokens)

    def _held(self) -> float:
        """Return the token slots in use, prompts under way at their full length."""
        num_rows = len(self._decodes) + len(self._prefills)
        return self._decode_tokens + sum(row.num_known for row in self._prefills) + BLOCK_SIZE / 2 * num_rows

    def _prefill(self, budget: int) -> tuple[int, int]:
        """Give the budget to prompts under way and then to new ones; return tokens and query-key pairs."""
        left, pairs = budget, 0
        for row in self._prefills:
            left, pairs = self._chunk(row, left, pairs)
        while self._waiting and left > 0 and self._fits(self._waiting[0]):
            if self._whole_prompts and self._waiting[0].num_known > left and left < budget:
                break
            self._prefills.append(self._waiting.popleft())
            self._waiting_tokens -= self._prefills[-1].num_known
            left, pairs = self._chunk(self._prefills[-1], left, pairs)
        return budget - left, pairs

    @staticmethod
    def _chunk(row: Row, left: int, pairs: int) -> tuple[int, int]:
        size = min(left, row.num_known - row.num_computed)
        pairs += prefill_pairs(row.num_computed, size)
        row.num_computed += size
        return left - size, pairs

    def _fits(self, row: Row) -> bool:
        """Whether a row may come in: all its tokens, and one block of headroom for everyone here."""
        num_rows = len(self._decodes) + len(self._prefills)
        if num_rows >= self._max_rows:
            return False
        if self._kv_tokens is None or not num_rows:
            return True
        return self._held() + row.num_known + BLOCK_SIZE * (num_rows + 0.5) <= self._kv_tokens

    def _make_room(self) -> int:
        """Preempt those admitted last until everyone else's next token fits; return how many."""
        count = 0
        while self._kv_tokens is not None and len(self._decodes) > 1:
            if self._held() + len(self._decodes) <= self._kv_tokens:
                break
            row = self._decodes.pop(next(reversed(self._decodes)))
            drawn = self._num_decode_steps - row.begun_at
            self._decode_tokens -= row.num_known + drawn
            self.num_lost_tokens += row.num_known + drawn
            row.num_known += drawn + 1  # the last one has no KV yet
            row.num_left, row.num_computed = row.num_left - drawn, 0
            self._waiting.appendleft(row)
            self._waiting_tokens += row.num_known
            count += 1
        return count

    def _begin_decoding(self, row: Row) -> None:
        """Its prompt's end has drawn one token; the rest come step by step."""
        row.num_left -= 1
        if row.num_left > 0:
            row.begun_at = self._num_decode_steps
            self._decodes[row.index] = row
            self._decode_tokens += row.num_known
            heapq.heappush(self._ends, (row.begun_at + row.num_left, row.begun_at, row.index))

    def _end_decode_step(self) -> None:
        self._num_decode_steps += 1
        self._decode_tokens += len(self._decodes)
        while self._ends and self._ends[0][0] == self._num_decode_steps:
            _, begun_at, index = heapq.heappop(self._ends)
            row = self._decodes.get(index)
            if row is not None and row.begun_at == begun_at:  # else it was preempted since
                self._decode_tokens -= row.num_known + self._num_decode_steps - begun_at
                del self._decodes[index]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a system does with a load."""

    ttft_s: F64
    """[num_requests], in order of arrival."""
    mean_held: float
    """Token slots in use, over those that there are and at most all of them: mean over the arrivals' time."""
    peak_demand: float
    """Most that requests held or waited for in one instance, over its slots."""
    num_preempted: int

    @property
    def ttft_p99_s(self) -> float:
        """99th percentile of all requests."""
        return float(np.percentile(self.ttft_s, 99))


def replay(instances: Sequence[Instance], workload: Workload, kv_tokens: int, until_s: float) -> Outcome:
    """Return what the instances do with a load.

    Args:
        instances: fresh ones.
        workload: each request goes to the instance with the least load.
        kv_tokens: slots that an instance really has.
        until_s: the means are over the time before.
    """
    columns = (workload.arrival_s.tolist(), workload.num_prompt.tolist(), workload.num_output.tolist())
    rows = [Row(i, *row) for i, row in enumerate(zip(*columns, strict=True))]
    for row in rows:
        for instance in instances:
            instance.advance(row.arrival_s)
        min(instances, key=lambda each: each.load(kv_tokens)).put(row)
    held, peak = 0.0, 0.0
    for instance in instances:
        instance.advance(math.inf)
        during = np.array(instance.steps.end_s) <= until_s
        within = np.minimum(instance.steps.held_tokens, kv_tokens)[during]
        held += float(within @ np.array(instance.steps.duration_s)[during])
        peak = max(peak, max(instance.steps.wanted_tokens, default=0.0))
    ttft_s = np.array([row.ttft_s for row in rows], dtype=np.float64)
    preempted = sum(instance.num_preempted for instance in instances)
    return Outcome(ttft_s, held / until_s / kv_tokens / len(instances), peak / kv_tokens, preempted)


def replay_scenario(scenario: Scenario, system: str, workload: Workload) -> Outcome:
    """Return what a system of `WHOLE_PROMPTS` does with a load on the scenario's cluster."""
    facts = scenario.instance()
    instances = [
        Instance(
            facts.cost,
            None if system == "oracle" else facts.kv_tokens,
            whole_prompts=WHOLE_PROMPTS[system],
            max_tokens=scenario.max_batch_tokens,
            max_rows=scenario.max_batch_rows,
        )
        for _ in range(scenario.instances)
    ]
    until_s = float(workload.arrival_s[-1]) if scenario.duration_s is None else scenario.duration_s
    return replay(instances, workload, facts.kv_tokens, until_s)


def main() -> None:
    """Print a line per window and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--scenario", default="standard-15")
    parser.add_argument("--trace", type=Path, help="another file than the scenario's")
    parser.add_argument("--lengths")
    parser.add_argument("--windows", type=parse_window, nargs="+", default=[None], metavar="START:END")
    parser.add_argument("--factors", type=float, nargs="+", default=[60.0, 65.0, 70.0, 75.0, 80.0, 85.0, 90.0])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for window_s in chosen.windows:
        for factor in chosen.factors:
            scenario = load_scenario(chosen.scenario).with_overrides(
                trace=chosen.trace, window_s=window_s, lengths=chosen.lengths, upscale=factor
            )
            workload = scenario.workload(chosen.seed, chosen.traces)
            found = {system: replay_scenario(scenario, system, workload) for system in WHOLE_PROMPTS}
            fcfs, chunked, oracle = found["fcfs"], found["fcfs-chunked"], found["oracle"]
            rows.append(
                (
                    workload.name,
                    f"{oracle.ttft_p99_s:.2f}",
                    f"{fcfs.ttft_p99_s / oracle.ttft_p99_s:.1f}",
                    f"{chunked.ttft_p99_s / oracle.ttft_p99_s:.1f}",
                    f"{oracle.mean_held:.0%}",
                    f"{oracle.peak_demand:.0%}",
                )
            )
    header = ("load", "oracle P99 TTFT, s", "fcfs, ratio", "fcfs-chunked, ratio", "mean held", "peak demand")
    print_table(f"replayed, seed {chosen.seed}", header, rows)


if __name__ == "__main__":
    main()
